"""Fill the places of a text with figures, which all come from the study's CSV files.

A place is {{name arguments…}}, such as {{mean study_weak ours final}} or {{rows study_slips}}; Document's methods of
the same names say what they take.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ablations
import combined
import numpy as np

from exgrpo_orlhf.show.seeds import Mean, holm, mean
from exgrpo_orlhf.show.tables import difference, markdown_table, number, p_value, plus_minus

APPENDIX = "appendix.md.in"
_PLACE = re.compile(r"\{\{(\w+)((?: [^{}]+)?)\}\}")
_SIGNIFICANT = 0.05


class DocumentError(ValueError):
    """No figure exists for a place; the message names the place."""


class Document:
    """Reads <part>.csv (written by scripts/compare.py) and the other files of a folder when a place needs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, list[dict[str, str]]] = {}
        self._places: dict[str, Callable[..., str]] = {
            **{"mean": self.mean, "difference": self.difference, "p": self.p, "gain_after": self.gain_after},
            **{"at": self.at, "gain_at": self.gain_at, "collapsed": self.collapsed, "cost": self.cost},
            **{"family": self.family, "families": self.families, "rows": self.rows, "column": self.column},
            **{"means": self.means, "surviving": self.surviving, "verdict": lambda file: ablations.verdict(self, file)},
            "pays": self.pays,
        }

    def fill(self, text: str) -> str:
        """Raises DocumentError for a place that cannot be filled, OSError for a file that cannot be read."""

        def figure(match: re.Match[str]) -> str:
            name, words = match[1], match[2].split()
            try:
                return self._places[name](*words)
            except (LookupError, TypeError, ValueError) as error:
                raise DocumentError(f"{match[0]}: no such figure in {self.folder} ({error})") from error

        return _PLACE.sub(figure, text)

    # -- places -------------------------------------------------------------------------------------------------------

    def mean(self, part: str, variant: str, measure: str, metric: str = "") -> str:
        """The mean over seeds ± its 95 % interval."""
        return plus_minus(mean(list(self.by_seed(part, variant, measure, metric).values())))

    def difference(self, part: str, variant: str, baseline: str, measure: str, metric: str = "") -> str:
        """The mean paired difference over seeds, with its 95 % interval."""
        return shown(mean(self.differences(part, variant, baseline, measure, metric)))

    def p(self, part: str, variant: str, measure: str, column: str = "p_holm") -> str:
        """A p-value of the difference from the part's baseline. column: p_holm, p (uncorrected) or p_exact"""
        return p_value(self.p_of(part, variant, measure, column))

    def at(self, part: str, variant: str, million: str) -> str:
        """The value after that many million generated tokens, interpolated: it compares parts of unequal length."""
        return plus_minus(mean(list(self._at(part, variant, "tokens", float(million) * 1e6).values())))

    def gain_at(self, part: str, variant: str, other_part: str, other: str, million: str) -> str:
        """The difference of two variants, which may be of different parts, at that point, over their common seeds."""
        return self._gain(part, variant, other_part, other, "tokens", float(million) * 1e6)

    def gain_after(self, part: str, variant: str, other_part: str, other: str, step: str) -> str:
        """The same after that many steps."""
        return self._gain(part, variant, other_part, other, "step", float(step))

    def collapsed(self, part: str, variant: str) -> str:
        """How many seeds collapsed, of how many."""
        rows = [row for row in self._rows(part, "run", "final") if row["variant"] == variant]
        return f"{sum(row['collapsed'] == '1' for row in rows)} of {len(rows)}"

    def family(self, part: str) -> str:
        """How many differences from the part's baseline are corrected together, for each measure."""
        return str(len(self._rows(part, "difference", "final")))

    def families(self) -> str:
        """The same over all parts of the folder."""
        return str(sum(int(self.family(part)) for part in self.parts()))

    def surviving(self, measure: str) -> str:
        """The differences from a baseline that hold after Holm's correction over those of all parts."""
        tests = [
            (f"`{part.removeprefix('study_')}/{row['variant']}`", float(row["p"]))
            for part in self.parts()
            for row in self._rows(part, "difference", measure)
            if row["p"]
        ]
        corrected = holm([p for _, p in tests])
        return ", ".join(name for (name, _), p in zip(tests, corrected, strict=True) if p < _SIGNIFICANT)

    def rows(self, part: str, baseline: str = "") -> str:
        """Lines of a table: each variant's final value and its differences from the baseline at equal tokens and by the
        area against steps. Bold: p (Holm) is below 5 %; a baseline that is not the part's own has no such p."""
        of_part = baseline or self._baseline(part)
        names = dict.fromkeys(row["variant"] for row in self._rows(part, "run", "final"))
        lines = []
        for variant in [of_part, *(name for name in names if name != of_part)]:
            final = number(mean(list(self.by_seed(part, variant, "final").values())).value)
            measures = () if variant == of_part else ("equal_tokens", "area_steps")
            effects = [self.difference(part, variant, of_part, each) for each in measures]
            ps = [None if baseline else self.p_of(part, variant, each) for each in measures]
            cells = [f"**{e}**" if p is not None and p < _SIGNIFICANT else e for e, p in zip(effects, ps, strict=True)]
            lines.append((f"{part.removeprefix('study_')}/{variant}", final, *cells))
        return _body(lines)

    def column(self, file: str, column: str, *conditions: str) -> str:
        """The mean of a column of <file>.csv over seeds, of the rows that meet the conditions (name=value)."""
        return _over_seeds(self._matching(file, conditions), column)

    def means(self, file: str, keys: str, columns: str, *conditions: str) -> str:
        """Lines of a table: a line for each value of the keys, with the means of the columns over seeds."""
        rows, names = self._matching(file, conditions), keys.split(",")
        groups = dict.fromkeys(tuple(row[name] for name in names) for row in rows)
        lines = []
        for group in groups:
            members = [row for row in rows if tuple(row[name] for name in names) == group]
            values = [_over_seeds(members, column).partition(" ")[0] for column in columns.split(",")]
            lines.append(("/".join((file.removeprefix("study_"), *group)), *values))
        return _body(lines)

    def cost(self) -> str:
        """The runs of all suites, and the hours of their training steps on one core."""
        suites = [part for part in self._all_parts() if part not in combined.PARTS]
        seconds = [float(row["value"]) for part in suites for row in self._rows(part, "run", "seconds")]
        return f"{len(seconds)} runs, {sum(seconds) / 3600:.1f} hours"

    def pays(self, bed: str, figure: str) -> str:
        """A figure of a bed of plan_pays.md, by its name in pays.FIGURES."""
        import pays

        if isinstance(result := pays.result_of(bed), str):
            raise LookupError(f"{bed}: {result}")
        return pays.FIGURES[figure](bed, result)

    # -- what the verdicts on ablations and the picture ask -----------------------------------------------------------

    def parts(self) -> list[str]:
        """The suites of the folder that have figures; instead of those that only complete other ones, the parts
        that compare them together."""
        return [part for part in self._all_parts() if part not in {*combined.COMPLETED, *combined.KEPT}]

    def has(self, part: str, variant: str, measure: str = "final") -> bool:
        return any(row["variant"] == variant for row in self._rows(part, "run", measure))

    def by_seed(self, part: str, variant: str, measure: str, metric: str = "") -> Mapping[str, float]:
        """The value of each seed. Raises KeyError where a variant has none."""
        rows = self._rows(part, "run", measure, metric)
        values = {row["seed"]: float(row["value"]) for row in rows if row["variant"] == variant}
        if not values:
            raise KeyError(f"{variant} has no {measure}")
        return values

    def differences(self, part: str, variant: str, baseline: str, measure: str, metric: str = "") -> list[float]:
        """variant − baseline for each seed that both have."""
        ours, theirs = (self.by_seed(part, name, measure, metric) for name in (variant, baseline))
        return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]

    def p_of(self, part: str, variant: str, measure: str, column: str = "p_holm") -> float | None:
        """A p-value of the difference from the part's baseline, where the file has one."""
        rows = self._rows(part, "difference", measure)
        return next((float(row[column]) for row in rows if row["variant"] == variant and row[column]), None)

    def section(self, part: str) -> str:
        """Link from docs/ to the section of the appendix that has the part's rows."""
        text = (self.folder / APPENDIX).read_text(encoding="utf-8")
        if not (place := re.search(rf"\{{\{{rows {part}[ }}]", text)):
            raise LookupError(f"{APPENDIX} has no rows of {part}")
        heading = re.findall(r"^#+ (.+)$", text[: place.start()], re.MULTILINE)[-1].lower()
        anchor = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")  # as GitHub makes it
        return f"{self.folder.name}/{APPENDIX.removesuffix('.in')}#{anchor}"

    # -- files --------------------------------------------------------------------------------------------------------

    def _all_parts(self) -> list[str]:
        suites = {path.stem for path in (self.folder / "suites").glob("*.gin")} | {*combined.PARTS, *combined.KEPT}
        return [name for name in sorted(suites) if (self.folder / f"{name}.csv").exists()]

    def _baseline(self, part: str) -> str:
        """The variant without a difference from the baseline: the baseline itself."""
        compared = {row["variant"] for row in self._rows(part, "difference", "final")}
        return next(row["variant"] for row in self._rows(part, "run", "final") if row["variant"] not in compared)

    def _gain(self, part: str, variant: str, other_part: str, other: str, axis: str, place: float) -> str:
        ours, theirs = self._at(part, variant, axis, place), self._at(other_part, other, axis, place)
        return shown(mean([ours[seed] - theirs[seed] for seed in ours if seed in theirs]))

    def _at(self, part: str, variant: str, axis: str, place: float) -> dict[str, float]:
        """By seed the value at a place of an axis of <part>_curves.csv, interpolated."""
        points: dict[str, list[tuple[float, float]]] = {}
        for row in self._read(f"{part}_curves"):
            if row["variant"] == variant:
                points.setdefault(row["seed"], []).append((float(row[axis]), float(row["value"])))
        by_seed = {}
        for seed, curve in points.items():
            places, values = np.array(sorted(curve)).T
            if not places[0] <= place <= places[-1]:
                raise ValueError(f"seed {seed} has {axis} {places[0]:.0f} to {places[-1]:.0f}")
            by_seed[seed] = float(np.interp(place, places, values))
        return by_seed

    def _rows(self, part: str, kind: str, measure: str, metric: str = "") -> Sequence[dict[str, str]]:
        """metric: '' is the first metric of the file, by which the part is judged"""
        rows = self._read(part)
        wanted = (kind, metric or rows[0]["metric"], measure)
        return [row for row in rows if (row["kind"], row["metric"], row["measure"]) == wanted]

    def _matching(self, file: str, conditions: Sequence[str]) -> list[dict[str, str]]:
        wanted = dict(condition.split("=") for condition in conditions)
        return [row for row in self._read(file) if wanted.items() <= row.items()]

    def _read(self, name: str) -> list[dict[str, str]]:
        if name not in self._files:
            with (self.folder / f"{name}.csv").open(encoding="utf-8", newline="") as file:
                self._files[name] = list(csv.DictReader(file))
        return self._files[name]


def _body(lines: Sequence[tuple[str, ...]]) -> str:
    """The lines of a table without its head, which the text has."""
    return "\n".join(markdown_table(lines[0], lines)[2:])


def _over_seeds(rows: Sequence[Mapping[str, str]], column: str) -> str:
    values = [float(row[column]) for row in rows if row[column]]
    return plus_minus(mean(values)) if len(values) > 1 else number(values[0])


def shown(effect: Mean) -> str:
    value, interval = difference(effect)
    return f"{value} {interval}" if effect.bounds else value
