"""Fill the places of a text with figures, which all come from the study's CSV files.

A place is {{name arguments…}}, such as {{mean normal ours final}}, {{difference weak ours on_policy area_tokens}} or
{{table slips}}. {{ablations}} is the table of all ablation files (ablations.py).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ablations
import combined
import numpy as np

from exgrpo_orlhf.evaluation.results_table import markdown_table
from exgrpo_orlhf.study.comparison import MEASURES
from exgrpo_orlhf.study.comparison_tables import difference, number, p_value, plus_minus
from exgrpo_orlhf.study.seeds import Mean, mean, paired

_PLACE = re.compile(r"\{\{(\w+)((?: [^{}]+)?)\}\}")
_SHOWN = ("final", "equal_tokens", "area_tokens", "area_steps")  # measures of a table
_SIGNIFICANT = 0.05


class DocumentError(ValueError):
    """No figure exists for a place; the message names the place."""


class Document:
    """Reads <part>.csv (written by scripts/compare.py) and the other files of a folder when a place needs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parts: dict[str, list[dict[str, str]]] = {}
        self._places: dict[str, Callable[..., str]] = {
            **{"mean": self.mean, "difference": self.difference, "p": self.p, "table": self.table},
            **{"gain_after": self.gain_after, "p_holm": self.shown_p_holm},
            **{"at": self.at, "gain_at": self.gain_at, "collapsed": self.collapsed},
            **{"luck": self.luck, "quarter": self.quarter, "picture": self.picture, "hours": self.hours},
            "forgetting": self.forgetting,
            "ablations": lambda: ablations.table(self),
        }

    def fill(self, text: str) -> str:
        """Raises DocumentError for a place that cannot be filled, OSError for a file that cannot be read."""

        def figure(match: re.Match[str]) -> str:
            what, words = match[1], match[2].split()
            try:
                return self._places[what](*words)
            except (LookupError, TypeError, ValueError) as error:
                raise DocumentError(f"{match[0]}: no such figure in {self.folder} ({error})") from error

        return _PLACE.sub(figure, text)

    # -- places -------------------------------------------------------------------------------------------------------

    def mean(self, part: str, variant: str, measure: str, metric: str = "") -> str:
        """The mean over seeds ± its 95 % interval."""
        return plus_minus(mean(list(self._by_seed(part, variant, measure, metric).values())))

    def difference(self, part: str, variant: str, baseline: str, measure: str, metric: str = "") -> str:
        """The mean paired difference over seeds, with its 95 % interval."""
        return " ".join(difference(mean(self.differences(part, variant, baseline, measure, metric))))

    def p(self, part: str, variant: str, baseline: str, measure: str, metric: str = "") -> str:
        """The p-value of that difference, by a paired t test, uncorrected."""
        return p_value(paired(self.differences(part, variant, baseline, measure, metric)).p)

    def shown_p_holm(self, part: str, variant: str, measure: str) -> str:
        """The corrected p-value of the difference from the part's baseline."""
        return p_value(self.p_holm(part, variant, measure))

    def at(self, part: str, variant: str, million: str) -> str:
        """The value after that many million generated tokens, interpolated: it compares parts of unlike length."""
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

    def table(self, part: str, metric: str = "") -> str:
        """Each variant's means and its differences from the part's baseline; bold: p (Holm) is below 5 %."""
        headings = dict(MEASURES)
        head = ["variant", "seeds", *(headings[key] for key in _SHOWN)]
        head += [f"Δ {headings[key]}" for key in _SHOWN[1:]] + ["collapsed", "million tokens", "minutes"]
        lines = []
        differences = {(row["variant"], row["measure"]): row for row in self._rows(part, "difference", None, metric)}
        for variant in dict.fromkeys(row["variant"] for row in self._rows(part, "run", "final", metric)):
            seeds = self._by_seed(part, variant, "final", metric)
            cells = [variant, str(len(seeds)), *(self.mean(part, variant, key, metric) for key in _SHOWN)]
            for key in _SHOWN[1:]:
                row = differences.get((variant, key))
                cells.append("" if row is None else _difference(row))
            cells.append(self.collapsed(part, variant).partition(" ")[0])
            for cost, unit in (("tokens", 1e6), ("seconds", 60.0)):
                cells.append(plus_minus(mean(list(self._by_seed(part, variant, cost, metric).values())), unit))
            lines.append(cells)
        return "\n".join(markdown_table(head, lines))

    def luck(self, regime: str, what: str, column: str) -> str:
        """The mean of a column of luck.csv over seeds."""
        return _over_seeds(self._read("luck"), column, regime=regime, what=what)

    def quarter(self, part: str, variant: str, quarter: str, column: str) -> str:
        """The mean of a column of <part>_quarters.csv over seeds."""
        return _over_seeds(self._read(f"{part}_quarters"), column, variant=variant, quarter=quarter)

    def forgetting(self, part: str, variant: str, column: str) -> str:
        """The mean of a column of <part>_forgetting.csv over seeds."""
        return _over_seeds(self._read(f"{part}_forgetting"), column, variant=variant)

    def picture(self, part: str) -> str:
        shows = "curves against steps, generated tokens and time; last values by seed"
        return f"![{part}: {shows}]({self.folder.name}/{part}.png)"

    def hours(self, *parts: str) -> str:
        """Hours of training steps, on one core, summed over all runs of the parts."""
        return f"{sum(float(row['value']) for part in parts for row in self._rows(part, 'run', 'seconds')) / 3600:.1f}"

    # -- what the table of ablations asks ------------------------------------------------------------------------------

    def parts(self) -> list[str]:
        """The suites of the folder that have figures; in the place of those that only complete other ones, the parts
        that compare them together."""
        suites = {path.stem for path in (self.folder / "suites").glob("*.gin")} - combined.COMPLETED
        return [name for name in sorted(suites | {*combined.PARTS}) if (self.folder / f"{name}.csv").exists()]

    def has(self, part: str, variant: str, measure: str = "final") -> bool:
        return any(row["variant"] == variant for row in self._rows(part, "run", measure))

    def differences(self, part: str, variant: str, baseline: str, measure: str, metric: str = "") -> list[float]:
        """variant − baseline for each seed that both have."""
        ours, theirs = (self._by_seed(part, name, measure, metric) for name in (variant, baseline))
        return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]

    def p_holm(self, part: str, variant: str, measure: str) -> float | None:
        """The corrected p-value of the difference from the part's baseline, where the file has one."""
        rows = self._rows(part, "difference", measure)
        return next((float(row["p_holm"]) for row in rows if row["variant"] == variant and row["p_holm"]), None)

    def section(self, part: str) -> str:
        """Link to the section of the study's page that shows the part's table, else to the page."""
        before, place, _ = (self.folder / "text.md").read_text(encoding="utf-8").partition(f"{{{{table {part}}}}}")
        if not place:
            return f"{self.folder.name}.md"
        heading = re.findall(r"^#+ (.+)$", before, re.MULTILINE)[-1].lower()
        anchor = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")  # as GitHub makes it
        return f"{self.folder.name}.md#{anchor}"

    # -- files --------------------------------------------------------------------------------------------------------

    def _gain(self, part: str, variant: str, other_part: str, other: str, axis: str, place: float) -> str:
        ours, theirs = self._at(part, variant, axis, place), self._at(other_part, other, axis, place)
        return " ".join(difference(mean([ours[seed] - theirs[seed] for seed in ours if seed in theirs])))

    def _at(self, part: str, variant: str, axis: str, place: float) -> dict[str, float]:
        """By seed the value at a place of an axis of <part>_curves.csv, interpolated."""
        points: dict[str, list[tuple[float, float]]] = {}
        for row in self._read(f"{part}_curves"):
            if row["variant"] == variant:
                points.setdefault(row["seed"], []).append((float(row[axis]), float(row["value"])))
        found = {}
        for seed, curve in points.items():
            places, values = np.array(sorted(curve)).T
            if not places[0] <= place <= places[-1]:
                raise ValueError(f"seed {seed} has {axis} {places[0]:.0f} to {places[-1]:.0f}")
            found[seed] = float(np.interp(place, places, values))
        return found

    def _by_seed(self, part: str, variant: str, measure: str, metric: str) -> Mapping[str, float]:
        rows = self._rows(part, "run", measure, metric)
        found = {row["seed"]: float(row["value"]) for row in rows if row["variant"] == variant}
        if not found:
            raise KeyError(f"{variant} has no {measure}")
        return found

    def _rows(self, part: str, kind: str, measure: str | None, metric: str = "") -> Sequence[dict[str, str]]:
        """metric: '' is the first metric of the file, by which the part is judged"""
        rows = self._read(part)
        metric = metric or rows[0]["metric"]
        return [
            row for row in rows if (row["kind"], row["metric"]) == (kind, metric) and measure in (None, row["measure"])
        ]

    def _read(self, part: str) -> list[dict[str, str]]:
        if part not in self._parts:
            with (self.folder / f"{part}.csv").open(encoding="utf-8", newline="") as file:
                self._parts[part] = list(csv.DictReader(file))
        return self._parts[part]


def _over_seeds(rows: Sequence[Mapping[str, str]], column: str, **of: str) -> str:
    values = [float(row[column]) for row in rows if row[column] and of.items() <= row.items()]
    return plus_minus(mean(values)) if len(values) > 1 else number(values[0])


def _difference(row: Mapping[str, str]) -> str:
    bounds = (float(row["low"]), float(row["high"])) if row["low"] else None
    value, interval = difference(Mean(float(row["value"]), bounds, int(row["seeds"])))
    shown = f"{value} {interval}" if bounds else value
    return f"**{shown}**" if row["p_holm"] and float(row["p_holm"]) < _SIGNIFICANT else shown
