"""docs/reproduce/tables.py: the plan's rates and tables, from the runs that are there."""

from __future__ import annotations

import csv
import sys

import pytest
from run_builders import ROOT

from exgrpo_orlhf.show.tables import csv_text
from exgrpo_orlhf.study.comparison_tables import CURVES

FOLDER = ROOT / "docs" / "reproduce"


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(FOLDER.parent / "study")
    yield __import__("tables")
    sys.modules.pop("tables")


def run(variant: str, rate: str, seed: int, end: float, last: int = 120) -> list[dict[str, object]]:
    about = {"metric": "eval/greedy_accuracy", "variant": f"{variant}-learning_rate={rate}", "seed": seed, "run": "r"}
    steps = range(0, last + 1, 20)
    return [{**about, "step": s, "tokens": 9.0 * s, "seconds": 1.0 * s, "value": end + s / 1e4} for s in steps]


def test_a_table_is_written_when_all_of_its_runs_are_there_at_the_rates_of_the_tuning_seeds(plan, tmp_path):
    def add(runs):
        (tmp_path / "new.csv").write_text(csv_text(CURVES, [row for rows in runs for row in rows]))
        plan.add(tmp_path / "new.csv", tmp_path)
        return plan.tables(tmp_path)

    ends = {"on-policy": {"1e-4": 0.1, "2e-4": 0.5, "4e-4": 0.4}, "ExGRPO": {"1e-4": 0.3, "2e-4": 0.2, "4e-4": 0.3}}
    tuning = [run(m, rate, seed, end) for m in ends for rate, end in ends[m].items() for seed in (100, 101)]
    assert add([*tuning[1:], run("on-policy", "1e-4", 100, 0.9, last=100)]) == ["tuning: 11 of 12 runs are there"]
    lines = add([tuning[0], run("on-policy", "2e-4", 100, 0.0)])  # the second is there already, and stays
    assert lines[:2] == ["rate of on-policy: 2e-4", "rate of ExGRPO: 1e-4"], "of equal rates the lower one"
    assert "table3: 0 of 25 runs are there" in lines
    variants = ["ExGRPO", "sigma_1.5", "sigma_0.5", "mu_0.25"]
    report = [run(v, "1e-4", seed, 0.3 - i / 10) for i, v in enumerate(variants) for seed in range(10, 15)]
    assert "table3: 20 of 25 runs are there" in add(report)
    assert not (tmp_path / "table3.csv").exists()
    lines = add([run("on-policy", "2e-4", seed, 0.45) for seed in range(10, 15)])
    assert {"table3: 25 of 25 runs are there", "table3_same_rate: 5 of 25 runs are there"} < {*lines}
    assert (tmp_path / "table3.png").stat().st_size > 10_000
    assert not (tmp_path / "table3_same_rate.csv").exists()
    with (tmp_path / "table3.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["kind"], row["measure"]) == ("difference", "final")]
    assert {row["variant"]: round(float(row["value"]), 6) for row in rows} == {
        **{"on-policy": 0.15, "sigma_1.5": -0.1, "sigma_0.5": -0.2},
        **{"mu_0.25": -0.3},
    }
