"""Each warning of a run is said once, when its condition has held for ten steps."""

from __future__ import annotations

import logging

import pytest
from run_builders import train_small

from exgrpo_orlhf.training.health import FILLING, STEPS, Health

WELL = {
    "reward/groups_with_signal": 0.5,
    "rollout/truncated_share": 0.1,
    "reward/no_answer_share": 0.1,
    "reward/timeout_share": 0.0,
    "reward/error_share": 0.0,
    "replay/started": 1.0,
    "replay/actual_share": 0.5,
    "replay/ess": 0.9,
}
ILL = {
    "reward/groups_with_signal": (0.0, "no group had both right and wrong rollouts"),
    "rollout/truncated_share": (0.75, "75% of the rollouts were cut off: raise MAX_RESPONSE_TOKENS, which"),
    "reward/no_answer_share": (0.75, "75% of the rollouts had no answer"),
    "reward/timeout_share": (0.05, "5.0% of the rollouts took too long to grade"),
    "reward/error_share": (0.05, "the grading of 5.0% of the rollouts failed"),
    "replay/actual_share": (0.2, "20% of the questions were replayed instead of 50%"),
    "replay/ess": (0.05, "was 5%: a few tokens decide the update"),
}


def warnings_of(caplog, rows, before=(), **start):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        health = Health([{"step": step, **row} for step, row in enumerate(before)], **start)
        for step, row in enumerate(rows, len(before)):
            health.look(step, row, rho=0.5)
    return caplog.messages


@pytest.mark.parametrize("metric", ILL)
def test_a_bad_mean_over_the_last_steps_is_said_once(metric, caplog):
    value, text = ILL[metric]
    ill = {**WELL, metric: value}
    assert warnings_of(caplog, [WELL] * 30) == []
    assert warnings_of(caplog, [ill] * STEPS) == [], "row 0 is the policy before training"
    (line,) = warnings_of(caplog, [ill] * 50)
    first = STEPS + FILLING if metric == "replay/actual_share" else STEPS
    assert line.startswith(f"step {first}: in the last {STEPS} steps ")
    assert text in line
    if metric == "replay/ess":
        assert warnings_of(caplog, [{**ill, "replay/continued_share": 0.5}] * 50) == [], "it has no weights"
    if metric == "reward/groups_with_signal":
        assert warnings_of(caplog, [ill, ill, WELL] * 20) == []


def test_a_resumed_run_counts_the_steps_of_its_log(caplog):
    ill = {**WELL, "rollout/truncated_share": 0.9}
    assert len(warnings_of(caplog, [ill], before=[ill] * STEPS)) == 1


def test_replay_that_has_not_started_does_not_starve_and_rows_without_replay_have_no_weights(caplog):
    waiting = {**WELL, "replay/started": 0.0, "replay/actual_share": 0.0, "replay/ess": 0.0}
    assert warnings_of(caplog, [waiting] * 30) == []
    none = {**WELL, "replay/actual_share": 0.0, "replay/ess": 0.0}
    (line,) = warnings_of(caplog, [none] * 40)
    assert "0% of the questions were replayed" in line
    assert warnings_of(caplog, [{**none, "rollout/filtered_groups": 2.0}] * 40) == [], "replaced, not missing"


def test_weights_are_of_stored_rows_that_entered_a_group(caplog):
    """Of planned revisits a group with a success has none; late injection plans no question."""
    none = {**WELL, "replay/injected": 0.0, "replay/ess": 0.0}
    assert warnings_of(caplog, [none] * 40) == []
    late = {**WELL, "replay/actual_share": 0.0, "replay/injected": 5.0, "replay/ess": 0.01}
    assert any("was 1%: a few tokens decide" in line for line in warnings_of(caplog, [late] * 40))


def test_a_start_that_has_not_come_in_a_third_of_the_steps_is_said_once_with_the_best_pass_at_1(caplog):
    start = {"planned": 60, "start_at_accuracy": 0.35}
    waiting = [{**WELL, "replay/started": 0.0, "replay/actual_share": 0.0, "reward/pass_at_1": p} for p in (0.1, 0.3)]
    assert warnings_of(caplog, waiting * 10, **start) == [], "steps 0 to 19 of 60"
    (line,) = warnings_of(caplog, waiting * 30, **start)
    assert line.startswith("step 20 of 60: replay has not started")
    assert "ReplayMixer.start_at_accuracy = 0.35, the best was 0.3;" in line
    (resumed,) = warnings_of(caplog, waiting * 2, before=waiting * 15, **start)
    assert resumed.startswith("step 30 of 60")
    assert warnings_of(caplog, [*waiting * 5, *[{**WELL, "reward/pass_at_1": 0.4}] * 50], **start) == []
    assert warnings_of(caplog, waiting * 30, planned=60) == [], "a run without a delayed start"


@pytest.mark.parametrize("rho", ["0.5", "0.0"])
def test_a_run_says_that_its_start_has_not_come_unless_it_never_replays(rho, warm_model, tmp_path, caplog):
    more = ("train.steps = 2", "train.eval_every = None", "ReplayMixer.start_at_accuracy = 0.95")
    with caplog.at_level(logging.WARNING):
        train_small(warm_model, tmp_path / "run", *more, f"ReplayMixer.rho = {rho}")
    assert ("step 1 of 2: replay has not started" in caplog.text) == (rho == "0.5")


def test_a_run_says_that_its_rollouts_are_cut_off_and_have_no_answer(warm_model, tmp_path, caplog):
    more = ("train.steps = 14", "train.eval_every = None", "Sampling.max_response_tokens = 3")
    with caplog.at_level(logging.WARNING):
        train_small(warm_model, tmp_path / "run", *more)
    messages = [message for message in caplog.messages if message.startswith("step 10: in the last 10 steps")]
    for text in ("cut off", "no answer", "right and wrong"):
        assert sum(text in message for message in messages) == 1
