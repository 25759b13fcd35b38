"""A comparison as one HTML page without scripts."""

from __future__ import annotations

from collections.abc import Sequence

from ..show.page import page as filled
from ..show.tables import number
from . import comparison_charts as charts
from .comparison import Comparison, differing_settings
from .comparison_tables import remarks, tables
from .curve import TrackedRun


def page(title: str, about: str, comparisons: Sequence[Comparison], notes: Sequence[str]) -> str:
    """The whole page. about: a line on the source of the runs; notes: those that hold for all comparisons"""
    variants = max((comparison.variants for comparison in comparisons), key=len)
    runs, last = _runs(comparisons)
    return filled(
        "comparison.html",
        title=title,
        about=about,
        notes=notes,
        comparisons=comparisons,
        charts=charts,
        tables=tables,
        remarks=remarks,
        variants=[variant.name for variant in variants],
        settings=differing_settings(variants)[0],
        runs=runs,
        last=last,
    )


def _runs(comparisons: Sequence[Comparison]) -> tuple[list[TrackedRun], dict[str, dict[str, str]]]:
    """Every run compared, and by its id and metric its last values."""
    runs: dict[str, TrackedRun] = {}
    last: dict[str, dict[str, str]] = {}
    for comparison in comparisons:
        for curve in (curve for variant in comparison.variants for curve in variant.curves):
            runs[curve.run.id] = curve.run
            value = f"{number(curve.final)} at step {curve.steps[-1]:,.0f}{', collapsed' if curve.collapsed else ''}"
            last.setdefault(curve.run.id, {})[comparison.metric] = value
    return sorted(runs.values(), key=lambda run: (run.variant, run.seed)), last
