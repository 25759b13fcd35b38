"""Charts by matplotlib, all in one look: SVG for pages, PNG for files.

Lengths are in pixels at full size. A drawn thing has a name in the SVG: its kind and its colour, such as 'curve-m0'.
"""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of charts, and those of pages in light.
PALETTE = {
    **{"paper": "#ffffff", "ink": "#1c1e21", "quiet": "#5a6068", "line": "#d9dce0", "faint": "#eceef0"},
    **{"m0": "#1f6fb4", "m1": "#c2560c", "m2": "#0d7f66", "m3": "#8d4fa8"},
    **{"m4": "#6d6f16", "m5": "#b1316b", "m6": "#0b7f95", "m7": "#5b6470"},
    **{"correct": "#1d8a78", "wrong": "#d0662b", "no_answer": "#9aa1aa", "timeout": "#8d5bb5", "error": "#3d434b"},
}
SERIES = 8  # colours m0 to m7
WIDTH = 1120  # of a chart over the whole page
BINS = 24
LINE = 1.2  # height of a line of text, in its size
NAME = 38  # characters of a name in a line
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
    **{"legend.framealpha": 0.8, "legend.edgecolor": "none", "legend.fontsize": 8.5},
}  # fmt: skip


class Chart(NamedTuple):
    """A picture in a page. label: what it shows, for those who do not see it; kind: its CSS class; source: its data"""

    label: str
    kind: str
    width: float
    height: float
    source: str


Band = tuple[npt.ArrayLike, npt.ArrayLike]  # low and high


@contextmanager
def drawing(width: float, height: float, **options: Any) -> Iterator[Figure]:
    """An empty figure. Draw and render inside the context. options: as Figure takes them; by default, names and labels
    of whatever length have their room."""
    import matplotlib  # half a second
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(width / 72, height / 72), **{"layout": "constrained", **options})


@contextmanager
def panel(width: float, height: float, **options: Any) -> Iterator[tuple[Figure, Axes]]:
    """A small chart with its axes, which lie at the same place in all charts of this size. options: as Axes.set takes
    them"""
    with drawing(width, height, layout=None) as figure:
        yield figure, place(figure, 48, 16, 10, 42, **options)


def place(figure: Figure, left: float, right: float, top: float, bottom: float, **options: Any) -> Axes:
    """Axes over the whole figure but for these margins."""
    width, height = figure.get_size_inches() * 72
    return figure.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height), **options
    )


def svg(figure: Figure, label: str, kind: str) -> Chart:
    out = io.BytesIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    width, height = figure.get_size_inches() * 72
    source = f"data:image/svg+xml;base64,{base64.b64encode(out.getvalue()).decode('ascii')}"
    return Chart(label, kind, width, height, source)


def png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def curve(
    axes: Axes,
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    colour: str,
    band: Band | None = None,
    kind: str = "curve",
    **look: Any,
) -> None:
    """A line, and the band between two others. colour: of PALETTE; look: as Axes.plot takes it"""
    if band is not None:
        axes.fill_between(x, *band, color=PALETTE[colour], alpha=0.15, linewidth=0, gid=f"band-{colour}")
    axes.plot(x, y, color=PALETTE[colour], gid=f"{kind}-{colour}", **{"linewidth": 1.7, **look})


def interval(
    axes: Axes, y: float, value: float, bounds: tuple[float, float] | None, colour: str, *, hollow: bool = False
) -> None:
    """A dot with the interval around it, at the height y."""
    if bounds:
        axes.plot(bounds, (y, y), color=PALETTE[colour], linewidth=2.4, alpha=0.55, gid=f"whisker-{colour}")
    dot(axes, y, value, colour, hollow=hollow)


def dot(axes: Axes, y: float, value: float, colour: str, *, hollow: bool = False) -> None:
    face, kind = (PALETTE["paper"], "hollow") if hollow else (PALETTE[colour], "full")
    axes.plot(value, y, "o", color=PALETTE[colour], markerfacecolor=face, alpha=0.85, gid=f"dot-{colour}-{kind}")


def wrapped(name: str, most: int = NAME) -> str:
    """All of a name, in lines of at most that many characters."""
    return "\n".join(textwrap.wrap(name, most))
