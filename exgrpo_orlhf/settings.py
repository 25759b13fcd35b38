"""The settings of a run: frozen, picklable, checked on construction.

What a single value may be stands in the annotation of its field, and `check` says what is wrong with one that is not
allowed. MAY_CHANGE names those that may differ when a run is continued: its length, what is kept of it, where things
lie.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple


class ConfigError(ValueError):
    """A gin file or binding that cannot be used: says which, where, and what is allowed."""


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message). The message begins with the gin name of the setting."""
    if not condition:
        raise ValueError(message)


def require_reference(name: str, value: object, kind: type | str, example: str) -> None:
    """Raises ValueError unless the value is of this class, or has the method of this name."""
    fits = isinstance(value, kind) if isinstance(kind, type) else callable(getattr(value, kind, None))
    require(fits, f"{name} must be a reference such as {example}, got {value!r:.200}")


class Bound(NamedTuple):
    """Which numbers a setting takes, and how a message says it: `rho: Annotated[float, Bound(…)]`."""

    says: str
    holds: Callable[[Any], bool]


def at_least(low: int) -> Bound:
    return Bound(f"must be at least {low}", lambda value: value >= low)


Count = Annotated[int, at_least(1)]
NotNegative = Annotated[float, Bound("must be at least 0 and finite", lambda value: 0 <= value < math.inf)]
Positive = Annotated[float, Bound("must be positive and finite", lambda value: 0 < value < math.inf)]
Share = Annotated[float, Bound("must lie in [0, 1]", lambda value: 0 <= value <= 1)]
PositiveShare = Annotated[float, Bound("must lie in (0, 1]", lambda value: 0 < value <= 1)]


def check(owner: type, values: Mapping[str, Any], name: str | None = None) -> None:
    """Compare arguments of a class with the annotations of its `__init__`: `Literal`, and `Bound` in `Annotated`.

    values: by parameter; those of no parameter are passed over. name: of the class in gin, if it is not its own
    Raises ValueError that names the setting, what it takes, and its value.
    """
    hints = typing.get_type_hints(inspect.getattr_static(owner, "__init__"), include_extras=True)
    for parameter, hint in hints.items():
        value, union = values.get(parameter), typing.get_args(hint)
        optional = type(None) in union
        if optional and value is None:
            continue
        kind = union[0] if optional else hint
        bound = getattr(kind, "__metadata__", (None,))[0]
        if typing.get_origin(kind) is Literal:
            choices = typing.get_args(kind)
            fits, says = value in choices, f"must be one of {', '.join(map(repr, choices))};"
        elif isinstance(bound, Bound):
            fits, says = bound.holds(value), f"{bound.says}{', or None;' if optional else ','}"
        else:
            continue
        require(fits, f"{name or owner.__name__}.{parameter} {says} got {value!r}")


MOST_ROWS = 2**20  # of a batch: a slip of the keyboard would fill the memory before a word is said


@dataclass(frozen=True)
class TrainSettings:
    """The run (gin name `train`).

    steps: batches in all; N means N. 0: the model is evaluated and saved without training
    questions_per_step: B, questions per batch, fresh and replayed
    group_size: K, rows per question
    seed: of every generator of the run
    eval_every: steps between evaluations on the validation questions, which also take place at step 0 and at the end;
        None: no evaluation
    save_every: steps between checkpoints; the end of the run always saves one
    keep: how many of the newest checkpoints stay
    best_metric: the metric of an evaluation, such as 'eval/greedy_accuracy', whose best checkpoint is made at once and
        kept beside the newest (the link `best` in the run's folder); None: the newest alone
    verify_checkpoint: whether the files of a checkpoint are hashed before the run is resumed from it; False: only
        trainer/state.json is, and of the others the sizes are compared
    engine: 'local' (one process, one CPU or GPU) or 'openrlhf' (Ray, DeepSpeed and vLLM)
    """

    MAY_CHANGE: ClassVar[tuple[str, ...]] = (
        "steps",
        "save_every",
        "keep",
        "eval_every",
        "best_metric",
        "verify_checkpoint",
    )

    steps: Annotated[int, at_least(0)] = 200
    questions_per_step: Count = 32
    group_size: Annotated[int, Bound("(K) must be at least 2", lambda value: value >= 2)] = 8
    seed: Annotated[int, at_least(0)] = 0
    eval_every: Count | None = 20
    save_every: Count = 50
    keep: Count = 2
    best_metric: str | None = None
    verify_checkpoint: bool = True
    engine: Literal["local", "openrlhf"] = "local"

    def __post_init__(self) -> None:
        check(TrainSettings, vars(self), "train")
        rows = self.questions_per_step * self.group_size
        require(
            rows <= MOST_ROWS,
            f"train.questions_per_step · train.group_size = {rows:,} rows in a batch, more than {MOST_ROWS:,}",
        )


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled. There is no top-p and no top-k: a filtered distribution is not the policy whose
    log-probs the importance weights divide by. What a model's own generation config asks for is left aside.

    temperature: of the rollouts and of all log-probs
    max_response_tokens: a response that reaches it without an end token is truncated
    """

    temperature: Positive = 1.0
    max_response_tokens: Count = 8192

    def __post_init__(self) -> None:
        check(Sampling, vars(self))


@dataclass(frozen=True)
class Optimizer:
    """AdamW and its schedule.

    warmup_steps: optimiser steps of linear warm-up
    schedule: after the warm-up; 'linear' and 'cosine' fall to 0 at optimiser step `decay_steps`, which is bound apart
        from train.steps so that a run can be extended
    max_grad_norm: the gradient is clipped to this norm
    skip_above_grad_norm: an update whose gradient norm is larger is skipped, counted and said; None: never
    steps_per_batch: optimiser steps per pass over the batch, each on an equal share of its questions
    passes_per_batch: how many times the batch is gone through
    """

    learning_rate: Positive = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: NotNegative = 0.0
    warmup_steps: Annotated[int, at_least(0)] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    decay_steps: int | None = None
    max_grad_norm: Annotated[float, Bound("must be positive", lambda value: value > 0)] = 1.0
    skip_above_grad_norm: Positive | None = None
    steps_per_batch: Count = 1
    passes_per_batch: Count = 1

    def __post_init__(self) -> None:
        check(Optimizer, vars(self))
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"Optimizer.betas must be two numbers in [0, 1), got {self.betas!r}",
        )
        require(
            (self.decay_steps is None) == (self.schedule == "constant"),
            f"Optimizer.decay_steps belongs to the schedules 'linear' and 'cosine' and to no other; got "
            f"{self.decay_steps!r} with Optimizer.schedule = {self.schedule!r}",
        )
        require(
            self.decay_steps is None or self.decay_steps > self.warmup_steps,
            f"Optimizer.decay_steps must be larger than Optimizer.warmup_steps, got {self.decay_steps!r}",
        )


@dataclass(frozen=True)
class LoRA:
    """Training of low-rank matrices beside frozen weights, by peft. There is no dropout: log-probs with it are those of
    another policy.

    rank: of the matrices; None: all weights are trained
    alpha: their product is multiplied by alpha / rank; None: 2 · rank
    targets: 'all-linear' (every linear layer but the output layer), or names of modules, such as ('q_proj', 'v_proj')
    """

    rank: Count | None = None
    alpha: Count | None = None
    targets: str | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        check(LoRA, vars(self))
        names = self.targets if isinstance(self.targets, tuple) else ()
        require(
            self.targets == "all-linear" or (len(names) > 0 and all(isinstance(name, str) and name for name in names)),
            f"LoRA.targets must be 'all-linear' or a tuple of names of modules, got {self.targets!r}",
        )

    @property
    def scale_numerator(self) -> int:
        """alpha, also where it is not bound."""
        return self.alpha if self.alpha is not None else 2 * (self.rank or 0)


@dataclass(frozen=True)
class Work:
    """Which questions on which model: values are references such as @ModularChains().

    validation: None for no evaluation during training
    experience: the replay/ folder of another run's checkpoint to start from, or a .jsonl file of expert trajectories
        (experience.py); None for an empty buffer
    """

    questions: Any
    model: Any
    validation: Any = None
    experience: str | None = None

    def __post_init__(self) -> None:
        require_reference("Work.questions", self.questions, "load", "@ModularChains()")
        require_reference("Work.model", self.model, "prepare", "@ChainModel()")
        if self.validation is not None:
            require_reference("Work.validation", self.validation, "load", "@validation/ModularChains()")


@dataclass(frozen=True)
class LocalEngine:
    """The machine.

    device: 'auto' takes the GPU if there is one
    dtype: of the computation; master weights and optimiser are float32 always. 'auto': float32 on a CPU, bfloat16 on
        a GPU
    threads: torch's CPU threads; more than the free cores is ruinous
    micro_batch_tokens: tokens of one forward and backward pass: with their padding, or of packed rows (on a CPU, see
        docs/performance.md) each prompt once
    generation_rows: responses generated at a time
    gradient_checkpointing: compute activations again in the backward pass instead of keeping them
    """

    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("device", "threads")

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: Count = 1
    micro_batch_tokens: Count = 16384
    generation_rows: Count = 256
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        check(LocalEngine, vars(self))


@dataclass(frozen=True)
class OpenRLHF:
    """Where and how OpenRLHF runs.

    flags: OpenRLHF's own command-line flags by name, without dashes: {'actor.num_gpus_per_node': 8}; True for a
        switch, a tuple for several values. Whatever another binding says (batch sizes, lengths, learning rate, …) is
        handed on from there and has no place here; flags.py names the binding
    more_flags: the same, over `flags`: for one flag more than a layout has
    ray_address: of a Ray cluster ('auto': the one this machine belongs to); None: the environment's RAY_ADDRESS, which
        a submitted Ray job has, or else a Ray of this run's own, on this machine
    cpu_bench: run on a machine without CUDA, with pretended GPUs, to test this engine; not for real training
    score_tokens: tokens of one forward pass that scores or measures responses, with padding unless the flag
        ds.packing_samples is given
    timeout: seconds, the longest wait for an answer of an actor or an engine, and for the GPUs at the start
    """

    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("ray_address", "timeout", "flags", "more_flags", "score_tokens")

    flags: Mapping[str, Any] = field(default_factory=dict)
    more_flags: Mapping[str, Any] = field(default_factory=dict)
    ray_address: str | None = None
    cpu_bench: bool = False
    score_tokens: Count = 32768
    timeout: Positive = 1800.0

    def __post_init__(self) -> None:
        for name in ("flags", "more_flags"):
            flags = getattr(self, name)
            require(
                isinstance(flags, Mapping) and all(isinstance(flag, str) for flag in flags),
                f"OpenRLHF.{name} must be a dict from flag names to values, got {flags!r}",
            )
            dashed = [flag for flag in flags if flag.startswith("-")]
            require(not dashed, f"OpenRLHF.{name}: flags are named without dashes, got {', '.join(dashed)}")
        check(OpenRLHF, vars(self))

    def all_flags(self) -> dict[str, Any]:
        return {**self.flags, **self.more_flags}


@dataclass(frozen=True)
class Evaluation:
    """How validation questions are answered.

    samples: responses to each question
    temperature: 0 is greedy
    top_p: of the sampled responses
    disjoint_from: a suite of evals/benchmarks.toml; a validation question that one of its sets in datasets/ has too is
        refused, because a checkpoint chosen by it would have been chosen on the test. None: no check
    """

    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("samples", "temperature", "top_p", "disjoint_from")

    samples: Count = 1
    temperature: NotNegative = 0.0
    top_p: PositiveShare = 1.0
    disjoint_from: str | None = "paper"

    def __post_init__(self) -> None:
        check(Evaluation, vars(self))
        require(
            self.samples == 1 or self.temperature > 0,
            f"Evaluation.samples = {self.samples} at Evaluation.temperature = 0 would all be the same; set one of them",
        )


@dataclass(frozen=True)
class Tracking:
    """experiment: MLflow experiment; uri: tracking server or sqlite:///file, below MLFLOW_TRACKING_URI and above the
    caller's default; enabled: off leaves metrics.jsonl alone; flush_seconds: seconds between two looks for new rows,
    and between two attempts in an outage; system_metrics: MLflow's own measurements of the machine on which the
    training loop runs (CPU, memory, disk, network, GPUs), every system_seconds."""

    MAY_CHANGE: ClassVar[tuple[str, ...]] = (
        "experiment",
        "uri",
        "enabled",
        "flush_seconds",
        "system_metrics",
        "system_seconds",
    )

    experiment: str = "exgrpo"
    uri: str | None = None
    enabled: bool = True
    flush_seconds: Positive = 5.0
    system_metrics: bool = False
    system_seconds: Positive = 10.0

    def __post_init__(self) -> None:
        check(Tracking, vars(self))
        require(bool(self.experiment.strip()), "Tracking.experiment is empty; name an experiment")
