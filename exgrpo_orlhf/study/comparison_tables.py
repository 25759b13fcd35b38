"""A comparison as tables and remarks, in the terminal, in markdown, as CSV, and with charts as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from ..show.page import page as filled
from ..show.seeds import EXACT_UP_TO, Mean
from ..show.tables import NONE, Table, aligned, csv_text, difference, markdown_table, p_value, plus_minus, scaled
from . import comparison_charts as charts
from .comparison import COSTS, MEASURES, Comparison, differing_settings
from .curve import UNITS, TrackedRun

VALUES = (
    *("kind", "metric", "measure", "variant", "seed", "seeds", "value", "low", "high"),
    *("p", "p_holm", "p_exact", "collapsed", "engine", "run", "name"),
)
CURVES = ("metric", "variant", "seed", "step", "tokens", "seconds", "value", "run")


def tables(comparison: Comparison) -> tuple[Table, Table | None]:
    """A table of what each variant reached, and one of the differences from the baseline if there are any."""
    rows = [
        (
            variant.name + (" (baseline)" if variant.name == comparison.baseline else ""),
            str(len(variant.curves)),
            ", ".join(map(str, variant.collapsed)) or NONE,
            *(plus_minus(variant.mean(key), scale=variant.scale(key)) for key, _ in MEASURES),
            *(plus_minus(variant.mean(key), UNITS[key][1], variant.scale(key)) for key in COSTS),
        )
        for variant in comparison.variants
    ]
    columns = [*(heading for _, heading in MEASURES), *(UNITS[key][0] for key in COSTS)]
    head = ("variant", "seeds", "collapsed", *columns)
    of_variants = Table(f"{comparison.metric}: mean ± 95 % interval over seeds", head, tuple(rows), 1)
    if not comparison.differences:
        return of_variants, None
    names = ("measure", "variant", "seeds", "difference", "95 % interval", "p", "p (Holm)", "p (sign flips)")
    title = f"{comparison.metric}: differences from {comparison.baseline}, seed by seed"
    rows, headings, by_name = [], dict(MEASURES), {variant.name: variant for variant in comparison.variants}
    for effect in comparison.differences:
        scale = max(of.scale(effect.measure) for of in (by_name[effect.variant], comparison.variants[0]))
        heading = headings.pop(effect.measure, "")  # a measure is named in its first row
        ps = map(p_value, (effect.mean.p, effect.p_holm, effect.p_exact))
        rows.append((heading, effect.variant, str(len(effect.seeds)), *difference(effect.mean, scale), *ps))
    return of_variants, Table(title, names, tuple(rows), 2)


def remarks(comparison: Comparison) -> list[str]:
    """Explanations of the columns, with the numbers of this comparison."""
    lines = ["collapsed: seeds that end below their start or below half of their own best"]
    if tokens := comparison.ranges.get("tokens"):
        lines.append(f"at equal tokens: at {tokens[1] / 1e6:,.3f} million generated tokens, interpolated linearly")
    if steps := comparison.ranges.get("steps"):
        lines.append(f"at equal steps: after {steps[1]:,.0f} steps, interpolated linearly")
    if comparison.ranges:
        ranges = ", ".join(
            f"{low / UNITS[axis][1]:,.4g} to {high / UNITS[axis][1]:,.4g} {UNITS[axis][0]}"
            for axis, (low, high) in comparison.ranges.items()
        )
        lines.append(f"areas are mean heights of the curve over what all runs cover: {ranges}")
    lines.append(
        "time is that of training steps, without evaluation; it compares only runs of the same machine and load"
    )
    if comparison.differences:
        lines.append("p: paired t test over seeds, two-sided; Holm: corrected for the number of variants compared")
        for seeds in sorted({len(effect.seeds) for effect in comparison.differences}):
            if 1 < seeds <= EXACT_UP_TO:
                least = f"2/{2**seeds} = {2 / 2**seeds:.3g}"
                lines.append(f"p (sign flips): exact, uncorrected; with {seeds} seeds it is never below {least}")
        if any(effect.mean.bounds is None and effect.mean.count > 1 for effect in comparison.differences):
            lines.append("no interval and no p where all seeds differ by the same amount: there is no spread")
    return lines


def terminal(comparisons: Sequence[Comparison], notes: Sequence[str]) -> str:
    text: list[str] = []
    for comparison in comparisons:
        for table in filter(None, tables(comparison)):
            text += [table.title, "", *aligned([table.head, *table.rows], left=table.left), ""]
        text += [*(f"  {remark}" for remark in remarks(comparison)), ""]
        text += [f"note: {note}" for note in comparison.notes] + ([""] if comparison.notes else [])
    return "\n".join([*text, *(f"note: {note}" for note in notes)]).rstrip()


def markdown(title: str, comparisons: Sequence[Comparison], notes: Sequence[str]) -> str:
    text = [f"# {title}", ""]
    for comparison in comparisons:
        for table in filter(None, tables(comparison)):
            text += [f"## {table.title}", "", *markdown_table(table.head, table.rows, table.left), ""]
        text += [*(f"- {remark}" for remark in (*remarks(comparison), *comparison.notes)), ""]
    # Names come from the tags of runs, and most viewers of markdown render HTML.
    return escape("\n".join([*text, *(f"- {note}" for note in notes)]).rstrip() + "\n", quote=False)


def values_csv(comparisons: Sequence[Comparison]) -> str:
    """A row for each measure and cost of each run (kind `run`) and of each variant (`variant`), and for each measure of
    each difference from the baseline (`difference`). Numbers are not rounded; a missing number is empty."""
    rows: list[dict[str, object]] = []
    for comparison in comparisons:
        for variant in comparison.variants:
            for key, values in variant.values.items():
                about = {"metric": comparison.metric, "measure": key, "variant": variant.name}
                for curve, value in zip(variant.curves, values, strict=True):
                    run = {name: getattr(curve.run, name) for name in ("seed", "engine", "name")}
                    cells = {"run": curve.run.id, "value": value, "collapsed": int(curve.collapsed)}
                    rows.append({"kind": "run", **about, **run, **cells})
                if mean := variant.mean(key):
                    rows.append({"kind": "variant", **about, **_mean(mean), "collapsed": len(variant.collapsed)})
        for effect in comparison.differences:
            about = {"metric": comparison.metric, "measure": effect.measure, "variant": effect.variant}
            tests = {"p": effect.mean.p, "p_holm": effect.p_holm, "p_exact": effect.p_exact}
            rows.append({"kind": "difference", **about, **_mean(effect.mean), **tests})
    return csv_text(VALUES, rows)


def _mean(mean: Mean) -> dict[str, float | None]:
    low, high = mean.bounds or (None, None)
    return {"seeds": mean.count, "value": mean.value, "low": low, "high": high}


def curves_csv(comparisons: Sequence[Comparison]) -> str:
    """A row for each point of each curve."""
    rows: list[dict[str, object]] = []
    for comparison in comparisons:
        for curve in (curve for variant in comparison.variants for curve in variant.curves):
            run = {"metric": comparison.metric, "variant": curve.run.variant, "seed": curve.run.seed}
            for step, *numbers in zip(curve.steps, curve.tokens, curve.seconds, curve.values, strict=True):
                point = dict(zip(("tokens", "seconds", "value"), map(float, numbers), strict=True))
                rows.append({**run, "run": curve.run.id, "step": int(step), **point})
    return csv_text(CURVES, rows)


def page(
    title: str, about: str, comparisons: Sequence[Comparison], notes: Sequence[str], defaults: Mapping[str, str] = {}
) -> str:
    """The whole page. about: a line on the source of the runs; notes: those that hold for all comparisons

    defaults: of settings, as `named_by_settings` has them
    """
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
        settings=differing_settings(variants, defaults)[0],
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
            final = f"{scaled(curve.final, curve.final)} at step {curve.steps[-1]:,.0f}"
            value = f"{final}{', collapsed' if curve.collapsed else ''}"
            last.setdefault(curve.run.id, {})[comparison.metric] = value
    return sorted(runs.values(), key=lambda run: (run.variant, run.seed)), last
