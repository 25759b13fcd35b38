"""A run that was killed and resumed ends bit-identical to one that was never disturbed."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from run_builders import (
    FRESH_PHASE,
    MIXED_PHASE,
    ROOT,
    STEPS,
    assert_same_ending,
    bindings,
    run_here,
    small_bindings,
    timeless,
    train_command,
    train_in,
    train_small,
    wait_until,
)
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from exgrpo_orlhf import checkpoints, config
from exgrpo_orlhf.checkpoints import UnusableCheckpoint, manifest
from exgrpo_orlhf.replay.snapshot import SnapshotError
from exgrpo_orlhf.training.run import train


def start_process(model: Path, phase: list[str], run: Path) -> subprocess.Popen:
    command = train_command(run, bindings(model, phase))
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") - 1 if path.exists() else -1


def wait_for(process: subprocess.Popen, condition) -> None:
    wait_until(condition, process=process, every=0.0005)


def kill_at_a_random_moment(model: Path, phase: list[str], run: Path) -> None:
    process = start_process(model, phase, run)
    step, pause = random.randint(2, STEPS - 6), random.uniform(0, 0.1)
    wait_for(process, lambda: steps_done(run) >= step)
    time.sleep(pause)
    process.send_signal(signal.SIGKILL)
    process.wait()
    print(f"killed {pause:.3f} s after step {step}, newest checkpoint {max(checkpoints.find(run), default=None)}")
    assert STEPS not in checkpoints.find(run), "the kill came too late to show anything"


@pytest.fixture(scope="module")
def straight(warm_model, tmp_path_factory) -> dict[str, Path]:
    """Undisturbed runs: one that stays in the fresh phase, one that replays from its second step."""
    runs = {}
    for name, phase in (("fresh", FRESH_PHASE), ("mixed", MIXED_PHASE)):
        runs[name] = tmp_path_factory.mktemp(name)
        run_here(warm_model, phase, runs[name], resume=False)
    return runs


def test_the_runs_cover_what_they_should(straight):
    assert all(row["replay/actual_share"] == 0 for row in timeless(straight["fresh"])[1:])
    mixed = timeless(straight["mixed"])
    assert sum(row["replay/actual_share"] > 0 for row in mixed[1:]) >= STEPS - 2
    assert sum(row["replay/candidates_scored"] > 0 for row in mixed[1:]) >= STEPS / 2
    assert mixed[-1]["train/epoch"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "phase"), [("fresh", FRESH_PHASE), ("mixed", MIXED_PHASE)])
def test_killed_at_a_random_moment_and_resumed_equals_a_straight_run(name, phase, straight, warm_model, tmp_path):
    run = tmp_path / "run"
    kill_at_a_random_moment(warm_model, phase, run)
    run_here(warm_model, phase, run, resume=True)
    assert_same_ending(run, straight[name])


@pytest.mark.slow
def test_killed_during_a_save_and_resumed_equals_a_straight_run(straight, warm_model, tmp_path):
    for attempt in range(5):
        run = tmp_path / f"run{attempt}"
        process = start_process(warm_model, MIXED_PHASE, run)
        partial = run / "checkpoint-6.partial"
        wait_for(process, partial.exists)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if partial.exists():
            break
    else:
        pytest.fail("no kill fell into a save in five attempts")
    assert max(checkpoints.find(run)) < 6
    run_here(warm_model, MIXED_PHASE, run, resume=True)
    assert not list(run.glob("*.partial"))
    assert_same_ending(run, straight["mixed"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_the_step_saves_and_a_resumed_run_equals_a_straight_one(
    number, straight, warm_model, tmp_path
):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started with nohup
    run = tmp_path / "run"
    process = start_process(warm_model, MIXED_PHASE, run)
    wait_for(process, lambda: steps_done(run) >= 3)
    process.send_signal(number)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 128 + number, output
    assert "continue with --resume" in output
    stopped_at = steps_done(run)
    assert stopped_at < STEPS
    assert max(checkpoints.find(run)) == stopped_at, "the step that was running is saved"
    run_here(warm_model, MIXED_PHASE, run, resume=True)
    assert_same_ending(run, straight["mixed"])


SLIPPING = ROOT / "benchmarks" / "slipping_calculator.py"  # it answers each step, at times wrongly
CALCULATOR = [f"Environment.path = {str(SLIPPING)!r}", "Environment.stop = ('=',)", "Environment.timeout = 60.0"]
OPTIONS = {
    "scored": [
        "TrajectorySelector.by = 'perplexity'",
        "QuestionSampler.partition = 'level'",
        "ReplayMixer.rho = 0.25",
        "ReplayMixer.rho_end = 0.75",
        "ReplayMixer.rho_steps = 8",
        "Optimizer.passes_per_batch = 2",
    ],
    "unscored": [
        "TrajectorySelector.by = 'recency'",
        "TrajectorySelector.prefer = 'highest'",
        "MixedPolicyLoss.shaping = False",
        "MixedPolicyLoss.max_weight = 1.5",
        "Optimizer.steps_per_batch = 2",
    ],
    "forgetting": [
        "ReplayBuffer.per_question = 2",
        "ReplayBuffer.max_age = 3",
        "ReplayBuffer.max_bytes = 3000",
        "RetirementPolicy.at_accuracy = 0.75",
    ],
    "short": [
        "Beside.rollouts = 1",
        "ReplayBuffer.replays_unsolved = True",
        "RetirementPolicy.times_in_a_row = 2",
        "Optimizer.steps_per_batch = 2",
    ],
    "in place": [
        "ReplayMixer.injection = @InPlace()",
        "Successes.up_to = 0.5",
        "DynamicSampling.max_rounds = 1",
    ],
    "late": [
        "ReplayMixer.rho = 0.0",
        "ReplayMixer.injection = @LateInjection()",
        "ReplayMixer.store_rule = @OneSuccess()",
        "DynamicSampling.max_rounds = 1",
    ],
    "revisits": [
        "ReplayMixer.injection = @UnlessSolved()",
        "UnlessSolved.late = @LateInjection()",
        "ReplayBuffer.replays_unsolved = True",
        "RetirementPolicy.at_accuracy = None",
        "QuestionSampler.mu = 0.0",
        "QuestionSampler.sigma = 0.25",
        "train.generate_ahead = True",
    ],
    "late, scored": [
        "ReplayMixer.rho = 0.0",
        "ReplayMixer.injection = @LateInjection()",
        "LateInjection.choice = 'selected'",
        "RetirementPolicy.at_accuracy = None",
        "Optimizer.learning_rate = 1e-4",
    ],
    "weighted": [
        "FreshSampler.by = 'accuracy'",
        "FreshSampler.cooldown = 1",
        "MixedPolicyLoss.ratio = 'sequence'",
        "Optimizer.passes_per_batch = 2",
    ],
    "paper": [  # the rules of recipes/paper.gin, and of Table 7
        "ReplayBuffer.counts_stored = True",
        "ReplayBuffer.replays_unsolved = True",
        "RetirementPolicy.revisits_every = 3",
        "RetirementPolicy.revisited_share = 1.0",
        "MixedPolicyLoss.clips_mixed = False",
        "MixedPolicyLoss.entropy_coef = 0.001",
        "Optimizer.steps_per_batch = 2",
    ],
    "graded": [
        "Verifier.kind = 'chain_steps'",
        "ReplayBuffer.difficulty = 'reward_spread'",
        "ReplayMixer.store_rule = @AboveMean()",
    ],
    "masked": [
        "ReplayMixer.rho = 0.0",
        "DynamicSampling.masks = True",
        "DynamicSampling.max_reward = 0.5",
        "MixedPolicyLoss.entropy_coef = 0.001",
    ],
    "together": [
        "ReplayMixer.injection = @InPlace()",
        "ReplayMixer.store_rule = @OneSuccess()",
        "ReplayBuffer.replays_unsolved = True",
        "FreshSampler.by = 'accuracy'",
        "FreshSampler.cooldown = 1",
        "DynamicSampling.max_rounds = 1",
        "MixedPolicyLoss.ratio = 'sequence'",
        "Optimizer.steps_per_batch = 2",
    ],
    "ahead": ["train.generate_ahead = True", "MixedPolicyLoss.max_fresh_weight = 2.0", "ReplayBuffer.max_age = 3"],
    "continued": [
        "ReplayMixer.injection = @Prefix()",
        "Prefix.of = 'both'",
        "ReplayBuffer.replays_unsolved = True",
        "DynamicSampling.max_rounds = 1",
    ],
    "continued, ahead": [
        "ReplayMixer.injection = @Prefix()",
        "Prefix.share = @UniformShare()",
        "Prefix.choice = 'selected'",
        "ReplayBuffer.replays_unsolved = True",
        "ReplayBuffer.max_age = 3",
        "train.generate_ahead = True",
        "LoRA.rank = 4",
    ],
    "continued episodes": [
        *CALCULATOR,
        "ReplayMixer.injection = @Prefix()",
        "ReplayBuffer.replays_unsolved = True",
        "train.generate_ahead = True",
    ],
    "stored groups": [
        *("ReplayMixer.injection = @StoredGroup()", "StoredGroup.choice = 'spread'", "StoredGroup.rows = 3"),
        *("StoredGroup.least = 3", "ReplayMixer.store_rule = @AllFinished()", "ReplayBuffer.per_question = 6"),
        *("MixedPolicyLoss.shaping = False", "MixedPolicyLoss.clips_replayed = True", "train.generate_ahead = True"),
        *("RetirementPolicy.at_accuracy = None", "DynamicSampling.max_rounds = 1", "Optimizer.steps_per_batch = 2"),
    ],
    "stored rows": [
        *("ReplayMixer.injection = @StoredRows()", "StoredRows.rows = 2", "StoredRows.decay_steps = 3.0"),
        *("ReplayMixer.store_rule = @WithSignal()", "ReplayBuffer.max_bytes = 20000", "ReplayBuffer.max_age = 4"),
        *("MixedPolicyLoss.shaping = False", "MixedPolicyLoss.clips_replayed = True", "ReplayMixer.rho = 0.0"),
        *("RetirementPolicy.at_accuracy = None", "MixedPolicyLoss.normalizer = 'tokens'"),
    ],
    "remix": [
        *("ReplayMixer.injection = @StoredRows()", "StoredRows.rows = 3", "StoredRows.share = 0.4"),
        *("ReplayMixer.store_rule = @AllFinished()", "ReplayBuffer.max_bytes = 200000", "ReplayBuffer.max_age = 2"),
        *("MixedPolicyLoss.shaping = False", "MixedPolicyLoss.clips_replayed = True", "ReplayMixer.rho = 0.0"),
        *(
            "MixedPolicyLoss.clip_around = 'policy'",
            "MixedPolicyLoss.kl_coef = 0.1",
            "RetirementPolicy.at_accuracy = None",
        ),
        *("MixedPolicyLoss.kl_convex = @ConvexKL()", "ConvexKL.constant_steps = 2", "ConvexKL.every = 1"),
        *("ReplayMixer.reincarnation = @Reincarnation()", "Reincarnation.after_step = 7"),
        *("Optimizer.passes_per_batch = 2", "MixedPolicyLoss.divisors = 'together'"),
    ],
    "reincarnated early": [
        *("ReplayMixer.reincarnation = @Reincarnation()", "Reincarnation.at_accuracy = 0.0", "LoRA.rank = 4"),
        *("ReplayMixer.injection = @LateInjection()", "ReplayMixer.rho = 0.0", "train.generate_ahead = True"),
        *("MixedPolicyLoss.kl_coef = 0.1", "Optimizer.passes_per_batch = 2", "Optimizer.learning_rate = 1e-2"),
    ],
    "adapter": [
        "LoRA.rank = 4",
        "MixedPolicyLoss.kl_coef = 0.01",
        "Optimizer.learning_rate = 1e-2",
        "Optimizer.steps_per_batch = 2",
    ],
    "several rewards": [
        "Verifier.rewards = {'modular_chain': 1.0, 'chain_steps': 0.5}",
        "GroupAdvantages.scale_by_std = True",
        "GroupAdvantages.of_each_reward = True",
        "train.generate_ahead = True",
    ],
    "episodes": [*CALCULATOR, "Optimizer.steps_per_batch = 2"],
    "episodes, late and ahead": [
        *CALCULATOR,
        "train.generate_ahead = True",
        "ReplayMixer.rho = 0.0",
        "ReplayMixer.injection = @LateInjection()",
        "LateInjection.choice = 'selected'",
        "RetirementPolicy.at_accuracy = None",
        "DynamicSampling.max_rounds = 1",
        "LoRA.rank = 4",
        "Optimizer.steps_per_batch = 2",
        "Optimizer.learning_rate = 1e-3",
    ],
}


def some(name: str, low: float = 0, high: float = math.inf) -> Callable[[list[dict]], bool]:
    """In some step before the resume or after it a metric is strictly between the two."""
    return lambda steps: any(low < row.get(name, -math.inf) < high for row in steps)


def falls(name: str) -> Callable[[list[dict]], bool]:
    return lambda steps: any(later[name] < earlier[name] for earlier, later in itertools.pairwise(steps))


def in_both_halves(name: str, low: float = 0) -> Callable[[list[dict]], bool]:
    """In steps before the resume, and in steps after it."""
    return lambda steps: all(max(row[name] for row in part) > low for part in (steps[:5], steps[5:]))


def share_rises(steps: list[dict]) -> bool:
    """2, then 3 of 8 questions, while there are as many candidates."""
    return steps[1]["replay/actual_share"] < steps[2]["replay/actual_share"]


def in_part(steps: list[dict]) -> bool:
    """Some planned questions were solved, and then nothing is injected."""
    return any(row["replay/injected"] < 8 * row["replay/actual_share"] for row in steps)


injected, again = in_both_halves("replay/injected"), in_both_halves("rollout/rounds", 1)
returned, passes = falls("replay/retired"), some("policy/approx_kl")
ACTS = {  # what shows in the metrics of the resumed run that an option's code has been there
    "scored": [share_rises, passes],
    "unscored": [some("replay/truncated_share", 0, 1)],
    "forgetting": [some("replay/evicted"), some("replay/age_max", 2, 4), some("replay/retired")],
    "short": [some("replay/actual_share"), some("replay/bucket_unsolved")],
    "in place": [again, some("replay/actual_share")],
    "late": [injected],
    "revisits": [some("replay/injected"), in_part],
    "late, scored": [injected],
    "weighted": [some("train/fresh_known", 0.9), some("train/fresh_between"), passes],
    "paper": [returned],
    "graded": [some("replay/spread_mean"), some("replay/evicted"), in_both_halves("replay/actual_share")],
    "continued": [in_both_halves("replay/given_tokens"), some("replay/failures"), again],
    "continued, ahead": [in_both_halves("replay/given_tokens"), some("replay/candidates_scored")],
    "continued episodes": [in_both_halves("replay/given_tokens")],
    "masked": [some("reward/groups_with_signal", 0, 1), in_both_halves("policy/grad_norm")],
    "together": [again, some("replay/actual_share"), some("train/fresh_known", 0.9)],
    "ahead": [in_both_halves("rollout/age_mean"), passes, some("replay/evicted")],
    "stored groups": [in_both_halves("replay/added_rows"), some("replay/added_whole", 0, 1), passes],
    "stored rows": [in_both_halves("replay/added_rows"), some("replay/evicted"), some("replay/age_max", 1)],
    "remix": [in_both_halves("replay/added_rows"), some("replay/age_max", 1), some("replay/over"), passes],
    "reincarnated early": [in_both_halves("replay/over")],
    "adapter": [passes],
    "several rewards": [in_both_halves("reward_part/chain_steps"), in_both_halves("replay/actual_share")],
    "episodes": [some("rollout/turns", 1), in_both_halves("replay/actual_share")],
    "episodes, late and ahead": [injected],
}
KILLED = (
    *("several rewards", "graded", "revisits", "weighted", "together", "continued", "stored groups", "stored rows"),
    *("remix", "reincarnated early", "episodes, late and ahead"),
)


UNSCORED = ("unscored", "late", "masked", "continued", "continued episodes", "stored groups", "stored rows")
UNSCORED += ("remix", "reincarnated early")


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_resumed_run_with_options_equals_a_straight_one(name, warm_model, tmp_path):
    """And in that run the options act. Some are killed as well."""
    phase = [*MIXED_PHASE, *OPTIONS[name]]
    run_here(warm_model, phase, tmp_path / "straight", resume=False)
    train_in(tmp_path / "run", [*bindings(warm_model, phase), "train.steps = 5"])
    run_here(warm_model, phase, tmp_path / "run", resume=True)
    assert_same_ending(tmp_path / "run", tmp_path / "straight")
    if name in KILLED:
        kill_at_a_random_moment(warm_model, phase, tmp_path / "killed")
        run_here(warm_model, phase, tmp_path / "killed", resume=True)
        assert_same_ending(tmp_path / "killed", tmp_path / "straight")
    done = timeless(tmp_path / "run")[1:]
    assert [acts(done) for acts in ACTS[name]] == [True] * len(ACTS[name])
    scored = some("replay/candidates_scored")(done)
    assert scored == (name not in UNSCORED)


def test_an_extended_run_equals_a_longer_one(straight, warm_model, tmp_path):
    """train.steps may change on resume: what was trained so far is the same."""
    run = tmp_path / "run"
    train_in(run, [*bindings(warm_model, MIXED_PHASE), "train.steps = 5"])
    run_here(warm_model, MIXED_PHASE, run, resume=True)
    assert_same_ending(run, straight["mixed"])


def test_a_run_of_an_older_version_goes_on_with_the_values_that_the_refusal_names(raw_model, tmp_path, caplog):
    """That version had two settings less, and one more."""
    words = small_bindings(raw_model, "train.eval_every = None")
    experiment = config.load(["toy.gin"], [*words, "train.steps = 2"])
    settings = ("ReplayMixer.rho_end", "MixedPolicyLoss.beta")
    identity = {name: value for name, value in experiment.identity.items() if name not in settings}
    older = replace(experiment, identity=identity)
    train(older, tmp_path, resume=False, tracking_uri="unused", tags={})
    go = lambda *more: train_in(tmp_path, [*words, "train.steps = 3", *more], resume=True)
    with pytest.raises(UnusableCheckpoint) as refused:
        go("MixedPolicyLoss.beta = 0.5", "train.seed = 3")
    beta, seed = str(refused.value).splitlines()[1:3]
    assert beta.startswith(
        "  MixedPolicyLoss.beta: not bound in the checkpoint, 0.5 now; a run from before this setting"
    )
    assert seed == "  train.seed: 0 in the checkpoint, 3 now"
    assert go(beta.partition(" goes on with ")[2]).steps == 3
    assert "from before these settings, which have their defaults now: MixedPolicyLoss.beta = 0.1, " in caplog.text
    state = {"identity": {**identity, "MixedPolicyLoss.gamma": "1.0"}}
    (folder := tmp_path / "checkpoint-9").mkdir()
    checkpoints.write_state(folder, state)
    manifest.seal(folder, 9, "x", {})
    with pytest.raises(UnusableCheckpoint, match=r"gamma: 1.0 .* not bound now; only the version that made the checkp"):
        checkpoints.read_state(folder, dict(experiment.identity), experiment.defaults)


def test_a_run_is_not_resumed_with_other_validation_questions_or_with_a_best_metric_that_is_not_measured(
    raw_model, tmp_path
):
    """The file changed, not its binding."""
    run, file = tmp_path / "run", tmp_path / "validation.jsonl"
    settings = ["Work.validation = @QuestionFile()", f"QuestionFile.path = {str(file)!r}", "train.eval_every = 9"]
    file.write_text('{"prompt": "1+1+1+1=", "answer": "4"}\n')
    settings += ["QuestionFile.answer = 'answer'", "train.best_metric = 'eval/greedy_accuracy'"]
    train_small(raw_model, run, "train.steps = 1", *settings)
    with pytest.raises(ValueError, match=r"train\.best_metric = 'eval/greedy_accuracy' is never measured"):
        train_small(raw_model, run, "train.steps = 2", *settings, "train.eval_every = None", resume=True)
    file.write_text('{"prompt": "1+1+1+2=", "answer": "5"}\n')
    with pytest.raises(ValueError, match=r"made with another validation set .* bring Work.validation's questions back"):
        train_small(raw_model, run, "train.steps = 2", *settings, resume=True)


def test_questions_with_other_columns_are_named_on_resume_and_a_moved_file_is_no_other_one(raw_model, tmp_path, caplog):
    def file(name: str, tests: str, n: int = 8) -> list[str]:
        path = tmp_path / name / "questions.jsonl"
        path.parent.mkdir()
        rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "tests": tests} for i in range(n)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = ["Work.questions = @QuestionFile()", "Work.validation = None", "train.eval_every = None"]
        settings += ["QuestionFile.answer = 'answer'", "QuestionFile.meta = ('tests',)", "Verifier.kind = 'exact'"]
        return [*settings, f"QuestionFile.path = {str(path)!r}"]

    def warnings(name: str, tests: str, steps: int) -> int:
        caplog.clear()
        train_small(raw_model, tmp_path / "run", *file(name, tests), f"train.steps = {steps}", resume=steps > 1)
        return caplog.text.count("further columns (QuestionFile.meta, extra_info) are not those of")

    assert warnings("a", "1", steps=1) == 0
    assert warnings("b", "1", steps=2) == 0
    assert warnings("c", "2", steps=3) == 1
    state = json.loads((path := tmp_path / "run" / "checkpoint-3" / "trainer" / "state.json").read_text())
    del state["content"]  # as an earlier version wrote it
    path.write_text(json.dumps(state))
    manifest.seal(path.parents[1], 3, manifest.read(path.parents[1]).run, {})
    assert warnings("d", "1", steps=4) == 0
    with pytest.raises(ValueError, match="made with another question set"):
        train_small(raw_model, tmp_path / "run", *file("e", "1", 9), "train.steps = 5", resume=True)


def test_a_template_that_writes_the_date_cannot_be_resumed_on_another_day_unseen(raw_model, tmp_path, monkeypatch):
    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=1)

    tokenizer = AutoTokenizer.from_pretrained(shutil.copytree(raw_model, tmp_path / "model"))
    tokenizer.chat_template = "{{ strftime_now('%d') }}+{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "model")
    settings = ("Prompts.template = 'chat'", "train.eval_every = None")
    train_small(tmp_path / "model", tmp_path / "run", "train.steps = 1", *settings)
    train_small(tmp_path / "model", tmp_path / "run", "train.steps = 2", *settings, resume=True)
    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    with pytest.raises(SnapshotError, match="another tokenizer or prompt template, or another day's date in it"):
        train_small(tmp_path / "model", tmp_path / "run", "train.steps = 3", *settings, resume=True)
