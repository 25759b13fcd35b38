"""Runs that begin with a supervised model: its curve is theirs, and a run of 0 steps is one like any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from run_builders import rows, small_bindings

from exgrpo_orlhf import checkpoints, config
from exgrpo_orlhf.tracking.metrics_log import MetricsLog
from exgrpo_orlhf.training.run import train
from exgrpo_orlhf.training.supervised_start import CURVE, SupervisedModel

SFT_STEPS = 2 * 3  # two epochs of 24 questions, 8 a step
pytestmark = pytest.mark.usefixtures("no_tracking_server")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, made_database) -> Path:
    """Of the cache, the runs and the tracking database."""
    folder = tmp_path_factory.mktemp("supervised")
    shutil.copy(made_database, folder / "mlflow.db")
    return folder


def go(model: Path, folder: Path, name: str, *more: str, run: str | None = None, resume: bool = False) -> Path:
    small = [each for each in small_bindings(model) if not each.startswith(("train.steps", "ReplayMixer", "Tracking"))]
    bindings = [
        *small,
        *("Work.model = @SupervisedModel()", "SupervisedModel.model = @PretrainedModel()"),
        *("SupervisedModel.examples = @ModularChains()", f"SupervisedModel.cache = {str(folder / 'cache')!r}"),
        *("SupervisedModel.epochs = 2", "SupervisedModel.batch_size = 8", "SupervisedModel.learning_rate = 2e-3"),
        *more,
    ]
    experiment = config.load([f"baselines/{name}.gin"], bindings)
    place = folder / (run or name)
    tags = {"gin": f"{name}.gin", "engine": "local", "seed": "0"}
    train(experiment, place, resume=resume, tracking_uri=f"sqlite:///{folder}/mlflow.db", tags=tags)
    return place


def logged(folder: Path, run: Path, metric: str) -> list[tuple[int, float]]:
    """What MLflow has of a metric, in the run of this folder. There is one such run."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs(["1"], f"attributes.run_name = '{run.name}'")
    assert len(runs) == 1
    return [(each.step, each.value) for each in client.get_metric_history(runs[0].info.run_id, metric)]


@pytest.fixture(scope="module")
def sft(warm_model, folder) -> Path:
    return go(warm_model, folder, "sft")


@pytest.fixture(scope="module")
def sft_rl(warm_model, folder) -> Path:
    return go(warm_model, folder, "sft_rl", "train.steps = 2")


def test_a_run_of_no_steps_evaluates_and_saves_the_supervised_model(sft, folder, run_script):
    [row] = rows(sft)
    assert row["step"] == 0
    assert row["eval/lucky_guess_rate"] >= 0
    assert [*checkpoints.find(sft)] == [0]
    [made] = (folder / "cache").glob("supervised-*")
    assert (sft / "checkpoint-0" / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()
    assert logged(folder, sft, "eval/greedy_accuracy") == [(0, row["eval/greedy_accuracy"])]
    done = run_script("../evals/run_bench.py", "--model", sft / "checkpoint-0", "--benchmarks", "chains", "--limit", 4,
                      "--engine", "transformers", "--out", folder / "results", "--no-mlflow")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "results" / "results.json").read_text())["benchmarks"]["chains"]["questions"] == 4


@pytest.mark.slow
def test_a_run_of_no_steps_is_resumed_without_doing_anything_and_can_be_made_longer(sft, folder, warm_model):
    before = (sft / "metrics.jsonl").read_bytes()
    go(warm_model, folder, "sft", resume=True)
    assert (sft / "metrics.jsonl").read_bytes() == before
    assert logged(folder, sft, "train/step") == [(0, 0)]
    go(warm_model, folder, "sft", run="longer")
    longer = go(warm_model, folder, "sft", "train.steps = 2", run="longer", resume=True)
    assert [row["step"] for row in rows(longer)] == [0, 1, 2]


def test_a_run_has_the_curve_of_its_start_once(sft_rl, folder, warm_model):
    [made] = (folder / "cache").glob("supervised-*")
    assert (sft_rl / CURVE).read_bytes() == (made / CURVE).read_bytes()
    losses = [(row["step"], row["supervised/loss"]) for row in MetricsLog(made / CURVE).rows()]
    assert [step for step, _ in losses] == list(range(1, SFT_STEPS + 1))
    assert losses[-1][1] < losses[0][1]
    assert logged(folder, sft_rl, "supervised/loss") == losses
    go(warm_model, folder, "sft_rl", "train.steps = 4", resume=True)
    assert logged(folder, sft_rl, "supervised/loss") == losses
    assert [step for step, _ in logged(folder, sft_rl, "train/step")] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows(sft_rl)] == [0, 1, 2, 3, 4]
    assert all("replay/actual_share" not in row and row["policy/grad_norm"] > 0 for row in rows(sft_rl)[1:])


def test_both_baselines_begin_with_the_same_model_and_can_be_compared(sft, sft_rl, folder, run_script):
    starts = [{k: v for k, v in rows(run)[0].items() if not k.startswith("time")} for run in (sft, sft_rl)]
    assert starts[0] == starts[1]
    compared = run_script("compare.py", "--uri", f"sqlite:///{folder}/mlflow.db", "--baseline", "sft.gin",
                          "--out", folder / "compare.html", "--png", folder / "compare.png")  # fmt: skip
    assert compared.returncode == 0, compared.stderr
    assert "sft_rl" in compared.stdout


def test_a_run_that_begins_again_with_another_model_leaves_the_curve_of_the_first(sft, warm_model, folder):
    """In a folder without a checkpoint, after a failure."""
    run = folder / "again"
    run.mkdir()
    (run / CURVE).write_bytes((sft / CURVE).read_bytes())
    (run / "metrics.jsonl").touch()
    go(warm_model, folder, "on_policy", "Work.model = @PretrainedModel()", "train.steps = 0", run="again", resume=True)
    assert not (run / CURVE).exists()


def test_validation_questions_among_the_examples_are_refused(warm_model, folder):
    both = "SupervisedModel.examples = @validation/ModularChains()"
    with pytest.raises(ValueError, match="10 of 10 validation questions are training questions too"):
        go(warm_model, folder, "sft", both, "validation/ModularChains.split = 'train'", "ModularChains.seed = 1",
           "validation/ModularChains.seed = 0", run="refused")  # fmt: skip


def test_what_takes_no_time_is_checked_before_the_model_is_made(warm_model, folder, sft, monkeypatch):
    monkeypatch.setattr(SupervisedModel, "prepare", lambda _: pytest.fail("made first"))
    with pytest.raises(checkpoints.RunFolderError, match="holds a run already: continue it with --resume"):
        go(warm_model, folder, "sft")
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl: no such file \(QuestionFile\.path\)"):
        go(warm_model, folder, "sft", "Work.questions = @QuestionFile()", "QuestionFile.path = 'no.jsonl'", run="none")
    with pytest.raises(ValueError, match="validation questions are training questions too"):
        go(warm_model, folder, "sft", "Work.validation = @ModularChains()", run="none")
    assert not (folder / "none").exists()


def test_the_operative_configuration_of_such_a_run_gives_it_again(sft, folder):
    again = config.load([sft / "config.gin"])
    assert again.params == config.load([sft / "config.gin"], ["train.steps = 0"]).params
    assert again.model.prepare() == next((folder / "cache").glob("supervised-*"))
    assert config.may_change("SupervisedModel.cache")
    assert not config.may_change("SupervisedModel.epochs")
