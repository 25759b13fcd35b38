"""The evaluated model: its location, its identity, and its prompts."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from .. import paths
from ..checkpoints import BEST, find
from ..engines import lora
from ..files import sha256
from ..questions.prompts import PromptEncoder, Prompts
from ..records import Message, Question
from .backends import GenerationRequest
from .benchmarks import Benchmark
from .sets import BenchmarkSet

_NO_LIMIT = 1 << 40  # prompt tokens: the model's context is the limit
_UNREADABLE = (OSError, ValueError, KeyError)  # what transformers raises for files that are not there or not a model's
_OWN_FILES = (".json", ".safetensors", ".bin", ".pt", ".model", ".txt", ".jinja", ".py")  # files of a model

Prompt = tuple[str, tuple[int, ...], tuple[Message, ...]]  # its text, its tokens, its messages


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
        return {name: value for name, value in vars(self).items() if name not in ("tokenizer", "context")}


def load(model: str) -> tuple[Subject, dict[str, Any]]:
    """The model and, if it is a checkpoint of a run or its adapter, the run's `Prompts` settings, with what the run has
    recorded of its prompts (`PromptEncoder.introduce`). Raises SubjectError.

    model: a folder, a hub id, a .gguf file, the name of an installed package that ships one, or the folder of a LoRA
        adapter, which is merged into its base model
    """
    from transformers import AutoConfig  # seconds

    from ..models.pretrained import find_model

    given = Path(model).expanduser()
    if given.is_dir() and not any((given / name).is_file() for name in ("config.json", lora.CONFIG)):
        raise SubjectError(_no_model(given))
    try:
        path, tokenizer = find_model(model, paths.cache(None))
    except (OSError, ValueError) as error:
        raise SubjectError(f"--model {model}: {error}") from error
    folder, config = Path(path), AutoConfig.from_pretrained(path, trust_remote_code=False)
    context = _positions(config)
    if not folder.is_dir():
        return Subject(path, tokenizer, context, revision=getattr(config, "_commit_hash", None)), {}
    checkpoint = given.resolve()
    if lora.is_adapter(given):
        checkpoint = checkpoint.parent
    state = checkpoint / "trainer" / "state.json"
    subject = Subject(path, tokenizer, context, hash=hash_of(folder))
    if not state.is_file():
        return subject, {}
    known, run = json.loads(state.read_text(encoding="utf-8")), checkpoint.parent
    log, bound = run / "metrics.id", known["identity"]
    subject = replace(
        subject,
        run=run.name,
        step=known["step"],
        mlflow_run_id=known.get("mlflow_run_id"),
        metrics_log=log.read_text(encoding="ascii").strip() if log.exists() else None,
    )
    names = [name for name in ("template", "system") if f"Prompts.{name}" in bound]
    prompts = {name: ast.literal_eval(bound[f"Prompts.{name}"]) for name in names}
    return subject, {**prompts, **known.get("prompt", {})}


def served(name: str, tokenizer: str | None) -> Subject:
    """A model of a server. tokenizer: folder or hub id; None: only the server has it. Raises SubjectError."""
    from transformers import AutoConfig, AutoTokenizer

    if tokenizer is None:
        return Subject(name, None, None)
    try:
        known = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except _UNREADABLE as error:
        raise SubjectError(f"--tokenizer {tokenizer}: {' '.join(str(error).split())[:300]}") from error
    try:
        context = _positions(AutoConfig.from_pretrained(tokenizer, trust_remote_code=False))
    except _UNREADABLE:  # a tokenizer alone: the server refuses prompts that are too long
        context = None
    return Subject(name, known, context)


def hash_of(folder: Path) -> str:
    """Hash of a model's files, names and contents, without other files of training or evaluation."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix in _OWN_FILES and path.is_file():
            total.update(f"{path.name} {sha256(path)}\n".encode())
    return total.hexdigest()


def requests_of(
    asked: BenchmarkSet, prompt: Callable[[int, Question], Prompt], seed: int, stop: tuple[int, ...] = ()
) -> Iterator[GenerationRequest]:
    """Requests for all samples of all questions of a set, in order.

    prompt: (row, question) → its prompt; seed: of the evaluation. The seed of a response is made from it, and does not
    depend on which other questions or samples are evaluated.
    """
    benchmark = asked.benchmark
    for row, question in asked.rows:
        written = prompt(row, question)
        for sample in range(benchmark.samples):
            name = f"{seed} {benchmark.name} {row} {question.id} {sample}".encode()
            yield GenerationRequest(
                (benchmark.name, row, sample),
                *written,
                int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1,
                benchmark.max_tokens,
                benchmark.temperature,
                benchmark.top_p,
                stop,
            )


def write_prompt(encoder: PromptEncoder, question: Question) -> Prompt:
    """Raises ValueError for a question that cannot be written."""
    return encoder.render(question), tuple(encoder.encode(question)), tuple(encoder.turns(question))


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
        requests: list[GenerationRequest] = []
        for asked in sets:
            requests += requests_of(asked, partial(self._prompt, asked.benchmark), self.seed, self._stop)
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

    def _prompt(self, benchmark: Benchmark, row: int, question: Question) -> Prompt:
        if instruction := self.instruction(benchmark):  # a new id, because the encoder caches by id
            question = Question.make(question.source, f"{question.prompt}\n\n{instruction}", question.answer)
        if self.encoder is None:
            system = [("system", self.prompts.system)] if self.prompts.system else []
            messages = (*system, ("user", str(question.prompt)))
            return "\n\n".join(content for _, content in messages), (), messages
        try:
            return write_prompt(self.encoder, question)
        except (ValueError, TypeError, TemplateError) as error:
            raise SubjectError(
                f"benchmark {benchmark.name!r}, row {row}: it cannot be written by --template {self.prompts.template}, "
                f"or has no tokens in this model's tokenizer ({type(error).__name__}: {error}): {question.prompt!r:.80}"
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


def _positions(config: Any) -> int | None:
    return getattr(config.get_text_config(), "max_position_embeddings", None)  # not every architecture has them


def _no_model(folder: Path) -> str:
    checkpoints = [path.name for path in find(folder).values()]
    if not checkpoints:
        return f"--model {folder}: there is no config.json in it, so it is no model"
    best = f", or {folder / BEST}" if (folder / BEST).exists() else ""
    return (
        f"--model {folder} is the folder of a run; give one of its checkpoints: {folder / checkpoints[-1]}{best} "
        f"(there are {', '.join(checkpoints)})"
    )
