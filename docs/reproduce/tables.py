#!/usr/bin/env python
"""Tables 3 and 6 on the test bed, by plan.md, from the runs that are there so far.

    python scripts/compare.py --group paper_tables --curves new.csv
    python docs/reproduce/tables.py --add new.csv     # keeps the complete runs in runs_curves.csv
    python docs/reproduce/tables.py                   # rates, missing runs, and each table whose runs are all there

A table is <table>.csv, <table>_curves.csv and <table>.png: each row at the rate of its method. Where ExGRPO's is not
the baseline's, <table>_same_rate has all rows at the baseline's. Exit status: 0, or 2 for a file that cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "study"))

from combined import curves_of, rows_of  # noqa: E402  (the study's, in its folder)

from exgrpo_orlhf import config  # noqa: E402
from exgrpo_orlhf.io.files import write  # noqa: E402
from exgrpo_orlhf.show.tables import csv_text  # noqa: E402
from exgrpo_orlhf.study import comparison_charts  # noqa: E402
from exgrpo_orlhf.study.comparison import compare  # noqa: E402
from exgrpo_orlhf.study.comparison_tables import CURVES, curves_csv, values_csv  # noqa: E402

FILE = "runs_curves.csv"
METRIC, BASELINE, METHOD = "eval/greedy_accuracy", "on-policy", "ExGRPO"
RATES = ("1e-4", "2e-4", "4e-4")
TUNING, REPORT = (100, 101), (10, 11, 12, 13, 14)  # seeds
STEPS, LAST = 120, (80, 100, 120)  # batches; the evaluations by which a rate is chosen

Rows = list[dict[str, str]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, metavar="CSV", help="curves that scripts/compare.py wrote")
    arguments = parser.parse_args()
    try:
        if arguments.add:
            add(arguments.add, HERE)
        for line in tables(HERE):
            print(line)
    except (OSError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def add(file: Path, folder: Path) -> None:
    """Adds the runs of a file of curves that have made all batches and are not in runs_curves.csv yet."""
    kept, new = read(folder), [row for row in rows_of(file) if row["metric"] == METRIC]
    there = complete(kept)
    rows = kept + [row for row in new if run_of(row) in complete(new) and run_of(row) not in there]
    rows.sort(key=lambda row: (*run_of(row), int(row["step"])))
    write(folder / FILE, csv_text(CURVES, rows))


def tables(folder: Path) -> list[str]:
    """Writes each table whose runs are all there. Returns what there is to say."""
    rows = read(folder)
    there = complete(rows)
    tuning = {(named(method, rate), seed) for method in (BASELINE, METHOD) for rate in RATES for seed in TUNING}
    if missing := tuning - there:
        return [f"tuning: {len(tuning) - len(missing)} of {len(tuning)} runs are there"]
    rates = {method: best_rate(rows, method) for method in (BASELINE, METHOD)}
    lines = [f"rate of {method}: {rate}" for method, rate in rates.items()]
    for table in ("table6", "table3"):
        variants = list(config.load_suite(f"paper/{table}.gin").variants)
        own = {variant: rates[BASELINE if variant == BASELINE else METHOD] for variant in variants}
        same = dict.fromkeys(variants, rates[BASELINE])
        for name, chosen in {table: own, **({f"{table}_same_rate": same} if same != own else {})}.items():
            needed = {(named(variant, rate), seed) for variant, rate in chosen.items() for seed in REPORT}
            lines.append(f"{name}: {len(needed & there)} of {len(needed)} runs are there")
            if needed <= there:
                curves = curves_of(folder / FILE, {variant: named(variant, rate) for variant, rate in chosen.items()})
                compared = compare(METRIC, [curve for curve in curves if curve.run.seed in REPORT], METHOD)
                write(folder / f"{name}.csv", values_csv([compared]))
                write(folder / f"{name}_curves.csv", curves_csv([compared]))
                write(folder / f"{name}.png", comparison_charts.picture([compared]))
    return lines


def best_rate(rows: Rows, method: str) -> str:
    """The rate with the highest mean over the tuning seeds and the last evaluations; of equal ones the lowest."""
    means = {}
    for rate in RATES:
        of_rate = [row for row in rows if row["variant"] == named(method, rate) and int(row["seed"]) in TUNING]
        means[rate] = np.mean([float(row["value"]) for row in of_rate if int(row["step"]) in LAST])
    return max(RATES, key=lambda rate: means[rate])  # the first of equal ones


def named(variant: str, rate: str) -> str:
    """As `scripts/ablate.py --grid` names it."""
    return f"{variant}-learning_rate={rate}"


def complete(rows: Rows) -> set[tuple[str, int]]:
    return {run_of(row) for row in rows if int(row["step"]) == STEPS}


def run_of(row: dict[str, str]) -> tuple[str, int]:
    return row["variant"], int(row["seed"])


def read(folder: Path) -> Rows:
    return rows_of(folder / FILE) if (folder / FILE).exists() else []


if __name__ == "__main__":
    sys.exit(main())
