"""Charts by matplotlib: SVG text for pages, PNG for files, and the charts of the evaluation's report.

Lengths are in pixels at full size. Every axis of shares or counts begins at zero.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from .results_table import interval
from .samples import Line

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In a page these become variables of its style sheet, which has other values for dark screens: no value twice.
PALETTE = {
    **{"paper": "#ffffff", "ink": "#1c1e21", "quiet": "#5a6068", "line": "#d9dce0", "faint": "#eceef0"},
    **{"m0": "#1f6fb4", "m1": "#c2560c", "m2": "#0d7f66", "m3": "#8d4fa8"},
    **{"m4": "#6d6f16", "m5": "#b1316b", "m6": "#0b7f95", "m7": "#5b6470"},
    **{"correct": "#1d8a78", "wrong": "#d0662b", "no_answer": "#9aa1aa", "timeout": "#8d5bb5", "error": "#3d434b"},
}
SERIES = 8  # colours m0 to m7
WIDTH = 1120  # of a chart over the whole page
PANEL = (270, 184)  # width and height of a small one
BINS = 24
LINE = 1.2  # height of a line of text, in its size
_VARIABLES = {value: f"var(--{name})" for name, value in PALETTE.items()}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "exgrpo",  # the same chart is the same text
    "text.parse_math": False,  # a $ in a name is a $
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": PALETTE["ink"],
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    **{"axes.axisbelow": True, "axes.grid": True, "grid.color": PALETTE["faint"], "axes.labelcolor": PALETTE["quiet"]},
    **{"axes.titlesize": 11, "axes.titlelocation": "left", "axes.labelsize": 9.5, "figure.dpi": 72},
    **{f"{axis}tick.{key}": value for axis in "xy" for key, value in (
        ("color", PALETTE["quiet"]), ("labelsize", 9), ("major.size", 0), ("minor.size", 0))},
}  # fmt: skip


class Drawing:
    """A figure in the making. An artist that is marked becomes a group with CSS classes and a tooltip in the SVG."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure
        self._marks: list[tuple[str, str]] = []

    def axes(self, left: float, right: float, top: float, bottom: float, **options: Any) -> Axes:
        """Axes over the whole figure but for these margins, in pixels; options: as Axes.set takes them."""
        width, height = self.figure.get_size_inches() * 72
        place = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
        return self.figure.add_axes(place, **options)

    def mark(self, artist: Artist, classes: str, words: str = "") -> None:
        artist.set_gid(f"mark-{len(self._marks)}")
        self._marks.append((classes, words))

    def svg(self, label: str, kind: str) -> str:
        """An element for a page: no ids but those that it refers to, no style of its own, colours by variables."""
        out = io.StringIO()
        self.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        width, height = self.figure.get_size_inches() * 72
        inner = re.sub(r"^.*?<svg[^>]*>|<metadata>.*?</metadata>|<style.*?</style>", "", out.getvalue(), flags=re.S)
        tick_class = lambda match: f' class="{match[0][5:10]}"' if "tick_" in match[0] else ""
        inner = re.sub(r' id="(?:[a-z2]+|matplotlib\.axis|\w+Collection)_\d+"', tick_class, inner)
        inner = re.sub(r'<g id="mark-(\d+)">', self._group, inner).replace("xlink:href", "href")
        variable = lambda colour: _VARIABLES.get(colour[0], colour[0])
        inner = re.sub(r'style="[^"]*"', lambda style: re.sub(r"#[0-9a-f]{6}", variable, style[0]), inner)
        return (
            f'<svg class="chart {kind}" role="img" aria-label="{escape(label)}" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}">{inner}'
        )

    def png(self) -> bytes:
        out = io.BytesIO()
        self.figure.savefig(out, format="png", dpi=110)
        return out.getvalue()

    def _group(self, match: re.Match[str]) -> str:
        classes, words = self._marks[int(match[1])]
        return f'<g class="{classes}">' + (f"<title>{escape(words)}</title>" if words else "")


@contextmanager
def drawing(width: float, height: float, **options: Any) -> Iterator[Drawing]:
    """options: as Figure takes them. Draw and render inside the context."""
    import matplotlib  # half a second
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        yield Drawing(Figure(figsize=(width / 72, height / 72), **options))


def text_width(words: str, size: float) -> float:
    """In pixels."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=_STYLE["font.family"], size=size)
    return float(text_to_path.get_text_width_height_descent(words, font, False)[0])


def wrapped(words: str, room: float, size: float) -> str:
    """All of a name in lines that fit into `room` pixels, broken after a space or a sign if possible."""
    parts = re.findall(r"[^\s_/.,:+-]+[\s_/.,:+-]*|[\s_/.,:+-]+", words)
    lines = [""]
    for part in (each for word in parts for each in ([word] if text_width(word, size) <= room else word)):
        if lines[-1] and text_width((lines[-1] + part).rstrip(), size) > room:
            lines.append("")
        lines[-1] += part
    return "\n".join(map(str.rstrip, lines))


def short(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


# -- the report ------------------------------------------------------------------------------------------------------


# A point of `intervals`: (number of its colour, name, estimate as in results.json or None, text if it is on a part of
# the questions). Without an estimate, it says that the model was not run.
Point = tuple[int, str, dict[str, Any] | None, str | None]


def top_of(values: Sequence[float]) -> float:
    """The end of an axis of shares: the smallest of 5, 10, 20, 50 and 100 % that holds them all."""
    return next(top for top in (0.05, 0.1, 0.2, 0.5, 1.0) if top == 1.0 or max(values, default=0) <= top)


def intervals(rows: Sequence[tuple[str, Sequence[Point]]], label: str) -> str:
    """Points with their intervals, one a line, under the name of their row; hollow for a part of the questions."""
    line, gap, size = 19, 13, 11
    names = [wrapped(name, 240, size) for name, _ in rows]
    text_heights = [size * LINE * (name.count("\n") + 1) for name in names]
    heights = [max(line * len(points), text) for text, (_, points) in zip(text_heights, rows, strict=True)]
    height = sum(heights) + gap * len(rows)
    estimates = [(estimate, part) for _, points in rows for _, _, estimate, part in points if estimate]
    top = top_of([estimate["high"] for estimate, _ in estimates])
    right = max(text_width(_numbers(*each), size) for each in estimates) + 36
    with drawing(WIDTH, height + 52) as chart:
        axes = chart.axes(262, right, 8, 44, xlim=(0, 100 * top), ylim=(height, 0), xlabel=label)
        axes.set_xticks([20 * top * step for step in range(6)])
        axes.grid(visible=False, axis="y")
        places, y = [], gap / 2
        for (_, points), own in zip(rows, heights, strict=True):
            places.append(y + own / 2)
            for i, point in enumerate(points):
                _interval(chart, axes, point, places[-1] + line * (i + 0.5 - len(points) / 2), top)
            y += own + gap
            axes.axhline(y - gap / 2, color=PALETTE["line"], linestyle=":", linewidth=1)
        axes.set_yticks(places, names, color=PALETTE["ink"], fontsize=size)
        return chart.svg(label, "intervals")


def _numbers(estimate: dict[str, Any], part: str | None) -> str:
    return interval(estimate) + (f", {part}" if part else "")


def _interval(chart: Drawing, axes: Axes, point: Point, y: float, top: float) -> None:
    series, name, estimate, part = point
    if estimate is None:
        chart.mark(axes.text(top, y, "not run", va="center", color=PALETTE[f"m{series}"]), "absent", f"{name}: not run")
        return
    numbers, colour = interval(estimate), PALETTE[f"m{series}"]
    value, low, high = (100 * estimate[bound] for bound in ("value", "low", "high"))
    (whisker,) = axes.plot((low, high), (y, y), color=colour, linewidth=2.4, alpha=0.55)
    face = PALETTE["paper"] if part else colour
    (dot,) = axes.plot((value,), (y,), "o", color=colour, markerfacecolor=face, markersize=8, clip_on=False)
    chart.mark(whisker, f"whisker m{series}", f"{name}: {numbers}")
    chart.mark(dot, f"dot m{series}{' part' if part else ''}", f"{name}: {numbers}")
    axes.text(102 * top, y, _numbers(estimate, part), va="center", fontsize=11)


def pass_curves(name: str, models: Sequence[tuple[int, dict[str, Any], dict[str, Any]]], top: float) -> str:
    """One benchmark: pass@k against k on a logarithmic axis, with intervals; maj@k dashed.

    models: (colour, k -> estimate of pass@k, k -> estimate of maj@k); top: end of the axis, a share
    """
    ticks: list[int] = []
    every = sorted({int(k) for _, by_k, _ in models for k in by_k})
    for k in every:  # names of k at least a tenth of the axis apart
        if not ticks or math.log(k / ticks[-1]) >= 0.1 * math.log(every[-1]):
            ticks.append(k)
    with drawing(*PANEL) as chart:
        options = {"ylim": (0, 100 * top), "xscale": "log", "xlabel": "k (samples)"}
        axes = chart.axes(42, 18, 10, 40, **options)
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.minorticks_off()
        axes.grid(visible=False, axis="x")
        axes.set_yticks([20 * top * step for step in range(6)])
        for series, by_k, majority in models:
            ks, colour = sorted(map(int, by_k)), PALETTE[f"m{series}"]
            value, low, high = ([100 * by_k[str(k)][bound] for k in ks] for bound in ("value", "low", "high"))
            chart.mark(axes.fill_between(ks, low, high, color=colour, alpha=0.14, linewidth=0), f"band m{series}")
            chart.mark(axes.plot(ks, value, color=colour, linewidth=1.8)[0], f"curve m{series}")
            if voted := sorted(map(int, majority)):
                shares = [100 * majority[str(k)]["value"] for k in voted]
                chart.mark(axes.plot(voted, shares, "--", color=colour, linewidth=1.4)[0], f"maj m{series}")
            for k, *numbers in zip(ks, value, low, high, strict=True):
                words = "pass@{}: {:.1f} [{:.1f}, {:.1f}]".format(k, *numbers)
                chart.mark(axes.plot(k, numbers[0], "o", color=colour, markersize=4)[0], f"knot m{series}", words)
        return chart.svg(f"{name}: pass@k against k", "curves")


def lengths(name: str, lines: Sequence[Line], longest: int, limit: int) -> str:
    """One model on one benchmark: samples by response length in tokens, the correct ones up, all others down.

    longest: the axis goes at least that far; limit: of response tokens, marked if it is on the axis
    """
    step = nice(longest / BINS)
    bars = Counter((line.verdict == "correct", min(int(line.tokens / step), BINS - 1)) for line in lines)
    most = max(bars.values(), default=1)
    with drawing(*PANEL) as chart:
        limits = {"xlim": (0, BINS * step), "ylim": (-most, most)}
        axes = chart.axes(42, 18, 10, 40, xlabel="response tokens", **limits)
        axes.set_yticks((-most, 0, most), (f"{most:,}", "0", f"{most:,}"))
        axes.set_xticks([i * step for i in range(0, BINS + 1, 6)], [f"{i * step:,.0f}" for i in range(0, BINS + 1, 6)])
        axes.grid(visible=False, axis="x")
        for (correct, i), count in sorted(bars.items(), key=lambda bar: (not bar[0][0], bar[0][1])):
            up, colour, kind, what = (1, "correct", "correct", "") if correct else (-1, "wrong", "other", "not ")
            words = f"{i * step:,.0f} to {(i + 1) * step:,.0f} tokens: {count:,} {what}correct"
            (bar,) = axes.bar((i + 0.5) * step, up * count, 0.9 * step, color=PALETTE[colour])
            chart.mark(bar, f"bar {kind}", words)
        if limit <= step * BINS:
            chart.mark(axes.axvline(limit, color=PALETTE["quiet"], linestyle="--"), "limit", f"limit: {limit:,} tokens")
        return chart.svg(f"{name}: response lengths", "lengths")


def nice(least: float) -> float:
    """A round number that is not below `least`, and not much above; at least 1."""
    least = max(least, 1)
    power = 10 ** math.floor(math.log10(least))
    return next(float(power * f) for f in (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if power * f >= least)
