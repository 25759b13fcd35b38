"""The replay buffer against a naive one."""

import random
import tracemalloc
from fractions import Fraction

import pytest
from replay_builders import REWARDS, group, trajectory

from exgrpo_orlhf.replay import ReplayBuffer, RetirementPolicy
from exgrpo_orlhf.replay.indexed_set import IndexedSet


def filled(n: int, accuracies=(Fraction(1, 4), Fraction(1, 2), Fraction(3, 4)), ids=str) -> ReplayBuffer:
    buffer = ReplayBuffer(RetirementPolicy())
    for i in range(n):
        question_id = ids(f"q{i}")
        buffer.record(question_id, accuracies[i % len(accuracies)], 0)
        buffer.store([(question_id, trajectory([i, 1]))])
    return buffer


# -- accuracy ---------------------------------------------------------------------------------------------------------


def test_accuracy_zero_moves_the_bucket_and_keeps_the_trajectories():
    """T5: a question that falls to 0 is no candidate while at 0, and one again, with its trajectories, when solved."""
    buffer = filled(1, [Fraction(1, 2)])
    buffer.observe([group(["wrong"] * 7, "q0", replayed=True)], 1)
    assert buffer.records["q0"].accuracy == 0
    assert buffer.n_candidates == 0
    assert not buffer.candidates
    assert (buffer.n_with_trajectories, buffer.n_trajectories) == (1, 1)
    buffer.observe([group(["correct", "wrong", "wrong", "wrong"], "q0")], 2)
    assert {accuracy: list(members) for accuracy, members in buffer.candidates.items()} == {Fraction(1, 4): ["q0"]}
    assert [list(t.token_ids) for t in buffer.trajectories("q0")] == [[0, 1]]


def test_an_unsolved_question_stays_a_candidate_where_asked_as_long_as_something_of_it_is_stored():
    buffer = ReplayBuffer(RetirementPolicy(), per_question=2, max_age=4, replays_unsolved=True)
    buffer.observe([group(["correct", "wrong"], q) for q in ("stored", "retired")], 1)
    buffer.store([(q, trajectory([1], step=1)) for q in ("stored", "retired")])
    buffer.observe([group(["wrong"], q, replayed=True) for q in ("stored", "retired", "never stored")], 2)
    assert {a: set(members) for a, members in buffer.candidates.items()} == {Fraction(0): {"stored", "retired"}}
    buffer.observe([group(["correct"], "retired", replayed=True)], 3)
    assert {a: list(members) for a, members in buffer.candidates.items()} == {Fraction(0): ["stored"]}
    buffer.advance(6)
    assert len(buffer.changes.evicted) == 1
    assert not buffer.candidates


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda buffer: buffer.record("q", Fraction(-1, 8), 0), ValueError, "question q: an accuracy lies in"),
        (lambda buffer: buffer.record("q", Fraction(9, 8), 0), ValueError, "question q: an accuracy lies in"),
        (
            lambda buffer: buffer.store([("q0", trajectory([3], finish="length"))]),
            ValueError,
            "question q0: a truncated response",
        ),
        (lambda buffer: buffer.store([("q", trajectory([1]))]), ValueError, "question q has no accuracy"),
        (lambda buffer: buffer.remove("q"), KeyError, "q"),
        (lambda buffer: buffer.restore([], [], {}, 0), ValueError, "empty"),
        (lambda buffer: (buffer.retire("q0", 1), buffer.restore([], [], {}, 0)), ValueError, "empty"),
        (lambda buffer: (buffer.retire("q0", 1), buffer.record("q0", Fraction(1, 2), 3)), ValueError, "q0 is retired"),
    ],
    ids=["accuracy < 0", "accuracy > 1", "truncated", "no record", "unknown", "not empty", "retired alone", "retired"],
)
def test_a_change_that_cannot_be_is_refused(change, error, message):
    buffer = filled(1)
    with pytest.raises(error, match=message):
        change(buffer)
    assert buffer.n_trajectories == len(buffer.records)
    assert {*buffer.records, *buffer.retired} == {"q0"}


# -- retirement -------------------------------------------------------------------------------------------------------


def test_nothing_retires_when_retirement_is_off():
    buffer = ReplayBuffer(RetirementPolicy(at_accuracy=None))
    buffer.observe([group(["correct"] * 8, "q")], 1)
    buffer.store([("q", trajectory([1]))])
    assert not buffer.retired
    assert list(buffer.candidates[Fraction(1)]) == ["q"]


# -- against a naive buffer -------------------------------------------------------------------------------------------


class NaiveBuffer:
    """The same rules over plain lists, everything derived anew at each look."""

    def __init__(self, replays_unsolved=False):
        self.replays_unsolved = replays_unsolved
        self.accuracy, self.observed, self.stored, self.retired = {}, {}, {}, {}

    def observe(self, question_id, correct, graded, rollouts, step):
        if graded < min(2, rollouts) or not graded or question_id in self.retired:
            return
        self.record(question_id, Fraction(correct, graded), step)
        if correct == graded:
            self.retire(question_id, step)

    def record(self, question_id, accuracy, step):
        self.accuracy[question_id], self.observed[question_id] = accuracy, step
        self.stored.setdefault(question_id, [])

    def store(self, question_id, tokens, logprob, step):
        if question_id in self.retired:
            return
        rest = [row for row in self.stored[question_id] if row[0] != tokens]
        self.stored[question_id] = [*rest, (tokens, logprob, step)]

    def remove(self, question_id):
        for table in (self.accuracy, self.observed, self.stored):
            del table[question_id]

    def retire(self, question_id, step):
        self.remove(question_id)
        self.retired[question_id] = step

    def view(self):
        buckets = {}
        for question_id, accuracy in self.accuracy.items():
            if (accuracy > 0 or self.replays_unsolved) and self.stored[question_id]:
                buckets.setdefault(accuracy, set()).add(question_id)
        trajectories = [row for rows in self.stored.values() for row in rows]
        return {
            "records": {q: (self.accuracy[q], self.observed[q], self.stored[q]) for q in self.accuracy},
            "retired": self.retired,
            "buckets": buckets,
            "counts": (
                sum(map(len, buckets.values())),
                sum(bool(rows) for rows in self.stored.values()),
                len(trajectories),
                sum(len(tokens) for tokens, _, _ in trajectories),
            ),
        }


def view(buffer: ReplayBuffer):
    return {
        "records": {
            question_id: (
                record.accuracy,
                record.observed_step,
                [
                    (tuple(t.token_ids.tolist()), float(t.behaviour_logprobs[0]), t.step)
                    for t in buffer.trajectories(question_id)
                ],
            )
            for question_id, record in buffer.records.items()
        },
        "retired": dict(buffer.retired),
        "buckets": {accuracy: set(members) for accuracy, members in buffer.candidates.items()},
        "counts": (buffer.n_candidates, buffer.n_with_trajectories, buffer.n_trajectories, buffer.n_tokens),
    }


def random_step(buffer, naive, draw, step):
    question_id = f"q{draw.randrange(12)}"
    action = draw.choice(["observe", "observe", "record", "store", "store", "store", "store", "retire", "remove"])
    if action == "observe":
        verdicts = draw.choices(list(REWARDS), weights=[8, 4, 1, 1, 1], k=draw.choice([2, 3, 4]))
        replayed = draw.random() < 0.5
        buffer.observe([group(verdicts, question_id, replayed)], step)
        graded = [verdict for verdict in verdicts if REWARDS[verdict] is not None]
        naive.observe(question_id, graded.count("correct"), len(graded), len(verdicts), step)
    elif action == "record" and question_id not in naive.retired:
        accuracy = Fraction(draw.randrange(5), 4)
        buffer.record(question_id, accuracy, step)
        naive.record(question_id, accuracy, step)
    elif action == "store" and (question_id in naive.accuracy or question_id in naive.retired):
        tokens = tuple(draw.choices([1, 2], k=draw.choice([1, 2])))
        logprob = -draw.randrange(1, 9) / 8
        buffer.store([(question_id, trajectory(tokens, step, logprob))])
        naive.store(question_id, tokens, logprob, step)
    elif question_id in naive.accuracy and action == "retire" and draw.random() < 0.3:
        buffer.retire(question_id, step)
        naive.retire(question_id, step)
    elif question_id in naive.accuracy and action == "remove" and draw.random() < 0.5:
        buffer.remove(question_id)
        naive.remove(question_id)


@pytest.mark.parametrize("replays_unsolved", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_buffer_equals_a_naive_one_after_every_change(seed, replays_unsolved):
    draw, naive = random.Random(seed), NaiveBuffer(replays_unsolved)
    buffer = ReplayBuffer(RetirementPolicy(), replays_unsolved=replays_unsolved)
    for step in range(150):
        random_step(buffer, naive, draw, step)
        assert view(buffer) == naive.view()


@pytest.mark.parametrize("seed", range(5))
def test_indexed_set_holds_each_member_once_at_a_dense_position(seed):
    draw, members, plain = random.Random(seed), IndexedSet(), set()
    for _ in range(300):
        member = str(draw.randrange(15))
        if draw.random() < 0.5:
            members.add(member)
            plain.add(member)
        elif member in plain:
            members.remove(member)
            plain.remove(member)
        else:
            with pytest.raises(KeyError):
                members.remove(member)
        assert len(members) == len(plain)
        assert [members[i] for i in range(len(members))] == list(members)
        assert set(members) == plain
        assert all((str(i) in members) == (str(i) in plain) for i in range(15))


# -- cost -------------------------------------------------------------------------------------------------------------


class CountedId(str):
    """A question id that counts how often anything looks at it."""

    __slots__ = ()
    looks = 0

    def __eq__(self, other):
        CountedId.looks += 1
        return str.__eq__(self, other)

    def __hash__(self):
        CountedId.looks += 1
        return str.__hash__(self)


def one_of_each_change(buffer: ReplayBuffer, question_id: str) -> None:
    middle = CountedId(question_id)
    buffer.record(middle, Fraction(1, 2), 1)
    buffer.store([(middle, trajectory([9, 9]))])
    buffer.observe([group(["correct", "wrong"], middle)], 2)
    buffer.observe([group(["correct", "correct"], middle)], 3)
    buffer.observe([group(["correct", "wrong"], CountedId("q0"))], 3)
    buffer.remove(CountedId("q0"))


def looks_and_bytes(n: int) -> tuple[int, int]:
    buffer = filled(n, ids=CountedId)
    CountedId.looks = 0
    tracemalloc.start()
    try:
        one_of_each_change(buffer, f"q{n // 2}")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return CountedId.looks, peak


def test_the_cost_of_a_change_does_not_grow_with_the_buffer():
    """T15: each update looks at the same few ids and allocates as little in a buffer of 6,000 as in one of 60.

    A membership test on a list would compare with thousands of ids, a rebuilt list would allocate tens of kilobytes.
    """
    small, large = looks_and_bytes(60), looks_and_bytes(6_000)
    assert 0 < small[0] < 100
    assert large[0] <= 1.5 * small[0]  # a little room: two ids may share a slot of a hash table
    assert large[1] < small[1] + 8_000
