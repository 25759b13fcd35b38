"""The doctor on the CPU test layout: it passes a correct layout, and names each planted fault."""

from __future__ import annotations

import os
import re
import resource
from fractions import Fraction
from pathlib import Path

import openrlhf_on_cpu  # noqa: F401
import pytest
import torch
from layouts import MODELS
from ray_node import running_ray
from run_builders import ROOT, environment, python
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DeepseekV3Config,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
    SmolLM3Config,
)

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.openrlhf import launch, stack
from exgrpo_orlhf.selftest import cluster, machine, parity, tiny
from exgrpo_orlhf.selftest.finding import Finding
from exgrpo_orlhf.settings import OpenRLHF
from exgrpo_orlhf.testbed.modular_chains import ModularChains

pytestmark = [pytest.mark.openrlhf, pytest.mark.slow]

CPU_LAYOUT = ("--gin", "gin/toy.gin", "--gin", "gin/engines/openrlhf_cpu.gin")
LAYOUTS = sorted(path.name for path in (ROOT / "gin" / "engines").glob("openrlhf_*.gin"))


def doctor(folder: Path, *arguments: str, program: str = "scripts/doctor.py", **options) -> tuple[int, dict[str, str]]:
    """Exit status, and the line of each check."""
    own = {"EXGRPO_CACHE": str(folder / "cache"), **options.pop("env", {})}
    done = python(ROOT / program, *arguments, "--out", folder / "runs", cwd=ROOT, env=own, **options)
    print(done.stdout, done.stderr)  # pytest shows it where a test fails
    lines = re.findall(r"^ *\d+ s  ((?:ok|failed|skipped) +(\w+) .*(?:\n {20}.*)*)", done.stdout, re.MULTILINE)
    assert lines or done.returncode == 2, done.stdout + done.stderr + log_of(folder)
    return done.returncode, {check: line for line, check in lines}


def log_of(folder: Path) -> str:
    log = folder / "runs" / "doctor.log"
    return log.read_text(errors="replace")[-4000:] if log.exists() else ""


# -- on the layout ----------------------------------------------------------------------------------------------------


def test_every_check_passes_on_the_cpu_test_layout_one_step_ahead(tmp_path):
    """The gradient is that of rows of another policy, and the steps train ahead."""
    status, lines = doctor(tmp_path, *CPU_LAYOUT, "--set", "train.generate_ahead = True")
    assert status == 0, (lines, log_of(tmp_path))
    without_cuda = {"driver", "kernels", "memory", "sleep", "nodes"}
    assert {check for check, line in lines.items() if line.startswith("skipped")} == without_cuda
    assert lines.keys() - without_cuda == {
        *("versions", "disk", "shm", "model", "start"),
        *("ranks", "folder", "environment", "logprobs", "replay", "gradient", "sync", "step", "resume"),
    }
    assert re.search(r"; \d+ replayed rows, generated ahead, in 1 optimiser steps", lines["replay"])
    assert re.search(r"; \d+ rows, generated ahead, in 1 optimiser steps", lines["gradient"])
    assert "3 steps" in lines["step"]
    assert "step 4 done" in lines["resume"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["doctor.log"], "its working folder is removed"


def test_planted_faults_are_named(tmp_path):
    """Two ranks on a cluster that was started without one of the driver's variables."""
    more = {"actor.num_gpus_per_node": 2, "ref.num_gpus_per_node": 2, "train.dynamic_batch_enable": True}
    more |= {"train.max_tokens_per_gpu": 16384, "rollout.max_tokens_per_gpu": 16384}
    checks = ("nodes", "folder", "environment", "logprobs", "gradient", "sync")
    with running_ray(
        tmp_path, cpus=16, gpus=3, PYTHONPATH=environment()["PYTHONPATH"], RAY_worker_niceness="0"
    ) as address:
        status, lines = doctor(
            tmp_path,
            *CPU_LAYOUT,
            *("--set", f"OpenRLHF.more_flags = {more!r}", "--set", f"OpenRLHF.ray_address = {address!r}"),
            *(part for name in checks for part in ("--only", name)),
            program="tests/builders/doctor_faults.py",
            env={"NCCL_SOCKET_IFNAME": "eth7"},
        )
    assert status == 1, (lines, log_of(tmp_path))
    assert lines.pop("nodes").startswith("ok")
    assert all(line.startswith("failed") and "remedy: " in line for line in lines.values()), lines
    assert "rank 1 does not see" in lines["folder"]
    assert "NCCL_SOCKET_IFNAME does not arrive at rank 0" in lines["environment"]
    assert "nats apart" in lines["logprobs"]
    assert "engine 0 differs in 1 of 17 weights: model.layers.1.mlp.down_proj.weight" in lines["sync"]
    match = re.search(r"([\d.]+) % from the plain one.* norm ([\d.]+) of", lines["gradient"])
    error, norm = match.groups()
    assert float(error) > 20
    assert float(norm) < 0.9


def test_a_disk_without_room_is_named_before_anything_is_built(tmp_path):
    """A limit on the file size, a megabyte, stands for a full disk."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    status, lines = doctor(tmp_path, *CPU_LAYOUT, "--only", "disk", "--only", "start", preexec_fn=limit)
    assert status == 1
    assert re.match(r"failed +disk .*writing 67 MB ended in: .*too large", lines["disk"])
    assert lines["start"].startswith("skipped")
    assert not list((tmp_path / "runs").glob("doctor-*"))


def test_an_unknown_check_and_a_layout_of_the_local_engine_are_refused(tmp_path):
    assert doctor(tmp_path, *CPU_LAYOUT, "--only", "gradients")[0] == 2
    assert doctor(tmp_path, "--gin", "gin/toy.gin", "--only", "versions")[0] == 2


# -- of one machine ---------------------------------------------------------------------------------------------------


def test_a_disk_has_room_for_the_checkpoints_that_are_kept_the_best_one_too(raw_model, tmp_path):
    disk = machine.disk(tmp_path, 10**15, 2)
    assert disk.outcome == "failed"
    assert "3,000,000.0 GB for 2 + 1 checkpoints of 1,000,000.0 GB" in disk.measured
    for metric, kept in (("None", 2), ("'eval/greedy_accuracy'", 3)):
        bindings = ["train.keep = 2", f"train.best_metric = {metric}"]
        experiment = config.load(["toy.gin", "engines/openrlhf_8gpu.gin"], bindings)
        [disk] = machine.examine(("disk",), tmp_path, experiment, str(raw_model), elsewhere=False)
        assert f" GB for {kept} + 1 checkpoints" in disk.measured


def test_a_layout_that_the_smallest_gpu_or_the_host_has_no_memory_for_is_named(tmp_path, monkeypatch):
    experiment = config.load(["toy.gin", "engines/openrlhf_8gpu.gin"], [])
    host = {"SC_PHYS_PAGES": 10**9, "SC_PAGE_SIZE": 1000}
    monkeypatch.setattr(machine.os, "sysconf", host.__getitem__)
    monkeypatch.setenv("PATH", str(tmp_path))

    def memory_of_gpu(mebibytes: int) -> Finding:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho 81559\necho {mebibytes}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        return machine.memory(experiment, MODELS["7B"])

    assert machine.memory(experiment, None).outcome == "skipped"
    fits, small = memory_of_gpu(81559), memory_of_gpu(24564)
    assert (fits.outcome, small.outcome) == ("ok", "failed")
    assert "update 38.8, rollout 66.5 of 85.5 GB; 228 of this machine's 1000 GB" in fits.measured
    assert "vllm.gpu_memory_utilization = 0.6 of 25.8 GB" in small.measured
    host["SC_PHYS_PAGES"] = 10**8
    assert memory_of_gpu(81559).outcome == "failed"


def test_a_driver_too_old_for_torchs_cuda_is_named_with_the_one_that_is_needed(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '550.54.15, NVIDIA H100 80GB HBM3, 81559 MiB'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    driver = machine.driver()
    assert driver.outcome == "failed"
    assert "550.54.15" in driver.measured
    assert "580" in driver.remedy


def test_a_lock_that_a_killed_build_left_is_named(tmp_path, monkeypatch):
    lock = tmp_path / "py311_cu130" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert machine.kernels(False).outcome == "skipped"
    lock.touch()
    kernels = machine.kernels(False)
    assert kernels.outcome == "failed"
    assert f"rm {lock}" in kernels.remedy


@pytest.mark.parametrize(
    ("names", "readable"), [("8.0 9.0a", False), ("Hopper", False), ("8.0;9.0+PTX", True), ("", True)]
)
def test_architectures_that_deepspeed_cannot_read_are_named_by_the_doctor_and_by_a_start(names, readable, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", names)
    assert readable == (machine.wrong_arch_list(os.environ) is None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if not readable:
        assert "TORCH_CUDA_ARCH_LIST has" in machine.kernels(False).measured
    with pytest.raises(launch.LaunchError, match="sees none here" if readable else "TORCH_CUDA_ARCH_LIST has"):
        launch.prepare(OpenRLHF())


@pytest.mark.parametrize(
    ("package", "installed", "outcome", "measured"),
    [
        ("wandb", None, "warning", "alone: wandb$"),  # only flags of OpenRLHF need it
        ("deepspeed", "0.18.0", "failed", r"openrlhf needs deepspeed==\S+, installed is 0\.18\.0"),
    ],
)
def test_a_package_that_is_missing_or_of_another_version_is_named(package, installed, outcome, measured, monkeypatch):
    monkeypatch.setattr(machine, "version", lambda name: installed if name == package else stack.version(name))
    versions = machine.versions()
    assert versions.outcome == outcome
    assert re.search(measured, versions.measured)


# -- the small model and its experiment -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [Qwen2Config, Qwen3Config, LlamaConfig, MixtralConfig])
@pytest.mark.parametrize("tensor_parallel", [1, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_the_small_model_has_the_bound_architecture_and_tells_temperatures_apart(
    tmp_path, shape, tensor_parallel, tied
):
    """With tied weights too, where a model that keeps the last token's embedding says nothing but that token."""
    shape(num_key_value_heads=8, tie_word_embeddings=tied).save_pretrained(tmp_path / "bound")
    architecture = tiny.make_model(str(tmp_path / "bound"), tmp_path / "small", tensor_parallel)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    assert type(model).__name__ == architecture == shape.__name__.removesuffix("Config") + "ForCausalLM"
    assert model.num_parameters() < 2 * 10**7
    assert model.config.num_key_value_heads % tensor_parallel == 0
    logits = model(torch.arange(18)[None]).logits
    assert 1 < logits.std() < 4
    assert torch.distributions.Categorical(logits=logits).entropy().mean() > 0.5, "nats of 2.9"


PATTERN = ["linear_attention"] * 3 + ["full_attention"]
JAMBA = {"attn_layer_offset": 2, "attn_layer_period": 8, "expert_layer_offset": 1, "expert_layer_period": 2}


@pytest.mark.parametrize(
    ("bound", "layers"),
    [
        (Qwen3Config(num_hidden_layers=4), 2),  # all alike
        (Qwen3NextConfig(num_hidden_layers=8, layer_types=PATTERN * 2, num_experts=8), 4),
        (JambaConfig(num_hidden_layers=8, num_experts=2, **JAMBA), 3),  # by modules alone
        (SmolLM3Config(num_hidden_layers=8), 4),  # every fourth is without positions
        (Lfm2Config(num_hidden_layers=4, layer_types=["conv", "conv", "conv", "full_attention"]), 4),
        (BambaConfig(num_hidden_layers=4, attn_layer_indices=[2]), 3),
        (DeepseekV3Config(num_hidden_layers=4, first_k_dense_replace=2, num_experts_per_tok=2), 3),
    ],
    ids=lambda bound: getattr(bound, "model_type", None),
)
def test_the_small_model_has_a_layer_of_each_kind_of_the_bound_one(tmp_path, bound, layers):
    bound.save_pretrained(tmp_path / "bound")
    tiny.make_model(str(tmp_path / "bound"), tmp_path / "small", 1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    assert model.config.num_hidden_layers == layers
    assert model.num_parameters() < 2 * 10**7
    kinds = {type(part) for part in model.modules()}
    with torch.device("meta"):
        assert kinds >= {type(part) for part in AutoModelForCausalLM.from_config(bound).modules()}
    assert model(torch.arange(18)[None], use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "more", [[], ["recipes/official.gin"], ["recipes/late_injection.gin", "recipes/lora.gin"], ["baselines/remix.gin"]]
)
def test_a_layout_is_examined_with_as_many_rows_as_its_ranks_need(tmp_path, layout, more):
    bound, experiment = tiny.doctor_experiments([*more, f"engines/{layout}"], [], tmp_path / "model")
    flags = experiment.openrlhf.all_flags()
    ranks = flags["actor.num_nodes"] * flags["actor.num_gpus_per_node"]
    rows = experiment.settings.questions_per_step * experiment.settings.group_size
    assert rows / experiment.optimizer.steps_per_batch >= tiny.ROWS * ranks
    assert experiment.loss == bound.loss
    assert experiment.lora == bound.lora
    assert experiment.mixer.share.rho == Fraction(1, 2), "with the paper's algorithm"
    assert experiment.mixer.injection.late_injection is None
    changed = flags.items() ^ bound.openrlhf.all_flags().items()
    allowed = {"train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu", "algo.advantage.is_correction_level"}
    assert {flag for flag, _ in changed} <= allowed


def test_a_layout_whose_flags_hold_a_macro_is_examined(tmp_path):
    flags = "OpenRLHF.more_flags = {'actor.num_gpus_per_node': %GPUS}"
    _, experiment = tiny.doctor_experiments(["engines/openrlhf_cpu.gin"], [flags, "GPUS = 2"], tmp_path / "model")
    assert experiment.openrlhf.more_flags["actor.num_gpus_per_node"] == 2


def test_a_gradient_that_lost_rows_differs_from_the_plain_one(tmp_path):
    """And bfloat16 alone, whose error depends on the processor, leaves the limit below that of half a gradient."""
    model = tmp_path / "model"
    tiny.make_model(None, model, 1)
    _, experiment = tiny.doctor_experiments(["engines/openrlhf_cpu.gin"], [], model)
    questions = ModularChains(count=experiment.settings.questions_per_step, operands=(3, 4)).load()
    batch = parity.random_batch(questions, experiment.settings.group_size, 18, tiny.RESPONSE)
    right, rounded = (parity.plain(experiment, model, batch, dtype) for dtype in ("float32", "bfloat16"))
    assert parity.Difference.between(right, right).error == 0
    own = parity.Difference.between(rounded, right)
    assert 1e-4 < own.error < 0.5 / cluster.GRADIENT_FACTOR
    half = parity.Difference.between([{name: g / 2 for name, g in step.items()} for step in right], right)
    assert half.norm == half.error == pytest.approx(0.5)
    with pytest.raises(ValueError, match="2 optimiser steps were made instead of 1"):
        parity.Difference.between(right * 2, right)
    ahead = parity.generated_ahead(parity.plain_engine(experiment, model, "float32"), batch)
    assert all(row.trajectory or row.response.behaviour_logprobs is not None for row in ahead.flat_rows())
    assert parity.Difference.between(parity.plain(experiment, model, ahead, "float32"), right).error > 0.1, (
        "a lost weight shows"
    )
