"""A supervised start (SFT): a pretrained model learns given responses by next-token prediction, before or without RL.

The loss of an optimiser step is the mean negative log-likelihood over all response tokens of its examples, end tokens
included and prompts not: L = −Σ log π(token) / number of response tokens. It is one mean over the whole step. A mean of
the micro-batches' means would weigh the tokens of short responses more and depend on how a step is cut; that mistake
alone costs supervised baselines accuracy (arXiv 2604.23747).
"""

# No postponed annotations: `check_settings` reads them from `__init__`.
import gc
import hashlib
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from ..checkpoints import cache, manifest, name_end_tokens
from ..checks import Count, Natural, NotNegative, Positive, ShareBelowOne, check_settings, reference, require
from ..engines.rows import ForwardRow
from ..io import files, paths, tokenizer_file, weights
from ..io.lazy import torch, transformers
from ..questions.prompts import PromptEncoder, Prompts
from ..questions.question_files import place_of, read_rows
from ..questions.reading import present, read_prompt
from ..records import Question
from ..settings import LocalEngine, Sampling
from ..tracking.metrics_log import MetricsLog

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Example = tuple[Question, str]  # the response without end token
CURVE = "supervised.jsonl"  # in the model's folder, in the form of metrics.jsonl
log = logging.getLogger(__name__)
FORMAT = 2  # raise it when the same settings would give another model


def copy_curve(model: Path, run: Path, resumed: bool) -> None:
    """A run that begins with a supervised model keeps that model's curve, which is logged as part of the run."""
    if (model / CURVE).is_file():
        curve = (model / CURVE).read_bytes()
        if resumed and not ((run / CURVE).is_file() and (run / CURVE).read_bytes() == curve):
            log.warning("%s was changed or deleted: it is copied again from %s", run / CURVE, model)
        files.write(run / CURVE, curve)
    elif not resumed:
        (run / CURVE).unlink(missing_ok=True)


@dataclass(frozen=True)
class SupervisedFile:
    """A file of prompts and responses, in any form of `QuestionFile`: {"prompt": …, "response": …} is a line of JSONL.

    path: .jsonl, .parquet or .csv
    prompt: field of the prompt: text, or chat messages [{"role": …, "content": …}, …]
    response: field of the response: text without end token
    """

    path: str
    prompt: str = "prompt"
    response: str = "response"

    def __post_init__(self) -> None:
        check_settings(SupervisedFile, vars(self))

    def examples(self) -> list[Example]:
        """As many as there are rows, in their order; the questions have no answers.

        Raises FileNotFoundError, or ValueError that names the file, the row or line, and the field.
        """
        path = Path(self.path)
        place, examples = place_of(path), []
        columns = (self.prompt, self.response)
        for row, record in enumerate(read_rows(path, columns, "SupervisedFile.path")):
            where = place.of(row)
            prompt = read_prompt(record, where, "SupervisedFile.prompt", self.prompt)
            response = present(record, self.response, where, "SupervisedFile.response")
            if not isinstance(response, str) or not response.strip():
                raise ValueError(f"{where}: field {self.response!r} is {response!r:.80}; a response is text, not empty")
            examples.append((Question.make(path.stem, prompt, "", {"place": where}), response))
        return examples


@dataclass(frozen=True, kw_only=True)
class SupervisedModel:
    """A model after supervised training, made once and then found in a cache.

    model: what it is made of, a reference such as @PretrainedModel()
    examples: prompts with responses: @SupervisedFile(), or a task that writes solutions, such as @ModularChains()
    prompts, sampling: @Prompts() and @Sampling(): prompts are written and limited, and responses limited, as in the run
    machine: @LocalEngine(): device, dtype, threads, micro_batch_tokens and gradient_checkpointing
    epochs: passes over the examples, each in another order
    batch_size: examples of an optimiser step; the last one of an epoch may have fewer
    learning_rate: of AdamW, at its peak
    schedule: how the rate falls to 0 after the warm-up
    warmup: share of the steps in which the rate rises to its peak
    weight_decay: of AdamW, of all but biases and the weights of norms
    max_grad_norm: the gradient is clipped to this norm
    seed: decides the orders; apart from train.seed, so that runs with different seeds begin with the same model
    cache: directory of finished models; None means $EXGRPO_CACHE, or ~/.cache/exgrpo_orlhf where that is not set
    """

    MAY_CHANGE = ("cache",)

    model: Annotated[Any, reference("prepare", "@PretrainedModel()")]
    examples: Annotated[Any, reference("examples", "@SupervisedFile()")]
    prompts: Prompts
    sampling: Sampling
    machine: LocalEngine
    epochs: Count = 3
    batch_size: Count = 32
    learning_rate: Positive = 1e-5
    schedule: Literal["linear", "cosine"] = "cosine"
    warmup: ShareBelowOne = 0.1
    weight_decay: NotNegative = 0.0
    max_grad_norm: Positive = 1.0
    seed: Natural = 0
    cache: str | None = None

    def __post_init__(self) -> None:
        check_settings(SupervisedModel, vars(self))

    def prepare(self) -> Path:
        """The folder of the finished model and its curve, which is made first unless the cache has it.

        An interrupted training begins again; the folder has its name only when all of it is saved. Two processes at
        once make it once: the second one waits.

        Raises FileNotFoundError, ValueError, ArithmeticError and EngineLost, each with the fix.
        """
        base = self.model.prepare()
        examples = self.examples.examples()
        require(bool(examples), "SupervisedModel.examples has no examples; bind a source that has some")
        config = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
        prompts = PromptEncoder(self.prompts, tokenizer_file.load(base))
        folder = paths.cache(self.cache) / f"supervised-{self._key(base, config, examples, prompts)}"
        if not cache.has(folder):
            rows = encode(examples, prompts, self.sampling.max_response_tokens)
            lock = folder.with_name(f".{folder.name}.lock")  # it stays: one that is removed can be held twice
            with cache.explained(folder):
                folder.parent.mkdir(parents=True, exist_ok=True)
                lock.touch()
            try:
                with files.locked(lock, wait=False):
                    pass
            except BlockingIOError:
                _print("another process is making this model; waiting for it")
            with files.locked(lock):
                if not cache.has(folder):
                    self._make(folder, base, rows, prompts)
                    gc.collect()
                    torch.cuda.empty_cache()  # the engine needs the memory
        return folder

    def _key(
        self, base: str | Path, config: "PretrainedConfig", examples: list[Example], prompts: PromptEncoder
    ) -> str:
        """A hash of all that makes the model. What changes rounding alone is no part of it: device, threads, sizes of
        micro-batches, and whether activations are computed again."""
        from ..engines.local.placement import device_of, dtype_of
        from ..engines.weight_decay import EXEMPT

        named = ("epochs", "batch_size", "learning_rate", "schedule", "warmup", "weight_decay", "max_grad_norm", "seed")
        shaping = {name: getattr(self, name) for name in named}
        shaping["dtype"] = str(dtype_of(self.machine.dtype, device_of(self.machine.device)))
        if self.weight_decay > 0:
            shaping["exempt"] = EXEMPT
        texts = [[question.prompt, response] for question, response in examples]
        # What the base is, not where it lies: its files' hashes; of a hub's model the commit.
        start: Any = [str(base), getattr(config, "_commit_hash", None)]
        if Path(base).is_dir():
            shown = [path for path in Path(base).iterdir() if path.is_file() and path.name[0] != "."]
            start = sorted((path.name, files.sha256(path)) for path in shown if path.name not in (CURVE, manifest.NAME))
        identity = [FORMAT, start, shaping, prompts.fingerprint(), texts]
        return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8).hexdigest()

    def training_questions(self) -> list[Question]:
        """The questions of the examples, also of those of a supervised model that this one starts from."""
        before = self.model.training_questions() if isinstance(self.model, SupervisedModel) else []
        return [*before, *(question for question, _ in self.examples.examples())]

    def _make(self, folder: Path, base: str | Path, rows: list[ForwardRow], prompts: PromptEncoder) -> None:
        """Train, then fill `folder`."""
        from ..engines.local.forward import within_memory
        from ..engines.local.placement import check_model, device_of, load
        from .supervised_training import SupervisedTraining

        threads, device = torch.get_num_threads(), device_of(self.machine.device)
        torch.set_num_threads(self.machine.threads)
        try:
            model = load(base, device)
            check_model(model, base, self.prompts.max_tokens + self.sampling.max_response_tokens)
            training = SupervisedTraining(model, rows, self)
            _print(f"{len(rows)} examples, {training.steps} steps of {self.batch_size} on {training.forward.device}")
            with within_memory(), tempfile.TemporaryDirectory() as work:
                curve = MetricsLog(Path(work) / CURVE)
                for step, metrics in training.run():
                    curve.append(step, metrics)
                with cache.making(folder) as unfinished:
                    weights.save(model, unfinished)
                    tokenizer_file.save(prompts.tokenizer, unfinished)
                    name_end_tokens(unfinished, prompts.turn_ends())
                    shutil.copy(curve.path, unfinished)
        finally:
            torch.set_num_threads(threads)


def encode(examples: Sequence[Example], prompts: PromptEncoder, max_response_tokens: int) -> list[ForwardRow]:
    """Prompts as those of the run's questions; responses closed with the token that closes the policy's own.

    Raises ValueError that names the place of an example whose prompt or response is too long, is empty, or cannot be
    written.
    """
    rows = []
    for number, (question, response) in enumerate(examples, 1):
        try:
            if not response.strip():
                raise ValueError(f"the response to {question.prompt!r:.80} is empty")
            ids = prompts.encode_response(response, max_response_tokens)
            rows.append(ForwardRow(prompts.encode(question), np.array(ids, np.int32)))
        except ValueError as error:
            place = question.meta.get("place", f"example {number}")
            raise ValueError(f"{place}: {error}") from None
    return rows


def _print(message: str) -> None:
    print(f"supervised start: {message}", file=sys.stderr, flush=True)
