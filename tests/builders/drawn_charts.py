"""Open a page in a browser, and read its charts back: which marks there are, and where they lie."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def opened(page: Path, tmp_path: Path, state: str = "") -> tuple[str, list[str]]:
    """The page's DOM after its script has run, and what it wrote to the console."""
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on the path")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    where = [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"{page.as_uri()}#{state}"]
    done = subprocess.run([CHROMIUM, *flags, *where], capture_output=True, timeout=300, check=True)
    console = [line for line in done.stderr.decode(errors="replace").split("\n") if "CONSOLE" in line]
    return done.stdout.decode("utf-8"), console


def charts(dom: str, kind: str) -> list[Element]:
    found = re.findall(rf'<img class="chart {kind}"[^>]* src="data:image/svg\+xml;base64,([^"]*)"', dom)
    return [ElementTree.fromstring(re.sub(r' xmlns="[^"]*"|xlink:(?=href)', "", decoded(source))) for source in found]


def decoded(source: str) -> str:
    return base64.b64decode(source).decode("utf-8")


def of_class(chart: Element, *wanted: str) -> list[Element]:
    """Groups by the parts of their names: 'curve', 'm0'."""
    return [node for node in chart.iter() if set(wanted) <= set(node.get("id", "").split("-"))]


def numbers(chart: Element) -> list[str]:
    """All that says where something lies."""
    return [node.get(name, "") for node in chart.iter() for name in ("d", "x", "y", "transform")]


def points(mark: Element) -> list[tuple[float, float]]:
    """(x, y) of a line's points, or of its dots where it has some, in the chart's units."""
    dots = [(float(use.get("x")), float(use.get("y"))) for use in mark.iter("use")]
    if dots:
        return dots
    outline = next(path.get("d") for path in mark.iter("path"))
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", outline)]


def outline(mark: Element, chart: Element) -> list[tuple[float, float]]:
    """(x, y) of the whole outline of what is drawn: of a dot its rim, of a band its edges."""
    pairs = lambda path: [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.get("d"))]
    shapes = {f"#{path.get('id')}": path for path in chart.iter("path") if path.get("id")}
    corners = [pair for path in mark.iter("path") if not path.get("id") for pair in pairs(path)]
    for use in mark.iter("use"):
        right, down = float(use.get("x")), float(use.get("y"))
        corners += [(x + right, y + down) for x, y in pairs(shapes[use.get("href")])]
    return corners


def clipped(mark: Element) -> bool:
    """Whether all of a mark is clipped at the edges of its plot."""
    drawn = [node for node in mark if node.tag in ("path", "g")]
    return bool(drawn) and all(node.get("clip-path", "").startswith("url(#") for node in drawn)


def plot(chart: Element) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of a chart's first plot, at which what is drawn is clipped."""
    rect = next(chart.iter("clipPath")).find("rect")
    x, y, width, height = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def size(bar: Element) -> tuple[float, float]:
    """(width, height)"""
    across, down = zip(*points(bar), strict=True)
    return max(across) - min(across), max(down) - min(down)


def texts(chart: Element) -> list[str]:
    return [node.text or "" for node in chart.iter("text")]


def horizontal(chart: Element) -> tuple[tuple[float, float], tuple[float, float]]:
    """(value, x) of the first and the last tick of the axis along x."""
    ticks = []
    for tick in (node for node in chart.iter() if node.get("id", "").startswith("xtick_")):
        label = next(tick.iter("text")).text.replace("\u2212", "-").replace(",", "")
        ticks.append(
            (float(label), points(next(node for node in tick if next(node.iter("path"), None) is not None))[0][0])
        )
    return ticks[0], ticks[-1]
