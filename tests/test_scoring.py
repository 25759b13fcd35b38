"""Which candidates are scored again, and what reuse says of itself."""

from __future__ import annotations

import numpy as np
import pytest

from exgrpo_orlhf.records import Trajectory
from exgrpo_orlhf.replay import ScoreReuse, TrajectorySelector


def trajectory(number: int, score: float | None, scored_step: int = 0) -> Trajectory:
    ids = np.array([number, 1], np.int32)
    return Trajectory(ids, np.zeros(2, np.float32), 1.0, 0, score=score, scored_step=scored_step)


def ask(reuse: ScoreReuse, stored: dict[str, list[Trajectory]], step: int = 10, prefer="lowest", seed: int = 0):
    return reuse.request(stored, TrajectorySelector(prefer=prefer), step, np.random.default_rng(seed))


def test_without_reuse_everything_is_scored_and_no_random_number_drawn():
    stored = {"q": [trajectory(i, 0.1 * i, 10) for i in range(4)]}
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    request = ScoreReuse().request(stored, TrajectorySelector(), 10, rng)
    assert request.positions == {"q": [0, 1, 2, 3]}
    assert rng.bit_generator.state == before
    scores, metrics = ScoreReuse().complete(request, {"q": [4.0, 3.0, 2.0, 1.0]}, TrajectorySelector(), 10)
    assert scores == {"q": [4.0, 3.0, 2.0, 1.0]}
    assert (metrics["replay/candidates_scored"], metrics["replay/candidates_reused"]) == (4, 0)


@pytest.mark.parametrize(("prefer", "best"), [("lowest", 1), ("highest", 3)])
def test_the_best_of_the_young_scores_and_all_others_are_measured(prefer, best):
    stored = {
        "q": [
            trajectory(0, None),  # never measured
            trajectory(1, 0.1, 6),
            trajectory(2, 0.5, 5),
            trajectory(3, 0.9, 10),
            trajectory(4, 0.0, 4),  # too old by one step
        ]
    }
    reuse = ScoreReuse(max_age=5, refresh=1, check_share=0.0)
    request = ask(reuse, stored, step=10, prefer=prefer)
    assert request.positions == {"q": sorted([0, best, 4])}
    assert [t.token_ids[0] for t in request.trajectories["q"]] == sorted([0, best, 4])
    measured = {"q": [7.0, 8.0, 9.0]}
    scores, metrics = reuse.complete(request, measured, TrajectorySelector(prefer=prefer), 10)
    expected = [t.score for t in stored["q"]]
    for position, value in zip(request.positions["q"], measured["q"], strict=True):
        expected[position] = value
    assert scores == {"q": expected}
    assert (metrics["replay/candidates_scored"], metrics["replay/candidates_reused"]) == (3, 2)


def test_nothing_is_measured_when_nothing_needs_it():
    stored = {"q": [trajectory(i, float(i), 9) for i in range(3)]}
    request = ask(ScoreReuse(max_age=5, refresh=0, check_share=0.0), stored)
    assert request.trajectories == {}
    scores, _ = ScoreReuse(max_age=5, refresh=0).complete(request, {}, TrajectorySelector(), 10)
    assert scores == {"q": [0.0, 1.0, 2.0]}


def test_checked_questions_are_scored_in_full_and_tell_when_reuse_would_have_chosen_otherwise():
    reuse = ScoreReuse(max_age=5, refresh=1, check_share=1.0)
    stored = {name: [trajectory(i, float(i), 9) for i in range(3)] for name in ("same", "other")}
    request = ask(reuse, stored)
    assert request.checked == {"same", "other"}
    measured = {"same": [0.5, 1.5, 2.5], "other": [0.5, 1.5, -1.0]}
    scores, metrics = reuse.complete(request, measured, TrajectorySelector(), 10)
    assert scores == measured, "what is known is used"
    # reuse measures trajectory 0 again (0.5) and keeps 1.0 and 2.0: it takes 0, the full scores of `other` take 2
    assert (metrics["replay/choices_checked"], metrics["replay/choices_differing"]) == (2, 1)


def test_the_share_of_checked_questions_is_the_one_asked_for():
    stored = {f"q{i}": [trajectory(i, 0.0, 9), trajectory(i + 9999, 1.0, 9)] for i in range(4000)}
    checked = len(ask(ScoreReuse(max_age=5, check_share=0.1), stored).checked)
    assert abs(checked - 400) < 5 * (400 * 0.9) ** 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_age": 0}, "max_age"), ({"refresh": -1}, "refresh"), ({"check_share": 1.5}, "check_share")],
)
def test_a_value_out_of_range_is_refused(settings, message):
    with pytest.raises(ValueError, match=rf"ScoreReuse\.{message}"):
        ScoreReuse(**settings)
