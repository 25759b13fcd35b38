"""Responses beside their rewards, in the log and in MLflow's table, and pictures of what was measured alone."""

from __future__ import annotations

import json
import logging
import re

import pytest
from run_builders import train_small

from exgrpo_orlhf.replay import ReplayBuffer, RetirementPolicy
from exgrpo_orlhf.study.run_page import page, read
from exgrpo_orlhf.tracking.client import connect


@pytest.mark.parametrize(("bound", "steps"), [("3", [1, 3]), ("None", []), ("1", [1, 2, 3, 4])])
def test_a_response_is_shown_beside_its_reward_now_and_then(bound, steps, warm_model, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        train_small(warm_model, tmp_path / "run", f"train.show_every = {bound}")
    shown = [re.match(r"step (\d+), responses to a question:\n", message) for message in caplog.messages]
    assert [int(match[1]) for match in shown if match] == steps
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == sorted({1, *steps}), "the first step's always"
    for row, message in zip(rows, (match.string for match in shown if match), strict=False):
        question, *responses = message.splitlines()[1:]
        logged = next(q for q in row["questions"] if any(r["kind"] == "fresh" for r in q["responses"]))
        assert question == f"  {logged['prompt']}  (gold {logged['answer']})"
        assert 1 <= len(responses) <= 2
        for line in responses:
            reward, verdict, text = re.match(r"  reward (\S+), (\w+): (.*)", line).groups()
            assert reward == ("1" if verdict == "correct" else "0")
            assert text in ["".join(response["text"]) for response in logged["responses"]]


def test_what_is_shown_may_change_and_changes_nothing_that_is_trained(warm_model, tmp_path):
    for name, bindings in (("run", ("train.show_every = None",)), ("shown", ("train.show_every = 1",))):
        train_small(warm_model, tmp_path / name, *bindings, "train.steps = 2")
    train_small(warm_model, tmp_path / "run", "train.show_every = 2", resume=True)
    train_small(warm_model, tmp_path / "shown", "train.show_every = 1", resume=True)
    weights = [(tmp_path / name / "checkpoint-4" / "model.safetensors").read_bytes() for name in ("run", "shown")]
    assert weights[0] == weights[1]


def test_mlflow_has_the_rollouts_as_a_table_with_their_rewards(warm_model, tmp_path):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    bindings = ("Tracking.enabled = True", f"Tracking.uri = {uri!r}", "train.show_every = 2")
    train_small(warm_model, tmp_path / "run", *bindings)
    table = json.loads((tmp_path / "run" / "responses.json").read_text())
    assert table["columns"][:4] == ["step", "prompt", "response", "reward"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    logged = [
        (row["step"], q["prompt"], "".join(r["text"]), r.get("reward", float(r["verdict"] == "correct")))
        for row in rows
        for q in row["questions"]
        for r in q["responses"]
        if r["kind"] == "fresh"
    ]
    assert [tuple(cells[:4]) for cells in table["data"]] == logged
    assert {cells[0] for cells in table["data"]} == {1, 2, 4}
    client = connect(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "responses.json", "type": "table"}]
    assert "responses.json" in [file.path for file in client.list_artifacts(run.info.run_id)]


def test_the_page_of_a_run_without_replay_has_no_empty_chart(warm_model, tmp_path):
    train_small(warm_model, tmp_path / "run", files=["baselines/on_policy.gin"])
    html = page(read(tmp_path / "run", ReplayBuffer(RetirementPolicy()), None, [], str), "run")
    labels = re.findall(r"<figcaption>(.*?)</figcaption>", html)
    assert labels == [
        "entropy under the current policy, nats",
        "lucky guesses, % of correct answers",
        "forgotten questions",
    ]
    assert "Nothing is stored." in html
