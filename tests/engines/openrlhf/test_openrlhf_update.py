"""MixedTrainer.update with one real actor in this process, which it calls without Ray."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import openrlhf_on_cpu  # noqa: F401  (first: without CUDA OpenRLHF cannot be imported before it)
import pytest
from engine_builders import make_engine, mixed_batch
from openrlhf_actor import LOSS, make_actor, rows_of

from exgrpo_orlhf.engines.engine import NonFiniteUpdate
from exgrpo_orlhf.engines.openrlhf.experience_maker import MixedExperienceMaker
from exgrpo_orlhf.engines.openrlhf.trainer import MixedTrainer
from exgrpo_orlhf.settings import OpenRLHF, Optimizer

pytestmark = pytest.mark.openrlhf


class WithoutRay(MixedTrainer):
    wandb_logger = tensorboard_logger = None
    ranks, step, settings = 1, 1, OpenRLHF(score_tokens=200)

    def __init__(self, actor: Any, optimizer: Optimizer) -> None:
        self.actor, self.args, self.prompts = actor, actor.strategy.args, actor.encoder
        self.x, self.actor_model_group, self.measured = SimpleNamespace(optimizer=optimizer), self, []

    def async_run_method(self, method_name: str) -> list[Any]:
        return [getattr(self.actor, method_name)()]

    def async_run_method_batch(self, method_name: str, rows: list[Any]) -> list[Any]:
        self.measured += [row for part in rows for row in part]
        return [[getattr(self.actor, method_name)(part) for part in rows]]

    def _answer(self, references: list[Any]) -> list[Any]:
        return references

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict[str, Any], int]:
        maker = MixedExperienceMaker(None, None, None, None, None, self.actor.strategy, self.actor.tokenizer)
        for experience in maker.make_experience_batch(rollout_samples):
            self.actor.append(experience)
        times = dict.fromkeys(("timing/make_experience", "timing/ppo_train", "timing/broadcast"), 0.0)
        return {**self.actor.fit(), **times}, global_step + 1


def made(model: Any, optimizer: Optimizer) -> tuple[WithoutRay, Any]:
    """A trainer, and a batch with short groups, two rows of which could not be graded."""
    batch = mixed_batch(make_engine(model), n=8, beside=1)
    for group, row in ((0, 1), (5, 0)):
        batch.rows[group][row] = replace(batch.rows[group][row], in_loss=False, advantage=0.0)
    bindings = (f"Optimizer.{name} = {getattr(optimizer, name)}" for name in ("steps_per_batch", "passes_per_batch"))
    actor = make_actor(model, "Optimizer.learning_rate = 1e-2", *bindings)
    return WithoutRay(actor, optimizer), batch


@pytest.mark.parametrize("optimizer", [Optimizer(), Optimizer(steps_per_batch=2), Optimizer(passes_per_batch=2)])
def test_an_update_returns_log_probs_and_entropy_of_every_row_under_the_policy_before_it(warm_model, optimizer):
    """With one optimiser step only the rows that could not be graded are measured for that."""
    trainer, batch = made(warm_model, optimizer)
    rows, flat = rows_of(trainer.actor, batch), batch.flat_rows()
    before = [trainer.actor.measure([row]) for row in rows]
    stats = trainer.update(batch, LOSS)
    once = optimizer == Optimizer()
    assert len(trainer.measured) == (2 if once else len(flat))
    expected = [row.token_ids.tolist() for row in flat if not (once and row.in_loss)]
    assert sorted(row.response.tolist() for row in trainer.measured) == sorted(expected)
    for i, (measured,) in enumerate(before):
        assert stats.policy_logprobs[i].dtype == np.float32
        np.testing.assert_allclose(stats.policy_logprobs[i], measured.logprobs, atol=0.1)
        assert stats.entropies[i] == pytest.approx(measured.entropy, abs=0.02)
        stored = stats.policy_logprobs[i] if flat[i].replayed is None else flat[i].replayed.behaviour_logprobs
        assert stats.behaviour_logprobs[i].tobytes() == stored.tobytes()


def test_the_rows_of_an_update_that_is_not_finite_come_with_their_log_probs(warm_model):
    trainer, batch = made(warm_model, Optimizer())
    batch.rows[1][0] = replace(batch.rows[1][0], advantage=float("inf"))
    with pytest.raises(NonFiniteUpdate) as raised:
        trainer.update(batch, LOSS)
    assert len(raised.value.dump) == len(batch.flat_rows())
    for row, dumped in zip(batch.flat_rows(), raised.value.dump, strict=True):
        assert dumped["token_ids"] == row.token_ids.tolist()
        assert len(dumped["policy_logprobs"]) == len(row.token_ids)
        assert np.isfinite(dumped["policy_logprobs"]).all()
