"""Parts that compare runs of several suites: their CSV files are made from the curves of those suites' files.

A suite has the runs that were missing when it was written; its counterparts, with the same rate and seeds, are in
another suite. The differences, their correction for multiple comparisons and the picture need all of them together.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from exgrpo_orlhf.io.files import write
from exgrpo_orlhf.study import comparison_charts
from exgrpo_orlhf.study.comparison import compare
from exgrpo_orlhf.study.comparison_tables import curves_csv, values_csv
from exgrpo_orlhf.study.curve import Curve, TrackedRun


class Combined(NamedTuple):
    """baseline: a variant; of: suite -> its variants, by the names that they have here"""

    baseline: str
    of: Mapping[str, Mapping[str, str]]


PARTS = {
    "study_rare_same_rate": Combined(
        "on_policy",
        {
            "study_rare_rates": {"on_policy": "on_policy_4e-4", "su01_without_replay": "su01_without_replay"},
            "study_rare": {name: name for name in ("paper", "su01", "late", "ours")},
        },
    ),
    "study_rare_one_part": Combined(
        "paper",
        {
            "study_rare": {name: name for name in ("paper", "su01", "late")},
            "study_rare_parts": {name: name for name in ("paper_random", "su01_all", "late_selected")},
        },
    ),
    "study_weak_lower_rate": Combined(
        "on_policy",
        {
            "study_weak_controls": {"on_policy": "on_policy_2e-4", "su01_without_replay": "su01_without_replay"},
            "study_weak_tuned": {name: name for name in ("paper", "su01")},
        },
    ),
    "study_weak_oracle": Combined(
        "on_policy",
        {
            "study_weak_tuned": {name: name for name in ("on_policy", "late")},
            "study_weak_sound": {"late_only_sound": "late_only_sound"},
        },
    ),
    "study_rare_more_parts": Combined(
        "paper",
        {
            "study_rare": {"paper": "paper"},
            "study_rare_ablations": {name: name for name in ("in_place", "one_success", "fresh_sampler")},
        },
    ),
    "study_rare_stores_all": Combined(
        "paper",
        {"study_rare": {"paper": "paper"}, "study_rare_failures": {"replays_failures": "replays_failures"}},
    ),
    "study_rare_methods": Combined(
        "on_policy",
        {
            "study_rare_rates": {"on_policy": "on_policy_4e-4"},
            "study_rare": {"late": "late"},
            "study_rare_others": {name: name for name in ("arpo", "gpg")},
        },
    ),
    "study_rare_ratio": Combined(
        "two_passes",
        {
            "study_rare": {"paper": "paper"},
            "study_rare_others": {name: name for name in ("two_passes", "sequence_ratio")},
        },
    ),
    "study_rare_ahead": Combined(
        "on_policy",
        {
            "study_rare_rates": {"on_policy": "on_policy_4e-4"},
            "study_ahead_rare": {name: name for name in ("on_policy_ahead", "paper_ahead")},
            "study_rare": {"paper": "paper"},
        },
    ),
}
KEPT = ("study_countdown", "study_weak_sound")  # figures of suites whose task or option is not in the package
PICTURES = ("study_rare_same_rate",)  # shown in docs/study.md
# Suites without the runs that theirs are to be compared with.
COMPLETED = {
    "study_rare_rates",
    "study_rare_parts",
    "study_rare_ablations",
    "study_rare_others",
    "study_rare_failures",
    "study_weak_controls",
    "study_weak_sound",
    "study_ahead_rare",
}


def make(folder: Path) -> None:
    """Write <part>.csv, <part>_curves.csv and, for PICTURES, <part>.png, for parts whose suites have all been run.

    Raises OSError, and KeyError for a variant that has no curve.
    """
    for part, combined in PARTS.items():
        if not all(_file(folder, suite).exists() for suite in combined.of):
            continue  # a place in the text that needs this part has no figure then, and the document says which
        curves = [curve for suite, names in combined.of.items() for curve in curves_of(_file(folder, suite), names)]
        common = set.intersection(*({c.run.seed for c in curves if c.run.variant == v} for v in _names(combined)))
        compared = compare(_metric(folder, combined), [c for c in curves if c.run.seed in common], combined.baseline)
        write(folder / f"{part}.csv", values_csv([compared]))
        write(folder / f"{part}_curves.csv", curves_csv([compared]))
        if part in PICTURES:
            write(folder / f"{part}.png", comparison_charts.picture([compared]))


def _names(combined: Combined) -> list[str]:
    return [name for names in combined.of.values() for name in names]


def _metric(folder: Path, combined: Combined) -> str:
    return rows_of(_file(folder, next(iter(combined.of))))[0]["metric"]


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _file(folder: Path, suite: str) -> Path:
    return folder / f"{suite}_curves.csv"


def curves_of(file: Path, names: Mapping[str, str]) -> Iterator[Curve]:
    """names: name of a variant -> its name in the file. Raises KeyError for one that has no curve there."""
    rows = rows_of(file)
    for name, there in names.items():
        points: dict[str, list[dict[str, str]]] = {}
        for row in rows:
            if row["variant"] == there:
                points.setdefault(row["seed"], []).append(row)
        if not points:
            raise KeyError(f"{file.name} has no variant {there}")
        for seed, of_run in points.items():
            run = TrackedRun(of_run[0]["run"], f"{there}/seed{seed}", name, int(seed))
            columns = ("step", "value", "tokens", "seconds")
            arrays = [np.array([float(row[column]) for row in of_run]) for column in columns]
            yield Curve(run, *arrays, of_run[0]["metric"])
