"""Tables and numbers as text: for the terminal, in markdown, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .seeds import Mean

NONE = "–"


class Table(NamedTuple):
    """A table of plain text. The first `left` columns are flush left."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def number(value: float, like: float | None = None, sign: str = "") -> str:
    """A number with 3 decimals below 10, 1 below 1000, else none. like: the number whose magnitude decides"""
    size = abs(value if like is None else like)
    return f"{value:{sign}z,.{3 if size < 10 else 1 if size < 1000 else 0}f}"


def scaled(value: float, scale: float, like: float | None = None, sign: str = "") -> str:
    """As `number`, but with 3 significant digits where the scale is below 0.01 and not 0.

    scale: the largest size among the values that the number is computed from
    """
    return f"{value:{sign}z#.3g}" if 0 < abs(scale) < 0.01 else number(value, like, sign)


def plus_minus(mean: Mean | None, unit: float = 1.0, scale: float = 1.0) -> str:
    """scale: of the values, in their own unit, as `scaled` has it"""
    if mean is None:
        return NONE
    value, bounds = mean.value / unit, mean.bounds
    half = "" if bounds is None else f" ± {scaled((mean.value - bounds[0]) / unit, scale / unit, value)}"
    return scaled(value, scale / unit) + half


def difference(mean: Mean, scale: float = 1.0) -> tuple[str, str]:
    """(value, interval), with their signs. scale: of the values that differ, as `scaled` has it"""
    bounds = [scaled(bound, scale, mean.value, "+") for bound in mean.bounds or ()]
    return scaled(mean.value, scale, sign="+"), f"[{', '.join(bounds)}]" if bounds else NONE


def p_value(p: float | None) -> str:
    return NONE if p is None else "<0.0001" if p < 1e-4 else f"{p:.4f}"


def count(runs: int | Sequence[object]) -> str:
    """'1 run', '2 runs'"""
    total = runs if isinstance(runs, int) else len(runs)
    return f"{total:,} run{'' if total == 1 else 's'}"


def first_few(names: Sequence[str], most: int = 6) -> str:
    """The first names, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def aligned(lines: Sequence[Sequence[str]], left: int, rule: bool = True) -> list[str]:
    """Columns two spaces apart, the first `left` of them flush left; rule: a line below the first one."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    if rule:
        text.insert(1, "  ".join("-" * width for width in widths))
    return text


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a markdown table; the first `left` columns are flush left."""
    rule = [*["---"] * left, *["---:"] * (len(head) - left)]
    clean = [[cell.replace("|", "\\|").replace("\n", " ") for cell in cells] for cells in (head, *rows)]
    return [f"| {' | '.join(cells)} |" for cells in (clean[0], rule, *clean[1:])]


def csv_text(head: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """A CSV file with these columns; a cell that is missing, None or NaN is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, head, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: cell for name, cell in row.items() if cell == cell} for row in rows)  # NaN is not itself
    return out.getvalue()
