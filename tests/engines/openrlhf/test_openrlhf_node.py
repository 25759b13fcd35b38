"""The checks of what a machine with GPUs must have for a layout, tested without GPUs."""

from __future__ import annotations

from pathlib import Path

import openrlhf_on_cpu  # noqa: F401  (first: without CUDA OpenRLHF cannot be imported before it)
import pytest
from run_builders import ROOT

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.openrlhf import estimates, launch
from exgrpo_orlhf.engines.openrlhf.flags import divisible_questions, needed_gpus

pytestmark = pytest.mark.openrlhf


def load(layout: str, *bindings: str, **flags):
    more = [f"OpenRLHF.more_flags = {flags!r}", *bindings]
    return config.load(["toy.gin", f"engines/openrlhf_{layout}.gin"], more)


LAYOUTS = sorted(path.stem.removeprefix("openrlhf_") for path in (ROOT / "gin" / "engines").glob("openrlhf_*gpu*.gin"))


@pytest.mark.parametrize("layout", [*LAYOUTS, "multinode", "multinode_ahead"])
def test_every_layout_of_gpus_passes_openrlhfs_parser_and_our_checks_with_the_papers_batch(layout):
    files = [
        "recipes/paper.gin",
        f"engines/openrlhf_{layout}.gin",
        *(["recipes/lora.gin"] if layout == "1gpu_24gb" else []),
    ]
    experiment = config.load(files, ["PretrainedModel.path = 'model'", "QuestionFile.path = 'questions.parquet'"])
    launch.parse(experiment, "model", Path("state"), resume=False)


def test_a_reference_model_on_gpus_of_its_own_is_counted_by_the_run_and_by_the_estimate():
    flags = {"train.colocate_all": False, "vllm.enable_sleep": False, "ds.enable_sleep": False}
    for binding, beside, gpus in (
        ("MixedPolicyLoss.kl_coef = 0.0", False, 16),
        ("MixedPolicyLoss.kl_coef = 0.1", False, 24),
        ("MixedPolicyLoss.kl_coef = 0.1", True, 16),
        ("MixedPolicyLoss.kl_coef = 0.1\nLoRA.rank = 8", False, 16),  # the actor without its adapter
    ):
        experiment = load("8gpu", *binding.split("\n"), **flags, **{"train.colocate_actor_ref": beside})
        assert needed_gpus(experiment) == gpus
        assert estimates.step_of(experiment, 10**9, estimates.CARDS["A100"])[1] == gpus


@pytest.mark.parametrize(
    ("ranks", "train", "rollout", "steps", "k"), [(1, 1, 1, 1, 4), (3, 2, 1, 2, 4), (8, None, 6, 1, 8), (2, 5, 4, 3, 6)]
)
def test_a_batch_that_the_ranks_divide_is_a_multiple_of_the_smallest_one(ranks, train, rollout, steps, k):
    sizes = {"train.micro_batch_size": train, "rollout.micro_batch_size": rollout}
    sizes = {"actor.num_gpus_per_node": ranks, **{flag: size for flag, size in sizes.items() if size}}
    bindings = [f"train.group_size = {k}", f"Optimizer.steps_per_batch = {steps}", "train.engine = 'openrlhf'"]
    experiment = config.load(["base.gin"], [*bindings, f"OpenRLHF.flags = {sizes!r}"])
    train = train or 1  # OpenRLHF's default
    fit = [n for n in range(1, 500) if n * k % (ranks * rollout) == n % steps == n * k // steps % (ranks * train) == 0]
    assert fit == [*range(divisible_questions(experiment), 500, divisible_questions(experiment))]


def test_a_python_that_openrlhf_has_no_build_for_is_named_before_the_package_that_it_cannot_install(monkeypatch):
    assert launch.wrong_python((3, 12, 0)) is None
    experiment = config.load(["toy.gin", "engines/openrlhf_8gpu.gin"])
    monkeypatch.setattr(launch.sys, "version_info", (3, 13, 1, "final", 0))
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(launch.LaunchError, match=r"needs Python 3\.11 or 3\.12: .* this is Python 3\.13"):
        launch.prepare(experiment.openrlhf)


def test_too_little_memory_is_a_warning_and_does_not_stop_the_run(monkeypatch, caplog, raw_model):
    monkeypatch.setattr(estimates, "gpu_bytes", lambda: 4e9)
    launch._check_memory(load("8gpu"), str(raw_model))
    assert "vllm.gpu_memory_utilization = 0.6 of 4.0 GB" in caplog.text
