"""Whole runs with OpenRLHF, Ray, DeepSpeed and vLLM, without CUDA. A minute each."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import openrlhf_on_cpu  # noqa: F401
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from run_builders import (
    BUILDERS,
    ROOT,
    ends_by_its_template,
    environment,
    python,
    rows,
    rows_so_far,
    set_words,
    small_bindings,
    wait_until,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from exgrpo_orlhf import checkpoints
from exgrpo_orlhf.checkpoints import manifest
from exgrpo_orlhf.study.run_page import explore
from exgrpo_orlhf.testbed.modular_chains import ModularChains, right_reasoning
from exgrpo_orlhf.testbed.tiny_models import END, PAD
from exgrpo_orlhf.training import initial_buffer

pytestmark = [pytest.mark.openrlhf, pytest.mark.slow]

CHECKED = BUILDERS / "openrlhf_checked.py"
MARK = "EXGRPO_TEST_RUN"  # in the environment of all that a run starts
LONG = 900  # seconds; only against waiting for ever


def bindings(model: Path, *more: str, **flags) -> list[str]:
    return small_bindings(model, "train.steps = 6", "train.eval_every = 3", f"OpenRLHF.more_flags = {flags!r}", *more)


def start(run: Path, resume: bool, *arguments: str) -> subprocess.Popen:
    run.parent.mkdir(parents=True, exist_ok=True)
    log = (run.parent / f"{run.name}.log").open("a")
    command = [sys.executable, str(CHECKED), str(run), str(int(resume)), *arguments]
    mark = uuid.uuid4().hex
    own = environment(**{MARK: mark})
    process = subprocess.Popen(command, stdout=log, stderr=log, env=own, start_new_session=True)
    process.mark = mark
    return process


def log_of(run: Path) -> str:
    return (run.parent / f"{run.name}.log").read_text(errors="replace")


def finish(process: subprocess.Popen, run: Path, status: int = 0) -> str:
    """Waits for the end of the process and of all that it started in Ray."""
    try:
        assert process.wait(timeout=LONG) == status, log_of(run)[-6000:]
    finally:
        end = time.monotonic() + 120
        while (left := of_session(process)) and time.monotonic() < end:
            time.sleep(0.5)
        for one in left:
            one.kill()
    assert not left, left
    return log_of(run)


def of_session(process: subprocess.Popen) -> list[psutil.Process]:
    """All processes that a driver started, directly or not. They all have the driver's environment."""
    processes = []
    for one in psutil.process_iter():
        try:
            ours = one.pid != process.pid and one.environ().get(MARK) == process.mark
            if ours and one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                processes.append(one)
        except psutil.Error:  # has ended, or belongs to another user
            continue
    return processes


def untied(model: Path, folder: Path) -> Path:
    """A copy whose output layer no longer shares the embedding's weights, which it starts with."""
    shutil.copytree(model, folder)
    copy = AutoModelForCausalLM.from_pretrained(model)
    copy.config.tie_word_embeddings = False
    copy.lm_head.weight = torch.nn.Parameter(copy.lm_head.weight.detach().clone())
    copy.save_pretrained(folder)
    assert "lm_head.weight" in dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    return folder


def seen(run: Path, what: str) -> list:
    """What openrlhf_checked.py has recorded."""
    return rows(run / "seen" / f"{what}.jsonl")


def assert_every_sync_arrived(run: Path, steps: int) -> None:
    syncs = seen(run, "sync")
    assert len(syncs) >= steps
    assert not any(syncs), syncs


def assert_trained(run: Path, steps: int) -> list[dict]:
    done = rows(run)
    assert [row["step"] for row in done] == list(range(steps + 1))
    assert all(math.isfinite(row["policy/loss"]) and math.isfinite(row["policy/grad_norm"]) for row in done[1:])
    # By chance a step may have no group with both right and wrong answers, and so no gradient, but not every step.
    assert sum(row["policy/grad_norm"] > 0 for row in done[1:]) > steps / 2
    assert sum(row["replay/actual_share"] for row in done[1:]) > 0, "nothing was replayed"
    assert max(row["replay/trajectories"] for row in done[1:]) > 0
    return done


def test_a_run_replays_syncs_saves_is_killed_and_resumes_with_the_same_state(warm_model, tmp_path):
    """One rank, one engine. The vLLM engine has the trainer's weights, so its log-probs differ by rounding only."""
    run = tmp_path / "run"
    arguments = bindings(warm_model, **{"algo.advantage.is_correction_level": "token"})
    process = start(run, False, *arguments)
    wait_until(lambda: 2 in checkpoints.find(run) and len(rows_so_far(run)) > 3, LONG, process)
    started = of_session(process)
    os.killpg(process.pid, signal.SIGKILL)
    psutil.wait_procs(started, timeout=120)
    saved = max(checkpoints.find(run))
    checkpoint = tmp_path / f"checkpoint-{saved}"
    shutil.copytree(run / checkpoint.name, checkpoint)  # the resumed run makes newer ones and removes it
    before = json.loads((checkpoint / "trainer" / "state.json").read_text())

    finish(start(run, True, *arguments), run)
    loaded = run / "seen" / f"loaded-{saved}"
    after = json.loads((loaded / "state.json").read_text())
    assert after == {name: before[name] for name in after}
    for table in ("questions.parquet", "trajectories.parquet"):
        assert (loaded / "replay" / table).read_bytes() == (checkpoint / "replay" / table).read_bytes()
    manifest.verify(run / "checkpoint-6")
    done = assert_trained(run, 6)
    assert_every_sync_arrived(run, 6)
    assert all(row["rollout/logprob_gap"] < 0.05 for row in done[1:])
    updates = seen(run, "update")
    assert all(update["measured"] == 0 and update["stored"] for update in updates), "the training pass measures it"
    assert all(0 < update["gap"] < 0.1 for update in updates), "of the same row that vLLM has sampled"
    assert set(checkpoints.find(run)) == {4, 6}
    assert all("eval/greedy_accuracy" in done[step] for step in (0, 3, 6))
    decided = rows(run / "decisions.jsonl")
    assert [row["step"] for row in decided] == [1, 2, 3, 4, 5, 6]
    assert any(row["replays"] for row in decided)
    for row, metrics in zip(decided, done[1:], strict=True):
        replayed = round(metrics["replay/actual_share"] * len(row["questions"]["id"]))
        assert len(row["replays"].get("id", ())) == row["questions"]["as"].count("replayed") == replayed
    assert f"6 steps, {len({one for row in decided for one in row['questions']['id']})} questions" in explore(run, [])
    published = python(ROOT / "scripts" / "publish.py", run / "checkpoint-6", "--out", tmp_path / "published")
    assert published.returncode == 0, published.stderr
    assert ", openrlhf engine." in (tmp_path / "published" / "README.md").read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path / "published")
    assert not [path for path in (tmp_path / "published").iterdir() if path.is_dir()]


def test_two_ranks_and_two_engines_with_packing_dynamic_batches_short_groups_kl_entropy_and_episodes(
    warm_model, tmp_path
):
    """The trainer's log-probs of the policy's tokens are vLLM's: an environment's tokens are where they were. The
    output layer has weights of its own, which vLLM gets too."""
    run, model = tmp_path / "run", untied(warm_model, tmp_path / "model")
    flags = {
        "actor.num_gpus_per_node": 2,
        "ref.num_gpus_per_node": 2,
        "vllm.num_engines": 2,
        "train.colocate_actor_ref": True,
        "ds.packing_samples": True,
        "train.dynamic_batch_enable": True,
        "train.max_tokens_per_gpu": 128,
        "actor.gradient_checkpointing_enable": True,
        "actor.adam.eps": 1e-7,
        "vllm.enable_prefix_caching": True,
        "vllm.enforce_eager": True,
        "vllm.sync_backend": "gloo",
        "algo.advantage.is_correction_level": "token",
    }
    more = ("MixedPolicyLoss.kl_coef = 0.01", "MixedPolicyLoss.entropy_coef = 0.001", "Optimizer.steps_per_batch = 2")
    more += (
        f"Environment.path = {str(BUILDERS / 'agent_file.py')!r}",
        "Environment.timeout = 120.0",
    )
    more += ("MAX_RESPONSE_TOKENS = 60",)
    more += ("Beside.rollouts = 1", "train.best_metric = 'eval/validation/avg_at_3'")
    sampled = ("Evaluation.samples = 3", "Evaluation.temperature = 0.7", "Evaluation.top_p = 0.9")
    finish(start(run, False, *bindings(model, *more, *sampled, **flags)), run)
    done = assert_trained(run, 6)
    assert_every_sync_arrived(run, 6)
    updates = seen(run, "update")
    assert all(update["measured"] == update["rows"] and update["stored"] for update in updates)
    assert all(0 < update["gap"] < 0.1 for update in updates)
    for row in done[1:]:
        assert row["rollout/logprob_gap"] < 0.05
        assert 1 < row["rollout/turns"] == row["reward_log/turns"] < 3
        assert row["rollout/episode_tokens"] > row["rollout/response_tokens"]
    assert [row["step"] for row in done if "eval/validation/avg_at_3" in row] == [0, 3, 6]
    assert (run / "best").resolve().name in ("checkpoint-3", "checkpoint-6")
    samples = rows(run / "evaluation" / "6" / "validation" / "samples.jsonl")
    assert len({one["seed"] for one in samples}) == len(samples) == 3 * 10


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_goes_on_with_another_number_of_ranks(stage, warm_model, tmp_path):
    """Moved from one rank to two and back it trains as the run that stays, until rounding changes a sampled token."""

    def go_on(name: str, steps: int, ranks: int) -> list[dict]:
        run, resume = tmp_path / name, (tmp_path / name).exists()
        flags = {"actor.num_gpus_per_node": ranks, "ref.num_gpus_per_node": ranks, "ds.zero_stage": stage}
        flags |= {"train.micro_batch_size": 4, "rollout.micro_batch_size": 4}
        more = [f"train.steps = {steps}", "train.eval_every = None", "train.save_every = 1000"]
        more += ["Optimizer.warmup_steps = 10"]
        finish(start(run, resume, *bindings(warm_model, *more, **flags)), run)
        assert not (run / "universal").exists()
        assert len([*(run / f"checkpoint-{steps}" / "_actor").glob("*/*_optim_states.pt")]) == ranks
        return rows(run)[1:]

    stayed, moved = go_on("stayed", 5, 1), go_on("moved", 2, 1)
    for steps, ranks in ((4, 2), (5, 1)):
        moved = go_on("moved", steps, ranks)
    assert [row["step"] for row in moved] == [1, 2, 3, 4, 5]
    rates = [row["policy/learning_rate"] for row in moved]
    assert rates == [row["policy/learning_rate"] for row in stayed]
    assert rates == sorted(set(rates)), "the warm-up goes on where it was"
    same = [a["reward/mean"] == b["reward/mean"] for a, b in zip(stayed, moved, strict=True)]
    assert all(same[:3]), "the first step of two ranks samples with the weights of one"
    for ours, theirs in [pair for pair, alike in zip(zip(moved, stayed, strict=True), same, strict=True) if alike][:3]:
        assert ours["policy/loss"] == pytest.approx(theirs["policy/loss"], rel=0.01, abs=1e-6)
        assert ours["policy/grad_norm"] == pytest.approx(theirs["policy/grad_norm"], rel=0.02)


def test_a_colocated_zero_3_run_follows_its_ablation_and_a_signal(warm_model, tmp_path):
    """Bindings reach the Ray workers: the trainer scores no candidates, the actor skips every update."""
    run = tmp_path / "run"
    flags = {"train.colocate_all": True, "ds.zero_stage": 3}
    more = ["TrajectorySelector.by = 'random'", "Optimizer.skip_above_grad_norm = 1e-9", "train.steps = 1000"]
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    return {'rewards': [float(q.endswith(f'#{gold}<end>')) for q, gold in zip(queries, labels)]}\n"
    )
    more += ["Verifier.kind = 'function'", f"Verifier.function = {str(reward)!r}"]
    process = start(run, False, *bindings(warm_model, *more, **flags))
    wait_until(lambda: len(rows_so_far(run)) > 3, LONG, process)
    process.send_signal(signal.SIGTERM)
    finish(process, run, 128 + signal.SIGTERM)
    done = rows(run)
    assert done[-1]["step"] == max(checkpoints.find(run)) < 1000
    assert all(row["policy/skipped_updates"] == (row["policy/grad_norm"] > 1e-9) for row in done[1:])
    assert sum(row["policy/skipped_updates"] for row in done[1:]) > 0
    assert all(row["replay/candidates_scored"] == 0 for row in done[1:])
    assert sum(row["reward/mean"] for row in done[1:]) > 0
    assert all(row["reward/timeout_share"] == row["reward/error_share"] == 0 for row in done[1:])
    assert_every_sync_arrived(run, 3)


def test_a_run_generates_ahead_beside_its_updates_and_loses_nothing_where_an_engine_dies_meanwhile(
    warm_model, tmp_path
):
    """It ends by name, and the resumed run trains on the batch that was ready."""
    run = tmp_path / "run"
    run.mkdir()
    (run / ".kill-an-engine").touch()
    more = ("train.generate_ahead = True", "MixedPolicyLoss.max_fresh_weight = 2.0", "DynamicSampling.max_rounds = 1")
    more += ("train.save_every = 1", "train.keep = 1", "Verifier.kind = 'math'")
    arguments = bindings(warm_model, *more)
    log = finish(start(run, False, *arguments), run, 1)
    error = log[log.rindex("error: ") :]
    assert all(part in error for part in ("EngineLost: ", "RolloutRayActor (process", "died", "last log lines of"))
    assert seen(run, "killed") == [True], "the engine was generating"
    assert set(checkpoints.find(run)) == {3}
    newest = run / "checkpoint-3"
    manifest.verify(newest)
    ready = pq.read_table(newest / "ahead" / "rollouts.parquet").to_pylist()
    assert {row["policy_step"] for row in ready} == {3}
    assert not list(run.glob("*.partial"))

    finish(start(run, True, *arguments), run)
    done = assert_trained(run, 6)
    assert_every_sync_arrived(run, 6)
    decided = rows(run / "decisions.jsonl")
    planned = {row["question_id"][:12] for row in ready}
    assert {*decided[3]["questions"]["id"]} >= planned, "the resumed run trains on what was ready"
    for row in done[1:]:
        # Rows of further rounds are sampled by the newest weights.
        assert row["rollout/age_mean"] == 0 if row["step"] == 1 else 0 < row["rollout/age_mean"] <= 1
        assert row["time/wait"] < row["time/rollout"], "a part of them was generated beside the update"
    updates = seen(run, "update")
    assert all(update["measured"] == 0 and update["stored"] for update in updates), "nothing is measured before it"
    assert any(row["policy/approx_kl"] > 0 for row in done[1:])
    assert all("policy/truncated_share" in row for row in done[1:])


def test_a_signal_while_the_engines_start_ends_the_start(warm_model, tmp_path):
    run = tmp_path / "run"
    process = start(run, False, *bindings(warm_model))

    def an_engine_starts() -> bool:
        try:
            return any("RolloutRayActor" in " ".join(one.cmdline()) for one in of_session(process))
        except psutil.Error:  # one has ended
            return False

    wait_until(an_engine_starts, LONG, process)
    process.send_signal(signal.SIGINT)
    log = finish(process, run, 128 + signal.SIGINT)
    assert "error: " not in log
    assert not (run / "config.gin").exists(), "no training loop had begun"


def test_a_full_object_store_ends_the_run_with_its_name(warm_model, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".fill-the-store").touch()
    monkeypatch.setenv("RAY_automatic_object_spilling_enabled", "0")
    monkeypatch.setenv("RAY_local_fs_capacity_threshold", "0.0")  # so that Ray treats the disk as full and cannot spill
    process = start(run, False, *bindings(warm_model, "Verifier.kind = 'choice'"))
    log = finish(process, run, 1)
    error = log[log.rindex("error: ") :]
    assert "OutOfDiskError" in error or "ObjectStoreFullError" in error
    assert 2 in checkpoints.find(run)


def test_a_trial_makes_its_steps_estimates_the_run_and_leaves_nothing_behind(warm_model, tmp_path):
    words = set_words(small_bindings(warm_model, "train.steps = 40"))
    layout = ["--gin", "toy.gin", "--gin", "engines/openrlhf_cpu.gin"]
    train = ROOT / "scripts" / "train.py"
    done = python(train, *layout, *words, "--smoke", "--out", tmp_path / "run", timeout=LONG)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert list(lines) == ["questions", "step", "time", "memory", "disk"]
    assert "40 steps" in lines["time"]
    assert not list(tmp_path.iterdir())


def test_su01s_recipe_with_experts_from_a_file_and_an_end_token_that_only_the_template_names(warm_model, tmp_path):
    """The stored successes take the place of a rollout each, groups without a signal are replaced, and there are four
    optimiser steps a batch. Late injection, scored between rollouts and update: test_openrlhf_lora.py."""
    model = ends_by_its_template(warm_model, tmp_path / "model")
    run, experts = tmp_path / "run", tmp_path / "experts.jsonl"
    questions = ModularChains(count=24, operands=(2, 3)).load()
    initial_buffer.write_experts(experts, [(question, right_reasoning(question.prompt)) for question in questions])
    chat_template = AutoTokenizer.from_pretrained(model).chat_template
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "template")
    (model / "chat_template.jinja").unlink()  # so that it comes from the other folder alone
    more = [f"Work.experience = {str(experts)!r}", "ReplayMixer.collects = False", "DynamicSampling.max_rounds = 2"]
    more += [f"Prompts.chat_template_from = '{tmp_path}/template'", "RetirementPolicy.at_accuracy = None"]
    more += ["Prompts.template = 'chat'", "train.steps = 3", "train.eval_every = None"]
    terminal = finish(start(run, False, "recipes/su01.gin", *bindings(model, *more)), run).splitlines()
    assert len(terminal) < 12, "one line a step on the terminal"
    assert not any("Traceback" in line or "Actor" in line for line in terminal), terminal
    assert {path.name.split("-")[0] for path in (run / "logs").iterdir()} >= {"driver.log", "CheckedTrainer"}
    steps = rows(run)[1:]
    assert max(row["rollout/rounds"] for row in steps) > 1
    assert max(row["rollout/filtered_groups"] for row in steps) > 0
    assert all(math.isfinite(row["policy/loss"]) and row["train/questions"] == 8 for row in steps)
    assert all(update["stored"] and update["rows"] == 8 * 4 for update in seen(run, "update"))
    assert all(0 < row["replay/actual_share"] <= 0.5 and "replay/injected" not in row for row in steps)
    assert all(row["replay/trajectories"] == len(questions) for row in steps)
    assert all(row["replay/log_weight_max"] < 0 for row in steps), "π_past is 1"
    assert all(row["rollout/truncated_share"] < 0.5 for row in steps), "responses end with it"
    assert AutoTokenizer.from_pretrained(run / "checkpoint-3").chat_template == chat_template
    assert GenerationConfig.from_pretrained(run / "checkpoint-3").eos_token_id == sorted(
        AutoTokenizer.from_pretrained(model).convert_tokens_to_ids([PAD, END])
    )
    assert_every_sync_arrived(run, 3)
