"""Keys, tokens and passwords are written nowhere, and what is written in their place can be given again."""

from __future__ import annotations

import os
import subprocess

import pytest
from http_server import http_server
from mlflow.tracking import MlflowClient
from run_builders import small_bindings, train_command

from exgrpo_orlhf import config
from exgrpo_orlhf.io.redaction import REDACTED, address_only, redacted
from exgrpo_orlhf.training.run import train

SECRET = "hunter2-0123456789abcdef"


PARAMETERS = (
    *("code", "sig", "subscription-key", "X-Amz-Signature", "X-Amz-Credential", "AWSAccessKeyId", "pwd", "db_pwd"),
    *("apiKey", "authtoken", "access_token", "jwt", "odbc_connect", "SharedAccessSignature"),
)


SECRETS = (
    *("logger.wandb.key", "api_key", "HF_TOKEN", "token", "password", "DB_PASSWORD", "x.client_secret", "credentials"),
    *("subscription-key", "Ocp-Apim-Subscription-Key", "x-functions-key", "pwd", "db_pwd", "db_pass", "Cookie", "jwt"),
    *("Judge.openai_key", "Judge.anthropic_key", "judge_key", "judgeKey", "GITLAB_TOKEN", "Judge.auth", "Judge.pw"),
    *("Judge.bearer", "access_key_id", "api_keys", "access_tokens"),
)
SETTINGS = (
    *("Prompts.max_tokens", "train.max_tokens_per_gpu", "data.input_key", "ckpt.best_metric_key", "eos_token"),
    *("first_pass", "Work.model", "label_key", "data.rejected_key", "bosToken", "PAD_TOKEN", "QuestionFile.meta"),
)


@pytest.mark.parametrize("name", SECRETS)
def test_a_value_is_hidden_by_its_name(name):
    assert redacted(name, SECRET) == redacted("X.options", {name: SECRET})[name] == REDACTED
    assert redacted(name, {"user": SECRET, "list": [SECRET]}) == {"user": REDACTED, "list": [REDACTED]}
    assert redacted(name, None) is None


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_only_sound_like_one_are_shown(name):
    assert redacted(name, 5) == 5
    assert redacted(name, "plain") == "plain"


def test_a_number_under_such_a_name_is_shown_and_every_setting_of_the_project_and_of_openrlhf_is():
    assert redacted("Judge.first_token", 5) == 5
    flags = ("ckpt.best_metric_key", *(f"data.{name}_key" for name in ["chosen", "image", "input", "label", "output"]))
    names = [*config.all_settings(), *flags]
    assert [name for name in names if redacted(name, "plain") != "plain"] == []


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
        ("http://host:5000/a@b?max_tokens=5&encoding=x#top", "http://host:5000/a@b?max_tokens=5&encoding=x#top"),
        ("http://[::1]:5000/a@b", "http://[::1]:5000/a@b"),
        ("mysql://host:3306/db?password=a@b&timeout=5", "mysql://host:3306/db?password=***&timeout=5"),
        *(
            (f"http://host/grade?v=1&{name}={SECRET}&w=2", f"http://host/grade?v=1&{name}=***&w=2")
            for name in PARAMETERS
        ),
        (f"mssql://host/db;uid=me;PWD={SECRET}", "mssql://host/db;uid=me;PWD=***"),
        *((f"postgresql://me:a{c}b@{SECRET}@host/db?a=b", "postgresql://host/db?a=b") for c in "/?#: '"),
        (f"mysql+pymysql://me:12/{SECRET}@host:3306/db", "mysql+pymysql://host:3306/db"),
        (f"http://me:{SECRET}/?#{SECRET}@host:5000/x", "http://host:5000/x"),
    ],
)
def test_addresses_are_shown_without_user_and_password(address, shown):
    assert redacted("Tracking.uri", address) == redacted("Tracking.uri", (address,))[0] == shown


@pytest.mark.parametrize("address", ["http://host:5000/x", "http://[::1]:5000/a@b", "host/x"])
def test_an_address_alone_has_no_query_either(address):
    assert address_only(address) == address
    assert address_only(address.replace("//", f"//me:{SECRET}@") + f"?mail={SECRET}#{SECRET}") == address


def test_a_long_text_is_searched_in_no_time():
    text = "x" * 10**6
    assert redacted("Prompts.template", text) == text


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
    more = ["train.steps = 1", "train.eval_every = 1", "ModularChains.count = 24", "Tracking.enabled = True", uri]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": store}
    refusing = lambda _, path, *request: (503 if SECRET in path else 500, {}, "busy")
    with http_server(refusing) as address:  # its refusals are logged and kept with the samples of the evaluation
        judge = f"Verifier.url = '{address.replace('//', f'//me:{SECRET}@')}/grade?code={SECRET}'"
        judged = ["Verifier.kind = 'http'", judge, "Verifier.tries = 1", "Verifier.max_failed_share = 1.0"]
        command = train_command(run, small_bindings(warm_model, *more, *judged))
        command += ["--tag", f"note={address}?sig={SECRET}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "answered 503" in done.stderr
        assert SECRET not in done.stderr
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
        (mlflow_experiment,) = MlflowClient(store).search_experiments(filter_string="name = 'exgrpo'")
        (tracked,) = MlflowClient(store).search_runs([mlflow_experiment.experiment_id])
        assert "train.steps = 1" in tracked.data.tags["set"].split("\n")
        assert f"password={REDACTED}&timeout=5" in tracked.data.tags["set"]
        assert tracked.data.tags["note"] == f"{address}?sig={REDACTED}"
        experiment = config.load([run / "config.gin"], ["train.steps = 2", "Tracking.enabled = False"])
        assert f"/grade?code={REDACTED}'" in experiment.config_text
        assert train(experiment, run, resume=True, tracking_uri="", tags={}).steps == 2
