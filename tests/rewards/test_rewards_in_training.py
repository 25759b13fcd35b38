"""Training with each kind of reward that is graded in other processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from replay_builders import QUESTIONS, choices, filled, mixer, rollout, source, trajectory
from run_builders import rows, small_bindings, train_small

from exgrpo_orlhf import config
from exgrpo_orlhf.objective import GroupAdvantages
from exgrpo_orlhf.records import RolloutGroup
from exgrpo_orlhf.replay import Plan
from exgrpo_orlhf.replay.difficulty import spread_of
from exgrpo_orlhf.replay.plan import DynamicSampling
from exgrpo_orlhf.replay.store_rule import AboveMean
from exgrpo_orlhf.rewards import Verifier

BINDINGS = ("train.steps = 2", "train.eval_every = None", "train.save_every = 2", "Verifier.timeout = 5.0")
FUNCTION = """
def reward_func(queries, prompts, labels):
    return {"rewards": [float(query.endswith(f"#{label}<end>")) for query, label in zip(queries, labels)]}
"""
PROGRESS = """
def reward_func(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)
"""


def go(model: Path, run: Path, *more: str, resume=False) -> list[dict]:
    train_small(model, run, *BINDINGS, *more, resume=resume)
    return rows(run)


@pytest.mark.slow
def test_an_evaluation_in_training_says_how_many_steps_are_made_and_planned(warm_model, tmp_path):
    (tmp_path / "reward.py").write_text(PROGRESS)
    bindings = ["Verifier.kind = 'function'", f"Verifier.function = '{tmp_path}/reward.py'", "train.eval_every = 2"]
    measured = go(warm_model, tmp_path / "run", *bindings)
    assert [row["eval/greedy_accuracy"] for row in (measured[0], measured[-1])] == [0, 1]


WRONG = RolloutGroup(QUESTIONS[0], tuple(rollout("wrong", range(n)) for n in (1, 8, 9, 10)), False)


def test_with_dynamic_sampling_the_length_penalty_alone_trains_nothing():
    """As in DAPO, whose batches have no group of equal rewards; without dynamic sampling it counts in every group."""
    verifier = Verifier("exact", overlong_share=0.4)
    mixed = replace(WRONG, question=QUESTIONS[1], rollouts=(rollout("correct", range(9)), *WRONG.rollouts[:3]))
    completed = mixer().complete([WRONG, mixed], {})
    batch = mixer().assemble(completed, GroupAdvantages(), lambda tokens: verifier.overlong_penalty(tokens, 10))
    assert DynamicSampling().masked(batch) is batch
    assert all(row.advantage for row in batch.flat_rows()[1:])
    without = DynamicSampling(max_rounds=1).masked(batch)
    assert [row.advantage for row in without.rows[0]] == [0.0] * 4
    assert all(row.in_loss for row in without.rows[0])
    assert without.rows[1] == batch.rows[1]


def test_a_long_row_counts_less_in_its_group_and_nowhere_else():
    """DAPO, equation 13, with L_max = 10 and L_cache = 4; a stored success of 10 tokens is a row as any other."""
    verifier, mixing = Verifier("exact", overlong_share=0.4), mixer(store_rule=AboveMean())
    penalty = lambda tokens: verifier.overlong_penalty(tokens, 10)
    assert [penalty(tokens) for tokens in (1, 6, 7, 8, 10, 40)] == [0, 0, -0.25, -0.5, -1, -1]
    assert Verifier("exact").overlong_penalty(10, 10) == 0
    replayed = RolloutGroup(QUESTIONS[1], tuple(rollout("wrong", range(n)) for n in (6, 7, 8)), True)
    stored = trajectory(range(10))
    completed = mixing.complete([WRONG, replayed], choices({QUESTIONS[1].id: stored}))
    batch = mixing.assemble(completed, GroupAdvantages(), penalty)
    expected = [[0, -0.5, -0.75, -1], [0, -0.25, -0.5, 1 - 1]]
    for members, rewards in zip(batch.rows, expected, strict=True):
        assert [row.advantage for row in members] == pytest.approx([one - sum(rewards) / 4 for one in rewards])
    assert mixing.collect(batch, [np.zeros(len(row.token_ids), np.float32) for row in batch.flat_rows()], 1) == []
    assert spread_of(WRONG) == 0
    plan = Plan(1, [QUESTIONS[0]], [], {})
    more = DynamicSampling(max_rounds=1).replacements(plan, completed[:1], 1, source(), filled(0))
    assert more is not None, "a group without a success is replaced"


def test_a_run_with_the_penalty_has_the_same_rewards_and_another_update(warm_model, tmp_path):
    plain = go(warm_model, tmp_path / "a")[1]
    short = go(warm_model, tmp_path / "b", "Verifier.overlong_share = 0.8")[1]
    assert all(short[name] == plain[name] for name in ("reward/mean", "reward/pass_at_1", "cost/generated_tokens"))
    assert -1 < short["reward/overlong_penalty"] < 0
    assert "reward/overlong_penalty" not in plain
    assert short["policy/grad_norm"] != plain["policy/grad_norm"]
    with pytest.raises(config.ConfigError, match=r"overlong_share must lie in \(0, 1\], or None; got 0.0"):
        config.load(["toy.gin"], small_bindings(warm_model, "Verifier.overlong_share = 0.0"))


LOGGED = FUNCTION.replace("labels)]}", 'labels)], "extra_logs": {"tokens used": [len(queries[0])], "odd": ["x"]}}')


@pytest.mark.slow
def test_extra_logs_are_metrics_of_a_step_and_of_one_that_was_generated_ahead_and_resumed(warm_model, tmp_path, caplog):
    (tmp_path / "reward.py").write_text(LOGGED)
    bindings = ["Verifier.kind = 'function'", f"Verifier.function = '{tmp_path}/reward.py'", "train.save_every = 1"]
    bindings.append("train.generate_ahead = True")
    straight = go(warm_model, tmp_path / "a", *bindings)
    assert all(row["reward_log/tokens used"] > 5 for row in straight[1:])
    assert not any("odd" in name for row in straight for name in row)
    assert caplog.text.count("extra_logs without a finite number for each query: odd") == 1
    go(warm_model, tmp_path / "b", *bindings, "train.steps = 1")
    resumed = go(warm_model, tmp_path / "b", *bindings, resume=True)
    assert resumed[-1]["reward_log/tokens used"] == straight[-1]["reward_log/tokens used"]
