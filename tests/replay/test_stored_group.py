"""A stored group: which rows, with which advantages and weights; the objective against the formulas of RePO's paper."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from replay_builders import QUESTIONS, K, group, mixer, trajectory

from exgrpo_orlhf.objective import GroupAdvantages, MixedPolicyLoss, TokenBatch
from exgrpo_orlhf.objective.divisors import weighted
from exgrpo_orlhf.records import CompletedGroup
from exgrpo_orlhf.replay import ReplayBuffer, RetirementPolicy
from exgrpo_orlhf.replay.injection import UnlessSolved
from exgrpo_orlhf.replay.store_rule import AllFinished, Successes
from exgrpo_orlhf.replay.stored_group import StoredGroup

REPO = dict(shaping=False, clips_replayed=True)


def outputs(rewards, first: int = 1):
    return [trajectory((i + 2, 1), step=i, reward=float(r)) for i, r in enumerate(rewards, first)]


def buffer_of(stored: dict[int, list], **limits) -> ReplayBuffer:
    """stored: by a question's number its outputs, oldest first"""
    buffer = ReplayBuffer(RetirementPolicy(at_accuracy=None), **{"per_question": 16, **limits})
    for i, several in stored.items():
        buffer.record(QUESTIONS[i].id, Fraction(0), 0)
        buffer.store((QUESTIONS[i].id, one) for one in several)
    return buffer


# -- which rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_each_choice_is_what_its_name_says(seed):
    """Against all subsets, as RePO's code tries them."""
    rng = np.random.default_rng(seed)
    stored = outputs(rng.choice([0.0, 1.0] if seed % 2 else [0.0, 0.25, 0.5, 1.0], 9))
    k = int(rng.integers(2, 8))
    of = lambda choice: StoredGroup(rows=k, choice=choice, least=2).chosen(stored)
    rewards = lambda rows: [one.reward for one in rows]
    assert of("newest") == stored[-k:]
    assert sum(rewards(of("best"))) == max(sum(rewards(s)) for s in itertools.combinations(stored, k))
    widest = [*itertools.combinations(rewards(stored), k)]
    largest = max(np.var(s) for s in widest)
    assert np.var(rewards(of("spread"))) == pytest.approx(largest, abs=1e-12)
    tied = [sum(s) for s in widest if np.var(s) > largest - 1e-12]
    assert sum(rewards(of("spread"))) == pytest.approx(max(tied)), "of equal variances the larger rewards"
    assert StoredGroup(rows=9, choice="all", least=2).chosen(stored) == stored
    for choice in ("newest", "best", "spread"):
        steps = [one.step for one in of(choice)]
        assert len(steps) == k
        assert steps == sorted(steps)


def test_of_equal_rewards_the_newer_are_replayed():
    stored = outputs([1, 0, 1, 0, 1, 0])
    assert [one.step for one in StoredGroup(rows=2, choice="best").chosen(stored)] == [3, 5]
    assert [one.step for one in StoredGroup(rows=2, choice="spread").chosen(stored)] == [5, 6]


def test_only_a_question_with_enough_stored_has_a_stored_group_whether_it_was_drawn_for_replay_or_not():
    buffer = buffer_of({0: outputs([0, 1, 0]), 1: outputs([0, 1, 1, 0]), 2: outputs([1, 0, 1, 0])})
    injection = StoredGroup(rows=3, least=4)
    groups = [group(["wrong"] * K, QUESTIONS[i], replayed=i == 2) for i in range(4)]
    drawn = injection.draw(groups, buffer, 9, np.random.default_rng(0))
    assert [[(id, one.step) for id, one in rows] for rows in drawn] == [
        *([], [(QUESTIONS[1].id, step) for step in (2, 3, 4)]),
        *([(QUESTIONS[2].id, step) for step in (2, 3, 4)], []),
    ]
    assert injection.stored_for(groups[2], {}) is None


class Fresh:
    question = staticmethod({question.id: question for question in QUESTIONS}.__getitem__)


def batch_of(stored: dict[int, list], verdicts: list[list[str]], advantages=None, **injection):
    """A group for each list of verdicts, with what is stored of its question."""
    replay = mixer(rho=0, injection=StoredGroup(**{"rows": 3, "least": 2, **injection}), store_rule=AllFinished())
    buffer = buffer_of(stored)
    replay.check(buffer)
    groups = [group(v, QUESTIONS[i]) for i, v in enumerate(verdicts)]
    completed = replay.complete(groups, {})
    rows = replay.draw(completed, buffer, Fresh(), 9)
    encode = lambda question: (3, 3)
    return replay.assemble(completed, advantages or GroupAdvantages(), None, {}, encode, rows), replay


def test_old_outputs_and_fresh_ones_have_their_advantages_apart():
    std = GroupAdvantages(scale_by_std=True)
    stored, verdicts = {0: outputs([1, 1, 0])}, [["correct", "wrong", "wrong", "error"], ["wrong"] * K]
    batch, replay = batch_of(stored, verdicts, std)
    fresh, old = batch.rows[0][:K], batch.rows[0][K:]
    rewards = np.array([1.0, 0.0, 0.0])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    np.testing.assert_allclose([row.advantage for row in fresh], [*expected, 0.0], atol=1e-12)
    rewards = np.array([1.0, 1.0, 0.0])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    np.testing.assert_allclose([row.advantage for row in old], expected, atol=1e-12)
    assert [row.prompt for row in old] == [(3, 3)] * 3
    assert [row.trajectory.step for row in old] == [1, 2, 3]
    assert len(batch.rows[1]) == K
    assert replay.injection.batch_metrics(batch) == {
        "replay/added_rows": 3.0, "replay/added_whole": 0.5, "replay/added_with_signal": 1.0,
    }  # fmt: skip


def test_before_the_start_nothing_is_added():
    replay = mixer(rho=0, injection=StoredGroup(), store_rule=AllFinished(), start_at_accuracy=0.5)
    completed = [CompletedGroup(g := group(["wrong"] * K), list(g.rollouts))]
    assert replay.draw(completed, buffer_of({0: outputs([0, 1] * 8)}), Fresh(), 1) == [[]]


# -- the objective ----------------------------------------------------------------------------------------------------


def rows_with_log_probs(seed: int):
    """A batch of three groups and, by row, log π_θ and log π_old of ratios on both sides of the clip."""
    rng = np.random.default_rng(seed)
    stored = {i: outputs(rng.choice([0.0, 1.0], n)) for i, n in ((0, 3), (2, 2))}
    batch, _ = batch_of(stored, [["correct", "wrong", "wrong", "correct"]] * 3, GroupAdvantages(scale_by_std=True))
    rows = [[replace(row, advantage=float(rng.normal())) for row in members] for members in batch.rows]
    batch = replace(batch, rows=rows)
    old = [-rng.exponential(size=row.length) - 0.1 for row in batch.flat_rows()]
    return batch, [past + 0.5 * rng.normal(size=len(past)) for past in old], old


def papers_loss(batch, policy, old, divisors, normalizer, length=24):
    """−(J_on + J_off), token by token: each a mean of its own over the questions of the batch; or the sum over all rows
    that there are. Returns it and its gradient in each log π_θ."""
    eps, value, gradient = 0.2, 0.0, []
    numbered = iter(range(len(policy)))
    places = {(g, i): next(numbered) for g, members in enumerate(batch.rows) for i in range(len(members))}
    tokens = {stored: sum(r.length for m in batch.rows for r in m if bool(r.trajectory) == stored) for stored in (0, 1)}
    for (g, i), n in places.items():
        row = batch.rows[g][i]
        part = 1 if i >= K else 0
        if divisors == "apart":
            rows, all_tokens = len(batch.rows) * (K, 3)[part], tokens[part]
        else:
            rows, all_tokens = len(policy), sum(tokens.values())
        divisor = {"sequences": rows * row.length, "constant": rows * length, "tokens": all_tokens}[normalizer]
        of_row = []
        for now, past in zip(policy[n], old[n], strict=True):
            r, a = math.exp(now - past), row.advantage
            clipped = min(max(r, 1 - eps), 1 + eps)
            value -= min(r * a, clipped * a) / divisor
            of_row.append(-r * a / divisor if r * a <= clipped * a else 0.0)
        gradient.append(of_row)
    return value, np.concatenate(gradient)


def engines_loss(loss, batch, policy, old, members, dtype, **more):
    """Of some rows, as the engines make it: weights of the whole step, and `Row.weight`. more: of TokenBatch, of each
    row"""
    rows = batch.flat_rows()
    lengths = torch.tensor([row.length for row in rows])
    weights = loss.row_weights(lengths, rows=len(batch.rows) * batch.group_size, tokens=int(lengths.sum()))
    weights = weights * torch.tensor([row.weight for row in rows], dtype=torch.float64)
    logprobs = torch.tensor(np.concatenate([policy[i] for i in members]), dtype=dtype, requires_grad=True)
    of_entropies = more.pop("entropies", [np.zeros(len(one)) for one in policy])
    spread = lambda values, kind: torch.tensor(
        [value for value, i in zip(values, members, strict=True) for _ in policy[i]], dtype=kind
    )
    value = loss(
        TokenBatch(
            logprobs,
            torch.tensor(np.concatenate([of_entropies[i] for i in members]), dtype=dtype),
            torch.tensor(np.concatenate([old[i] for i in members]), dtype=dtype),
            spread([rows[i].advantage for i in members], dtype),
            spread([rows[i].trajectory is not None for i in members], torch.bool),
            spread([True for _ in members], torch.bool),
            spread([float(weights[i]) for i in members], dtype),
            1 / int(lengths.sum()),
            spread(range(len(members)), torch.int64),
            mixed=True,
            base_share=batch.base_share,
            **{
                name: torch.tensor(np.concatenate([of_rows[i] for i in members]), dtype=dtype)
                for name, of_rows in more.items()
            },
        )
    )
    value.backward()
    return value.item(), logprobs.grad.double().numpy()


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("normalizer", ["sequences", "constant", "tokens"])
@pytest.mark.parametrize("divisors", ["apart", "together"])
def test_the_objective_is_that_of_the_papers_formulas_whole_and_in_micro_batches(divisors, normalizer, dtype, error):
    loss = MixedPolicyLoss(normalizer=normalizer, response_length=24, divisors=divisors, **REPO)
    for seed in range(5):
        batch, policy, old = rows_with_log_probs(seed)
        batch = weighted(batch, loss)
        value, gradient = papers_loss(batch, policy, old, divisors, normalizer)
        n = len(policy)
        for size in (n, 1, 4):
            parts = [range(i, min(i + size, n)) for i in range(0, n, size)]
            results = [engines_loss(loss, batch, policy, old, part, dtype) for part in parts]
            assert sum(part[0] for part in results) == pytest.approx(value, abs=error)
            np.testing.assert_allclose(np.concatenate([part[1] for part in results]), gradient, atol=error, rtol=0)


def test_divisors_are_of_added_rows_alone():
    batch, _, _ = rows_with_log_probs(0)
    assert {row.weight for row in batch.flat_rows()} == {1.0}
    loss = MixedPolicyLoss(normalizer="sequences", **REPO)
    apart, together = (weighted(batch, replace(loss, divisors=kind)) for kind in ("apart", "together"))
    assert {(row.trajectory is None, row.weight) for row in apart.flat_rows()} == {(True, 1.0), (False, K / 3)}
    assert {row.weight for row in together.flat_rows()} == {3 * K / (3 * K + 5)}


@pytest.mark.parametrize("normalizer", ["sequences", "constant", "tokens"])
@pytest.mark.parametrize("divisors", ["apart", "together"])
def test_each_optimiser_step_divides_by_what_it_has_itself(divisors, normalizer):
    """Of three groups the first and the third, which have 3 and 2 stored rows, and then the second, which has none."""
    loss = MixedPolicyLoss(normalizer=normalizer, response_length=24, divisors=divisors, **REPO)
    batch, _, _ = rows_with_log_probs(0)
    in_steps = weighted(batch, loss, steps=2)
    for part in (0, 1):
        alone = weighted(replace(batch, rows=batch.rows[part::2]), loss)
        weights = [
            [row.weight for row in of.flat_rows()] for of in (replace(in_steps, rows=in_steps.rows[part::2]), alone)
        ]
        assert weights[0] == weights[1]


# -- what cannot be meant ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("injection", "limits", "rule", "message"),
    [
        ({}, {}, Successes(), r"@StoredGroup\(\) needs failures too.*of successes alone all rewards are equal"),
        ({"rows": 1}, {}, AllFinished(), r"StoredGroup\.rows must be at least 2.*got 1"),
        ({}, {"per_question": 8}, AllFinished(), r"StoredGroup\.least = 16 is never reached .*per_question = 8"),
        ({"choice": "all"}, {}, AllFinished(), r"'all' needs StoredGroup\.rows, got 8, .*per_question, got 16"),
        ({}, {"counts_stored": True}, AllFinished(), r"counts_stored counts a stored success that .* leaves out"),
    ],
)
def test_what_a_stored_group_cannot_do_is_refused(injection, limits, rule, message):
    replay = mixer(rho=0, injection=StoredGroup(**injection), store_rule=rule)
    with pytest.raises(ValueError, match=message):
        replay.check(buffer_of({}, **limits))


def test_failures_are_no_successes_for_another_injection():
    with pytest.raises(ValueError, match="where a success belongs"):
        mixer(injection=UnlessSolved(), store_rule=AllFinished()).check(buffer_of({}))
