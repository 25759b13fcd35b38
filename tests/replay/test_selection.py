"""Which stored trajectory is replayed."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from exgrpo_orlhf.records import Trajectory
from exgrpo_orlhf.replay import TrajectorySelector


def trajectory(token: int, step: int = 0) -> Trajectory:
    return Trajectory(np.array([token, 1], np.int32), np.array([-0.5, -0.1], np.float32), 1.0, step)


def stored(n: int) -> list[Trajectory]:
    return [trajectory(i, step=i) for i in range(n)]


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("by", ["entropy", "perplexity"])
@pytest.mark.parametrize(("prefer", "plain"), [("lowest", np.argmin), ("highest", np.argmax)])
def test_the_chosen_trajectory_has_the_extreme_entropy(prefer, plain, by):
    draw = np.random.default_rng(1)
    candidates = {f"q{i}": stored(int(draw.integers(2, 7))) for i in range(50)}
    scores = {question_id: draw.uniform(0, 3, len(kept)).tolist() for question_id, kept in candidates.items()}
    chosen = TrajectorySelector(by, prefer).choose(candidates, scores, rng())
    assert list(chosen) == list(candidates)
    for question_id, kept in candidates.items():
        assert chosen[question_id] is kept[plain(scores[question_id])]


@pytest.mark.parametrize("prefer", ["lowest", "highest"])
def test_equal_scores_take_the_newest_whatever_the_order(prefer):
    kept = [trajectory(1, step=3), trajectory(2, step=9), trajectory(3, step=5)]
    for order in itertools.permutations(kept):
        chosen = TrajectorySelector(prefer=prefer).choose({"q": order}, {"q": [0.5] * 3}, rng())
        assert chosen["q"].step == 9


@pytest.mark.parametrize("prefer", ["lowest", "highest"])
def test_equal_scores_and_steps_are_decided_by_the_tokens_whatever_the_order(prefer):
    """A comparison of the payload would raise here."""
    kept = [trajectory(token, step=3) for token in range(5)]
    chosen = {
        TrajectorySelector(prefer=prefer).choose({"q": order}, {"q": [0.5] * 5}, rng())["q"].key
        for order in itertools.permutations(kept)
    }
    assert chosen == {min(t.key for t in kept)}


def test_a_lower_score_wins_over_a_newer_step():
    kept = [trajectory(1, step=0), trajectory(2, step=99)]
    assert TrajectorySelector().choose({"q": kept}, {"q": [0.4, 0.5]}, rng())["q"].step == 0


def test_only_trajectories_whose_score_matters_are_scored():
    candidates = {"one": stored(1), "two": stored(2), "three": stored(3)}
    assert set(TrajectorySelector().to_score(candidates)) == {"two", "three"}
    assert TrajectorySelector().to_score(candidates)["three"] == candidates["three"]
    assert TrajectorySelector(by="random").to_score(candidates) == {}
    assert TrajectorySelector(by="perplexity").to_score(candidates) == TrajectorySelector().to_score(candidates)


@pytest.mark.parametrize(
    ("by", "prefer", "taken"),
    [("length", "lowest", 1), ("length", "highest", 2), ("recency", "lowest", 0), ("recency", "highest", 3)],
)
def test_length_and_recency_are_known_without_a_scoring_pass(by, prefer, taken):
    lengths, steps = [4, 2, 9, 5], [1, 3, 7, 8]
    kept = [
        Trajectory(np.arange(n, dtype=np.int32), np.full(n, -0.5, np.float32), 1.0, step)
        for n, step in zip(lengths, steps, strict=True)
    ]
    selector, generator = TrajectorySelector(by, prefer), rng()
    before = generator.bit_generator.state
    assert selector.to_score({"q": kept}) == {}
    for order in itertools.permutations(kept):
        assert selector.choose({"q": order}, {}, generator)["q"] is kept[taken]
    assert generator.bit_generator.state == before


@pytest.mark.parametrize("prefer", ["lowest", "highest"])
def test_equal_lengths_take_the_newest_and_equal_steps_the_smaller_hash(prefer):
    kept = [trajectory(token, step=step) for token, step in ((1, 3), (2, 9), (3, 5))]
    same = [trajectory(token, step=3) for token in range(5)]
    for order in itertools.permutations(kept):
        assert TrajectorySelector("length", prefer).choose({"q": order}, {}, rng())["q"].step == 9
    for order in itertools.permutations(same):
        assert TrajectorySelector("recency", prefer).choose({"q": order}, {}, rng())["q"].key == min(
            t.key for t in same
        )


def test_a_trajectory_that_stands_alone_needs_no_score():
    kept = stored(1)
    for by in ("entropy", "perplexity", "length", "recency", "random"):
        assert TrajectorySelector(by=by).choose({"q": kept}, {}, rng())["q"] is kept[0]


def test_random_choice_is_uniform():
    kept, generator, draws = stored(4), np.random.default_rng(5), 4_000
    selector = TrajectorySelector(by="random")
    counts = Counter(selector.choose({"q": kept}, {}, generator)["q"].step for _ in range(draws))
    statistic = sum((counts[i] - draws / 4) ** 2 / (draws / 4) for i in range(4))
    assert statistic < 21.1  # χ² with 3 degrees of freedom exceeds this once in 10,000


def test_random_choice_comes_from_the_generator_handed_in():
    candidates = {f"q{i}": stored(5) for i in range(30)}
    selector = TrajectorySelector(by="random")
    steps = [
        [t.step for t in selector.choose(candidates, {}, np.random.default_rng(seed)).values()] for seed in (3, 3, 4)
    ]
    assert steps[0] == steps[1] != steps[2]


def test_choosing_by_entropy_draws_no_random_number():
    generator = rng()
    before = generator.bit_generator.state
    TrajectorySelector().choose({"q": stored(3)}, {"q": [0.1, 0.1, 0.1]}, generator)
    assert generator.bit_generator.state == before


@pytest.mark.parametrize("scores", [{}, {"q": [0.1]}, {"q": [0.1, 0.2, 0.3]}, {"q": [0.1, math.nan]}])
def test_missing_surplus_and_non_finite_scores_are_refused(scores):
    with pytest.raises(ValueError, match="question q: needs 2 finite scores"):
        TrajectorySelector().choose({"q": stored(2)}, scores, rng())


@pytest.mark.parametrize("by", ["entropy", "perplexity", "length", "recency", "random"])
def test_a_question_without_trajectories_is_refused(by):
    with pytest.raises(ValueError, match="question q has no stored trajectory"):
        TrajectorySelector(by=by).choose({"q": []}, {}, rng())


@pytest.mark.parametrize(("name", "settings"), [("by", {"by": "luck"}), ("prefer", {"prefer": "middle"})])
def test_unknown_choices_are_refused_with_the_binding_named(name, settings):
    with pytest.raises(ValueError, match=rf"TrajectorySelector\.{name} must be"):
        TrajectorySelector(**settings)
