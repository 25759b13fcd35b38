"""Read the charts of a page back: which marks there are, and where they lie."""

from __future__ import annotations

import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

SVG = "{http://www.w3.org/2000/svg}"


def charts(dom: str, kind: str) -> list[Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(rf'<svg class="chart {kind}".*?</svg>', dom, re.DOTALL)]


def of_class(chart: Element, *wanted: str) -> list[Element]:
    return [node for node in chart.iter() if set(wanted) <= set(node.get("class", "").split())]


def points(mark: Element) -> list[tuple[float, float]]:
    """(x, y) of a line's points, or of its dots where it has some, in the chart's units."""
    dots = [(float(use.get("x")), float(use.get("y"))) for use in mark.iter("use")]
    if dots:
        return dots
    outline = next(path.get("d") for path in mark.iter("path"))
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", outline)]


def width(bar: Element) -> float:
    across = [x for x, _ in points(bar)]
    return max(across) - min(across)


def height(bar: Element) -> float:
    down = [y for _, y in points(bar)]
    return max(down) - min(down)


def texts(chart: Element) -> list[str]:
    return [node.text or "" for node in chart.iter("text")]


def horizontal(chart: Element) -> tuple[tuple[float, float], tuple[float, float]]:
    """(value, x) of the first and the last tick of the axis along x."""
    found = []
    for tick in of_class(chart, "xtick"):
        label = next(tick.iter("text")).text.replace("\u2212", "-").replace(",", "")
        found.append(
            (float(label), points(next(node for node in tick if next(node.iter("path"), None) is not None))[0][0])
        )
    return found[0], found[-1]
