"""The training loop: it does what was asked, says what it could not do, and never ends early in silence."""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from engine_builders import saved_model
from full_disk import full_disk
from mlflow.tracking import MlflowClient
from run_builders import ROOT, rows, set_words, small_bindings, timeless
from run_builders import train_small as go
from step_builders import decide_verdicts
from tracking_builders import tracked_runs
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo_orlhf import checkpoints, config
from exgrpo_orlhf.checkpoints import RunFolderError, UnusableCheckpoint, claim, manifest
from exgrpo_orlhf.engines.engine import NonFiniteUpdate
from exgrpo_orlhf.engines.local import TorchEngine
from exgrpo_orlhf.engines.local.forward import within_memory
from exgrpo_orlhf.replay import ReplayBuffer, RetirementPolicy, snapshot
from exgrpo_orlhf.replay.snapshot import SnapshotError
from exgrpo_orlhf.rewards import GradingError
from exgrpo_orlhf.sampling import EngineLost
from exgrpo_orlhf.tracking.metrics_log import MetricsLog
from exgrpo_orlhf.training.loop import TrainingRun
from exgrpo_orlhf.training.run import train
from exgrpo_orlhf.training.validation import Validation

CALCULATOR = ROOT / "exgrpo_orlhf" / "testbed" / "chain_calculator.py"
UNEVALUATED = "train.eval_every = None"


@pytest.fixture(scope="module")
def finished(warm_model, tmp_path_factory) -> Path:
    """A run of two steps."""
    go(warm_model, run := tmp_path_factory.mktemp("finished"), "train.steps = 2")
    return run


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


def test_n_steps_mean_n_and_the_end_is_saved_and_evaluated(warm_model, tmp_path):
    """T13."""
    outcome = go(warm_model, tmp_path, "train.steps = 5", "train.save_every = 3", "train.eval_every = 3")
    assert (outcome.steps, outcome.planned, outcome.stopped_by) == (5, 5, None)
    assert list(checkpoints.find(tmp_path)) == [3, 5]
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4, 5]
    assert [row["step"] for row in rows(tmp_path) if "eval/greedy_accuracy" in row] == [0, 3, 5]


def test_every_step_has_the_metrics_of_replay(finished):
    needed = {
        "replay/actual_share", "replay/age_mean", "replay/age_max", "replay/log_weight_max", "replay/ess",
        "replay/saturated_share", "policy/entropy_fresh", "replay/entropy", "replay/bucket_hard",
        "replay/bucket_medium", "replay/bucket_easy", "replay/retired", "replay/candidates_scored",
        "reward/mean", "reward/lucky_guess_rate", "cost/generated_tokens", "time/step",
    }  # fmt: skip
    for row in rows(finished)[1:]:
        assert needed <= set(row)
    tokens = [row["cost/generated_tokens"] for row in rows(finished)]
    assert tokens == sorted(tokens)
    assert tokens[0] == 0 < tokens[1]


@pytest.mark.slow
def test_groups_may_come_in_any_order(warm_model, tmp_path, monkeypatch):
    rollout = TorchEngine.rollout
    go(warm_model, tmp_path / "a", UNEVALUATED)
    monkeypatch.setattr(TorchEngine, "rollout", lambda *arguments: reversed([*rollout(*arguments)]))
    go(warm_model, tmp_path / "b", UNEVALUATED)
    measured = [timeless(tmp_path / name) for name in "ab"]
    assert measured[0] == measured[1]
    assert sum(row.get("replay/actual_share", 0) for row in measured[0]) > 0
    assert all(row["time/rollout"] > 0 and row["time/grade"] > 0 for row in rows(tmp_path / "b")[1:])


@pytest.mark.slow
def test_a_grader_that_fails_ends_what_the_engine_is_still_generating(warm_model, tmp_path, monkeypatch):
    rollout, ended, end = TorchEngine.rollout, [], time.monotonic() + 600  # only against waiting for ever

    def generating(*arguments):
        try:
            while time.monotonic() < end:
                yield from rollout(*arguments)
        finally:
            ended.append(time.monotonic())

    reward = (  # it starts once, for the check before the run; its process ends, and the next one cannot start
        "import os, pathlib\n"
        "started = pathlib.Path(__file__).with_suffix('.started')\n"
        "assert not started.exists() or 1 / 0\n"
        "started.touch()\n"
        "def reward_func(queries, prompts, labels):\n    os._exit(1)\n"
    )
    (tmp_path / "reward.py").write_text(reward)
    monkeypatch.setattr(TorchEngine, "rollout", generating)
    function = ("Verifier.kind = 'function'", f"Verifier.function = '{tmp_path}/reward.py'")
    with pytest.raises(GradingError, match="ZeroDivisionError") as raised:
        go(warm_model, tmp_path / "run", "train.eval_every = None", *function)
    assert raised.value  # it holds the frames, and with them the generator: nobody ends it by forgetting it
    assert len(ended) == 1
    assert ended[0] < end


@pytest.mark.slow
@pytest.mark.parametrize("episodes", [False, True])
def test_a_rollout_with_a_token_that_the_tokenizer_does_not_have_is_ungradable_and_never_stored(
    episodes, warm_model, tmp_path, caplog
):
    """A row that pads the embedding is sampled in place of every second end token. A grader does not see it."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(warm_model), AutoTokenizer.from_pretrained(warm_model)
    unknown = len(tokenizer)
    embedding = model.resize_token_embeddings(unknown + 1, mean_resizing=False).weight.data
    embedding[unknown] = embedding[tokenizer.eos_token_id]
    padded = saved_model(model, warm_model, tmp_path / "model")
    more = ["Verifier.max_failed_share = 1.0", UNEVALUATED, "train.steps = 3", "train.group_size = 8"]
    if episodes:
        more += [f"Environment.path = {str(CALCULATOR)!r}", "Environment.stop = ('=',)", "Environment.timeout = 60.0"]
    go(padded, run := tmp_path / "run", *more)
    written, buffer = rows(run)[1:], ReplayBuffer(RetirementPolicy())
    assert all(0 < row["reward/error_share"] < 1 for row in written)
    assert f"not graded: the tokenizer has no tokens [{unknown}]; question " in caplog.text
    folder = run / "checkpoint-3" / "replay"
    snapshot.load(folder, buffer, snapshot.fingerprint(folder))
    stored = [entry.trajectory for record in buffer.records.values() for entry in record.stored]
    assert len(stored) > 3
    assert all(int(one.token_ids.max()) < unknown for one in stored)


def test_a_run_can_start_from_another_runs_buffer(warm_model, tmp_path):
    """Replay begins with the first step, on stored trajectories whose ages go on from the other run's."""
    go(warm_model, tmp_path / "first", "train.steps = 6", "RetirementPolicy.at_accuracy = None", UNEVALUATED)
    borrowed = f"Work.experience = {str(tmp_path / 'first' / 'checkpoint-6')!r}"
    go(warm_model, tmp_path / "second", "train.steps = 2", "train.seed = 1", borrowed, UNEVALUATED)
    first = rows(tmp_path / "second")[1]
    candidates = rows(tmp_path / "first")[-1]["replay/candidates"]
    assert candidates > 0
    assert first["replay/actual_share"] == min(4, candidates) / 8
    assert 1 <= first["replay/age_mean"] <= 7
    with pytest.raises(SnapshotError, match="are not among the run's training questions"):
        go(warm_model, tmp_path / "third", "ModularChains.seed = 5", borrowed)
    with pytest.raises(ValueError, match=r"Work\.experience = 'nowhere' is neither a checkpoint of a run"):
        go(warm_model, tmp_path / "fourth", "Work.experience = 'nowhere'")
    run = tmp_path / "first"
    with pytest.raises(ValueError, match=rf"Work\.experience = '{run}' is the folder of a run; .*'{run}/checkpoint-6'"):
        go(warm_model, tmp_path / "fifth", f"Work.experience = {str(run)!r}")


@pytest.mark.parametrize(
    ("rule", "more"),
    [("@AllFinished()", "ReplayBuffer.per_question = 4"), ("@AboveMean()", "Verifier.kind = 'chain_steps'")],
)
def test_a_buffer_with_failures_is_taken_only_where_failures_are_stored(rule, more, warm_model, tmp_path):
    all_of_them = (f"ReplayMixer.store_rule = {rule}", more, UNEVALUATED)
    go(warm_model, tmp_path / "first", "train.steps = 8", *all_of_them)
    borrowed = f"Work.experience = {str(tmp_path / 'first' / 'checkpoint-8')!r}"
    with pytest.raises(
        ValueError,
        match=re.escape("its run stored failures too, which this one (ReplayMixer.store_rule = @Successes()"),
    ):
        go(warm_model, tmp_path / "second", "train.steps = 1", borrowed)
    state = tmp_path / "first" / "checkpoint-8" / "trainer" / "state.json"
    renamed = state.read_text().replace("ReplayMixer.store_rule", "ReplayMixer.stores")  # as in a run of 0.1
    state.write_text(renamed)
    with pytest.raises(ValueError, match="its run stored failures too"):
        go(warm_model, tmp_path / "older", "train.steps = 1", borrowed)
    alone = tmp_path / "alone"  # without the state that says what its run stored
    shutil.copytree(tmp_path / "first" / "checkpoint-8" / "replay", alone)
    with pytest.raises(ValueError, match="its run stored failures too"):
        go(warm_model, tmp_path / "copied", "train.steps = 1", f"Work.experience = {str(alone)!r}")
    state.write_text(renamed.replace("ReplayMixer.stores", "ReplayMixer.store_rule"))
    with pytest.raises(ValueError, match=r"longer than Sampling\.max_response_tokens = 9; raise MAX_RES"):
        go(warm_model, tmp_path / "short", "train.steps = 1", "MAX_RESPONSE_TOKENS = 9", *all_of_them, borrowed)
    go(warm_model, tmp_path / "third", "train.steps = 1", "train.seed = 1", *all_of_them, borrowed)
    assert rows(tmp_path / "third")[1]["replay/actual_share"] > 0


@pytest.mark.slow
def test_without_a_checkpoint_a_run_begins_again_and_keeps_what_was_measured(warm_model, tmp_path, monkeypatch):
    """In the same MLflow run, as long as the configuration is the same: its steps are, bit-identical."""
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    run, tracked, weights = tmp_path / "run", ("train.steps = 2", "Tracking.enabled = True"), []
    for attempt, seed in enumerate((0, 0, 5)):
        before = [(run / name).read_bytes() for name in ("metrics.jsonl", "decisions.jsonl") if attempt]
        for folder in checkpoints.find(run).values():
            shutil.rmtree(folder)
        go(warm_model, run, *tracked, f"train.seed = {seed}", resume=attempt > 0)
        aside = ("", ".before-restart", ".before-restart-2")[attempt]  # nothing that was kept is replaced
        kept = [(run / f"{name}{aside}.jsonl").read_bytes() for name in ("metrics", "decisions") if attempt]
        assert kept == before
        assert [row["step"] for row in rows(run)] == [0, 1, 2]
        weights.append((run / "checkpoint-2" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]
    mlflow_runs = tracked_runs(store)
    assert len(mlflow_runs) == 2, "one for both attempts with seed 0, one for the other seed"
    for one in mlflow_runs:
        assert [m.step for m in MlflowClient(store).get_metric_history(one.info.run_id, "reward/mean")] == [1, 2]


def test_an_experiment_can_be_run_twice(warm_model, tmp_path):
    experiment = config.load(["toy.gin"], small_bindings(warm_model, "train.steps = 2", UNEVALUATED))
    for name in ("one", "two"):
        train(experiment, tmp_path / name, resume=False, tracking_uri="unused", tags={})
    ours, theirs = ((tmp_path / name / "checkpoint-2" / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert ours == theirs


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (["--set", "train.steps=9"], [], True),
        (["--set", "ReplayMixer.rho=0.25"], ["--set", "ReplayMixer.rho = 0.25"], True),
        (["--set", "ReplayMixer.rho=0.25"], [], False),
        (["--seed", "1"], [], False),
        (["--set", f"QuestionFile.path='{'ä/' * 200}a'"], ["--set", f"QuestionFile.path='{'ä/' * 200}b'"], False),
    ],
)
def test_a_runs_name_says_which_experiment_it_is(one, other, same, monkeypatch):
    """Also a longer one: that is the same run, continued. A file system takes 255 bytes."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import train as script

    names = []
    for more in (one, other):
        arguments = script._parser().parse_args(["--gin", "toy.gin", *more])
        names.append(script._name(arguments, arguments.seed or 0, config.may_change, []))
    assert (names[0] == names[1]) == same
    assert max(len(name.encode()) for name in names) < 200


@pytest.mark.parametrize(("tag", "text"), [("pass@1=3", "write 'pass_at_1'"), ("note", "'note' is not NAME=VALUE")])
def test_a_tag_that_mlflow_would_refuse_is_refused_before_a_model_is_made(tag, text, run_script):
    done = run_script("train.py", "--gin", "toy.gin", "--tag", tag)
    assert done.returncode == 2
    assert text in done.stderr


def test_a_binding_with_a_secret_is_no_part_of_a_runs_name(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import train as script

    bindings = ["PW = 'hunter2'", "ReplayMixer.rho = 0.25"]
    arguments = script._parser().parse_args(["--gin", "toy.gin", "--set", bindings[0], "--set", bindings[1]])
    written = ["PW = '***'", bindings[1]]
    assert script._name(arguments, 0, config.may_change, written) == "toy-ReplayMixer.rho_0.25-seed0"


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "sign"), [("eval/greedy_accuracy", 1), ("eval/validation/truncated_rate", -1)])
def test_the_best_checkpoint_is_kept_beside_the_newest(metric, sign, warm_model, tmp_path, monkeypatch):
    """The metric rises (a rate of failures falls), falls and never recovers; a resumed run still knows the best."""
    heights = iter([0.1, 0.2, 0.7, 0.3, 0.4, 0.5])
    monkeypatch.setattr(Validation, "evaluate", lambda *_: {metric: sign * next(heights)})
    more = (
        "train.save_every = 10",
        "train.keep = 1",
        "train.eval_every = 1",
        f"train.best_metric = {metric!r}",
    )
    go(warm_model, tmp_path, "train.steps = 3", *more)
    assert list(checkpoints.find(tmp_path)) == [2, 3]
    go(warm_model, tmp_path, "train.steps = 5", *more, resume=True)
    assert list(checkpoints.find(tmp_path)) == [2, 5]
    assert (tmp_path / "best" / "model.safetensors").exists()
    assert (tmp_path / "best").resolve().name == "checkpoint-2"


@pytest.mark.slow
def test_the_best_by_another_measure_is_not_the_best_by_this_one(warm_model, tmp_path, monkeypatch):
    heights = iter([0.1, 0.9, 0.2, 0.3, 0.4])
    monkeypatch.setattr(
        Validation,
        "evaluate",
        lambda *_: {"eval/greedy_accuracy": next(heights), "eval/lucky_guess_rate": 5.0},
    )
    more = ("train.save_every = 10", "train.eval_every = 1", "train.keep = 1")
    go(warm_model, tmp_path, "train.steps = 2", *more, "train.best_metric = 'eval/lucky_guess_rate'")
    assert (tmp_path / "best").resolve().name == "checkpoint-1"
    best = "train.best_metric = 'eval/greedy_accuracy'"
    go(warm_model, tmp_path, "train.steps = 3", *more, best, resume=True)
    assert (tmp_path / "best").resolve().name == "checkpoint-3"
    go(warm_model, tmp_path, "train.steps = 4", *more, best, "Evaluation.disjoint_from = None", resume=True)
    assert (tmp_path / "best").resolve().name == "checkpoint-4"


@pytest.mark.parametrize("leaves_fresh", [False, True])
def test_a_run_in_which_every_question_retires_completes_its_steps_and_says_so(
    leaves_fresh, warm_model, tmp_path, monkeypatch, caplog
):
    """T14: the official code ends such a run in silence."""
    decide_verdicts(monkeypatch, lambda *_: True)  # all questions are mastered at once
    with caplog.at_level(logging.WARNING):
        outcome = go(
            warm_model,
            tmp_path,
            "train.steps = 5",  # after the third all 24 are
            UNEVALUATED,
            f"RetirementPolicy.leaves_fresh = {leaves_fresh}",
        )
    assert outcome.steps == 5
    done = rows(tmp_path)[1:]
    assert done[-1]["replay/retired"] == 24
    assert done[-1]["replay/trajectories"] == 0
    assert all(row["train/questions"] == 8 for row in done)
    assert ("all 24 questions are retired" in caplog.text) == leaves_fresh


def test_a_batch_larger_than_the_question_set_is_smaller_and_trains_and_it_is_said_once(warm_model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        outcome = go(
            *(warm_model, tmp_path, "train.questions_per_step = 40", "ModularChains.count = 10", "train.steps = 3"),
            UNEVALUATED,
        )
    assert caplog.text.count("10 questions instead of 40") == 1
    assert outcome.steps == 3
    assert [row["train/questions"] for row in rows(tmp_path)[1:]] == [10, 10, 10]


def test_validation_questions_that_are_trained_on_are_refused(warm_model, tmp_path):
    """T12: the official validation set is the test set."""
    with pytest.raises(ValueError, match=r"validation questions are training questions too.*Work\.validation"):
        go(warm_model, tmp_path, "Work.validation = @ModularChains()")


def test_a_run_is_not_overwritten_and_not_run_twice_at_once(run, warm_model):
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match="--resume"):
        go(warm_model, run, "train.steps = 2")
    assert (run / "metrics.jsonl").read_bytes() == before
    with claim(run, resume=True), pytest.raises(RunFolderError, match="another process"):
        go(warm_model, run, resume=True)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(RunFolderError, match="--resume"):  # its checkpoints are a run too
        go(warm_model, run, "train.steps = 2")


@pytest.mark.parametrize(
    ("bindings", "difference"),
    [
        (["ReplayMixer.rho = 0.25"], r"ReplayMixer\.rho: 0\.5 in the checkpoint, 0\.25 now"),
        (["QuestionSampler.method = 'uniform'"], r"QuestionSampler\.method: 'gaussian' .* 'uniform' now"),
        (["LoRA.rank = 4"], r"LoRA\.rank: not bound in the checkpoint, 4 now"),
        (["Evaluation.temperature = 0.6"], r"Evaluation\.temperature: .* 0\.6 now"),
        (["Evaluation.top_p = 0.9"], r"Evaluation\.top_p: .* 0\.9 now"),
    ],
)
def test_a_checkpoint_of_another_configuration_is_refused_and_the_difference_named(
    bindings, difference, finished, warm_model
):
    with pytest.raises(UnusableCheckpoint, match=difference):
        go(warm_model, finished, "train.steps = 4", *bindings, resume=True)


@pytest.mark.slow
def test_a_run_that_had_too_little_memory_is_resumed_with_each_setting_that_the_message_names(run, warm_model):
    with pytest.raises(EngineLost) as lost, within_memory():
        raise torch.OutOfMemoryError("CUDA out of memory.")
    less = {"micro_batch_tokens": 64, "gradient_checkpointing": True, "sampler_memory": 0.2}
    assert set(re.findall(r"LocalEngine\.(\w+)", str(lost.value))) == less.keys()
    for steps, (name, value) in enumerate(less.items(), 3):
        words = (f"train.steps = {steps}", f"LocalEngine.{name} = {value}")
        assert go(warm_model, run, *words, resume=True).steps == steps


def test_a_checkpoint_from_when_a_setting_could_not_change_is_resumed_too(run, tmp_path):
    state = json.loads((run / "checkpoint-2" / "trainer" / "state.json").read_text(encoding="utf-8"))
    identity = state["identity"]
    older = {**state, "identity": {**identity, "LocalEngine.micro_batch_tokens": "4096"}}
    (folder := tmp_path / "checkpoint-9").mkdir()
    checkpoints.write_state(folder, older)
    manifest.seal(folder, 9, "x", {})
    assert checkpoints.read_state(folder, identity) == older


def test_a_non_finite_update_stops_the_run_and_leaves_its_batch(warm_model, tmp_path, monkeypatch):
    update = TorchEngine.update

    def poisoned(engine, batch, loss):
        if poisoned.steps == 2:
            with torch.no_grad():
                engine.model.get_output_embeddings().weight[3, 0] = float("nan")
        poisoned.steps += 1
        return update(engine, batch, loss)

    poisoned.steps = 0
    monkeypatch.setattr(TorchEngine, "update", poisoned)
    with pytest.raises(NonFiniteUpdate, match=r"step 3: .*failed-step-3\.jsonl"):
        go(warm_model, tmp_path, "train.steps = 6", UNEVALUATED)
    assert len(rows(tmp_path / "failed-step-3.jsonl")) == 8 * 4
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2], "nothing is lost of the steps before"
    assert list(checkpoints.find(tmp_path)) == [2]


@pytest.mark.slow
def test_a_full_disk_while_saving_loses_nothing(run, warm_model, tmp_path):
    """No file may grow beyond 60 kB: the weights fit, the optimiser's moments do not, and so the second save fails in
    the middle. What was there stays, and the run resumes from it."""
    message = r"(?s)checkpoint-4 could not be written.*checkpoint-2 is untouched"
    with full_disk(60_000), pytest.raises(checkpoints.CheckpointError, match=message):
        go(warm_model, run, "train.steps = 4", resume=True)
    assert list(checkpoints.find(run)) == [2]
    assert not list(run.glob("*.partial"))
    outcome = go(warm_model, run, "train.steps = 4", resume=True)
    assert outcome.steps == 4
    straight = tmp_path / "straight"
    go(warm_model, straight, "train.steps = 4")
    ours, theirs = ((folder / "checkpoint-4" / "model.safetensors").read_bytes() for folder in (run, straight))
    assert ours == theirs


def test_resuming_a_complete_run_trains_nothing(run, warm_model):
    before = (run / "metrics.jsonl").read_bytes()
    assert go(warm_model, run, "train.steps = 2", resume=True).steps == 2
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("option", ["--out", "--resume"])
def test_a_run_begins_in_no_folder_of_other_things(option, warm_model, tmp_path, run_script):
    go(warm_model, tmp_path / "study" / "v0" / "seed0", "train.steps = 0")
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.parquet").touch()
    words = [*set_words(small_bindings(warm_model)), *([option] if option == "--resume" else [])]
    for folder, named in ((data, "it has train.parquet"), (tmp_path / "study", "the runs below it: v0/seed0")):
        before = sorted(folder.rglob("*"))
        done = run_script("train.py", "--gin", "toy.gin", *words, "--out", folder)
        assert done.returncode == 2
        assert f"{folder} is not empty and holds no run ({named})" in done.stderr
        assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("moment", ["config.gin is written", "the first evaluation"])
def test_a_run_killed_before_its_first_metrics_is_resumed(moment, warm_model, tmp_path, monkeypatch):
    """Without tracking, where nothing else asks for its identity."""
    run, go_on = tmp_path / "run", ("train.steps = 1", "Tracking.enabled = False")

    def killed(*_, **__):
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(
            *((TrainingRun, "run") if moment == "config.gin is written" else (MetricsLog, "append")), killed
        )
        with pytest.raises(SystemExit):
            go(warm_model, run, *go_on)
    assert (run / "config.gin").exists()
    assert not (run / "metrics.jsonl").exists()
    assert go(warm_model, run, *go_on, resume=True).steps == 1
