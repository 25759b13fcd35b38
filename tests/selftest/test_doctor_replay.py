"""The doctor's check `replay` on OpenRLHF's actor in this process: it sees each planted fault, and passes without one.
benchmarks/planted_faults.py does the same on a layout, with the sync of weights."""

from __future__ import annotations

from pathlib import Path

import openrlhf_on_cpu  # noqa: F401  (first: without CUDA OpenRLHF cannot be imported before it)
import pytest
import torch
from openrlhf.utils import get_strategy
from openrlhf_actor import EngineWithoutRay, actor_weights
from planted_faults import FAULTS, MARGIN, figures_of, of_each_fault, planted

from exgrpo_orlhf.engines.openrlhf import launch
from exgrpo_orlhf.selftest import tiny
from exgrpo_orlhf.selftest.actors import DoctorActor
from exgrpo_orlhf.selftest.cluster import DoctorTrainer

pytestmark = [pytest.mark.openrlhf, pytest.mark.slow]


class DoctorHere(DoctorTrainer):
    """The doctor's trainer and its engine with one actor, in this process. It has no vLLM engines."""

    def __init__(self, folder: Path, *bindings: str) -> None:
        model = folder / "model"
        tiny.make_model(None, model, 1)
        _, experiment = tiny.doctor_experiments(["toy.gin", "engines/openrlhf_cpu.gin"], bindings, model)
        args = launch.parse(experiment, str(model), folder / "nowhere", resume=False)
        args.exgrpo = experiment
        actor = DoctorActor(1, 0, None, None)
        actor.init_model_from_pretrained(get_strategy(args), str(model), 1, None)
        self.args, self.engine = args, EngineWithoutRay(actor)


def test_each_fault_in_replay_deviates_by_far_more_than_the_limit_and_without_one_the_check_passes(tmp_path):
    """Of the whole batch's gradient most of these faults are within the limit, which is why replay is checked alone."""
    doctor = DoctorHere(tmp_path)
    findings = {finding.check: finding for finding in of_each_fault(doctor, doctor.check_replay)}
    for fault in FAULTS:
        figures = figures_of(findings[fault])
        assert findings[fault].outcome == "failed"
        assert figures["deviation"] > MARGIN * figures["limit"], findings[fault]
    assert findings[""].outcome == findings["whole: "].outcome == "ok"
    assert figures_of(findings["advantage 0"])["norm"] == 0
    assert figures_of(findings["sign of the advantage"])["cosine"] < -0.99
    unseen = {fault for fault in FAULTS if findings[f"whole: {fault}"].outcome == "ok"}
    assert unseen >= {"importance weight dropped (w = 1)", "advantage 0", "another row's log-probs"}


@pytest.mark.parametrize(
    "bindings",
    [
        ["OpenRLHF.more_flags = {'ds.zero_stage': 3}"],
        ["OpenRLHF.more_flags = {'train.dynamic_batch_enable': True, 'train.max_tokens_per_gpu': 16384}"],
        ["Optimizer.steps_per_batch = 2", "Optimizer.weight_decay = 0.1"],
        ["train.generate_ahead = True"],
        ["LoRA.rank = 4", "MixedPolicyLoss.entropy_coef = 0.01"],
        ["MixedPolicyLoss.max_weight = 2.0", "MixedPolicyLoss.shaping = False"],
        ["Optimizer.skip_above_grad_norm = 100.0"],
    ],
    ids=lambda bindings: bindings[0],
)
def test_the_check_of_replay_changes_no_weight_and_finds_a_fault_in_any_layout(bindings, tmp_path):
    doctor = DoctorHere(tmp_path, *bindings)
    before, limit = actor_weights(doctor.engine.actor), doctor.engine.actor.guard.limit
    right = doctor.check_replay()
    with planted("another row's log-probs", doctor):
        wrong = doctor.check_replay()
    assert (right.outcome, wrong.outcome) == ("ok", "failed"), (right, wrong)
    assert torch.equal(actor_weights(doctor.engine.actor), before)
    assert doctor.engine.actor.guard.limit == limit
    assert doctor.check_gradient().outcome == "ok"
    assert not torch.equal(actor_weights(doctor.engine.actor), before)


def test_a_gradient_guard_that_skips_nothing_is_named(tmp_path):
    doctor = DoctorHere(tmp_path)
    doctor.engine.actor.guard._skip = lambda norm: doctor.engine.actor.guard.norms.append(float(norm))
    with pytest.raises(ValueError, match="skip_above_grad_norm should have skipped"):
        doctor.check_replay()
