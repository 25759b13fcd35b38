"""Rules of the paper's Algorithms 1 and 2 and of its Tables 7 and 9: those that a binding switches on, and those that
the code follows in another form, with the same result."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from replay_builders import QUESTIONS, K, assemble, filled, group, ids_of, mixer, source, train, trajectory
from test_sampling import assert_follows, draw, pool

from exgrpo_orlhf.replay import QuestionSampler, ReplayBuffer, RetirementPolicy
from exgrpo_orlhf.replay.plan import DynamicSampling
from exgrpo_orlhf.training.step import batch_metrics

ID = QUESTIONS[0].id


def with_one_stored(accuracy: Fraction, retirement: RetirementPolicy | None = None, **settings) -> ReplayBuffer:
    buffer = ReplayBuffer(retirement or RetirementPolicy(), **settings)
    buffer.record(ID, accuracy, 0)
    buffer.store([(ID, trajectory())])
    return buffer


# -- Algorithm 1, line 24: the stored success counts ------------------------------------------------------------------


@pytest.mark.parametrize("correct", range(K - 1))
def test_with_counts_stored_a_replayed_groups_accuracy_is_that_of_its_k_rows(correct):
    buffer = with_one_stored(Fraction(1, 2), counts_stored=True)
    buffer.observe([group(["correct"] * correct + ["wrong"] * (K - 1 - correct), replayed=True)], 1)
    assert buffer.records[ID].accuracy == Fraction(correct + 1, K)
    assert buffer.n_candidates == 1, "a replayed question is never below 1/K"


def test_with_counts_stored_only_what_could_be_graded_counts_and_fresh_groups_are_as_before():
    buffer = with_one_stored(Fraction(1, 2), counts_stored=True)
    buffer.observe([group(["correct", "wrong", "timeout"], replayed=True)], 1)
    assert buffer.records[ID].accuracy == Fraction(2, 3)
    buffer.observe([group(["timeout", "timeout", "correct"], replayed=True)], 2)
    assert buffer.records[ID].accuracy == Fraction(2, 3), "a group with too few verdicts leaves the record as it is"
    buffer.observe([group(["wrong"] * K)], 3)
    assert buffer.records[ID].accuracy == 0


@pytest.mark.parametrize("counts_stored", [False, True])
def test_a_replayed_question_retires_when_all_its_fresh_rollouts_are_correct_either_way(counts_stored):
    buffer = with_one_stored(Fraction(1, 2), counts_stored=counts_stored)
    buffer.observe([group(["correct"] * (K - 1), replayed=True)], 1)
    assert ID in buffer.retired


# -- Algorithm 1, line 32: retirement after the update ----------------------------------------------------------------


class RetiresAfterTheUpdate(ReplayBuffer):
    """The paper's order: what is solved leaves the buffer after the update, when new experience is stored."""

    def retire(self, question_id: str, step: int) -> None:
        self.pending = [*getattr(self, "pending", []), (question_id, step)]

    def store(self, experience) -> int:
        pending = getattr(self, "pending", [])
        solved = {question_id for question_id, _ in pending}  # Algorithm 1 collects no group with k = K
        stored = super().store(pair for pair in experience if pair[0] not in solved)
        for question_id, step in pending:
            super().retire(question_id, step)
        self.pending = []
        return stored


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("leaves_fresh", [False, True])
def test_retirement_before_or_after_the_update_gives_the_same_run(seed, leaves_fresh):
    histories = []
    for kind in (ReplayBuffer, RetiresAfterTheUpdate):
        buffer = kind(RetirementPolicy(leaves_fresh=leaves_fresh))
        plans = [ids_of(plan) for plan in train(mixer(rho=0.5, seed=seed), source(), buffer, 40, skill=0.8)]
        records = {name: (r.accuracy, [one.key for one in r.stored]) for name, r in buffer.records.items()}
        histories.append((plans, records, dict(buffer.retired)))
    assert len(histories[0][2]) > 5
    assert histories[0] == histories[1]


# -- Algorithm 2: all bucket counts from one multinomial --------------------------------------------------------------


def multinomial_counts(p: list[float], sizes: tuple[int, ...], n: int) -> Counter[tuple[int, ...]]:
    """P(questions drawn from each bucket), by following every branch of Algorithm 2: one multinomial over the buckets
    that are not exhausted; what a bucket lacks is clipped, and drawn again in the same way from the others."""
    chances: Counter[tuple[int, ...]] = Counter()
    left = [weight if size else 0.0 for weight, size in zip(p, sizes, strict=True)]
    left = [weight / sum(left) for weight in left]
    for counts in itertools.product(range(n + 1), repeat=len(p)):
        if sum(counts) != n or any(count and not weight for count, weight in zip(counts, left, strict=True)):
            continue
        ways = math.factorial(n) / math.prod(map(math.factorial, counts))
        chance = ways * math.prod(weight**count for weight, count in zip(left, counts, strict=True))
        taken = tuple(map(min, counts, sizes))
        if sum(taken) == n:
            chances[taken] += chance
            continue
        rest = tuple(size - count for size, count in zip(sizes, taken, strict=True))
        for more, further in multinomial_counts(p, rest, n - sum(taken)).items():
            chances[tuple(map(sum, zip(taken, more, strict=True)))] += chance * further
    return chances


def test_the_sampler_follows_algorithm_2():
    sizes = {Fraction(1, 8): 1, Fraction(3, 8): 3, Fraction(4, 7): 1, Fraction(7, 8): 2}
    settings = QuestionSampler(mu=0.5, sigma=0.3)
    densities = [math.exp(settings.log_density(accuracy, 8)) for accuracy in sizes]
    rng, candidates, draws = np.random.default_rng(0), pool(sizes), 4_000
    observed: Counter[tuple[int, ...]] = Counter()
    for _ in range(draws):
        drawn = Counter(one.split(":")[0] for one in draw(settings, candidates, 4, rng))
        observed[tuple(drawn[str(accuracy)] for accuracy in sizes)] += 1
    assert_follows(observed, multinomial_counts(densities, tuple(sizes.values()), 4), draws)


# -- Table 7: retired questions are in the batch again ----------------------------------------------------------------


def revisiting(n_retired: int, **settings) -> ReplayBuffer:
    buffer = ReplayBuffer(RetirementPolicy(**{"revisits_every": 5, "revisited_share": 0.25, **settings}))
    buffer.observe([group(["correct"] * K, question) for question in QUESTIONS[:n_retired]], 0)
    return buffer


@pytest.mark.parametrize(("retired", "revisited"), [(0, 0), (3, 0), (4, 1), (18, 4), (40, 8)])
def test_every_so_many_steps_a_share_of_the_retired_questions_is_in_the_batch_as_fresh_ones(retired, revisited):
    """At most the whole batch, which has 8."""
    buffer, fresh = revisiting(retired), source()
    before = set(buffer.retired)
    buffer.advance(4)
    assert not buffer.changes.returned
    mixer(8).plan(fresh, buffer, 4)
    assert set(buffer.retired) == before, "step 4 is not due"
    buffer.advance(5)
    plan = mixer(8).plan(fresh, buffer, 5)
    back = buffer.changes.returned
    assert len(back) == revisited
    assert [question.id for question in plan.fresh][:revisited] == back
    assert len({question.id for question in plan.fresh}) == 8
    assert set(buffer.retired) == before - set(back)


def test_a_revisited_question_is_observed_like_any_other():
    buffer, fresh = revisiting(8), source()
    buffer.advance(5)
    first, second = mixer(8).plan(fresh, buffer, 5).fresh[:2]
    buffer.observe([group(["correct"] * K, first), group(["wrong", "correct"] * (K // 2), second)], 5)
    assert first.id in buffer.retired
    assert second.id not in buffer.retired
    assert buffer.records[second.id].accuracy == Fraction(1, 2)


def test_which_questions_are_revisited_follows_from_the_mixers_generator():
    drawn = []
    for seed in (1, 1, 2):
        buffer = revisiting(20)
        drawn.append(buffer.revisit(5, 8, np.random.default_rng(seed)))
    assert drawn[0] == drawn[1] != drawn[2]
    buffer, rng = revisiting(20, revisits_every=None), np.random.default_rng(1)
    state = rng.bit_generator.state
    assert buffer.revisit(5, 8, rng) == []
    assert rng.bit_generator.state == state, "switched off, no random number is used"


def test_revisits_take_no_place_of_a_replayed_question():
    buffer = revisiting(12)
    for question in QUESTIONS[20:30]:
        buffer.record(question.id, Fraction(1, 2), 0)
        buffer.store([(question.id, trajectory())])
    plan = mixer(8, rho=0.75).plan(source(), buffer, 5)
    assert (len(plan.replayed), len(plan.fresh)) == (6, 2)
    assert [question.id for question in plan.fresh] == buffer.changes.returned


# -- Table 9: other levels are masked ---------------------------------------------------------------------------------


def test_masked_groups_stay_in_the_batch_with_no_token_in_the_loss():
    groups = [group(["correct"] * n + ["wrong"] * (K - n), QUESTIONS[n]) for n in range(K + 1)]
    batch = assemble(groups)
    masked = DynamicSampling(masks=True, min_reward=0.25, max_reward=0.5).masked(batch)
    assert masked.groups == batch.groups
    for n, (rows, before) in enumerate(zip(masked.rows, batch.rows, strict=True)):
        inside = 1 <= n <= 2
        assert rows == (before if inside else [replace(row, advantage=0.0, in_loss=False) for row in before])
    assert batch_metrics(masked, 1, [0.0] * len(masked.flat_rows()))["reward/groups_with_signal"] == 2 / (K + 1)
    assert DynamicSampling().masked(batch) is batch


def test_the_stored_trajectory_counts_for_the_level_of_its_group_and_ungradable_rows_do_not():
    replayed = group(["correct", "timeout", "wrong"], replayed=True)  # with the stored success: 2 of 3
    batch = assemble([replayed], {ID: trajectory()})
    for low, high, inside in ((0.6, 0.7, True), (0.4, 0.6, False)):
        rows = DynamicSampling(masks=True, min_reward=low, max_reward=high).masked(batch).flat_rows()
        assert [row.in_loss for row in rows] == ([True, False, True, True] if inside else [False] * 4)


def test_a_plan_has_a_question_at_most_once_with_all_of_them_together():
    buffer = filled(12)
    buffer.retirement = RetirementPolicy(revisits_every=2, revisited_share=0.5)
    for plan in train(mixer(8, rho=0.5), source(), buffer, 30, skill=0.85):
        fresh, replayed = ids_of(plan)
        assert len({*fresh, *replayed}) == len(fresh) + len(replayed) == 8
