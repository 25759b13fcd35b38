"""The charts of the report: accuracies with intervals, pass@k against k, response lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..show.charts import BINS, LINE, PALETTE, WIDTH, Chart, curve, drawing, panel, svg, wrapped
from ..show.charts import interval as draw_interval
from .results_table import interval
from .samples import Line

PANEL = (270, 184)  # width and height of a small chart
# The name of a model's colour, its estimate as in results.json, None if it was not run, and a text if it is on a part
# of the questions.
Point = tuple[str, dict[str, Any] | None, str | None]


def accuracies(rows: Sequence[tuple[str, Sequence[Point]]], label: str) -> Chart:
    """Points with their intervals, one a line, under the name of their row; hollow for a part of the questions."""
    line, gap, size = 19, 13, 11
    names = [wrapped(name) for name, _ in rows]
    heights = [max(line * len(points), size * LINE * (name.count("\n") + 1)) + gap
               for name, (_, points) in zip(names, rows, strict=True)]  # fmt: skip
    below = np.cumsum(heights)
    middles = below - np.array(heights) / 2
    with drawing(WIDTH, below[-1] + 52) as figure:
        axes = figure.subplots()
        axes.set(ylim=(below[-1], 0), xlabel=label)
        axes.grid(visible=False, axis="y")
        axes.set_yticks(middles, names, color=PALETTE["ink"], fontsize=size)
        for middle, edge, (_, points) in zip(middles, below, rows, strict=True):
            axes.axhline(edge, color=PALETTE["line"], linestyle=":", linewidth=1)
            for i, (colour, estimate, part) in enumerate(points):
                y = middle + line * (i + 0.5 - len(points) / 2)
                if estimate is not None:
                    value, *bounds = (100 * estimate[bound] for bound in ("value", "low", "high"))
                    draw_interval(axes, y, value, (bounds[0], bounds[1]), colour, hollow=part is not None)
                words = "not run" if estimate is None else interval(estimate) + (f", {part}" if part else "")
                look: dict[str, Any] = {
                    "color": PALETTE[colour if estimate is None else "ink"],
                    "va": "center",
                    "fontsize": size,
                }
                axes.text(1.02, y, words, transform=axes.get_yaxis_transform(), **look)
        axes.set_xlim(left=0)
        return svg(figure, label, "intervals")


def pass_curves(title: str, models: Sequence[tuple[int, dict[str, Any], dict[str, Any]]], top: float) -> Chart:
    """One benchmark: pass@k against k on a logarithmic axis, with intervals; maj@k dashed.

    models: (number, k -> estimate of pass@k, k -> estimate of maj@k); top: end of the axis, a share
    """
    with panel(*PANEL, xlabel="k (samples)", xscale="log", ylim=(0, 100 * top)) as (figure, axes):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(visible=False, axis="x")
        for number, by_k, by_k_of_votes in models:
            ks, colour = sorted(map(int, by_k)), f"m{number}"
            value, low, high = ([100 * by_k[str(k)][bound] for k in ks] for bound in ("value", "low", "high"))
            curve(axes, ks, value, colour, (low, high), marker="o", markersize=4)
            voted = sorted(map(int, by_k_of_votes))
            shares = [100 * by_k_of_votes[str(k)]["value"] for k in voted]
            curve(axes, voted, shares, colour, kind="maj", linestyle="--", linewidth=1.4)
        return svg(figure, title, "curves")


def lengths(title: str, lines: Sequence[Line], longest: int, limit: int) -> Chart:
    """One model on one benchmark: samples by response length in tokens, the correct ones up, all others down.

    longest: end of the axis; limit: of response tokens, marked if it is on the axis
    """
    edges = np.linspace(0, max(longest, 1), BINS + 1)
    up, down = (
        np.histogram([line.tokens for line in lines if (line.verdict == "correct") == correct], edges)[0]
        for correct in (True, False)
    )
    with panel(*PANEL, xlabel="response tokens", xlim=(0, edges[-1])) as (figure, axes):
        for counts, colour in ((up, "correct"), (-down, "wrong")):
            axes.bar(edges[:-1], counts, 0.9 * edges[1], align="edge", color=PALETTE[colour], gid=f"bar-{colour}")
        axes.grid(visible=False, axis="x")
        most = max(up.max(), down.max(), 1)
        axes.set_yticks((-most, 0, most), (f"{most:,}", "0", f"{most:,}"))
        axes.locator_params(axis="x", nbins=5)
        if limit <= edges[-1]:
            axes.axvline(limit, color=PALETTE["quiet"], linestyle="--", gid="limit")
        return svg(figure, title, "lengths")
