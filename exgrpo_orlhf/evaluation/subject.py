"""The model that is evaluated: where it is, what exactly it is, and how it wants to be asked."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoints import BEST, find
from ..prompts import PromptEncoder, Prompts
from ..replay import Question
from .benchmarks import Benchmark
from .engines import Request
from .seeds import response_seed
from .sets import BenchmarkSet

_NO_LIMIT = 1 << 40  # tokens: here the model's context is the limit
_SPEAKING = ("plain", "chat")  # templates that do not say how to answer
_NOT_WEIGHTS = ("trainer", "replay", "_actor")  # of a checkpoint: what a model is without


class SubjectError(ValueError):
    """A model that cannot be evaluated: says why, and what to do."""


@dataclass(frozen=True)
class Subject:
    """path: as `from_pretrained` takes it; hash: of all its files, None for one of the hub, which has a revision
    context: its positions; None: no limit is known
    run, step, mlflow_run_id, metrics_log: of the training run that made it, where it is a checkpoint of this trainer;
        the last is the identity of its metrics, by which MLflow knows it too
    """

    path: str
    tokenizer: Any
    context: int | None
    hash: str | None = None
    revision: str | None = None
    run: str | None = None
    step: int | None = None
    mlflow_run_id: str | None = None
    metrics_log: str | None = None

    @property
    def name(self) -> str:
        """runs/x/checkpoint-120 → x-120"""
        return f"{self.run}-{self.step}" if self.run else Path(self.path).name

    def describe(self) -> dict[str, Any]:
        names = ("path", "hash", "revision", "run", "step", "mlflow_run_id", "metrics_log")
        return {name: getattr(self, name) for name in names}


def load(model: str) -> tuple[Subject, dict[str, Any]]:
    """The model and, where it is a checkpoint of a run, that run's `Prompts` settings. Raises SubjectError."""
    from transformers import AutoConfig, AutoTokenizer  # seconds

    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SubjectError(_no_model(folder))
        path = str(folder)
    elif model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise SubjectError(f"--model {model}: there is no such folder")
    else:
        path = model
    try:
        config = AutoConfig.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        said = " ".join(str(error).split())[:400]
        raise SubjectError(
            f"--model {model}: it or its tokenizer cannot be loaded ({said}); give a folder with both, or a hub id "
            "where there is a network (log in with `hf auth login` where the model is gated)"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # without its files a tokenizer is made that knows nothing
        raise SubjectError(
            f"--model {model}: there is no tokenizer; save that of the model it was trained from beside the "
            "weights (tokenizer.save_pretrained)"
        )
    context = getattr(config.get_text_config(), "max_position_embeddings", None)  # not every architecture has a limit
    subject = Subject(path, tokenizer, context)
    if not folder.is_dir():
        return replace(subject, revision=getattr(config, "_commit_hash", None)), {}
    subject = replace(subject, hash=hash_of(folder))
    state = folder / "trainer" / "state.json"
    if not state.is_file():
        return subject, {}
    known, run = json.loads(state.read_text(encoding="utf-8")), folder.resolve().parent
    log = run / "metrics.id"
    subject = replace(
        subject,
        run=run.name,
        step=known["step"],
        mlflow_run_id=known.get("mlflow_run_id"),
        metrics_log=log.read_text(encoding="ascii").strip() if log.exists() else None,
    )
    return subject, _prompts_of(known["identity"])


def hash_of(folder: Path) -> str:
    """Of a model's files by name and content, without what training keeps beside them."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and relative.parts[0] not in _NOT_WEIGHTS:
            with path.open("rb") as file:
                total.update(f"{relative} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


class Asker:
    """From a benchmark's questions to requests."""

    def __init__(self, subject: Subject, prompts: Prompts, seed: int) -> None:
        """Raises SubjectError where the tokenizer lacks what the template needs."""
        self.subject, self.prompts, self.seed = subject, prompts, seed
        try:
            self.encoder = PromptEncoder(replace(prompts, max_tokens=_NO_LIMIT), subject.tokenizer)
        except ValueError as error:
            raise SubjectError(str(error).replace("Prompts.template = ", "--template ")) from error

    def requests(self, asked: BenchmarkSet) -> list[Request]:
        """`samples` for each question, in order. Raises SubjectError for a prompt that the model has no room for."""
        benchmark, requests = asked.benchmark, []
        for row, question in asked.rows:
            put = self._with_instruction(benchmark, question)
            try:
                ids = tuple(self.encoder.encode(put))
            except ValueError as error:
                raise SubjectError(
                    f"benchmark {benchmark.name!r}, row {row}: the prompt has no tokens in this model's tokenizer, or "
                    f"a message that --template {self.prompts.template} cannot write: {question.prompt!r:.80}"
                ) from error
            self._check_room(benchmark, row, len(ids))
            text, messages = self.encoder.render(put), tuple(self.encoder.turns(put))
            requests += [
                Request(
                    (benchmark.name, row, sample),
                    text,
                    ids,
                    messages,
                    response_seed(self.seed, benchmark.name, row, question.id, sample),
                    benchmark.max_tokens,
                    benchmark.temperature,
                    benchmark.top_p,
                )
                for sample in range(benchmark.samples)
            ]
        return requests

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.prompts.template,
            "system": self.prompts.system,
            "fingerprint": self.encoder.fingerprint(),
        }

    def _with_instruction(self, benchmark: Benchmark, question: Question) -> Question:
        silent = self.prompts.template in _SPEAKING and not self.prompts.system
        if not benchmark.ask or (benchmark.ask_when == "silent" and not silent):
            return question
        # Its own id would find the prompt without the instruction in the encoder's memory.
        return Question.make(question.source, f"{question.prompt}\n\n{benchmark.ask}", question.answer)

    def _check_room(self, benchmark: Benchmark, row: int, length: int) -> None:
        context = self.subject.context
        if context is None or length + benchmark.max_tokens <= context:
            return
        room = context - length
        mend = f"give --max-tokens {room} or less" if room > 0 else "the model is too small for this benchmark"
        raise SubjectError(
            f"benchmark {benchmark.name!r}, row {row}: {length} prompt tokens and {benchmark.max_tokens} of the "
            f"response exceed the {context} positions of {self.subject.path}; {mend}"
        )


def _prompts_of(identity: dict[str, str]) -> dict[str, Any]:
    """The bindings of `Prompts` that a run was trained with."""
    bound = {name.rpartition(".")[2]: value for name, value in identity.items() if re.match(r"Prompts\.", name)}
    return {name: ast.literal_eval(value) for name, value in bound.items() if name in ("template", "system")}


def _no_model(folder: Path) -> str:
    checkpoints = [path.name for path in find(folder).values()]
    if not checkpoints:
        return f"--model {folder}: there is no config.json in it, so it is no model"
    best = f", or {folder / BEST}" if (folder / BEST).exists() else ""
    return (
        f"--model {folder} is the folder of a run; give one of its checkpoints: {folder / checkpoints[-1]}{best} "
        f"(there are {', '.join(checkpoints)})"
    )
