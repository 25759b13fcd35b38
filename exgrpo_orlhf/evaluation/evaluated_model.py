"""The evaluated model: its location, its identity, and its prompts."""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from ..checkpoints import BEST, find, identities
from ..engines import lora
from ..environments.playing import Player, player_of
from ..grader.grade import Message
from ..io import paths, tokenizer_file
from ..io.files import sha256
from ..questions.prompts import PromptEncoder, Prompts
from ..records import Question
from ..sampling import EngineLost, Request
from ..tracking.samples import response_seed
from .benchmarks import Benchmark
from .sets import BenchmarkSet

if TYPE_CHECKING:
    from ..sampling.torch_loop import LoopSampler

log = logging.getLogger(__name__)
_NO_LIMIT = 1 << 40  # prompt tokens: the model's context is the limit
_UNREADABLE = (OSError, ValueError, KeyError)  # what transformers raises for files that are not there or not a model's
_OWN_FILES = (".json", ".safetensors", ".bin", ".pt", ".model", ".txt", ".jinja", ".py")  # files of a model

Prompt = tuple[str, tuple[int, ...], tuple[Message, ...]]  # its text, its tokens, its messages


class ModelError(ValueError):
    """A model that cannot be evaluated. The message says why and what to do."""


@dataclass(frozen=True)
class EvaluatedModel:
    """A model.

    path: as `from_pretrained` takes it, or a server's name for it
    tokenizer: None if only the server has it
    context: its number of positions; None if it is unknown or not limited
    hash: of its files; None for a model of the hub, which has a revision, and for a server's that is no folder here
    run, step, mlflow_run_id, metrics_log: of the training run, if it is a checkpoint of this trainer; metrics_log is
        the identity of the run's metrics log, by which MLflow can find the run
    tokenizer_of: of a server's model that is no folder here, hash, run and step of the folder of its tokenizer
    root: of such a model, what the server says that it has loaded
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
    tokenizer_of: dict[str, Any] | None = None
    root: str | None = None

    @property
    def name(self) -> str:
        """runs/x/checkpoint-120 → x-120; of a study runs/g/v/seed0/checkpoint-120 → v-seed0-120"""
        return f"{self.run}-{self.step}" if self.run else Path(self.path).name

    def describe(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("tokenizer", "context")}

    def identity(self) -> dict[str, Any]:
        """What tells it from another model. Of a server's model its name alone may be known."""
        files, served = ("hash", "revision"), ("path", "tokenizer_of", "root")
        known = {name: value for name, value in self.describe().items() if value}
        names = files if known.keys() & files else served
        return {name: known[name] for name in names if name in known}


def load(model: str) -> tuple[EvaluatedModel, dict[str, Any]]:
    """The model and, if it is a checkpoint of a run or its adapter, the run's `Prompts` settings, with what the run has
    recorded of its prompts (`PromptEncoder.introduce`). Raises ModelError.

    model: a folder, a hub id, a .gguf file, the name of an installed package that ships one, or the folder of a LoRA
        adapter, which is merged into its base model
    """
    from transformers import AutoConfig  # seconds

    from ..engines.pretrained import find_model

    place = Path(model).expanduser()
    if place.is_dir() and not any((place / name).is_file() for name in ("config.json", lora.CONFIG)):
        if not (checkpoints := [path.name for path in find(place).values()]):
            raise ModelError(f"--model {place}: there is no config.json in it, so it is no model")
        best = f", or {place / BEST}" if (place / BEST).exists() else ""
        raise ModelError(
            f"--model {place} is the folder of a run; give one of its checkpoints: {place / checkpoints[-1]}{best} "
            f"(there are {', '.join(checkpoints)})"
        )
    try:
        path, tokenizer = find_model(model, paths.cache(None))
    except (OSError, ValueError) as error:
        raise ModelError(f"--model {model}: {error}") from error
    folder, config = Path(path), AutoConfig.from_pretrained(path, trust_remote_code=False)
    loaded = EvaluatedModel(path, tokenizer, _positions(config))
    if not folder.is_dir():
        return replace(loaded, revision=getattr(config, "_commit_hash", None)), {}
    checkpoint = place.resolve().parent if lora.is_adapter(place) else place.resolve()
    return _identified(loaded, folder, checkpoint), training_prompts(checkpoint)


def _identified(model: EvaluatedModel, files: Path, checkpoint: Path) -> EvaluatedModel:
    """With the hash of its files and, of a checkpoint of a run, the run and the step."""
    model = replace(model, hash=hash_of(files))
    if not (state := _state(checkpoint)):
        return model
    run = checkpoint.parent
    return replace(
        model,
        run=paths.run_name(run).replace("/", "-"),
        step=state["step"],
        mlflow_run_id=state.get("mlflow_run_id"),
        metrics_log=next(iter(identities(run)), None),
    )


def training_prompts(checkpoint: Path) -> dict[str, Any]:
    """The `Prompts` settings of the run that made a checkpoint, with what it has recorded of its prompts
    (`PromptEncoder.introduce`); {} for another folder."""
    names, state = ("template", "system", "chat_template_kwargs", "thought_tags"), _state(checkpoint)
    bindings = {name: state.get("identity", {}).get(f"Prompts.{name}") for name in names}
    prompts = {name: ast.literal_eval(value) for name, value in bindings.items() if value not in (None, "()")}
    return {**prompts, **state.get("prompt", {})}


def _state(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / "trainer" / "state.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def served(name: str, tokenizer: str | None, api: str) -> tuple[EvaluatedModel, dict[str, Any]]:
    """A server's model and, of a checkpoint of a run, what `load` says of its prompts.

    name: the server's, which may be the model's folder here; tokenizer: folder or hub id; None: that of the folder or,
    with the api 'chat', the server's. Raises ModelError.
    """
    if api == "completions" and tokenizer is None:
        if not Path(name).is_dir():
            raise ModelError(
                "--engine openai needs --tokenizer FOLDER-OR-HUB-ID of the served model, to write its prompts; or "
                "--api chat, where the server writes them"
            )
        return load(name)
    training = training_prompts(Path(name)) or training_prompts(Path(tokenizer or name))
    model = EvaluatedModel(name, None, None)
    if (Path(name) / "config.json").is_file():
        model = _identified(model, Path(name), Path(name).resolve())
    if tokenizer is None:
        return model, training
    if api == "chat":
        raise ModelError("--tokenizer cannot be used with --api chat: the server renders the prompts")
    from transformers import AutoConfig

    try:
        loaded = tokenizer_file.load(tokenizer)
    except _UNREADABLE as error:
        raise ModelError(f"--tokenizer {tokenizer}: {' '.join(str(error).split())[:300]}") from error
    try:
        context = _positions(AutoConfig.from_pretrained(tokenizer, trust_remote_code=False))
    except _UNREADABLE:  # a tokenizer alone: the server refuses prompts that are too long
        context = None
    if model.hash is None and Path(tokenizer).is_dir():
        of, names = _identified(model, Path(tokenizer), Path(tokenizer).resolve()).describe(), ("hash", "run", "step")
        model = replace(model, tokenizer_of={name: of[name] for name in names if of[name] is not None})
    return replace(model, tokenizer=loaded, context=context), training


def loop_sampler(model: EvaluatedModel, device: str, dtype: str, rows: int, threads: int) -> LoopSampler:
    """The model in this process. device, dtype: 'auto' or torch's name; rows: responses at a time
    threads: of the CPU

    Raises EngineLost for a device that is not there and a model without weights, an end token, or a cache of rows.
    """
    import torch

    from ..engines.local.placement import device_of, dtype_of, end_and_pad
    from ..engines.local.placement import load as load_weights
    from ..sampling.batch import check_rows
    from ..sampling.torch_loop import LoopSampler

    if threads > (cores := len(os.sched_getaffinity(0))):
        log.warning("--threads %d, but this process has %d cores: it is slower by far", threads, cores)
    torch.set_num_threads(threads)
    try:
        place = device_of(device, "--device")
        loaded = load_weights(model.path, place, dtype_of(dtype, place))
        end, pad = end_and_pad(loaded, model.tokenizer)
        check_rows(loaded, pad)
    except ValueError as error:
        raise EngineLost(f"{model.path}: {error}") from error
    return LoopSampler(loaded, model.tokenizer, end, pad, rows)


def hash_of(folder: Path) -> str:
    """Hash of a model's files, names and contents, without other files of training or evaluation."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix in _OWN_FILES and path.is_file():
            total.update(f"{path.name} {sha256(path)}\n".encode())
    return total.hexdigest()


class RequestBuilder:
    """Makes requests from the questions of benchmarks."""

    def __init__(
        self, model: EvaluatedModel, prompts: Prompts, seed: int, training: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """training: the prompts of the model's training, as `load` returns them.
        Raises ModelError if the tokenizer lacks something that the template needs."""
        self.model, self.prompts, self.seed, self.training = model, prompts, seed, training
        self.encoder: PromptEncoder | None = None
        self._end: tuple[int, ...] = ()
        self._silent = "boxed" not in (prompts.system or "")
        if model.tokenizer is None:
            return
        try:
            self.encoder = PromptEncoder(replace(prompts, max_tokens=_NO_LIMIT), model.tokenizer)
            self._end = self.encoder.turn_ends()
            self._silent = "boxed" not in self.encoder.render(Question.make("", "?", "?"))
        except (ValueError, TemplateError) as error:
            raise ModelError(str(error).replace("Prompts.template = ", "--template ")) from error

    def requests(self, sets: Sequence[BenchmarkSet]) -> list[Request]:
        """Requests for all samples of all questions, in order. Raises ModelError if one exceeds the context."""
        requests: list[Request] = []
        for test_set in sets:
            for row, question in test_set.rows:
                requests += self._of_question(test_set.benchmark, row, question)
        if self.model.context is not None:
            self._check_room(requests, self.model.context)
        return requests

    def _of_question(self, benchmark: Benchmark, row: int, question: Question) -> Iterator[Request]:
        text, prompt_ids, messages = self._prompt(benchmark, row, question)
        for sample in range(benchmark.samples):
            yield Request(
                prompt_ids,
                response_seed(self.seed, benchmark.name, row, question, sample),
                benchmark.max_tokens,
                benchmark.temperature,
                benchmark.top_p,
                end=self._end,
                key=(benchmark.name, row, sample),
                prompt=text,
                messages=messages,
            )

    def question(self, benchmark: Benchmark, question: Question) -> Question:
        """A question of a benchmark with what stands around it."""
        (before, below), text = self._around(benchmark), str(question.prompt)
        if text.startswith(before) and text.endswith(below):
            return question
        # With a new id, because the encoder caches by id.
        return Question.make(question.source, f"{before}{text}{below}", question.answer, question.meta)

    def player(self, benchmark: Benchmark) -> Player | None:
        """None where a response is one turn."""
        if self.encoder is None:  # a server's
            return None
        return player_of(benchmark.environment, self.encoder, benchmark.max_tokens)

    def instruction(self, benchmark: Benchmark) -> str | None:
        """The words before each question of a benchmark (…) and below it, for a reader; None for none."""
        before, below = self._around(benchmark)
        return (f"{before}…" if before else "") + below.strip() or None

    def _around(self, benchmark: Benchmark) -> tuple[str, str]:
        """The words before and below each question. A checkpoint of this trainer is asked in those of its training,
        any other model in those of the set; an instruction that a block names stands there in any case."""
        ask = benchmark.ask if self.training else benchmark.instruction(self._silent)
        before, below = self.training.get("around", ("", ""))
        return ("", f"\n\n{ask}") if ask and ask != f"{before}{below}".strip() else (before, below)

    def describe(self) -> dict[str, Any]:
        prompts = self.prompts
        own = {"chat_template_kwargs": prompts.chat_template_kwargs, "thought_tags": [*prompts.thought_tags]}
        return {
            "name": self.prompts.template if self.encoder else "the server's",
            "system": self.prompts.system,
            "fingerprint": self.encoder.fingerprint() if self.encoder else None,
            **{name: value for name, value in own.items() if value},
        }

    def _prompt(self, benchmark: Benchmark, row: int, question: Question) -> Prompt:
        question = self.question(benchmark, question)
        if self.encoder is None:
            system = [("system", self.prompts.system)] if self.prompts.system else []
            messages = (*system, ("user", str(question.prompt)))
            return "\n\n".join(content for _, content in messages), (), messages
        try:
            ids = self.encoder.encode(question)
            return str(self.encoder.tokenizer.decode(ids)), tuple(ids), tuple(self.encoder.turns(question))
        except (ValueError, TypeError, TemplateError) as error:
            raise ModelError(
                f"benchmark {benchmark.name!r}, row {row}: --template {self.prompts.template} cannot render it, or it "
                f"has no tokens in this model's tokenizer ({type(error).__name__}: {error}): {question.prompt!r:.80}"
            ) from error

    def _check_room(self, requests: Sequence[Request], context: int) -> None:
        longest = max(requests, key=lambda request: len(request.prompt_ids) + request.max_tokens)
        length, tokens = len(longest.prompt_ids), longest.max_tokens
        if length + tokens > context:
            room = context - max(len(request.prompt_ids) for request in requests)
            fix = f"give --max-tokens {room} or less" if room > 0 else "the model is too small for this benchmark"
            benchmark, row, _ = longest.key
            raise ModelError(
                f"benchmark {benchmark!r}, row {row}: {length} prompt tokens and {tokens} of the response exceed the "
                f"{context} positions of {self.model.path}; {fix}"
            )


def _positions(config: Any) -> int | None:
    return getattr(config.get_text_config(), "max_position_embeddings", None)  # not every architecture has them
