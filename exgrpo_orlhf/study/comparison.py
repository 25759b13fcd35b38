"""Compare variants over seeds: what each reached, and its differences from a baseline."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..show.seeds import Array, Mean, holm, mean, sign_flip
from ..show.tables import count, first_few
from .curve import AXES, Curve, Params, TrackedRun, band, common_range

# What is measured of every run and compared, in the metric's unit: (key, heading).
MEASURES = (
    ("final", "final"),  # the last value at the last step
    ("equal_tokens", "at equal tokens"),  # at the fewest generated tokens that a compared run has, interpolated
    ("equal_steps", "at equal steps"),  # at the fewest steps that a compared run has, interpolated
    ("area_steps", "area, steps"),  # mean height of the curve over the steps that all runs cover
    ("area_tokens", "area, tokens"),
    ("area_seconds", "area, seconds"),
)
# What a run has cost at its last value.
COSTS = ("tokens", "seconds")
Ranges = Mapping[str, tuple[float, float]]  # axis -> what all runs cover of it, where there is such a range
LABEL = 60  # characters of a setting in the name of a variant
SEED = "train.seed"  # the param by which the runs of a variant differ


class ComparisonError(ValueError):
    """The request cannot be compared. The message names what there is."""


@dataclass(frozen=True)
class ComparedVariant:
    """Curves in the order of their seeds. values: measure or cost -> a value for each curve, NaN if there is none"""

    name: str
    curves: tuple[Curve, ...]
    values: Mapping[str, tuple[float, ...]]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(curve.run.seed for curve in self.curves)

    @property
    def collapsed(self) -> tuple[int, ...]:
        """The seeds whose curve collapsed."""
        return tuple(curve.run.seed for curve in self.curves if curve.collapsed)

    def mean(self, measure: str) -> Mean | None:
        """The mean over seeds; None if a run lacks the measure, because the mean would be over other runs."""
        values = self.values[measure]
        return None if any(map(math.isnan, values)) else mean(values)

    def scale(self, measure: str) -> float:
        """The largest size of a seed's value, 0 if no run has the measure."""
        return max((abs(value) for value in self.values[measure] if not math.isnan(value)), default=0.0)


@dataclass(frozen=True)
class VariantDifference:
    """variant − baseline over the common seeds.

    p_holm: of the paired t test, corrected for the variants compared by this measure; p_exact: sign flips, uncorrected
    """

    variant: str
    measure: str
    seeds: tuple[int, ...]
    mean: Mean
    p_holm: float | None
    p_exact: float | None


@dataclass(frozen=True)
class Comparison:
    """Variants compared by one metric. notes: remarks that a reader needs"""

    metric: str
    variants: tuple[ComparedVariant, ...]
    baseline: str | None
    differences: tuple[VariantDifference, ...]
    ranges: Ranges
    notes: tuple[str, ...]

    @cached_property
    def bands(self) -> Mapping[str, tuple[tuple[Array, Array, Array, Array] | None, ...]]:
        """axis -> the mean curve of each variant with its interval, as `band` gives them"""
        return {axis: tuple(band(variant.curves, axis) for variant in self.variants) for axis in AXES}


def compare(metric: str, curves: Sequence[Curve], baseline: str | None) -> Comparison:
    """Compare variants. The baseline comes first, the others follow by name.

    curves: at least one, at most one for each variant and seed. Raises ComparisonError for an unknown baseline.
    """
    by_variant: dict[str, list[Curve]] = defaultdict(list)
    for curve in sorted(curves, key=lambda curve: curve.run.seed):
        by_variant[curve.run.variant].append(curve)
    if baseline is not None and baseline not in by_variant:
        names = ", ".join(sorted(by_variant))
        raise ComparisonError(f"the baseline {baseline!r} is not among the variants that have {metric}: {names}")
    ranges = {axis: common for axis in AXES if (common := common_range(curves, axis))}
    variants = []
    for name in sorted(by_variant, key=lambda name: (name != baseline, name)):
        rows = [_values(curve, ranges) for curve in by_variant[name]]
        values = {key: tuple(row[key] for row in rows) for key in rows[0]}
        variants.append(ComparedVariant(name, tuple(by_variant[name]), values))
    differences = _differences(variants) if baseline is not None else ()
    notes = [*_notes(metric, variants, ranges), *(_paired_notes(variants) if baseline is not None else ())]
    return Comparison(metric, tuple(variants), baseline, differences, ranges, tuple(notes))


def _values(curve: Curve, ranges: Ranges) -> dict[str, float]:
    none = (math.nan, math.nan)
    return {
        "final": curve.final,
        **{f"equal_{axis}": curve.at(axis, ranges.get(axis, none)[1]) for axis in ("tokens", "steps")},
        **{f"area_{axis}": curve.area(axis, *ranges.get(axis, none)) for axis in AXES},
        **{cost: float(curve.along(cost)[-1]) for cost in COSTS},
    }


def _differences(variants: Sequence[ComparedVariant]) -> tuple[VariantDifference, ...]:
    """Differences of all variants from the first, the baseline, by measure and then by variant."""
    base, *others = variants
    differences: list[VariantDifference] = []
    for measure, _ in MEASURES:
        of_base = dict(zip(base.seeds, base.values[measure], strict=True))
        tests = []
        for variant in others:
            pairs = zip(variant.seeds, variant.values[measure], strict=True)
            by_seed = {seed: value - of_base[seed] for seed, value in pairs if seed in of_base}
            if by_seed and not any(map(math.isnan, by_seed.values())):
                tests.append((variant.name, tuple(by_seed), [*by_seed.values()]))
        means = [mean(values) for _, _, values in tests]
        corrected = holm([estimate.p for estimate in means])
        differences += [
            VariantDifference(name, measure, seeds, estimate, p_holm, sign_flip(values))
            for (name, seeds, values), estimate, p_holm in zip(tests, means, corrected, strict=True)
        ]
    return tuple(differences)


def _notes(metric: str, variants: Sequence[ComparedVariant], ranges: Ranges) -> Iterable[str]:
    curves = [curve for variant in variants for curve in variant.curves]
    engines: dict[str, Counter[str]] = defaultdict(Counter)
    for curve in curves:
        engines[curve.run.engine][curve.run.variant] += 1
    if len(engines) > 1:
        texts = {engine: [f"{name} ({count(n)})" for name, n in engines[engine].items()] for engine in sorted(engines)}
        by_engine = "; ".join(f"{engine}: {first_few(names)}" for engine, names in texts.items())
        yield f"runs of different engines are compared: {by_engine}"
    if single := [variant.name for variant in variants if len(variant.curves) == 1]:
        yield f"one seed only, so no interval: {', '.join(single)}"
    for variant in variants:
        if len(variant.curves) > 1 and len(set(variant.values["final"])) == 1:
            yield f"{variant.name}: all seeds end at the same value: no spread, so no interval"
    seeds = sorted({seed for variant in variants for seed in variant.seeds})
    for variant in variants:
        if missing := [seed for seed in seeds if seed not in variant.seeds]:
            yield f"{variant.name}: no run of {_seeds(missing)}"
    last = Counter(int(curve.steps[-1]) for curve in curves)
    if len(last) > 1:
        ends = ", ".join(f"step {step:,} ({count(last[step])})" for step in sorted(last))
        yield f"the last {metric} is not at the same step in all runs, but 'final' compares them: {ends}"
    for axis in ("tokens", "seconds"):
        if without := [str(curve.run) for curve in curves if not curve.has(axis)]:
            yield f"no record of {axis} at the steps of {metric}, so no comparison by {axis}: {first_few(without)}"
    if points := [str(curve.run) for curve in curves if len(curve.steps) == 1]:
        yield f"{metric} was measured once only, so there is no area and no collapse: {first_few(points)}"
    for axis in AXES:
        if axis not in ranges and all(curve.has(axis) for curve in curves):
            yield f"no range of {axis} is covered by all runs: nothing is compared along it"
    for variant in variants:
        if variant.collapsed:
            share, names = f"{len(variant.collapsed)} of {len(variant.curves)}", _seeds(variant.collapsed)
            yield f"{variant.name}: {share} seeds collapsed (end below the start or half of their own best): {names}"


def _paired_notes(variants: Sequence[ComparedVariant]) -> Iterable[str]:
    base, *others = variants
    for variant in others:
        common = [seed for seed in variant.seeds if seed in base.seeds]
        if not common:
            yield f"{variant.name}: no seed in common with {base.name}, so no difference"
        elif len(common) == 1:
            yield f"{variant.name}: one seed in common with {base.name}: a difference without interval or p-value"
        elif len(common) < max(len(variant.seeds), len(base.seeds)):
            yield f"{variant.name}: differences are over {_seeds(common)}, which {base.name} has too"


def _value(params: Params, name: str, defaults: Mapping[str, str]) -> str:
    """Of a setting. A run without it, such as one from before the setting, counts as one with its default."""
    return params.get(name, defaults.get(name.rpartition("/")[2], "not bound"))


def differing_settings(
    variants: Sequence[ComparedVariant], defaults: Mapping[str, str] = {}
) -> tuple[dict[str, list[str]], list[str]]:
    """(param -> its value in each variant, if variants differ; notes on variants whose own runs differ).

    Several values of one variant are joined by ' | '. A missing param is ''. defaults: as `named_by_settings` has them
    """
    names = sorted({name for v in variants for c in v.curves for name in c.run.params} - {SEED})
    differing: dict[str, list[str]] = {}
    mixed: dict[str, list[str]] = defaultdict(list)
    for name in names:
        params = [[curve.run.params for curve in variant.curves] for variant in variants]
        values = [{_value(of_run, name, defaults) for of_run in of_variant} for of_variant in params]
        if any(of_variant != values[0] for of_variant in values):
            differing[name] = [" | ".join(sorted({of_run.get(name, "") for of_run in each})) for each in params]
        for variant, of_variant in zip(variants, values, strict=True):
            if len(of_variant) > 1:
                mixed[variant.name].append(name)
    return differing, [
        f"{variant}: its runs differ in more than the seed: {first_few(params)}" for variant, params in mixed.items()
    ]


def named_by_settings(
    runs: Sequence[TrackedRun], variant_of: Callable[[Params], Params], defaults: Mapping[str, str] = {}
) -> list[TrackedRun]:
    """Where runs of one variant have different configurations, its name gets the settings that differ.

    variant_of: of a run's params those that tell variants apart, the seed left aside
    defaults: of all settings, as text (config.all_settings); by default a setting that a run lacks is 'not bound'
    """
    by_variant: dict[str, list[tuple[TrackedRun, Params]]] = defaultdict(list)
    for run in runs:
        by_variant[run.variant].append((run, variant_of(run.params)))
    renamed = []
    for pairs in by_variant.values():
        names = sorted({name for _, values in pairs for name in values} - {SEED})
        differing = [name for name in names if len({_value(values, name, defaults) for _, values in pairs}) > 1]
        for run, values in pairs:
            words = [f"{name} = {_value(values, name, defaults)}" for name in differing]
            label = first_few([word if len(word) <= LABEL else word[: LABEL - 1] + "…" for word in words], 4)
            if label != ", ".join(words):  # what is cut may be what differs
                label += f", {hashlib.blake2b(repr(words).encode(), digest_size=3).hexdigest()}"
            renamed.append(replace(run, variant=f"{run.variant} ({label})") if differing else run)
    return renamed


def newest(runs: Iterable[TrackedRun]) -> tuple[list[TrackedRun], list[str]]:
    """One run for each variant and seed: the newest finished one, else the newest; and notes on the others."""
    by_key: dict[tuple[str, int], list[TrackedRun]] = defaultdict(list)
    for run in runs:
        by_key[run.variant, run.seed].append(run)
    chosen, notes = [], []
    for (variant, seed), same in by_key.items():
        *others, best = sorted(same, key=lambda run: (run.status == "FINISHED", run.started, run.id))
        chosen.append(best)
        if others:
            ids = ", ".join(run.id for run in same if run is not best)
            notes.append(f"{variant}, seed {seed}: {count(same)}; the newest is taken, {best.id}, and not {ids}")
    return chosen, notes


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
