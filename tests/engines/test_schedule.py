"""The learning rate's schedule."""

import pytest

from exgrpo_orlhf.engines.schedule import rate_share


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("linear", 2, [0.5, 1, 2 / 3, 1 / 3]),
        ("cosine", 1, [1, 0.5 + 0.25 * 2**0.5, 0.5, 0.5 - 0.25 * 2**0.5]),
        ("linear", 4, [0.25, 0.5, 0.75, 1]),
        ("constant", 2, [0.5, 1, 1, 1]),
    ],
)
def test_every_step_trains_and_the_rate_peaks_after_the_warm_up(schedule, warmup, expected):
    shape = {"steps": None if schedule == "constant" else 4, "warmup": warmup, "schedule": schedule}
    rates = [rate_share(step, **shape) for step in (1, 2, 3, 4)]
    assert rates == pytest.approx(expected)
