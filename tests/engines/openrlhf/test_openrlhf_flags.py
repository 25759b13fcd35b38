"""OpenRLHF's flags: which are passed on, which are refused, and that nothing starts before all are checked."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import openrlhf_on_cpu  # noqa: F401  (first: without CUDA OpenRLHF cannot be imported before it)
import pytest
import ray
import torch
from engine_builders import SMALL
from run_builders import ROOT, python, set_words, small_bindings
from transformers import AutoTokenizer, Gemma2Config, OPTConfig

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.engine import RunSpec
from exgrpo_orlhf.engines.openrlhf import driver, flags, launch
from exgrpo_orlhf.training import initial_buffer
from exgrpo_orlhf.training.preparation import prepare_and_run

pytestmark = pytest.mark.openrlhf

CPU_FLAGS = {
    "actor.num_gpus_per_node": 1,
    "ref.num_gpus_per_node": 1,
    "vllm.num_engines": 1,
    "train.micro_batch_size": 4,
    "rollout.micro_batch_size": 4,
}
CORRECTION = "algo.advantage.is_correction_"
AHEAD = ["train.generate_ahead = True"]


def layout_bindings(model: Path | str, *bindings: str, **more) -> list[str]:
    """8 questions × 4 rows with the CPU test layout. more: flags"""
    layout = ["train.engine = 'openrlhf'", "OpenRLHF.cpu_bench = True", f"OpenRLHF.flags = {CPU_FLAGS | more!r}"]
    return [*small_bindings(model), *layout, *bindings]


def load(model: Path | str, *bindings: str, **more):
    return config.load(["toy.gin"], layout_bindings(model, *bindings, **more))


def parsed(experiment, model: Path | str = "model"):
    return launch.parse(experiment, str(model), Path("state"), resume=False)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Launches a run, which must not start anything."""

    def started(*_, **__):
        raise AssertionError("it was started")

    monkeypatch.setattr(driver, "drive", started)

    def begin(model: Path | str, *bindings: str, **more) -> None:
        experiment = load(model, *bindings, **more)
        launch.launch(
            RunSpec(experiment, tmp_path / "run", "unused", {}, prepare_and_run, load_buffer=initial_buffer.load),
            str(experiment.model.prepare()),
            resume=False,
        )

    yield begin
    assert not ray.is_initialized()


# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("vllm.num_engine", r"no flag 'vllm\.num_engine'; nearest: .*vllm\.num_engines"),
        ("ds.zero_stages", r"no flag 'ds\.zero_stages'; nearest: .*ds\.zero_stage"),
        ("actor.num_gpu_per_node", r"no flag 'actor\.num_gpu_per_node'; nearest: .*actor\.num_gpus_per_node"),
        ("train_micro_batch_size", r"no flag 'train_micro_batch_size'; nearest: .*train\.micro_batch_size"),
        ("zzz", "no flag 'zzz'; docs/settings.md and docs/dev/flags.md list them"),
        ("actor.nu", "no flag 'actor.nu'"),  # argparse would take the beginning of a flag
        ("--ds.zero_stage", "without dashes, got --ds.zero_stage"),
        ("algo.advantage.lambd", r"algo\.advantage\.lambd cannot be used here: there is no critic"),
    ],
)
def test_an_unknown_flag_is_refused_and_the_nearest_named(raw_model, start, flag, message):
    with pytest.raises(ValueError, match=rf"^OpenRLHF\.flags: .*{message}"):
        start(raw_model, **{flag: 1})


def test_more_flags_wins_over_flags_and_is_checked_too(raw_model):
    experiment = load(raw_model, "OpenRLHF.more_flags = {'vllm.num_engines': 2, 'train.micro_batch_size': None}")
    args = parsed(experiment)
    assert args.vllm.num_engines == 2
    assert args.train.micro_batch_size == 1, "OpenRLHF's default: None leaves a flag out"
    with pytest.raises(ValueError, match=r"train\.seed is decided by train\.seed"):
        parsed(load(raw_model, "OpenRLHF.more_flags = {'train.seed': 2}"))


# -- the result of OpenRLHF's own parser ------------------------------------------------------------------------------


def test_the_work_arrives_as_bound(raw_model):
    experiment = load(
        raw_model,
        "Optimizer.learning_rate = 3.7e-6",
        "Optimizer.betas = (0.87, 0.993)",
        "Optimizer.weight_decay = 0.013",
        "Optimizer.max_grad_norm = 0.7",
        "Optimizer.steps_per_batch = 2",
        "Optimizer.passes_per_batch = 3",
        "Sampling.temperature = 0.9",
        "MixedPolicyLoss.kl_coef = 0.04",
        "train.seed = 11",
    )
    args = parsed(experiment, "some/model")
    assert args.actor.model_name_or_path == "some/model"
    assert (args.rollout.batch_size, args.rollout.n_samples_per_prompt) == (8, 4)
    assert (args.train.batch_size, args.train.max_epochs) == (16, 3)
    assert (args.data.max_len, args.rollout.max_new_tokens) == (32 + 24, 24)
    assert (args.actor.adam.lr, tuple(args.actor.adam.betas)) == (3.7e-6, (0.87, 0.993))
    assert (args.actor.adam.weight_decay, args.actor.max_norm) == (0.013, 0.7)
    assert (args.rollout.temperature, args.rollout.top_p, args.train.seed) == (0.9, 1.0, 11)
    assert (args.algo.kl.init_coef, args.algo.kl.use_loss, args.algo.kl.estimator) == (0.04, True, "k3")
    assert args.algo.kl.target is None
    assert args.actor.entropy_coef is None
    assert (args.ckpt.path, args.ckpt.load_enable) == ("state", False)
    resumed = launch.parse(experiment, "some/model", Path("runs/a b/checkpoint-3"), resume=True)
    assert (resumed.ckpt.path, resumed.ckpt.load_enable) == ("runs/a b/checkpoint-3", True)
    assert args.critic.model_name_or_path is None
    assert args.critic.freezing_steps == -1  # else the actor would not be trained
    assert args.reward.remote_url  # else OpenRLHF would start a reward model
    assert not args.train.async_enable


def test_no_term_no_flag_and_no_clipping_are_none_for_openrlhf_and_deepspeed_too(raw_model):
    args = parsed(load(raw_model, "Optimizer.max_grad_norm = None"))
    assert (args.algo.kl.init_coef, args.algo.kl.use_loss, args.actor.entropy_coef) == (0.0, False, None)
    assert args.actor.max_norm == 0.0, "DeepSpeed clips to a positive norm alone"
    assert parsed(load(raw_model, "MixedPolicyLoss.entropy_coef = 0.003")).actor.entropy_coef == 0.003
    kl = parsed(load(raw_model, "MixedPolicyLoss.kl_coef = 0.1", "LoRA.rank = 4")).algo.kl
    assert (kl.init_coef, kl.use_loss) == (0.0, False), "the reference is the model without its adapter"


def test_packing_does_not_switch_flash_attention_on_without_cuda(raw_model):
    args = parsed(load(raw_model, **{"ds.packing_samples": True}))
    assert (args.ds.packing_samples, args.ds.attn_implementation) == (True, "sdpa")


def test_switches_and_values_become_arguments():
    values = {"a.b": 1, "a.c": True, "a.d": (0.9, 0.99), "a.e": False, "a.g": 0.0, "a.h": 0, "a.i": "x y"}
    expected = ["--a.b", "1", "--a.c", "--a.d", "0.9", "0.99", "--a.g", "0.0", "--a.h", "0", "--a.i", "x y"]
    assert flags.as_arguments(values) == expected


def test_parsing_leaves_no_trace(raw_model):
    import argparse

    import openrlhf.utils

    before = sys.argv, openrlhf.utils.get_strategy, ray.is_initialized, argparse.ArgumentParser.parse_args
    parsed(load(raw_model))
    with pytest.raises(launch.LaunchError, match="is_correction_level"):
        parsed(load(raw_model, **{f"{CORRECTION}level": "word"}))
    assert before == (sys.argv, openrlhf.utils.get_strategy, ray.is_initialized, argparse.ArgumentParser.parse_args)


# -- layouts and settings that cannot be run --------------------------------------------------------------------------

KL = ["MixedPolicyLoss.kl_coef = 0.1"]
COLOCATED, BESIDE = {"train.colocate_all": True}, {"train.colocate_actor_ref": True}
DIVERGENCE = {f"{CORRECTION}level": "token", f"{CORRECTION}gating": "tv"}
REFUSALS = {  # beside those of tests/scripts/test_dry_run.py, which need no OpenRLHF
    "one rollout a question": (["train.group_size = 1"], {}, r"train\.group_size"),
    "engines left out, packed": ([], {"vllm.num_engines": None, "ds.packing_samples": True}, r"vllm\.num_engines"),
    "a word for a number": ([], {"vllm.num_engines": "two"}, r"vllm\.num_engines"),
    "a value for a switch": ([], {"train.colocate_all": 1}, r"train\.colocate_all takes bool, got 1"),
    "a switch for a value": ([], {"vllm.num_engines": True}, r"vllm\.num_engines takes int, got True"),
    "no ranks": ([], {"actor.num_gpus_per_node": 0}, r"actor\.num_gpus_per_node must be at least 1, got 0"),
    "fewer rows than none": ([], {"train.micro_batch_size": -4}, r"train\.micro_batch_size must be at least 1, got -4"),
    "no tokens": ([], {"train.max_tokens_per_gpu": 0}, r"train\.max_tokens_per_gpu must be at least 1, got 0"),
    "a word for a share": ([], {"vllm.gpu_memory_utilization": "half"}, r"gpu_memory_utilization takes float, .*half"),
    "a reference model on unlike numbers, all colocated": (
        KL,
        COLOCATED | {"ref.num_gpus_per_node": 2},
        r"ref\.num_gpus_per_node",
    ),
    "as many reference GPUs on other nodes": (
        KL,
        BESIDE | {"ref.num_gpus_per_node": 1, "ref.num_nodes": 2, "actor.num_gpus_per_node": 2},
        r"ref\.num_nodes",
    ),
    "a reference model on unlike numbers": (KL, BESIDE | {"ref.num_gpus_per_node": 2}, r"train\.colocate_actor_ref"),
    "actors asleep without colocation": ([], {"ds.enable_sleep": True}, r"ds\.enable_sleep"),
    "rows that do not divide in training": ([], {"train.micro_batch_size": 5}, r"train\.micro_batch_size = 5"),
    "rows that do not divide in rollout": ([], {"rollout.micro_batch_size": 3}, r"rollout\.micro_batch_size = 3"),
    "questions that do not divide into steps": (["Optimizer.steps_per_batch = 3"], {}, r"Optimizer\.steps_per_batch"),
    "an average in half precision": ([], {"train.enable_ema": True}, r"enable_ema.* be mostly the initial model"),
    "experts that the model has not": ([], {"actor.aux_loss_coef": 0.01}, r"aux_loss_coef balances experts.* has none"),
    "half precision": ([], {"ds.param_dtype": "fp16"}, r"ds\.param_dtype"),
    "gradients added up in half precision": (
        [],
        {"ds.grad_accum_dtype": "fp16", "ds.zero_stage": 3},
        r"ds\.grad_accum_dtype must be bf16 or fp32, got 'fp16'",
    ),
    "more positions than there are": (["Prompts.max_tokens = 100000"], {}, r"Prompts\.max_tokens.*positions"),
    "more questions than there are": (["train.questions_per_step = 32"], {}, r"train\.questions_per_step"),
    "prompts that do not fit": (["Prompts.max_tokens = 2"], {}, r"Prompts\.max_tokens"),
    "a correction of three bounds": ([], {f"{CORRECTION}threshold": (1, 2, 3)}, "is_correction_threshold"),
    "a correction without a level": ([], {f"{CORRECTION}mode": "clip"}, "mode has no effect without .*_level"),
    "sequences clipped": ([], {f"{CORRECTION}level": "seq", f"{CORRECTION}mode": "clip"}, "is_correction"),
    "a divergence clipped": ([], DIVERGENCE | {f"{CORRECTION}mode": "clip"}, "is_correction"),
    "generating ahead on the actors' GPUs": (AHEAD, COLOCATED, r"train\.colocate_all cannot.* need GPUs of their own"),
    "generating ahead, corrected again": (AHEAD, {f"{CORRECTION}level": "token"}, "max_fresh_weight truncates"),
    "generating ahead, engines asleep": (AHEAD, {"vllm.enable_sleep": True}, r"vllm\.enable_sleep cannot be used with"),
    "generating ahead, actors asleep": (AHEAD, {"ds.enable_sleep": True}, r"ds\.enable_sleep cannot be used with"),
    "an adapter beside modules that are not there": (
        ["LoRA.rank = 2", "LoRA.targets = ('q_prj',)"],
        {},
        r"LoRA\.targets = \('q_prj',\): .*not found",
    ),
    "a divergence with a lower bound": ([], DIVERGENCE, "is_correction"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_layout_that_cannot_run_is_refused_before_anything_starts(raw_model, start, name):
    bindings, more, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message):  # ConfigError and LaunchError are
        start(raw_model, *bindings, **more)


def test_a_model_with_dropout_is_refused_by_its_name(raw_model, tmp_path, start):
    """With dropout the log-probs of the training pass would not be those of the policy that sampled."""
    model = shutil.copytree(raw_model, tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "attention_dropout": 0.1, "classifier_dropout": 0.1}))
    with pytest.raises(
        launch.LaunchError, match=r"model has dropout or router noise \(attention_dropout\); set it to 0"
    ):
        start(model)


def test_a_model_that_caps_its_logits_is_refused_by_its_configuration_alone(raw_model, tmp_path, start, caplog):
    """The weights are not read; an architecture of which that cannot be told is a warning."""
    Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=30.0).save_pretrained(tmp_path / "capped")
    OPTConfig(vocab_size=18, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(
        tmp_path / "unknown"
    )
    for name in ("capped", "unknown"):
        AutoTokenizer.from_pretrained(raw_model).save_pretrained(tmp_path / name)
    with pytest.raises(launch.LaunchError, match=r"capped does more to its logits than its output layer does"):
        launch._check_model(load(raw_model), str(tmp_path / "capped"))
    with pytest.raises(launch.LaunchError, match="dropout"):
        launch._check_model(load(raw_model), str(tmp_path / "unknown"))
    assert "unknown: whether it scales or caps its logits could not be checked" in caplog.text


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "custom_generate/generate.py"])
def test_a_model_that_brings_code_along_is_refused_because_openrlhf_would_run_it(file, raw_model, tmp_path, start):
    folder = shutil.copytree(raw_model, tmp_path / "model")
    path = folder / file
    if path.suffix == ".py":
        path.parent.mkdir()
        path.write_text("raise SystemExit('code of the model was run')\n")
    else:
        code = {"AutoConfig": "code.C", "AutoTokenizer": ["code.T", None]}
        path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": code}))
    with pytest.raises(launch.LaunchError, match="brings Python files along, which OpenRLHF and its vLLM would run"):
        start(folder)


def test_experience_that_cannot_be_used_is_named(raw_model, tmp_path, start):
    bindings = [f"Work.experience = {str(tmp_path / 'experts.jsonl')!r}", "ReplayMixer.collects = False"]
    with pytest.raises(FileNotFoundError, match=r"experts\.jsonl: no such file \(Work\.experience\)"):
        start(raw_model, *bindings)
    spec = RunSpec(load(raw_model, *bindings), tmp_path / "run", "unused", {}, prepare_and_run)
    launch._check_questions(spec, str(raw_model), begins=False)  # a resumed run has its own buffer
    (tmp_path / "experts.jsonl").write_text('{"prompt": "no question", "response": "#1"}\n')
    with pytest.raises(ValueError, match=r"experts\.jsonl, line 1: none of the run's questions"):
        start(raw_model, *bindings)


@pytest.mark.parametrize("package", ["openrlhf", "vllm", "deepspeed", "ray"])
def test_a_package_that_is_not_installed_is_named_with_the_way_to_it(raw_model, start, monkeypatch, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    with pytest.raises(launch.LaunchError, match=rf"needs the package {package}.*make openrlhf-cpu"):
        start(raw_model)


def test_without_cuda_and_without_the_cpu_test_layout_the_ways_out_are_named(raw_model, start, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for address in (None, "local"):
        with pytest.raises(launch.LaunchError, match=r"OpenRLHF\.ray_address.*local engine.*openrlhf_cpu\.gin"):
            start(raw_model, "OpenRLHF.cpu_bench = False", f"OpenRLHF.ray_address = {address!r}")
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")


def test_what_can_be_run_is_started(raw_model, start):
    with pytest.raises(AssertionError, match="it was started"):
        start(raw_model)


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_ends_with_one_line_that_names_the_reason(raw_model, tmp_path):
    words = set_words(layout_bindings(raw_model, "OpenRLHF.ray_address = '127.0.0.1:1'"))
    done = python(ROOT / "scripts" / "train.py", "--gin", "toy.gin", "--out", tmp_path / "run", *words, timeout=900)
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert "OpenRLHF.ray_address = '127.0.0.1:1'" in errors[0]
    assert "Traceback" not in done.stderr
