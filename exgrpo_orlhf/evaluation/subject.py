"""The evaluated model: its location, its identity, and its prompts."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from ..checkpoints import BEST, find
from ..questions.prompts import PromptEncoder, Prompts
from ..records import Question
from .benchmarks import Benchmark
from .engines import GenerationRequest
from .seeds import response_seed
from .sets import BenchmarkSet

_NO_LIMIT = 1 << 40  # prompt tokens: the model's context is the limit
_OWN_FILES = (".json", ".safetensors", ".bin", ".pt", ".model", ".txt", ".jinja", ".py")  # files of a model


class SubjectError(ValueError):
    """A model that cannot be evaluated. The message says why and what to do."""


@dataclass(frozen=True)
class Subject:
    """A model.

    path: as `from_pretrained` takes it, or a server's name for it
    tokenizer: None if only the server has it
    context: its number of positions; None: no limit is known
    hash: of its files; None for a model of the hub, which has a revision, and for one of a server
    run, step, mlflow_run_id, metrics_log: of the training run, if it is a checkpoint of this trainer; metrics_log is
        the identity of the run's metrics log, by which MLflow can find the run
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
    """The model and, if it is a checkpoint of a run, the run's `Prompts` settings. Raises SubjectError."""
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
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # without its files an empty tokenizer is made
        raise SubjectError(
            f"--model {model}: there is no tokenizer; save that of the model it was trained from beside the "
            "weights (tokenizer.save_pretrained)"
        )
    context = getattr(config.get_text_config(), "max_position_embeddings", None)  # not every architecture has one
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


def served(name: str, tokenizer: str | None) -> Subject:
    """A model of a server. tokenizer: folder or hub id; None: only the server has it. Raises SubjectError."""
    from transformers import AutoConfig, AutoTokenizer

    if tokenizer is None:
        return Subject(name, None, None)
    try:
        known = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError, KeyError) as error:
        raise SubjectError(f"--tokenizer {tokenizer}: {' '.join(str(error).split())[:300]}") from error
    try:
        context = getattr(AutoConfig.from_pretrained(tokenizer).get_text_config(), "max_position_embeddings", None)
    except (OSError, ValueError, KeyError):  # a tokenizer alone: the server refuses prompts that are too long
        context = None
    return Subject(name, known, context)


def hash_of(folder: Path) -> str:
    """Hash of a model's files, names and contents, without other files of training or evaluation."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix in _OWN_FILES and path.is_file():
            with path.open("rb") as file:
                total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


class Asker:
    """Makes requests from the questions of benchmarks."""

    def __init__(self, subject: Subject, prompts: Prompts, seed: int) -> None:
        """Raises SubjectError if the tokenizer lacks something that the template needs."""
        self.subject, self.prompts, self.seed = subject, prompts, seed
        self.encoder: PromptEncoder | None = None
        self._stop: tuple[int, ...] = ()
        self._silent = "boxed" not in (prompts.system or "")
        if subject.tokenizer is None:
            return
        try:
            self.encoder = PromptEncoder(replace(prompts, max_tokens=_NO_LIMIT), subject.tokenizer)
            self._stop = self.encoder.turn_ends()
            self._silent = "boxed" not in self.encoder.render(Question.make("", "?", "?"))
        except (ValueError, TemplateError) as error:
            raise SubjectError(str(error).replace("Prompts.template = ", "--template ")) from error

    def requests(self, sets: Sequence[BenchmarkSet]) -> list[GenerationRequest]:
        """Requests for all samples of all questions, in order. Raises SubjectError if one exceeds the context."""
        requests = [request for asked in sets for request in self._of(asked)]
        if self.subject.context is not None:
            self._check_room(requests, self.subject.context)
        return requests

    def instruction(self, benchmark: Benchmark) -> str | None:
        """The instruction below each question of a benchmark; None for none."""
        return benchmark.instruction(self._silent)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.prompts.template if self.encoder else "the server's",
            "system": self.prompts.system,
            "fingerprint": self.encoder.fingerprint() if self.encoder else None,
        }

    def _of(self, asked: BenchmarkSet) -> Iterator[GenerationRequest]:
        benchmark = asked.benchmark
        instruction = self.instruction(benchmark)
        for row, question in asked.rows:
            put = question
            if instruction:  # a new id, because the encoder caches by id
                put = Question.make(question.source, f"{question.prompt}\n\n{instruction}", question.answer)
            text, ids, messages = self._encoded(benchmark, row, put)
            for sample in range(benchmark.samples):
                yield GenerationRequest(
                    (benchmark.name, row, sample),
                    text,
                    ids,
                    messages,
                    response_seed(self.seed, benchmark.name, row, question.id, sample),
                    benchmark.max_tokens,
                    benchmark.temperature,
                    benchmark.top_p,
                    self._stop,
                )

    def _encoded(
        self, benchmark: Benchmark, row: int, put: Question
    ) -> tuple[str, tuple[int, ...], tuple[tuple[str, str], ...]]:
        """The prompt as text, as tokens and as messages."""
        if self.encoder is None:
            system = [("system", self.prompts.system)] if self.prompts.system else []
            messages = (*system, ("user", str(put.prompt)))
            return "\n\n".join(content for _, content in messages), (), messages
        try:
            return self.encoder.render(put), tuple(self.encoder.encode(put)), tuple(self.encoder.turns(put))
        except (ValueError, TypeError, TemplateError) as error:
            raise SubjectError(
                f"benchmark {benchmark.name!r}, row {row}: it cannot be written by --template {self.prompts.template}, "
                f"or has no tokens in this model's tokenizer ({type(error).__name__}: {error}): {put.prompt!r:.80}"
            ) from error

    def _check_room(self, requests: Sequence[GenerationRequest], context: int) -> None:
        longest = max(requests, key=lambda request: len(request.prompt_ids) + request.max_tokens)
        length, tokens = len(longest.prompt_ids), longest.max_tokens
        if length + tokens <= context:
            return
        room = context - max(len(request.prompt_ids) for request in requests)
        mend = f"give --max-tokens {room} or less" if room > 0 else "the model is too small for this benchmark"
        benchmark, row, _ = longest.key
        raise SubjectError(
            f"benchmark {benchmark!r}, row {row}: {length} prompt tokens and {tokens} of the response exceed the "
            f"{context} positions of {self.subject.path}; {mend}"
        )


def _prompts_of(identity: dict[str, str]) -> dict[str, Any]:
    """The settings of `Prompts` that a run was trained with."""
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
