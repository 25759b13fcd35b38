"""An experiment as it is built from gin files, before anything runs."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from .checks import require
from .environments.environment import Environment
from .objective import GroupAdvantages, MixedPolicyLoss
from .questions.fresh import FreshSampler
from .questions.prompts import Prompts
from .records import Question
from .replay import ReplayBuffer, ReplayMixer, TrajectorySelector
from .replay.plan import DynamicSampling
from .rewards import Verifier
from .settings import Evaluation, LocalEngine, LoRA, OpenRLHF, Optimizer, Sampling, Tracking, TrainSettings
from .workers.user_file import source_hash


class QuestionSource(Protocol):
    def load(self) -> list[Question]: ...


class ModelSource(Protocol):
    def prepare(self) -> str | Path: ...


@dataclass(frozen=True)
class Experiment:
    """Everything a run is made of, built and checked before anything starts (config/build.py).

    config_text: the operative gin config; params: the same, flat; identity: those of them that must be the same for a
        run to be continued; config_hash: of identity; defaults: of all settings, as text
    base: hash of the base model's weights, where a resumed run needs them (training/run.py)
    local, openrlhf: the settings of the engine that runs; the other one is None
    """

    settings: TrainSettings
    questions: QuestionSource
    validation: QuestionSource | None
    experience: str | None
    model: ModelSource
    prompts: Prompts
    sampling: Sampling
    optimizer: Optimizer
    lora: LoRA
    local: LocalEngine | None
    openrlhf: OpenRLHF | None
    environment: Environment
    verifier: Verifier
    mixer: ReplayMixer
    selector: TrajectorySelector
    dynamic_sampling: DynamicSampling
    buffer: ReplayBuffer
    advantages: GroupAdvantages
    loss: MixedPolicyLoss
    evaluation: Evaluation
    tracking: Tracking
    fresh: FreshSampler
    fresh_rng: np.random.Generator
    config_text: str
    config_hash: str
    params: Mapping[str, str]
    identity: Mapping[str, str]
    defaults: Mapping[str, str]
    base: str | None = None

    def __post_init__(self) -> None:
        graded_there = self.environment.path is not None and self.environment.reward == "environment"
        by_sum = (
            self.verifier.overlong_share or self.verifier.format or self.dynamic_sampling.max_rounds or graded_there
        )
        require(
            not self.advantages.of_each_reward or (self.verifier.rewards is not None and not by_sum),
            "GroupAdvantages.of_each_reward needs Verifier.rewards, and neither Verifier.overlong_share, .format, "
            "DynamicSampling.max_rounds nor Environment.reward = 'environment', which go by the sum of the rewards",
        )
        require(
            not graded_there or (self.verifier.format, self.verifier.rewards, self.verifier.function) == (None,) * 3,
            "Verifier.format, .rewards and .function need Environment.reward = 'verifier': this environment grades by "
            "itself",
        )
        require(
            self.environment.path is None or not str(self.experience or "").endswith(".jsonl"),
            f"Work.experience = {self.experience!r}: a text does not say which of its tokens are an environment's; "
            "take the buffer of a run with episodes",
        )
        self.mixer.check(self.buffer)
        require(
            self.buffer.max_age != 1 or not self.settings.generate_ahead,
            "ReplayBuffer.max_age = 1 with train.generate_ahead replays nothing: a trajectory is stored one step after "
            "it was sampled and evicted before the next batch is planned; bind 2 or more",
        )
        prefix = self.mixer.injection.prefix
        require(
            prefix is None or not str(self.experience or "").endswith(".jsonl"),
            f"Work.experience = {self.experience!r}: ReplayMixer.injection = @Prefix() continues stored token ids, and "
            "a text has none; take the buffer of a run (runs/x/checkpoint-100)",
        )
        require(
            prefix is None or prefix.cut == "token" or self.environment.path is None,
            f"Prefix.cut = {prefix and prefix.cut!r}: what is given of an episode ends with a turn; leave it unbound",
        )
        steps, questions = self.optimizer.steps_per_batch, self.settings.questions_per_step
        require(
            steps <= questions,
            f"Optimizer.steps_per_batch = {steps} exceeds train.questions_per_step = {questions}: each optimiser step "
            "needs a question",
        )
        updates = self.settings.steps * self.optimizer.steps_per_batch * self.optimizer.passes_per_batch
        require(
            self.optimizer.decay_steps is None or updates <= self.optimizer.decay_steps,
            f"Optimizer.decay_steps = {self.optimizer.decay_steps}: after that optimiser step the rate is 0, and "
            f"train.steps = {self.settings.steps} makes {updates} of them; raise the one or lower the other",
        )
        require(
            self.mixer.replays or self.experience is None,
            "ReplayMixer.rho = 0 with ReplayMixer.injection = "
            f"{self.mixer.injection} never replays Work.experience; leave it unbound",
        )
        require(
            self.mixer.collects or self.experience is not None,
            "ReplayMixer.collects = False leaves nothing to replay but Work.experience, which is None: bind it",
        )

    @property
    def copies(self) -> tuple[str, ...]:
        """Which frozen copies of the trained weights a run keeps (engines/frozen_copy.py): 'base', the reference of the
        KL term where that is to become the policy, and 'preceding', π_{k−1}."""
        if self.loss.kl_coef == 0:
            return ()
        return ("base",) * (self.mixer.reincarnation is not None) + ("preceding",) * (self.loss.kl_convex is not None)

    @property
    def reference_model(self) -> bool:
        """Whether the reference of the KL term is a model of its own, neither a copy nor the model without adapter."""
        return self.loss.kl_coef > 0 and self.lora.rank is None and "base" not in self.copies

    @property
    def own_code(self) -> dict[str, str]:
        """The hashes of the files that play and grade, by their bindings, as they were at their first use, with which a
        run goes on. A changed file changes what a run learns."""
        own = {} if self.environment.path is None else {"Environment.path": source_hash(self.environment.source)}
        return {**own, **self.verifier.own_code}


@dataclass(frozen=True)
class Outcome:
    """steps: done in all; planned: train.steps; stopped_by: the signal that ended the run early, or None"""

    steps: int
    planned: int
    stopped_by: signal.Signals | None
