"""The metrics of a step against plain computations; a mean of nothing is 0."""

import math
import warnings
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from replay_builders import QUESTIONS, assemble, group, rollout, trajectory

from exgrpo_orlhf.grader.grade import Grade
from exgrpo_orlhf.objective import MixedPolicyLoss
from exgrpo_orlhf.records import MixedBatch, Rollout, RolloutGroup, Row
from exgrpo_orlhf.replay import DifficultyBuckets, Plan, ReplayBuffer, RetirementPolicy
from exgrpo_orlhf.replay.plan import SelectedBatch
from exgrpo_orlhf.training.step import batch_metrics

BETA = 0.1


def row(length=4, advantage=0.5, in_loss=True, stored_at=None, sound=None) -> Row:
    ids = np.arange(length, dtype=np.int32)
    stored = None if stored_at is None else trajectory(ids, stored_at, sound=sound)
    return Row(QUESTIONS[0], stored or Rollout(ids, "stop"), advantage, in_loss)


def sampled(*groups) -> dict[str, float]:
    return SelectedBatch(Plan(1, [], [], {}), [], [one.with_stored(None, 1) for one in groups], None).metrics()


def measured(rows, policy, behaviour, entropies=None, *, step=10, clip=(0.2, 0.2), later=(), **bounds):
    """Any overflow or division by zero is an error."""
    loss = MixedPolicyLoss(beta=BETA, clip_low=clip[0], clip_high=clip[1], **bounds)
    entropies = [0.0] * len(rows) if entropies is None else entropies
    policy, behaviour = ([np.array(values, np.float32) for values in side] for side in (policy, behaviour))
    passes = [dict(enumerate(policy)), *later]
    fresh = [
        (r.advantage, p[i], behaviour[i]) for p in passes for i, r in enumerate(rows) if r.trajectory is None and i in p
    ]
    with warnings.catch_warnings(), np.errstate(over="raise", invalid="raise", divide="raise"):
        warnings.simplefilter("error")
        of_rows = batch_metrics(MixedBatch([], [rows], len(rows)), step, entropies)
        of_fresh = loss.fresh_metrics(loss.fresh_sums(fresh, any(row.trajectory is not None for row in rows)))
        return {**of_rows, **of_fresh, **loss.replayed_metrics(rows, policy, behaviour)}


def random_logprobs(rows, scale, seed=0):
    draw = np.random.default_rng(seed)
    behaviour = [(-draw.exponential(size=len(r.token_ids))).astype(np.float32) for r in rows]
    policy = [(b + scale * draw.normal(size=len(b))).astype(np.float32) for b in behaviour]
    return policy, behaviour


def ratios(policy, behaviour, indices) -> list[float]:
    return [math.exp(float(p) - float(b)) for i in indices for p, b in zip(policy[i], behaviour[i], strict=True)]


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 0.1, 2.0, 6.0])
def test_weights_of_replayed_tokens_equal_a_plain_computation(scale):
    """T18: maximum, effective sample size and saturated share of w* over exactly the replayed tokens."""
    rows = [row(5), row(7, stored_at=1), row(3), row(40, stored_at=4), row(1, stored_at=9)]
    policy, behaviour = random_logprobs(rows, scale)
    metrics = measured(rows, policy, behaviour)
    w = ratios(policy, behaviour, (1, 3, 4))
    assert len(w) == 48
    assert metrics["replay/log_weight_max"] == pytest.approx(math.log(max(w)), abs=1e-6)
    assert metrics["replay/ess"] == pytest.approx(sum(w) ** 2 / sum(x * x for x in w) / len(w))
    shaped = [x / (x + BETA) for x in w]
    flat = [f for f in shaped if f * (1 - f) < 0.01]
    assert metrics["replay/saturated_share"] == pytest.approx(len(flat) / len(w))
    if scale == 6.0:
        assert 0 < len(flat) < len(w)


def test_fresh_ratios_equal_a_plain_computation_over_all_passes_and_the_rest_is_of_the_first():
    rows = [row(30, advantage=0.5), row(20, advantage=0.0), row(9, stored_at=1), row(30, advantage=-0.5)]
    policy, behaviour = random_logprobs(rows, 0.4)
    again, _ = random_logprobs(rows, 0.5)
    later = [{i: again[i] for i in (0, 2, 3)}]  # the row without an advantage is not measured again
    once = measured(rows, policy, behaviour, clip=(0.1, 0.3))
    twice = measured(rows, policy, behaviour, clip=(0.1, 0.3), later=later)
    first, second = ratios(policy, behaviour, (0, 1, 3)), ratios(again, behaviour, (0, 3))
    for metrics, w, above, below in (
        (once, first, first[:30], first[50:]),
        (twice, first + second, first[:30] + second[:30], first[50:] + second[30:]),
    ):
        assert metrics["policy/approx_kl"] == pytest.approx(sum(x - 1 - math.log(x) for x in w) / len(w))
        clipped = sum(x > 1.3 for x in above) + sum(x < 0.9 for x in below)
        assert 0 < clipped < len(above + below)
        assert metrics["policy/clip_share"] == pytest.approx(clipped / len(w))
    ours = {"policy/approx_kl", "policy/clip_share"}
    assert {k: v for k, v in twice.items() if k not in ours} == {k: v for k, v in once.items() if k not in ours}
    assert measured(rows, policy, behaviour, clip=(None, None))["policy/clip_share"] == 0


def test_truncated_share_is_of_the_weights_above_the_largest_one():
    policy, behaviour = [[0.0, -1.0, -1.0, -1.0]], [[-1.0, -1.0, -1.5, -9.0]]  # log w* = 1, 0, 0.5, 8
    metrics = measured([row(4, stored_at=0)], policy, behaviour, max_weight=2.0)  # log 2 = 0.69
    assert metrics["replay/truncated_share"] == 0.5
    assert metrics["replay/log_weight_max"] == pytest.approx(8), "the weights before truncation"
    assert metrics["replay/saturated_share"] == 0, "of the truncated weight: e^8 would be saturated"
    assert measured([row(4, stored_at=0)], policy, behaviour)["replay/saturated_share"] == 0.25
    unshaped = MixedPolicyLoss(shaping=False).replayed_metrics([row(1, stored_at=0)], [np.ones(1)], [np.full(1, -9.0)])
    assert unshaped["replay/saturated_share"] == 0, "where nothing is shaped, nothing saturates"
    around_policy = MixedPolicyLoss(shaping=False, clips_replayed=True, clip_around="policy")
    without = around_policy.replayed_metrics([row(1, stored_at=0)], [np.ones(1)], [np.full(1, -9.0)])
    assert "replay/saturated_share" not in without, "the clip's centre is not known there"
    assert "replay/truncated_share" not in measured([row(4, stored_at=0)], policy, behaviour)
    assert measured([row(1)], [[-1.0]], [[-1.0]], max_weight=2.0)["replay/truncated_share"] == 0


def test_a_fresh_weight_is_truncated_before_it_is_compared_with_the_clip_as_in_the_loss():
    policy, behaviour = [[0.0, -1.0, -1.0, -1.5]], [[-1.0, -1.5, -1.0, -1.0]]  # log w = 1, 0.5, 0, −0.5
    for bound, truncated, clipped in ((1.1, 0.5, 0), (1.3, 0.5, 0.5), (2.0, 0.25, 0.5)):
        metrics = measured([row(4, advantage=0.5)], policy, behaviour, max_fresh_weight=bound)
        assert (metrics["policy/truncated_share"], metrics["policy/clip_share"]) == (truncated, clipped)
    assert "policy/truncated_share" not in measured([row(4)], policy, behaviour)


def test_ages_entropies_and_lengths_are_of_fresh_and_replayed_rows_apart():
    rows = [row(5), row(7, stored_at=2), row(3), row(4, stored_at=9)]
    logprobs = [[-1.0] * len(r.token_ids) for r in rows]
    metrics = measured(rows, logprobs, logprobs, [1.0, 0.25, 3.0, 0.75], step=12)
    assert (metrics["replay/age_mean"], metrics["replay/age_max"]) == (6.5, 10)
    assert (metrics["policy/entropy_fresh"], metrics["replay/entropy"]) == (2.0, 0.5)
    assert metrics["replay/response_tokens"] == 5.5


def test_entropies_of_sound_and_lucky_answers_are_of_correct_fresh_rows_whose_reasoning_was_checked():
    graded = [("correct", True), ("correct", False), ("correct", True), ("wrong", False), ("correct", None)]
    grades = [Grade(verdict, float(verdict == "correct"), sound=sound) for verdict, sound in graded]
    fresh = [replace(row(4), response=replace(row(4).response, grade=grade)) for grade in grades]
    rows = [*fresh, row(4), row(4, stored_at=1, sound=True)]
    logprobs = [[-1.0] * 4] * 7
    metrics = measured(rows, logprobs, logprobs, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    assert (metrics["policy/entropy_sound"], metrics["policy/entropy_lucky"]) == (2.5, 2.0)
    without = measured(rows[3:], logprobs[3:], logprobs[3:])
    assert not {"policy/entropy_sound", "policy/entropy_lucky"} & without.keys(), "there is nothing to average"


def test_lucky_guesses_are_counted_among_replayed_rows_whose_reasoning_was_checked():
    rows = [row(2, stored_at=1, sound=sound) for sound in (True, False, None, True)]
    logprobs = [[-1.0, -1.0]] * 4
    assert measured(rows, logprobs, logprobs)["replay/lucky_guess_rate"] == pytest.approx(1 / 3)
    assert "replay/lucky_guess_rate" not in measured(rows[2:3], logprobs[:1], logprobs[:1]), "none was checked"


def test_an_empty_set_of_replayed_or_of_fresh_rows_gives_zero_everywhere():
    """T10: no NaN. ρ = 1 leaves fresh rows in every group, an engine's shard may hold none."""
    of_fresh = measured([row(3), row(4)], [[-1.0] * 3, [-2.0] * 4], [[-1.0] * 3, [-2.0] * 4], [1.0, 2.0])
    replay = {name: value for name, value in of_fresh.items() if name.startswith("replay/")}
    assert len(replay) == 7
    assert set(replay.values()) == {0.0}
    of_replayed = measured([row(3, stored_at=1)], [[-1.0] * 3], [[-1.5] * 3], [1.0])
    assert {value for name, value in of_replayed.items() if name.startswith("policy/")} == {0.0}
    assert all(map(math.isfinite, of_replayed.values()))


@pytest.mark.parametrize("log_weight", [1e4, -1e4, 800.0, -800.0])
def test_extreme_weights_of_replayed_tokens_do_not_overflow(log_weight):
    """T18."""
    policy = [[-1.0, -1.0, -1.0 + log_weight]]
    metrics = measured([row(3, stored_at=0)], policy, [[-1.0, -1.0, -1.0]])
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["replay/log_weight_max"] == max(0.0, log_weight)
    assert metrics["replay/saturated_share"] == pytest.approx(1 / 3)
    assert metrics["replay/ess"] == pytest.approx(1 / 3 if log_weight > 0 else 2 / 3)


@pytest.mark.parametrize("log_ratio", [800.0, -800.0])
def test_extreme_ratios_of_fresh_tokens_do_not_overflow(log_ratio):
    metrics = measured([row(2), row(2)], [[-1.0, -1.0 + log_ratio], [-1.0] * 2], [[-1.0] * 2] * 2)
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["policy/clip_share"] == (0.25 if log_ratio > 0 else 0)


# -- rewards ----------------------------------------------------------------------------------------------------------


def test_reward_metrics_equal_a_plain_count():
    rollouts = (
        rollout("correct", range(2), sound=True),
        rollout("correct", range(4), finish="length", sound=False),
        rollout("correct", range(6)),
        rollout("wrong", range(8)),
        rollout("no_answer", range(10), finish="length"),
        rollout("timeout", range(12)),
    )
    metrics = sampled(RolloutGroup(QUESTIONS[0], rollouts, False), group(["error", "wrong"]))
    assert metrics["reward/mean"] == pytest.approx(3 / 6)
    assert metrics["reward/pass_at_1"] == pytest.approx(3 / 6)
    assert metrics["reward/lucky_guess_rate"] == pytest.approx(1 / 2)
    assert metrics["reward/no_answer_share"] == pytest.approx(1 / 8)
    assert metrics["rollout/response_tokens"] == pytest.approx(46 / 8)
    assert metrics["rollout/truncated_share"] == pytest.approx(2 / 8)


SIGNAL = [  # verdicts of the fresh rollouts, and whether their rewards differ
    (["correct", "wrong"], False, 1),
    *((verdicts, False, 0) for verdicts in (["correct", "correct"], ["wrong", "wrong"], ["correct", "timeout"])),
    *((verdicts, True, 1) for verdicts in (["wrong", "wrong"], ["correct", "wrong"], ["wrong", "timeout"])),
    *((verdicts, True, 0) for verdicts in (["timeout", "error"], ["correct", "correct"])),
]


@pytest.mark.parametrize(("verdicts", "replayed", "signal"), SIGNAL)
def test_a_group_has_signal_if_its_rewards_differ_the_stored_success_included(verdicts, replayed, signal):
    one = group(verdicts, replayed=replayed)
    chosen = {one.question.id: trajectory()} if replayed else {}
    k = len(verdicts) + replayed
    batch = assemble([one], chosen, group_size=k)
    assert batch_metrics(batch, 1, [0.0] * k)["reward/groups_with_signal"] == signal


def test_rewards_of_nothing_are_zero():
    """T10."""
    assert set(sampled().values()) == {0.0}
    none = sampled(group(["timeout", "error"]))
    assert (none["reward/mean"], none["reward/pass_at_1"]) == (0, 0)
    assert "reward/lucky_guess_rate" not in none, "no reasoning was checked"


# -- buffer and plan --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replays_unsolved", [False, True])
def test_bucket_sizes_are_counts_of_candidates_by_level(replays_unsolved):
    """Unsolved are all with something stored, whether they can be replayed or not."""
    buffer = ReplayBuffer(RetirementPolicy(), replays_unsolved=replays_unsolved)
    for i, correct in enumerate([0, 0, 1, 2, 3, 4, 6, 7, 8, 5]):
        buffer.record(QUESTIONS[i].id, Fraction(correct, 8), 0)
        if i != 9:  # observed, nothing stored
            buffer.store([(QUESTIONS[i].id, trajectory(range(i + 1)))])
    buffer.record(QUESTIONS[10].id, Fraction(1, 8), 0)
    buffer.retire(QUESTIONS[10].id, 1)
    metrics = buffer.metrics(DifficultyBuckets())
    levels = [metrics[f"replay/bucket_{level}"] for level in ("unsolved", "hard", "medium", "easy", "solved")]
    assert levels == [2, 2, 3, 1, 1]
    assert buffer.n_candidates == (9 if replays_unsolved else 7)
    assert (metrics["replay/trajectories"], metrics["replay/stored_tokens"]) == (9, 45)
    assert metrics["replay/retired"] == 1


def test_an_empty_buffer_and_an_empty_plan_give_zero():
    """T10."""
    assert set(ReplayBuffer(RetirementPolicy()).metrics(DifficultyBuckets()).values()) == {0.0}
    assert set(Plan(1, [], [], {}).metrics().values()) == {0.0}
