"""Which stored trajectory is replayed."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from replay_builders import trajectory

from exgrpo_orlhf.records import Measured, Question, Trajectory
from exgrpo_orlhf.replay import TrajectorySelector

Q = Question("q", "1+1=", "2", "sums")


def stored(n: int) -> list[Trajectory]:
    return [trajectory([i, 1], step=i) for i in range(n)]


def scored(entropies) -> list[Measured]:
    """The perplexity of each is e to its entropy."""
    return [Measured(np.full(2, -entropy, np.float32), entropy) for entropy in entropies]


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("by", ["entropy", "perplexity"])
@pytest.mark.parametrize(("prefer", "plain"), [("lowest", np.argmin), ("highest", np.argmax)])
def test_the_chosen_trajectory_has_the_extreme_entropy_whatever_its_age(prefer, plain, by):
    draw, generator = np.random.default_rng(1), rng()
    questions = [Question.make("sums", f"{i}+1=", str(i + 1)) for i in range(50)]
    candidates = {question: stored(int(draw.integers(2, 7))) for question in questions}
    scores = {question: draw.uniform(0, 3, len(kept)).tolist() for question, kept in candidates.items()}
    measured = {question: scored(values) for question, values in scores.items()}
    chosen = TrajectorySelector(by, prefer).choose(candidates, measured, generator)
    assert list(chosen) == [question.id for question in questions]
    for question, kept in candidates.items():
        assert chosen[question.id].trajectory is kept[plain(scores[question])]
    assert generator.bit_generator.state == rng().bit_generator.state, "no random number is drawn"


@pytest.mark.parametrize("prefer", ["lowest", "highest"])
@pytest.mark.parametrize("by", ["entropy", "perplexity", "length", "recency"])
def test_equal_scores_take_the_newest_then_the_smaller_hash_whatever_the_order(by, prefer):
    """A comparison of the payload would raise here."""
    equal = {Q: scored([0.5] * 5)}
    same = [trajectory([token, 1], step=3) for token in range(5)]
    ages = [trajectory([token, 1], step=step) for token, step in ((1, 3), (2, 9), (3, 5), (4, 4), (5, 1))]
    for expected, kept in ((min(same, key=lambda t: t.key), same), (ages[1], ages)):
        if by == "recency" and kept is ages:
            continue  # its score is the step itself
        for order in itertools.permutations(kept):
            assert TrajectorySelector(by, prefer).choose({Q: order}, equal, rng())["q"].trajectory is expected


def test_the_priority_is_the_distance_from_the_accuracy_and_falls_with_age():
    kept = [trajectory([step, 1], step, reward=reward) for step, reward in ((5, 1.0), (9, 0.0), (1, 0.0))]
    selector = TrajectorySelector("priority", decay_steps=4.0)
    assert selector.to_score({Q: kept}) == {}
    for accuracy, step in itertools.product((0.0, 0.1, 0.25, 0.5, 0.9, 1.0), (10, 30)):
        scores = [abs(one.reward - accuracy) * math.exp(-(step - one.step) / 4.0) for one in kept]
        for order in itertools.permutations(kept):
            assert (
                selector.choose({Q: order}, {}, rng(), {"q": accuracy}, step)["q"].trajectory
                is kept[int(np.argmax(scores))]
            )
    assert selector.choose({Q: kept}, {}, rng(), {"q": 0.1}, 10)["q"].trajectory is kept[0], "a rare success"
    assert selector.choose({Q: kept}, {}, rng(), {"q": 0.5}, 10)["q"].trajectory is kept[1], (
        "of equal distance the younger"
    )
    assert selector.choose({Q: kept}, {}, rng(), {}, 10)["q"].trajectory is kept[1], (
        "mastered since: a failure is far from it"
    )


def test_only_trajectories_whose_score_matters_are_scored():
    alone = Question("alone", "1+2=", "3", "sums")
    candidates = {alone: stored(1), Q: stored(3)}
    for by in ("entropy", "perplexity", "random"):
        assert TrajectorySelector(by).to_score(candidates) == ({} if by == "random" else {Q: candidates[Q]})
        [choice] = TrajectorySelector(by).choose({alone: candidates[alone]}, {}, rng()).values()
        assert choice.trajectory is candidates[alone][0]


@pytest.mark.parametrize(
    ("by", "prefer", "taken"),
    [("length", "lowest", 1), ("length", "highest", 2), ("recency", "lowest", 0), ("recency", "highest", 3)],
)
def test_length_and_recency_are_known_without_a_scoring_pass(by, prefer, taken):
    lengths, steps = [4, 2, 9, 5], [1, 3, 7, 8]
    kept = [trajectory(range(n), step) for n, step in zip(lengths, steps, strict=True)]
    selector, generator = TrajectorySelector(by, prefer), rng()
    before = generator.bit_generator.state
    assert selector.to_score({Q: kept}) == {}
    for order in itertools.permutations(kept):
        assert selector.choose({Q: order}, {}, generator)["q"].trajectory is kept[taken]
    assert generator.bit_generator.state == before


def test_random_choice_is_uniform():
    kept, generator, draws = stored(4), np.random.default_rng(5), 4_000
    selector = TrajectorySelector(by="random")
    counts = Counter(selector.choose({Q: kept}, {}, generator)["q"].trajectory.step for _ in range(draws))
    statistic = sum((counts[i] - draws / 4) ** 2 / (draws / 4) for i in range(4))
    assert statistic < 21.1  # χ² with 3 degrees of freedom exceeds this once in 10,000


def test_random_choice_comes_from_the_generator_handed_in():
    candidates = {Question.make("sums", f"{i}+1=", "?"): stored(5) for i in range(30)}
    selector = TrajectorySelector(by="random")
    steps = [
        [t.trajectory.step for t in selector.choose(candidates, {}, np.random.default_rng(seed)).values()]
        for seed in (3, 3, 4)
    ]
    assert steps[0] == steps[1] != steps[2]


@pytest.mark.parametrize("scores", [[], [0.1], [0.1, 0.2, 0.3], [0.1, math.nan]])
def test_missing_surplus_and_non_finite_scores_are_refused(scores):
    with pytest.raises(ValueError, match="question q: needs 2 finite scores"):
        TrajectorySelector().choose({Q: stored(2)}, {Q: scored(scores)}, rng())


@pytest.mark.parametrize("by", ["entropy", "perplexity", "length", "recency", "random"])
def test_a_question_without_trajectories_is_refused(by):
    with pytest.raises(ValueError, match="question q has no stored trajectory"):
        TrajectorySelector(by=by).choose({Q: []}, {}, rng())
