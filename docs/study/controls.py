#!/usr/bin/env python
"""What the stored row adds beyond asking again: the answer by plan_controls.md, from the runs that are there so far.

    python docs/study/controls.py --add runs/controls   # keeps the complete runs in controls_runs.csv
    python docs/study/controls.py                       # what is missing next, or the test; the table as Markdown

Exit status: 0, or 2 for files that cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

from combined import rows_of  # noqa: E402  (in this folder)
from document import shown  # noqa: E402
from pays import CONFIRMED, TUNING, Run, evaluations, smallest_end  # noqa: E402

from exgrpo_orlhf import config  # noqa: E402
from exgrpo_orlhf.io.files import write  # noqa: E402
from exgrpo_orlhf.show.seeds import mean, sign_flip  # noqa: E402
from exgrpo_orlhf.show.tables import NONE, csv_text, first_few, markdown_table, p_value  # noqa: E402

FILE = HERE / "controls_runs.csv"
RATES = ("5e-5", "1e-4", "2e-4", "4e-4")
BEYOND = {"5e-5": "2.5e-5", "4e-4": "8e-4"}  # asked for once, of an arm whose best rate is at that edge
TWICE = "_twice"  # how a group's folder, and an arm here, ends whose runs make twice the steps
METHOD = "method"
HEAD = ("arm", "rate", "seed", "step", "accuracy", "generated")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, metavar="FOLDER", help="of the group's runs: runs/controls")
    arguments = parser.parse_args()
    try:
        if arguments.add:
            add(arguments.add)
        print("\n".join(answer()))
    except (OSError, KeyError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def add(folder: Path) -> None:
    """Adds the runs that have made all their steps and are not in the file yet."""
    rows: list[dict[str, Any]] = [*rows_of(FILE)] if FILE.exists() else []
    there = {(row["arm"], row["rate"], int(row["seed"])) for row in rows}
    for run in sorted(folder.glob("*/seed*")):
        if not (run / "config.gin").exists():
            continue
        experiment = config.load([run / "config.gin"])
        arm, _, rate = run.parent.name.partition("-learning_rate=")
        arm += TWICE * folder.name.endswith(TWICE)
        key = (arm, rate, experiment.settings.seed)
        if key not in there and (run / "decisions.jsonl").exists():
            measured = [{name: row[name] for name in HEAD[3:]} for row in evaluations(run, experiment)]
            rows += [dict(zip(HEAD[:3], key, strict=True)) | row for row in measured]
    rows.sort(key=lambda row: (row["arm"], float(row["rate"]), int(row["seed"]), int(row["step"])))
    write(FILE, csv_text(HEAD, rows))


def runs() -> list[Run]:
    rows = [*rows_of(FILE)] if FILE.exists() else []
    found = []
    for (arm, rate, seed), group in groupby(rows, key=lambda row: (row["arm"], row["rate"], row["seed"])):
        own = list(group)
        accuracy, generated = (np.array([float(row[name]) for row in own]) for name in HEAD[4:])
        found.append(Run(arm, rate, int(seed), accuracy, {"generated": generated, "trained": generated, "updates": 0}))
    return found


def answer() -> list[str]:
    """The tuning table; then the test, or which runs it lacks."""
    arms = list(config.load_suite("docs/study/suites/controls.gin").variants)
    tuned = {(run.arm, run.rate, run.seed): run for run in runs() if run.seed in TUNING}
    wanted = [(arm, rate, seed) for arm in arms for rate in RATES for seed in TUNING]
    if not tuned:
        return [f"none of the {len(wanted)} tuning runs is there"]
    tokens = smallest_end([run for run in tuned.values() if run.accuracy[-1] > 0] or [*tuned.values()])

    def level(arm: str, rate: str) -> float:
        """The mean of the last three evaluations before the tokens that all reach, over the tuning seeds."""
        of_seed = [tuned[arm, rate, seed] for seed in TUNING if (arm, rate, seed) in tuned]
        last = [run.accuracy[run.cost() <= tokens][-3:].mean() for run in of_seed]
        return float(np.mean(last)) if len(last) == len(TUNING) else float("nan")

    rates_tried = (BEYOND[RATES[0]], *RATES, BEYOND[RATES[-1]])
    levels = {arm: {rate: level(arm, rate) for rate in rates_tried} for arm in arms}
    cells = lambda values: [NONE if np.isnan(value) else f"{value:.3f}" for value in values]
    table = [(arm, *cells(of_rate.values())) for arm, of_rate in levels.items()]
    lines = markdown_table(("arm", *rates_tried), table)
    best = lambda arm, among: max(
        among, key=lambda rate: np.nan_to_num(levels[arm][rate], nan=-1.0)
    )  # the first of equals
    if not (missing := [key for key in wanted if key not in tuned]):
        edges = {arm: BEYOND[rate] for arm in arms if (rate := best(arm, RATES)) in BEYOND}
        wanted += [(arm, rate, seed) for arm, rate in edges.items() for seed in TUNING]
        missing = [key for key in wanted if key not in tuned]
    if missing:
        return [*lines, "", f"{len(missing)} of {len(wanted)} tuning runs are missing: {_names(missing)}"]
    rates = {arm: best(arm, rates_tried) for arm in arms}
    end = lambda arm: np.mean([tuned[arm, rates[arm], seed].at(tokens) for seed in TUNING])
    control = max((arm for arm in arms if arm != METHOD), key=end)
    lines += ["", *(f"{arm}: rate {rates[arm]}, {end(arm):.3f} at {tokens:,.0f} tokens" for arm in arms)]
    lines += ["", f"{METHOD} against {control}, chosen by the tuning seeds"]
    return lines + _test({arm: rates[arm] for arm in (METHOD, control)})


def _test(rates: dict[str, str]) -> list[str]:
    found = {(run.arm, run.seed): run for run in runs() if rates.get(run.arm) == run.rate}
    needed = [(arm, rates[arm], seed) for arm in rates for seed in CONFIRMED]
    if missing := [key for key in needed if (key[0], key[2]) not in found]:
        return [f"{len(missing)} of {len(needed)} report runs are missing: {_names(missing)}"]
    tokens = smallest_end([found[arm, seed] for arm, _, seed in needed])
    method, control = ([found[arm, seed].at(tokens) for seed in CONFIRMED] for arm in rates)
    gains = [ours - theirs for ours, theirs in zip(method, control, strict=True)]
    means = " and ".join(f"{np.mean(values):.3f}" for values in (method, control))
    p = p_value(float(sign_flip(gains)))
    said = [f"at {tokens:,.0f} tokens, {len(CONFIRMED)} seeds: {means}, {shown(mean(gains))}, exact p {p}"]
    twice = {(run.arm, run.seed): run for run in runs() if run.arm.endswith(TWICE)}
    if missing := [(arm + TWICE, rates[arm], seed) for arm, _, seed in needed if (arm + TWICE, seed) not in twice]:
        return [*said, f"{len(missing)} of {len(needed)} runs of twice the steps are missing: {_names(missing)}"]
    tokens = smallest_end([*twice.values()])
    means = " and ".join(f"{np.mean([twice[arm + TWICE, seed].at(tokens) for seed in CONFIRMED]):.3f}" for arm in rates)
    return [*said, f"at {tokens:,.0f} tokens, described: {means}"]


def _names(keys: list[tuple[str, str, int]]) -> str:
    return first_few([f"{arm} {rate} seed {seed}" for arm, rate, seed in keys])


if __name__ == "__main__":
    sys.exit(main())
