"""OpenRLHF's trainer with our training loop. Its process holds the engine and the replay buffer."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from openrlhf.trainer.ppo_trainer import BasePPOTrainer

from ...io import tokenizer_file
from ..engine import RunSpec
from . import patches
from .experience_maker import MixedExperienceMaker, keep_order
from .openrlhf_engine import OpenRLHFEngine
from .output import mark_messages


class StopFile:
    """`Stop` by a file in the run's folder, which the driver writes when it gets a signal. The driver may be on another
    machine than the trainer."""

    def __init__(self, run: Path) -> None:
        self.path = run / ".stop"

    @property
    def signal(self) -> signal.Signals | None:
        try:
            return signal.Signals[self.path.read_text(encoding="ascii").strip()]
        except (FileNotFoundError, KeyError):  # there is none, or it is only half written
            return None


class MixedTrainer(BasePPOTrainer):  # type: ignore[misc]
    """The trainer that OpenRLHF's program starts. It makes the engine, and calls `RunSpec.loop` with it instead of
    OpenRLHF's loop over prompts.

    Left to OpenRLHF's trainer are the model groups, the experience maker's splitting and balancing, and `train_step`
    (append, ppo_train, broadcast), which the engine calls.
    """

    def __init__(self, pretrain: str, strategy: Any, *groups: Any, **generate_kwargs: Any) -> None:
        """OpenRLHF's program calls this with the arguments of its PPOTrainer.

        groups: of the policy actors, of a critic and a reward model (None here), of the reference model; vLLM engines
        """
        mark_messages()
        tokenizer = tokenizer_file.load(pretrain)
        tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
        super().__init__(strategy, *groups, tokenizer)
        patches.balancing(keep_order)
        self.experience_maker = MixedExperienceMaker(
            self.actor_model_group, None, None, self.reference_model_group, self.kl_ctl, strategy, tokenizer
        )
        self.spec: RunSpec = self.args.exgrpo_spec
        self.engine = OpenRLHFEngine(
            self.args,
            tokenizer,
            actors=self.actor_model_group,
            vllm_engines=self.vllm_engines,
            train_step=self.train_step,
            broadcast=super().broadcast_to_vllm,
        )

    def get_max_steps(self) -> int:
        return 1  # of OpenRLHF's own schedule, whose place actor.py gives to ours

    def fit(self) -> None:
        self.spec.loop(self.spec, lambda checkpoint: self.engine, StopFile(self.spec.run))

    def broadcast_to_vllm(self) -> None:
        """OpenRLHF's train_step ends with it. With train.generate_ahead the engines are then still generating with the
        weights before the update, and get the new ones by `OpenRLHFEngine.sync`."""
        if not self.spec.experiment.settings.generate_ahead:
            self.engine.sync()
