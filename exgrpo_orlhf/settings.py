"""What a run is asked to do, whichever engine does it. Frozen, picklable, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message). The message begins with the gin name of the setting."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class TrainSettings:
    """The run (gin name `train`).

    steps: batches in all; N means N
    questions_per_step: B, questions per batch, fresh and replayed
    group_size: K, rows per question
    seed: of every generator of the run
    eval_every: steps between evaluations on the validation questions, which also take place at step 0 and at the end;
        None: no evaluation
    save_every: steps between checkpoints; the end of the run always saves one
    keep: how many of the newest checkpoints stay
    best_metric: the metric of an evaluation, such as 'eval/greedy_accuracy', whose best checkpoint is made at once and
        kept beside the newest (the link `best` in the run's folder); None: the newest alone
    engine: 'local' (one process, one CPU or GPU) or 'openrlhf' (Ray, DeepSpeed and vLLM)
    """

    steps: int = 200
    questions_per_step: int = 32
    group_size: int = 8
    seed: int = 0
    eval_every: int | None = 20
    save_every: int = 50
    keep: int = 2
    best_metric: str | None = None
    engine: Literal["local", "openrlhf"] = "local"

    def __post_init__(self) -> None:
        require(self.steps >= 1, f"train.steps must be at least 1, got {self.steps!r}")
        require(
            self.questions_per_step >= 1,
            f"train.questions_per_step must be at least 1, got {self.questions_per_step!r}",
        )
        require(self.group_size >= 2, f"train.group_size (K) must be at least 2, got {self.group_size!r}")
        require(self.seed >= 0, f"train.seed must be at least 0, got {self.seed!r}")
        require(
            self.eval_every is None or self.eval_every >= 1,
            f"train.eval_every must be at least 1, or None for no evaluation; got {self.eval_every!r}",
        )
        require(self.save_every >= 1, f"train.save_every must be at least 1, got {self.save_every!r}")
        require(
            self.engine in ("local", "openrlhf"), f"train.engine must be 'local' or 'openrlhf', got {self.engine!r}"
        )
        require(self.keep >= 1, f"train.keep must be at least 1 checkpoint, got {self.keep!r}")


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled. There is no top-p and no top-k: a filtered distribution is not the policy whose
    log-probs the importance weights divide by. What a model's own generation config asks for is left aside.

    temperature: of the rollouts and of all log-probs
    max_response_tokens: a response that reaches it without an end token is truncated
    """

    temperature: float = 1.0
    max_response_tokens: int = 8192

    def __post_init__(self) -> None:
        require(self.temperature > 0, f"Sampling.temperature must be positive, got {self.temperature!r}")
        require(
            self.max_response_tokens >= 1,
            f"Sampling.max_response_tokens must be at least 1, got {self.max_response_tokens!r}",
        )


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

    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    decay_steps: int | None = None
    max_grad_norm: float = 1.0
    skip_above_grad_norm: float | None = None
    steps_per_batch: int = 1
    passes_per_batch: int = 1

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, f"Optimizer.learning_rate must be positive, got {self.learning_rate!r}")
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"Optimizer.betas must be two numbers in [0, 1), got {self.betas!r}",
        )
        require(self.weight_decay >= 0, f"Optimizer.weight_decay must be at least 0, got {self.weight_decay!r}")
        require(self.warmup_steps >= 0, f"Optimizer.warmup_steps must be at least 0, got {self.warmup_steps!r}")
        require(
            self.schedule in ("constant", "linear", "cosine"),
            f"Optimizer.schedule must be 'constant', 'linear' or 'cosine', got {self.schedule!r}",
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
        require(self.max_grad_norm > 0, f"Optimizer.max_grad_norm must be positive, got {self.max_grad_norm!r}")
        require(
            self.skip_above_grad_norm is None or self.skip_above_grad_norm > 0,
            f"Optimizer.skip_above_grad_norm must be positive, or None; got {self.skip_above_grad_norm!r}",
        )
        for name in ("steps_per_batch", "passes_per_batch"):
            require(getattr(self, name) >= 1, f"Optimizer.{name} must be at least 1, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class PretrainedModel:
    """Any causal language model of transformers. path: a folder, or a hub id."""

    path: str

    def prepare(self) -> str:
        """What `from_pretrained` takes. Raises FileNotFoundError for a folder that is not there."""
        if self.path.startswith(("/", ".", "~")) and not Path(self.path).expanduser().is_dir():
            raise FileNotFoundError(f"PretrainedModel.path = {self.path!r}: there is no such folder")
        return str(Path(self.path).expanduser()) if self.path.startswith("~") else self.path
