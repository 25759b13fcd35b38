"""curves.png of a run: whatever its length, its axes can be read."""

from __future__ import annotations

from itertools import pairwise

import pytest

from exgrpo_orlhf.study import comparison_charts


@pytest.fixture
def figures(monkeypatch) -> list:
    """Those that are drawn."""
    drawn, png = [], comparison_charts.png
    monkeypatch.setattr(comparison_charts, "png", lambda figure: drawn.append(figure) or png(figure))
    return drawn


@pytest.mark.parametrize(("steps", "tokens"), [(3, 900), (60, 11_000), (20_000, 15), (20_000, 7_000_000)])  # of a step
def test_labels_of_the_ticks_do_not_overlap(steps, tokens, figures):
    rows = []
    for step in {0, 1, steps // 2, steps}:
        rows.append({"step": step, "cost/generated_tokens": step * tokens, comparison_charts.ACCURACY: step / steps})
        rows[-1] |= {"reward/mean": 0.1, "replay/actual_share": 0.5, "replay/retired": 3 * step}
    comparison_charts.training_picture({"run": sorted(rows, key=lambda row: row["step"])})
    for axes in figures[0].axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            labels = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            boxes = [label.get_window_extent() for label in labels if label.get_text()]
            assert not any(one.overlaps(other) for one, other in pairwise(boxes)), axes.get_title()


def test_a_run_has_its_colour_in_every_panel_though_another_lacks_a_metric(figures):
    rows = [{"step": step, comparison_charts.ACCURACY: 0.1 * step, "time/step": 1.0} for step in range(3)]
    comparison_charts.training_picture({"a": rows, "b": [{**row, "replay/retired": 1} for row in rows]})
    accuracy, *_, retired = figures[0].axes
    colours = {line.get_label(): line.get_color() for line in accuracy.lines}
    assert [line.get_color() for line in retired.lines] == [colours["b"]] != [colours["a"]]


def test_what_was_not_measured_has_no_panel_and_no_warning(figures, recwarn):
    rows = [{"step": step, "reward/mean": 0.1 * step, "time/step": 1.0} for step in range(1, 4)]
    measured = [{**row, "replay/retired": 1, "cost/generated_tokens": 9 * row["step"]} for row in rows]
    validated = [{**row, comparison_charts.ACCURACY: 0.5} for row in measured]
    once = [{"step": 0, comparison_charts.ACCURACY: 0.5}]
    assert comparison_charts.training_picture({"run": []}) is None
    for logged, panels in ((once, 1), (rows, 1), (measured, 2), (validated, 4)):
        comparison_charts.training_picture({"run": logged})
        assert [bool(axes.lines) for axes in figures[-1].axes] == [True] * panels
    assert not recwarn.list
