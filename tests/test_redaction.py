"""Keys, tokens and passwords are written nowhere, and what is written in their place can be given again."""

from __future__ import annotations

import os
import subprocess

import pytest
from mlflow.tracking import MlflowClient
from run_builders import small_bindings, train_command

from exgrpo_orlhf import config
from exgrpo_orlhf.redaction import REDACTED, redacted
from exgrpo_orlhf.training.run import train

SECRET = "hunter2-0123456789abcdef"


@pytest.mark.parametrize(
    "name",
    ["logger.wandb.key", "api_key", "HF_TOKEN", "token", "password", "DB_PASSWORD", "x.client_secret", "credentials"],
)
def test_a_value_is_hidden_by_its_name(name):
    assert redacted(name, SECRET) == redacted("X.options", {name: SECRET})[name] == REDACTED
    assert redacted(name, {"user": SECRET, "list": [SECRET]}) == {"user": REDACTED, "list": [REDACTED]}
    assert redacted(name, None) is None


@pytest.mark.parametrize(
    "name",
    [
        "Prompts.max_tokens",
        "train.max_tokens_per_gpu",
        "data.input_key",
        "ckpt.best_metric_key",
        "eos_token",
        "Work.model",
    ],
)
def test_settings_that_only_sound_like_one_are_shown(name):
    assert redacted(name, 5) == 5
    assert redacted(name, "plain") == "plain"


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        (f"http://me:{SECRET}@host:5000/x@y", "http://host:5000/x@y"),
        (
            f"postgresql://me:p@{SECRET}@host/db?sslmode=on&password={SECRET}",
            "postgresql://host/db?sslmode=on&password=***",
        ),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
        ("http://host/?mail=a@b", "http://host/?mail=a@b"),
    ],
)
def test_addresses_are_shown_without_user_and_password(address, shown):
    assert redacted("Tracking.uri", address) == redacted("Tracking.uri", (address,))[0] == shown


def openrlhf(*more: str) -> config.Experiment:
    return config.load(["quickstart.gin", "engines/openrlhf_cpu.gin"], more)


def test_what_is_written_of_a_configuration_has_no_secret_and_the_run_has_it():
    flags = f"OpenRLHF.more_flags = {{'logger.wandb.key': '{SECRET}', 'logger.wandb.org': 'us'}}"
    experiment = openrlhf(flags, f"Tracking.uri = 'http://me:{SECRET}@host'")
    assert experiment.openrlhf.all_flags()["logger.wandb.key"] == SECRET
    assert experiment.tracking.uri == f"http://me:{SECRET}@host"
    bindings = config.overrides_as_bound([flags, "Tracking.uri = ''"])
    assert bindings[1] == "Tracking.uri = 'http://host'"
    parts = (experiment.params, experiment.identity, bindings)
    for text in (experiment.config_text, *map(str, parts)):
        assert SECRET not in text
    assert "'logger.wandb.org': 'us'" in experiment.config_text


def test_a_macro_whose_value_is_a_secret_is_hidden_and_others_are_not():
    login = "OpenRLHF.more_flags = {'logger.wandb.key': %LOGIN, 'logger.wandb.org': %TEAM}"
    experiment = openrlhf(f"LOGIN = '{SECRET}'", "TEAM = 'us'", login)
    bindings = config.overrides_as_bound([f"LOGIN = '{SECRET}'"])
    assert SECRET not in experiment.config_text + str(experiment.params) + str(bindings)
    assert "TEAM = 'us'" in experiment.config_text


def test_the_saved_configuration_is_that_of_the_same_run(tmp_path):
    experiment = openrlhf(f"OpenRLHF.more_flags = {{'logger.wandb.key': '{SECRET}'}}")
    (tmp_path / "config.gin").write_text(experiment.config_text, encoding="utf-8")
    again = config.load([tmp_path / "config.gin"])
    assert (again.identity, again.config_hash) == (experiment.identity, experiment.config_hash)
    assert again.config_text == experiment.config_text
    assert again.openrlhf.all_flags()["logger.wandb.key"] == REDACTED


@pytest.mark.slow
def test_no_file_of_a_run_and_nothing_in_mlflow_has_the_secret_and_the_saved_configuration_resumes(
    warm_model, tmp_path
):
    store, run = f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "run"
    uri = f"Tracking.uri = '{store}?password={SECRET}&timeout=5'"  # sqlite3 ignores neither: the environment's wins
    more = ["train.steps = 1", "train.eval_every = None", "ModularChains.count = 24", "Tracking.enabled = True", uri]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": store}
    command = train_command(run, small_bindings(warm_model, *more))
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    (mlflow_experiment,) = MlflowClient(store).search_experiments(filter_string="name = 'exgrpo'")
    (tracked,) = MlflowClient(store).search_runs([mlflow_experiment.experiment_id])
    assert "train.steps = 1" in tracked.data.tags["set"].split("\n")
    assert f"password={REDACTED}&timeout=5" in tracked.data.tags["set"]
    experiment = config.load([run / "config.gin"], ["train.steps = 2", "Tracking.enabled = False"])
    assert train(experiment, run, resume=True, tracking_uri="", tags={}).steps == 2
