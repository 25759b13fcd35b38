"""The report's charts, as SVG text. Colours are classes of report.css, which knows light and dark.

Lengths are in SVG units, one pixel at full size. Every axis of shares or counts begins at zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .results_folder import VERDICTS, Line
from .tables import percent

NAMES = {"correct": "correct", "wrong": "wrong", "no_answer": "no answer", "timeout": "timeout", "error": "error"}
WIDTH = 1120  # of a chart over the whole page
PANEL = (270, 200)  # width and height of a small one
BINS = 24
PATTERN = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line class="hatch" x1="0" y1="0" x2="0" y2="5"/></pattern></defs>'
)


@dataclass(frozen=True)
class Point:
    """A value with its interval, shares 0..1. series: its colour; part: on a part of the questions, drawn hollow."""

    series: int
    name: str
    value: float
    low: float
    high: float
    part: str | None


def svg(width: float, height: float, label: str, parts: Sequence[str], kind: str) -> str:
    return (
        f'<svg class="chart {kind}" role="img" aria-label="{escape(label)}" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}">{"".join(parts)}</svg>'
    )


def element(name: str, cls: str, inner: str = "", **numbers: float) -> str:
    """Attributes by name, hyphens for underscores, finite or refused."""
    for attribute, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"{attribute} of a {name} is {number}: nothing to draw")
    given = "".join(f' {attribute}="{round(number, 2):g}"' for attribute, number in numbers.items())
    return f'<{name} class="{cls}"{given}>{inner}</{name}>'


def text(x: float, y: float, words: str, cls: str = "", anchor: str = "start") -> str:
    return f'<text class="{cls}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def short(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


def tooltip(words: str) -> str:
    return f"<title>{escape(words)}</title>"


def top_of(values: Sequence[float]) -> float:
    """The end of an axis of shares: the least of 5, 10, 20, 50 and 100 % that holds them all."""
    return next(top for top in (0.05, 0.1, 0.2, 0.5, 1.0) if top == 1.0 or max(values, default=0) <= top)


def intervals(rows: Sequence[tuple[str, Sequence[Point | str]]], axis: str) -> str:
    """Points with their intervals, a line each, under the name of their row. A text in place of a point is a remark."""
    left, right, line, gap, head = 250, 900, 19, 13, 8
    height = head + sum(gap + line * len(points) for _, points in rows) + 44
    floor = height - 44
    top = top_of([point.high for _, points in rows for point in points if isinstance(point, Point)])
    parts = []
    for step in range(6):
        x = left + (right - left) * step / 5
        parts.append(element("line", "grid", x1=x, x2=x, y1=head, y2=floor))
        parts.append(text(x, floor + 16, f"{100 * top * step / 5:g}", "tick", "middle"))
    parts.append(text((left + right) / 2, floor + 35, axis, "axis", "middle"))
    y: float = head + gap / 2
    for name, points in rows:
        parts.append(text(0, y + line * len(points) / 2 + 4, short(name, 34), "label"))
        for point in points:
            middle = y + line / 2
            if isinstance(point, str):
                parts.append(text(left + 8, middle + 4, point, "tick"))
            else:
                parts.append(_point(point, middle, left, (right - left) / top, right + 16))
            y += line
        y += gap
        parts.append(element("line", "rule", x1=left, x2=right, y1=y - gap / 2, y2=y - gap / 2))
    return svg(WIDTH, height, axis, parts, "intervals")


def _point(point: Point, y: float, left: float, scale: float, words: float) -> str:
    low, high, x = (left + scale * share for share in (point.low, point.high, point.value))
    numbers = f"{percent(point.value)} [{percent(point.low)}, {percent(point.high)}]"
    shape = "dot part" if point.part else "dot"
    return (
        f'<g class="point m{point.series}">{tooltip(f"{point.name}: {numbers}")}'
        + element("line", "whisker", x1=low, x2=high, y1=y, y2=y)
        + element("circle", shape, cx=x, cy=y, r=4.5)
        + text(words, y + 4, numbers + (f", {point.part}" if point.part else ""), "value")
        + "</g>"
    )


def curves(name: str, models: Sequence[tuple[int, dict[str, Any], dict[str, Any]]], top: float) -> str:
    """One benchmark: pass@k against k on a logarithmic axis, with intervals; maj@k dashed.

    models: (colour, k -> estimate of pass@k, k -> estimate of maj@k); top: end of the axis, a share
    """
    (width, height), left, right, head, foot = PANEL, 42, 18, 26, 40
    most = max(int(k) for _, by_k, _ in models for k in by_k)

    def at(k: str, share: float) -> tuple[float, float]:
        x = left + (width - left - right) * math.log(int(k)) / math.log(most)
        return x, height - foot - (height - head - foot) * share / top

    parts = [
        text(0, 15, short(name, 40), "title"),
        text((left + width) / 2, height - 6, "k (samples)", "axis", "middle"),
    ]
    for step in range(6):
        y = at("1", top * step / 5)[1]
        parts.append(element("line", "grid", x1=left, x2=width - right, y1=y, y2=y))
        parts.append(text(left - 6, y + 4, f"{100 * top * step / 5:g}", "tick", "end"))
    last = -math.inf
    for k in sorted({k for _, by_k, _ in models for k in by_k}, key=int):
        x = at(k, 0)[0]
        if x - last >= 20:
            parts.append(text(x, height - foot + 16, k, "tick", "middle"))
            last = x
    for colour, by_k, majority in models:
        ks = sorted(by_k, key=int)
        band = [at(k, by_k[k]["low"]) for k in ks] + [at(k, by_k[k]["high"]) for k in reversed(ks)]
        parts.append(f'<polygon class="band m{colour}" points="{_points(band)}"/>')
        for cls, estimates in (("curve", by_k), ("curve maj", majority)):
            points = [at(k, estimates[k]["value"]) for k in sorted(estimates, key=int)]
            if points:
                parts.append(f'<polyline class="{cls} m{colour}" points="{_points(points)}"/>')
        for k in ks:
            estimate = by_k[k]
            words = f"pass@{k}: {percent(estimate['value'])} [{percent(estimate['low'])}, {percent(estimate['high'])}]"
            x, y = at(k, estimate["value"])
            parts.append(element("circle", f"knot m{colour}", tooltip(words), cx=x, cy=y, r=2.5))
    return svg(width, height, f"{name}: pass@k against k", parts, "curves")


def _points(points: Sequence[tuple[float, float]]) -> str:
    if not all(map(math.isfinite, (number for point in points for number in point))):
        raise ValueError(f"a curve through {points}: nothing to draw")
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def lengths(name: str, lines: Sequence[Line], longest: int, limit: int) -> str:
    """One model on one benchmark: samples by response length in tokens, the correct ones up, all others down.

    longest: where the axis ends, at least; limit: the most tokens a response could have, marked where the axis has it
    """
    (width, height), left, right, head, foot = PANEL, 42, 18, 26, 40
    step = nice(longest / BINS)
    counts = {True: [0] * BINS, False: [0] * BINS}
    for line in lines:
        counts[line.verdict == "correct"][min(int(line.tokens / step), BINS - 1)] += 1
    most = max(1, *counts[True], *counts[False])
    base = head + (height - head - foot) / 2
    scale = (height - head - foot) / 2 / most
    across = (width - left - right) / BINS
    parts = [
        text(0, 15, short(name, 40), "title"),
        text((left + width) / 2, height - 6, "response tokens", "axis", "middle"),
    ]
    for y, words in ((base - scale * most, f"{most:,}"), (base, "0"), (base + scale * most, f"{most:,}")):
        parts.append(element("line", "grid", x1=left, x2=width - right, y1=y, y2=y))
        parts.append(text(left - 6, y + 4, words, "tick", "end"))
    for tick in range(0, BINS + 1, 6):
        parts.append(text(left + tick * across, height - foot + 16, f"{tick * step:,.0f}", "tick", "middle"))
    for correct, cls in ((True, "bar correct"), (False, "bar other")):
        for i, count in enumerate(counts[correct]):
            if count:
                words = f"{i * step:,.0f} to {(i + 1) * step:,.0f} tokens: {count:,} {'' if correct else 'not '}correct"
                y = base - scale * count if correct else base
                x = left + i * across + 0.5
                bar = element("rect", cls, tooltip(words), x=x, y=y, width=across - 1, height=scale * count)
                parts.append(bar)
    if limit <= step * BINS:
        x = left + limit / step * across
        parts.append(
            element("line", "limit", tooltip(f"limit: {limit:,} tokens"), x1=x, x2=x, y1=head, y2=height - foot)
        )
    return svg(width, height, f"{name}: response lengths", parts, "lengths")


def nice(least: float) -> float:
    """A round number that is not below, and hardly above; at least 1."""
    power = 10 ** math.floor(math.log10(max(least, 1)))
    return next(power * f for f in (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if power * f >= max(least, 1))


def verdicts(rows: Sequence[tuple[str, Sequence[tuple[str, Sequence[Line]]]]]) -> str:
    """Shares of the verdicts, a bar for each model under the name of the benchmark; the truncated part is hatched."""
    left, right, line, gap, head = 300, WIDTH - 20, 21, 10, 4
    height = head + sum(gap + line * len(models) for _, models in rows) + 40
    parts, y = [PATTERN], float(head)
    for benchmark, models in rows:
        parts.append(text(0, y + line / 2 + 4, short(benchmark, 26 if models[0][0] else 44), "label"))
        for model, lines in models:
            parts.append(text(left - 10, y + line / 2 + 4, short(model, 20), "tick", "end"))
            parts += _stack(lines, left, right - left, y + 2, line - 4)
            y += line
        y += gap
    for step in range(6):
        x = left + (right - left) * step / 5
        parts.append(text(x, height - 24, f"{20 * step}", "tick", "middle"))
    parts.append(text((left + right) / 2, height - 6, "share of samples, %", "axis", "middle"))
    return svg(WIDTH, height, "share of verdicts", parts, "verdicts")


def _stack(lines: Sequence[Line], x: float, width: float, y: float, height: float) -> list[str]:
    parts = []
    for verdict in VERDICTS:
        those = [line.truncated for line in lines if line.verdict == verdict]
        if not those:
            continue
        share = len(those) / len(lines)
        words = f"{NAMES[verdict]}: {len(those):,} of {len(lines):,} ({percent(share)} %), {sum(those):,} truncated"
        wide, cut = width * share, width * sum(those) / len(lines)
        parts.append(element("rect", f"segment {verdict}", tooltip(words), x=x, y=y, width=wide, height=height))
        if cut:
            parts.append(element("rect", "truncated", x=x + wide - cut, y=y, width=cut, height=height))
        if wide >= 36:
            parts.append(text(x + wide / 2, y + height / 2 + 4, percent(share), f"inside {verdict}", "middle"))
        x += wide
    return parts
