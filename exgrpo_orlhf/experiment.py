"""An experiment as it is built from gin files, before anything runs."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .dynamic_sampling import DynamicSampling
from .engines.local.settings import LocalSettings
from .engines.openrlhf.settings import OpenRLHFSettings
from .evaluation.validation import ValidationSettings
from .objective import GroupAdvantages, MixedPolicyLoss
from .prompts import Prompts
from .replay import BufferLimits, Question, ReplayMixer, RetirementPolicy, ScoreReuse, TrajectorySelector
from .rewards import Verifier
from .settings import Optimizer, Sampling, TrainSettings
from .tracking import TrackingSettings


class QuestionSource(Protocol):
    def load(self) -> list[Question]: ...


class ModelSource(Protocol):
    def prepare(self) -> str | Path: ...


@dataclass(frozen=True)
class Sources:
    """Which questions on which model (gin name `Work`): values are references such as @ModularChains().

    validation: None for no evaluation during training
    experience: the replay/ folder of another run's checkpoint to start from, or a .jsonl file of expert trajectories
        (experience.py); None for an empty buffer
    """

    questions: Any
    model: Any
    validation: Any = None
    experience: str | None = None

    def __post_init__(self) -> None:
        for name, example in (("questions", "@ModularChains()"), ("model", "@ChainModel()")):
            if getattr(self, name) is None:
                raise ValueError(f"Work.{name} must be a reference such as {example}, got None")


@dataclass(frozen=True)
class Experiment:
    """Everything a run is made of, built and checked before anything starts (config.py).

    config_text: the operative gin config; params: the same, flat; identity: those of them that must be the same for a
        run to be continued; config_hash: of identity
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
    local: LocalSettings | None
    openrlhf: OpenRLHFSettings | None
    verifier: Verifier
    mixer: ReplayMixer
    selector: TrajectorySelector
    scoring: ScoreReuse
    dynamic_sampling: DynamicSampling
    retirement: RetirementPolicy
    limits: BufferLimits
    advantages: GroupAdvantages
    loss: MixedPolicyLoss
    evaluation: ValidationSettings
    tracking: TrackingSettings
    fresh_rng: np.random.Generator
    config_text: str
    config_hash: str
    params: Mapping[str, str]
    identity: Mapping[str, str]

    def __post_init__(self) -> None:
        if self.mixer.only_sound and not self.verifier.checks_reasoning:
            raise ValueError(
                "ReplayMixer.only_sound needs a verifier that checks the reasoning ('modular_chain', 'countdown'); "
                f"Verifier.kind is {self.verifier.kind!r}"
            )
        if self.mixer.collects:
            return
        if self.experience is None:
            raise ValueError(
                "ReplayMixer.collects = False leaves nothing to replay but Work.experience, which is None: bind it"
            )
        if not max(self.mixer.rho, self.mixer.rho_end):
            raise ValueError("ReplayMixer.collects = False with ReplayMixer.rho = 0 never replays Work.experience")
        if self.limits.max_age is not None:
            raise ValueError(
                f"ReplayBuffer.max_age = {self.limits.max_age} would empty the buffer for good where "
                "ReplayMixer.collects is False; it must be None"
            )


@dataclass(frozen=True)
class Outcome:
    """steps: done in all; planned: train.steps; stopped_by: the signal that ended the run early, or None"""

    steps: int
    planned: int
    stopped_by: signal.Signals | None
