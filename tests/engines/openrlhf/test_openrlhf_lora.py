"""LoRA on OpenRLHF: vLLM gets merged weights under the base model's names, and a checkpoint holds everything.

Its gradients are compared with the local engine's in test_openrlhf_matrix.py.
"""

from __future__ import annotations

import math

import openrlhf_on_cpu  # noqa: F401
import peft
import pytest
import torch
from engine_builders import move_adapter, sampled_batch
from openrlhf_actor import make_actor, update
from run_builders import rows
from test_openrlhf_run import assert_every_sync_arrived, bindings, finish, seen, start
from transformers import AutoModelForCausalLM

from exgrpo_orlhf.engines import lora as adapters
from exgrpo_orlhf.engines.openrlhf.actor import MixedActor

pytestmark = pytest.mark.openrlhf

LORA = ("LoRA.rank = 4", "Optimizer.learning_rate = 1e-3")


@pytest.fixture
def moved(monkeypatch):
    """Adapters do not begin as the base model."""
    make = MixedActor.__init__

    def make_and_move(self, *args, **options):
        make(self, *args, **options)
        if self.adapter:
            move_adapter(self.model)

    monkeypatch.setattr(MixedActor, "__init__", make_and_move)


def merged_by_peft(base, adapter) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()


def assert_checkpoint_is_merged(folder, base):
    """Apart from bfloat16's rounding of the base weight and of the sum."""
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
    theirs = merged_by_peft(base, folder / adapters.FOLDER)
    assert ours.keys() == theirs.keys()
    assert any((ours[name] - plain[name]).abs().max() > 1e-3 for name in ours), "the adapter does something"
    for name, weight in ours.items():
        assert ((weight - theirs[name]).abs() <= 2**-8 * (plain[name].abs() + theirs[name].abs()) + 1e-6).all(), name


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_holds_merged_weights_and_the_adapter_and_resumes_exactly(stage, warm_model, tmp_path, moved):
    actor = make_actor(warm_model, *LORA, **{"ds.zero_stage": stage})
    batch = sampled_batch(warm_model)
    update(actor, batch)
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    actor.save_state(str(folder), 1)
    assert_checkpoint_is_merged(folder, warm_model)

    again = make_actor(warm_model, *LORA, resume=folder, **{"ds.zero_stage": stage})
    for one in (actor, again):
        update(one, batch)
    first, second = (one.actor.adapter.merged_state() for one in (actor, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_with_zero_3_on_two_ranks_vllm_has_the_merged_weights_after_every_step_and_stored_successes_are_injected_late(
    warm_model, tmp_path
):
    """In groups of planned revisits too. The candidates are scored with the adapter, the reference of the KL term is
    measured without it."""
    run = tmp_path / "run"
    late = [
        "ReplayMixer.injection = @LateInjection()",
        "LateInjection.choice = 'selected'",
        "RetirementPolicy.at_accuracy = None",
    ]
    late += ["TrajectorySelector.by = 'entropy'", "TrajectorySelector.prefer = 'lowest'"]
    more = (*LORA, "Optimizer.learning_rate = 1e-2", "MixedPolicyLoss.kl_coef = 0.01", "ModularChains.count = 8")
    flags = {"ds.zero_stage": 3, "actor.num_gpus_per_node": 2, "actor.gradient_checkpointing_enable": True}
    more += ("train.steps = 12", "train.eval_every = None")
    finish(start(run, False, "recipes/planned_revisits.gin", *bindings(warm_model, *late, *more, **flags)), run)
    done = rows(run)[1:]
    assert len(done) == 12
    assert sum(row["policy/grad_norm"] > 0 for row in done) > 6
    assert all(row["time/reference"] > 0.01 for row in done), "the rows are measured without the adapter"
    assert_every_sync_arrived(run, 12)
    assert_checkpoint_is_merged(run / "checkpoint-12", warm_model)

    assert all(math.isfinite(row["policy/loss"]) and row["train/questions"] == 8 for row in done)
    assert all(update["stored"] and update["rows"] == 8 * 4 for update in seen(run, "update"))
    decided = rows(run / "decisions.jsonl")
    planned = [
        (correct, question in row["replays"].get("id", ()))
        for row in decided
        for question, kind, correct in zip(*(row["questions"][name] for name in ("id", "as", "correct")), strict=True)
        if kind == "replayed"
    ]
    assert {stored for _, stored in planned} == {True, False}
    assert all(stored == (correct == 0) for correct, stored in planned), "only where none of its rollouts succeeds"
    assert sum(row["replay/injected"] for row in done) > 0 < sum(row["replay/candidates_scored"] for row in done)
