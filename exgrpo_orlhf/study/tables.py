"""A comparison as tables and remarks, in the terminal, in markdown and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..evaluation.tables import NONE, aligned, markdown_table
from .comparison import COSTS, MEASURES, ComparedVariant, Comparison
from .curve import Curve
from .seeds import EXACT_UP_TO, Mean

UNITS = {"tokens": ("million tokens", 1e6), "seconds": ("minutes", 60.0), "steps": ("steps", 1.0)}
VALUES = (
    *("kind", "metric", "measure", "variant", "seed", "seeds", "value", "low", "high"),
    *("p", "p_holm", "p_exact", "collapsed", "engine", "run", "name"),
)
CURVES = ("metric", "variant", "seed", "step", "tokens", "seconds", "value", "run")


@dataclass(frozen=True)
class Table:
    """A table of plain text. The first `left` columns are flush left."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int


def number(value: float, like: float | None = None, sign: str = "") -> str:
    """A number with 3 decimals below 10, 1 below 1000, else none. like: the number whose magnitude decides"""
    size = abs(value if like is None else like)
    return f"{value:{sign},.{3 if size < 10 else 1 if size < 1000 else 0}f}"


def plus_minus(found: Mean | None, unit: float = 1.0) -> str:
    if found is None:
        return NONE
    value = found.value / unit
    if found.low is None:
        return number(value)
    return f"{number(value)} ± {number((found.value - found.low) / unit, value)}"


def p_value(p: float | None) -> str:
    return NONE if p is None else "<0.0001" if p < 1e-4 else f"{p:.4f}"


def tables(comparison: Comparison) -> list[Table]:
    """A table of what each variant reached and, with a baseline, one of the differences by measure."""
    rows = []
    for variant in comparison.variants:
        name = variant.name + (" (baseline)" if variant.name == comparison.baseline else "")
        collapsed = ", ".join(map(str, variant.collapsed)) or NONE
        measured = [plus_minus(variant.mean(key)) for key, _ in MEASURES]
        costs = [plus_minus(variant.mean(key), UNITS[key][1]) for key in COSTS]
        rows.append((name, str(len(variant.curves)), collapsed, *measured, *costs))
    measures, costs = [heading for _, heading in MEASURES], [UNITS[key][0] for key in COSTS]
    head = ("variant", "seeds", "collapsed", *measures, *costs)
    found = [Table(f"{comparison.metric}: mean ± 95 % interval over seeds", head, tuple(rows), 1)]
    if comparison.differences:
        names = ("measure", "variant", "seeds", "difference", "95 % interval", "p", "p (Holm)", "p (sign flips)")
        title = f"{comparison.metric}: differences from {comparison.baseline}, seed by seed"
        found.append(Table(title, names, tuple(_differences(comparison)), 2))
    return found


def _differences(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Rows by measure, which is named in its first row."""
    for key, heading in MEASURES:
        for i, each in enumerate(each for each in comparison.differences if each.measure == key):
            first, ps = ("" if i else heading), (each.p, each.p_holm, each.p_exact)
            difference = number(each.mean.value, sign="+")
            yield (first, each.variant, str(len(each.seeds)), difference, interval(each.mean), *map(p_value, ps))


def interval(found: Mean) -> str:
    if found.low is None or found.high is None:
        return NONE
    return f"[{number(found.low, found.value, '+')}, {number(found.high, found.value, '+')}]"


def remarks(comparison: Comparison) -> list[str]:
    """Explanations of the columns, with the numbers of this comparison."""
    said = ["collapsed: seeds that end below their start or below half of their own best"]
    if tokens := comparison.ranges["tokens"]:
        said.append(f"at equal tokens: at {tokens[1] / 1e6:,.3f} million generated tokens, interpolated linearly")
    covered = [
        f"{low / UNITS[axis][1]:,.4g} to {high / UNITS[axis][1]:,.4g} {UNITS[axis][0]}"
        for axis, (low, high) in ((axis, common) for axis, common in comparison.ranges.items() if common)
    ]
    if covered:
        said.append(f"areas are mean heights of the curve over what all runs cover: {', '.join(covered)}")
    said.append(
        "time is that of training steps, without evaluation; it compares only runs of the same machine and load"
    )
    if comparison.differences:
        said.append("p: paired t test over seeds, two-sided; Holm: corrected for the number of variants compared")
        for count in sorted({len(each.seeds) for each in comparison.differences}):
            if 1 < count <= EXACT_UP_TO:
                least = f"2/{2**count} = {2 / 2**count:.3g}"
                said.append(f"p (sign flips): exact, uncorrected; with {count} seeds it is never below {least}")
        if any(each.mean.low is None and each.mean.count > 1 for each in comparison.differences):
            said.append("no interval and no p where all seeds differ by the same amount: there is no spread")
    return said


def terminal(comparisons: Sequence[Comparison], notes: Sequence[str]) -> str:
    text: list[str] = []
    for comparison in comparisons:
        for table in tables(comparison):
            text += [table.title, "", *aligned([table.head, *table.rows], left=table.left), ""]
        text += [*(f"  {remark}" for remark in remarks(comparison)), ""]
        text += [f"note: {note}" for note in comparison.notes] + ([""] if comparison.notes else [])
    return "\n".join([*text, *(f"note: {note}" for note in notes)]).rstrip()


def markdown(title: str, comparisons: Sequence[Comparison], notes: Sequence[str]) -> str:
    text = [f"# {title}", ""]
    for comparison in comparisons:
        for table in tables(comparison):
            text += [f"## {table.title}", "", *markdown_table(table.head, table.rows, table.left), ""]
        text += [*(f"- {remark}" for remark in (*remarks(comparison), *comparison.notes)), ""]
    return "\n".join([*text, *(f"- {note}" for note in notes)]).rstrip() + "\n"


def values_csv(comparisons: Sequence[Comparison]) -> str:
    """A row for each measure and cost of each run (kind `run`) and of each variant (`variant`), and for each measure of
    each difference from the baseline (`difference`). Numbers are not rounded; a missing number is empty."""
    rows: list[dict[str, object]] = []
    for comparison in comparisons:
        for variant in comparison.variants:
            for key in variant.values:
                about = {"metric": comparison.metric, "measure": key, "variant": variant.name}
                rows += [{**about, **row} for row in _of_runs(variant, key)]
                if found := variant.mean(key):
                    seeds = {"kind": "variant", "seeds": found.count, "collapsed": len(variant.collapsed)}
                    rows.append({**about, **seeds, "value": found.value, "low": found.low, "high": found.high})
        for each in comparison.differences:
            tests = {"p": each.p, "p_holm": each.p_holm, "p_exact": each.p_exact}
            about = {"metric": comparison.metric, "measure": each.measure, "variant": each.variant}
            numbers = {"value": each.mean.value, "low": each.mean.low, "high": each.mean.high}
            rows.append({"kind": "difference", **about, "seeds": each.mean.count, **numbers, **tests})
    return _csv(VALUES, rows)


def _of_runs(variant: ComparedVariant, key: str) -> list[dict[str, object]]:
    return [
        {
            **{"kind": "run", "seed": curve.run.seed, "value": None if math.isnan(value) else value},
            **{"collapsed": int(curve.collapsed), "engine": curve.run.engine},
            **{"run": curve.run.id, "name": curve.run.name},
        }
        for curve, value in zip(variant.curves, variant.values[key], strict=True)
    ]


def curves_csv(comparisons: Sequence[Comparison]) -> str:
    return _csv(CURVES, [row for c in comparisons for v in c.variants for each in v.curves for row in _points(c, each)])


def _points(comparison: Comparison, curve: Curve) -> list[Mapping[str, object]]:
    about = {"metric": comparison.metric, "variant": curve.run.variant, "seed": curve.run.seed, "run": curve.run.id}
    return [
        {
            **{**about, "step": int(step), "value": float(curve.values[i])},
            **{"tokens": None if curve.tokens is None else float(curve.tokens[i])},
            **{"seconds": None if curve.seconds is None else float(curve.seconds[i])},
        }
        for i, step in enumerate(curve.steps)
    ]


def _csv(head: Sequence[str], rows: Sequence[Mapping[str, object]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, head, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)  # None becomes an empty cell
    return out.getvalue()
