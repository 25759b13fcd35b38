"""Single stored rows: how they are drawn, what is kept with them, and the objective of Advantage-PER."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from replay_builders import QUESTIONS, K, group, mixer, trajectory
from test_stored_group import Fresh, engines_loss

from exgrpo_orlhf.objective import ConvexKL, GroupAdvantages, MixedPolicyLoss
from exgrpo_orlhf.objective.divisors import weighted
from exgrpo_orlhf.replay import ReplayBuffer, RetirementPolicy, snapshot
from exgrpo_orlhf.replay.store_rule import WithSignal
from exgrpo_orlhf.replay.stored_rows import StoredRows


def row(number: int, advantage: float | None, step: int = 1, reward: float = 1.0):
    return replace(trajectory((number + 2, 1), step=step, reward=reward), advantage=advantage)


def buffer_of(rows, **limits) -> ReplayBuffer:
    """rows: each of the question of its place, modulo 10"""
    buffer = ReplayBuffer(RetirementPolicy(at_accuracy=None), **{"max_bytes": 10**6, **limits})
    for i, one in enumerate(rows):
        buffer.record(QUESTIONS[i % 10].id, Fraction(0), 0)
        buffer.store([(QUESTIONS[i % 10].id, one)])
    return buffer


GROUPS = [group(["wrong"] * K, question) for question in QUESTIONS[20:24]]


@pytest.mark.parametrize(
    ("injection", "weight"),
    [
        (StoredRows(rows=1, alpha=0.5), lambda one, age: (abs(one.advantage) + 1e-6) ** 0.5),
        (StoredRows(rows=1, alpha=0.0), lambda one, age: 1.0),
        (
            StoredRows(rows=1, by="reward", alpha=0.6, decay_steps=5.0),
            lambda one, age: ((one.reward + 1e-6) * math.exp(-age / 5)) ** 0.6,
        ),
    ],
    ids=["advantage", "uniform", "reward"],
)
def test_a_draw_follows_the_priorities(injection, weight):
    """Of one row: the frequencies of 6000 draws lie within five standard errors of p."""
    rows = [row(i, a, step, r) for i, (a, step, r) in enumerate([(0.9, 1, 1.0), (-0.1, 8, 0.5), (0.4, 4, 0.0)])]
    buffer, rng = buffer_of(rows), np.random.default_rng(0)
    counts = np.zeros(3)
    for _ in range(6000):
        [[(_, drawn)]] = injection.draw(GROUPS[:1], buffer, 9, rng)
        counts[drawn.step == np.array([1, 8, 4])] += 1
    p = np.array([weight(one, 9 - one.step) for one in rows])
    p /= p.sum()
    assert (np.abs(counts / 6000 - p) < 5 * np.sqrt(p * (1 - p) / 6000) + 1e-9).all(), (counts, p)


def test_a_row_is_once_in_a_draw_of_its_own_question_and_may_come_again():
    buffer, rng = buffer_of([row(i, 0.5) for i in range(25)]), np.random.default_rng(0)
    draws = []
    for _ in range(4):
        rows = StoredRows(rows=4).draw(GROUPS, buffer, 2, rng)
        assert [len(of_group) for of_group in rows] == [4] * 4
        flat = [pair for of_group in rows for pair in of_group]
        assert all(one.key in {e.key for e in buffer.records[id].stored} for id, one in flat)
        draws.append({one.key for _, one in flat})
        assert len(draws[-1]) == 16
    assert any(a & b for a, b in itertools.pairwise(draws))
    few = StoredRows(rows=4).draw(GROUPS, buffer_of([row(i, 0.5) for i in range(6)]), 2, rng)
    assert [len(of_group) for of_group in few] == [2, 2, 1, 1]


def test_by_a_share_the_batchs_rows_are_stored_ones_to_that_share_rounded_down():
    """40 % of a batch of 4 groups of 4 and n stored rows: n = ⌊16 · 0.4/0.6⌋ = 10 of at most 3 a group."""
    buffer, rng = buffer_of([row(i, 0.5) for i in range(25)]), np.random.default_rng(0)
    rows = StoredRows(rows=3, share=0.4).draw(GROUPS, buffer, 2, rng)
    assert [len(of_group) for of_group in rows] == [3, 3, 2, 2]
    rows = StoredRows(rows=8, share=0.5).draw(GROUPS, buffer, 2, rng)
    assert [len(of_group) for of_group in rows] == [4] * 4
    with pytest.raises(
        ValueError, match=r"StoredRows\.rows must be at least 6 for StoredRows\.share = 0\.4 with train\."
    ):
        StoredRows(rows=5, share=0.4).fresh_rollouts(8)
    assert StoredRows(rows=6, share=0.4).fresh_rollouts(8) == 8


def test_before_the_first_step_and_of_rows_that_are_too_old_nothing_is_drawn():
    buffer, rng = buffer_of([row(i, 0.5, step=i) for i in range(6)], max_age=3), np.random.default_rng(0)
    injection = StoredRows(rows=4, first_step=7)
    assert injection.draw(GROUPS, buffer, 6, rng) == [[]] * 4
    buffer.advance(7)
    drawn = [one.step for rows in injection.draw(GROUPS, buffer, 7, rng) for _, one in rows]
    assert sorted(drawn) == [4, 5]


def test_a_resumed_buffer_draws_the_same_and_keeps_the_advantages(tmp_path):
    buffer = buffer_of([row(i, (i - 6) / 7, step=i) for i in range(13)])
    snapshot.save(buffer, tmp_path / "replay", "x")
    again = snapshot.read(tmp_path / "replay")
    kept = lambda b: {e.key: e.trajectory.advantage for record in b.records.values() for e in record.stored}
    assert kept(again) == kept(buffer)
    keys = lambda b: [
        [one.key for _, one in rows] for rows in StoredRows(rows=2).draw(GROUPS, b, 20, np.random.default_rng(5))
    ]
    assert keys(again) == keys(buffer)


def batch_of(rows, advantages):
    replay = mixer(rho=0, injection=StoredRows(rows=2), store_rule=WithSignal())
    buffer = buffer_of(rows)
    replay.check(buffer)
    groups = [group(v, q) for v, q in zip((["correct", "wrong"] * 2, ["wrong"] * K), QUESTIONS[20:22], strict=True)]
    completed = replay.complete(groups, {})
    drawn = replay.draw(completed, buffer, Fresh(), 9)
    return replay.assemble(completed, advantages, None, {}, lambda question: (int(question.answer),), drawn), replay


def test_a_stored_row_keeps_its_prompt_and_its_advantage_and_what_is_stored_of_a_step_has_one():
    batch, replay = batch_of([row(i, 0.1 * i - 0.15) for i in range(3)], GroupAdvantages(scale_by_std=True))
    added = [one for rows in batch.rows for one in rows[K:]]
    assert len(added) == 3
    assert {(one.advantage, one.prompt) for one in added} == {
        (0.1 * i - 0.15, (int(QUESTIONS[i].answer),)) for i in range(3)
    }
    logprobs = [np.full(one.length, -0.5, np.float32) for one in batch.flat_rows()]
    stored = replay.collect(batch, logprobs, 9)
    assert {id for id, _ in stored} == {QUESTIONS[20].id}, "of the group with a signal alone"
    assert [one.advantage for _, one in stored] == [one.advantage for one in batch.rows[0][:K]]
    plain = mixer(rho=0.5).store_rule.experience(batch, logprobs, 9)
    assert {one.advantage for _, one in plain} == {None}, "other runs' snapshots stay as they are"


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
def test_the_objective_of_advantage_per_is_one_token_mean_of_clipped_rows(dtype, error):
    """−(1/N) Σ over fresh and stored tokens together, clip 0.2 and 0.28, dual clip 10, A of each row."""
    loss = MixedPolicyLoss(
        normalizer="tokens", divisors="together", shaping=False, clips_replayed=True, clip_high=0.28, dual_clip=10.0
    )
    rng = np.random.default_rng(1)
    batch, _ = batch_of([row(i, float(rng.normal())) for i in range(6)], GroupAdvantages(scale_by_std=True))
    batch = weighted(batch, loss)
    rows = batch.flat_rows()
    old = [-rng.exponential(size=one.length) - 0.1 for one in rows]
    policy = [past + rng.choice([-0.5, 0.1, 0.5, 3.0], size=len(past)) for past in old]
    value, gradient, tokens = 0.0, [], sum(one.length for one in rows)
    for one, now, past in zip(rows, policy, old, strict=True):
        for r in np.exp(now - past):
            a = one.advantage
            term = min(r * a, min(max(r, 0.8), 1.28) * a)
            bounded = max(term, 10.0 * a) if a < 0 else term
            value -= bounded / tokens
            gradient.append(-r * a / tokens if bounded == r * a else 0.0)
    assert any(one.trajectory and one.advantage < 0 for one in rows)
    for size in (len(rows), 3):
        parts = [range(i, min(i + size, len(rows))) for i in range(0, len(rows), size)]
        results = [engines_loss(loss, batch, policy, old, part, dtype) for part in parts]
        assert sum(part[0] for part in results) == pytest.approx(value, abs=error)
        np.testing.assert_allclose(np.concatenate([part[1] for part in results]), gradient, atol=error, rtol=0)


def test_rows_of_a_run_that_kept_no_advantages_are_refused():
    with pytest.raises(ValueError, match=r"run/replay: its rows have no advantages.*a run with the same injection"):
        StoredRows().check_stored([row(0, 0.5), row(1, None)], "run/replay")
    StoredRows().check_stored([row(0, 0.5)], "run/replay")


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("base_share", [1.0, 0.7])
def test_the_objective_of_remix_is_that_of_the_papers_formulas_whole_and_in_micro_batches(base_share, dtype, error):
    """L = L_MixPPG + β·[λ·KL(π_θ‖π_base) + (1−λ)·KL(π_θ‖π_{k−1})] − c·H, with

    L_MixPPG = −mean over rows of the mean over tokens of min(r·A, clip(r, π_k/π_{k−i} − ε, π_k/π_{k−i} + ε)·A),
    r = π_θ/π_{k−i}, where a fresh row is of π_k itself, KL by exp(x) − x − 1 in the same means, H over all tokens.
    """
    beta, c, epsilon = 0.3, 0.2, 0.2
    loss = MixedPolicyLoss(
        **dict(normalizer="sequences", divisors="together", shaping=False, clips_replayed=True, clip_around="policy"),
        **dict(kl_coef=beta, kl_convex=ConvexKL(), entropy_coef=c),
    )
    rng = np.random.default_rng(2)
    batch, _ = batch_of([row(i, float(rng.normal())) for i in range(6)], GroupAdvantages(scale_by_std=True))
    batch = replace(weighted(batch, loss), base_share=base_share)
    rows = batch.flat_rows()
    of_rows = lambda *shifts: [rng.choice(shifts, size=one.length) for one in rows]
    old = [-rng.exponential(size=one.length) - 0.1 for one in rows]  # π_k
    past = [
        k + shift * (one.trajectory is not None)
        for one, k, shift in zip(rows, old, of_rows(-0.3, 0.3, 1.0), strict=True)
    ]
    policy, base, preceding = (
        [k + x for k, x in zip(old, of_rows(-s, -0.1, 0.1, s), strict=True)] for s in (0.4, 0.8, 0.5)
    )
    value, gradient, tokens, inside = 0.0, [], sum(one.length for one in rows), []
    for one, *of_tokens in zip(rows, policy, past, old, base, preceding, strict=True):
        for now, sampled, k, b, p in zip(*of_tokens, strict=True):
            a, r, centre = one.advantage, math.exp(now - sampled), math.exp(k - sampled)
            clipped = min(max(r, centre - epsilon), centre + epsilon)
            value -= min(r * a, clipped * a) / len(rows) / one.length
            slope = -r * a if r * a <= clipped * a else 0.0
            for share, reference in ((base_share, b), (1 - base_share, p)):
                x = reference - now
                value += beta * share * (math.exp(x) - x - 1) / len(rows) / one.length
                slope += beta * share * (1 - math.exp(x))
            gradient.append(slope / len(rows) / one.length)
            value -= c * 0.5 / tokens  # the entropy of every token
            inside.append((one.trajectory is not None, r == clipped, 0.8 <= r <= 1.2))
    assert {(True, True, False), (True, False, True)} < {*inside}, "a clip around 1 would be another one"
    more = {"reference_logprobs": base, "preceding_logprobs": preceding, "old_logprobs": old}
    more["entropies"] = [np.full(one.length, 0.5) for one in rows]
    for size in (len(rows), 3, 1):
        parts = [range(i, min(i + size, len(rows))) for i in range(0, len(rows), size)]
        results = [engines_loss(loss, batch, policy, past, part, dtype, **more) for part in parts]
        assert sum(part[0] for part in results) == pytest.approx(value, abs=error)
        np.testing.assert_allclose(np.concatenate([part[1] for part in results]), gradient, atol=error, rtol=0)


def test_without_measured_log_probs_the_clip_around_the_policy_is_around_the_pass_itself():
    """One optimiser step a batch: π_θ = π_k, so nothing is clipped however old a row is."""
    loss = MixedPolicyLoss(shaping=False, clips_replayed=True, clip_around="policy", normalizer="tokens")
    batch, _ = batch_of([row(i, 1.0 - i) for i in range(3)], GroupAdvantages())
    rows = batch.flat_rows()
    policy, past = ([np.full(one.length, x) for one in rows] for x in (-0.5, -2.0))
    _, gradient = engines_loss(loss, batch, policy, past, range(len(rows)), torch.float64)
    _, around_one = engines_loss(
        replace(loss, clip_around="sampler"), batch, policy, past, range(len(rows)), torch.float64
    )
    stored = np.concatenate([np.full(one.length, one.trajectory is not None) for one in rows])
    advantages = np.concatenate([np.full(one.length, one.advantage) for one in rows])
    np.testing.assert_allclose(gradient[stored], (-math.exp(1.5) * advantages / len(stored))[stored], atol=1e-12)
    assert (around_one[stored & (advantages > 0)] == 0).all()
