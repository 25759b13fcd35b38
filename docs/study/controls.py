#!/usr/bin/env python
"""A method against the best of its controls, on one bed: the answer by plan_controls.md or plan_prefixes.md, from the
runs that are there so far.

    python docs/study/controls.py --add runs/controls                 # keeps the complete runs in controls_runs.csv
    python docs/study/controls.py                                     # what is missing next, or the test; as Markdown
    python docs/study/controls.py --bed prefixes_rarer [--add runs/prefixes_rarer]      # likewise

Exit status: 0, or 2 for files that cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

from combined import rows_of  # noqa: E402  (in this folder)
from document import shown  # noqa: E402
from pays import CONFIRMED, TUNING, Run, evaluations, runs_of, smallest_end  # noqa: E402

from exgrpo_orlhf import config  # noqa: E402
from exgrpo_orlhf.io.files import write  # noqa: E402
from exgrpo_orlhf.show.charts import curve, drawing, png  # noqa: E402
from exgrpo_orlhf.show.seeds import holm, mean, sign_flip  # noqa: E402
from exgrpo_orlhf.show.tables import NONE, csv_text, first_few, markdown_table, p_value  # noqa: E402

LADDER = ("2.5e-5", "5e-5", "1e-4", "2e-4", "4e-4", "8e-4")  # of rates
RATE = "Optimizer.learning_rate = "
TWICE = "_twice"  # how a group's folder, and an arm here, ends whose runs make twice the steps
HEAD = ("arm", "rate", "seed", "step", "accuracy", "generated")


class Bed(NamedTuple):
    """Arms that are compared on one bed.

    suite: its runs are in <suite>_runs.csv
    methods: of its arms, those of which the best is compared with the best of the others
    rates: of the grid; empty where the suite binds each arm's
    others: a bed whose arms are among the others, by their runs there
    more: arms that supervised.py runs, of no suite
    twice: whether the two compared arms are described after twice the steps
    paid: a bed of pays.py whose arms are among the others, by their runs there at the rate that they have there
    described: of its arms, those that were added after its answer, and are neither asked for nor chosen by it
    """

    suite: str
    methods: tuple[str, ...]
    rates: tuple[str, ...]
    others: Bed | None = None
    more: tuple[str, ...] = ()
    twice: bool = False
    paid: str | None = None
    described: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        return HERE / f"{self.suite}_runs.csv"

    @property
    def grids(self) -> dict[str, tuple[str, ...]]:
        """The rates of each arm: all of a grid, or the one that is bound."""
        variants = config.load_suite(f"docs/study/suites/{self.suite}.gin").variants
        bound = {
            arm: tuple(each.partition(RATE)[2] for each in given if RATE in each) for arm, given in variants.items()
        }
        own = {arm: self.rates or bound[arm] for arm in variants} | dict.fromkeys(self.more, self.rates)
        paid = {run.arm: (run.rate,) for run in runs_of(self.paid)} if self.paid else {}
        return own | (self.others.grids if self.others else {}) | paid


class Choice(NamedTuple):
    """What is compared on a bed, by its tuning seeds. rates: of all arms; found: the bed's runs"""

    method: str
    control: str
    rates: dict[str, str]
    found: dict[tuple[str, str, int], Run]

    @property
    def missing(self) -> list[tuple[str, str, int]]:
        needed = [(arm, self.rates[arm], seed) for arm in (self.method, self.control) for seed in CONFIRMED]
        return [key for key in needed if key not in self.found]

    def gains(self, one: str, other: str) -> tuple[str, list[float]]:
        """Differences by seed at the most tokens that both arms' report runs have reached, and what is said of them."""
        of_arms = [[self.found[arm, self.rates[arm], seed] for seed in CONFIRMED] for arm in (one, other)]
        tokens = smallest_end([run for of_arm in of_arms for run in of_arm])
        ours, theirs = ([run.at(tokens) for run in of_arm] for of_arm in of_arms)
        means = f"{np.mean(ours):.3f} and {np.mean(theirs):.3f}"
        gains = [a - b for a, b in zip(ours, theirs, strict=True)]
        return f"at {tokens:,.0f} tokens, {len(CONFIRMED)} seeds: {means}", gains


CONTROLS = Bed("controls", ("method",), LADDER[1:5], more=("supervised_k8",), twice=True)
PREFIXES, FEWER = ("prefixes_k4", "prefixes_k8"), LADDER[1:4]
BEDS = {
    "controls": CONTROLS,
    "prefixes_rarer": Bed("prefixes_rarer", PREFIXES, FEWER, CONTROLS, described=("prefix_sampling_k4",)),
    "prefixes_seldom": Bed("prefixes_seldom", PREFIXES, FEWER),
    "prefixes_once": Bed("prefixes_once", PREFIXES, (), paid="once"),
    "prefixes_mostly": Bed("prefixes_mostly", PREFIXES, FEWER, described=("failure_prefix_k4",)),
}
PLANNED = [name for name in BEDS if name != "controls"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, metavar="FOLDER", help="of the group's runs: runs/controls")
    parser.add_argument("--bed", choices=BEDS, default="controls")
    arguments = parser.parse_args()
    try:
        bed = BEDS[arguments.bed]
        if arguments.add:
            add(arguments.add, bed)
        print("\n".join([*answer(bed), *(corrected() if arguments.bed in PLANNED else ())]))
    except (OSError, KeyError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def add(folder: Path, bed: Bed) -> None:
    """Adds the bed's runs that have made all their steps and are not in its file yet."""
    if not folder.name.startswith(bed.suite):  # arms of other beds have the same names
        raise ValueError(f"{folder}: the folder of {bed.suite}'s runs has a name that begins so")
    rows: list[dict[str, Any]] = [*rows_of(bed.file)] if bed.file.exists() else []
    there = {(row["arm"], row["rate"], int(row["seed"])) for row in rows}
    for run in sorted(folder.glob("*/seed*")):
        if not (run / "config.gin").exists():
            continue
        experiment = config.load([run / "config.gin"])
        arm = run.parent.name.partition("-learning_rate=")[0] + TWICE * folder.name.endswith(TWICE)
        rates = [rate for rate in LADDER if float(rate) == experiment.optimizer.learning_rate]
        if not rates:
            raise ValueError(f"{run}: its rate {experiment.optimizer.learning_rate} is none of {', '.join(LADDER)}")
        key = (arm, rates[0], experiment.settings.seed)
        if key not in there and (run / "decisions.jsonl").exists():
            measured = [{name: row[name] for name in HEAD[3:]} for row in evaluations(run, experiment)]
            rows += [dict(zip(HEAD[:3], key, strict=True)) | row for row in measured]
    rows.sort(key=lambda row: (row["arm"], float(row["rate"]), int(row["seed"]), int(row["step"])))
    write(bed.file, csv_text(HEAD, rows))


def runs(bed: Bed) -> dict[tuple[str, str, int], Run]:
    """By arm, rate and seed."""
    rows = [*rows_of(bed.file)] if bed.file.exists() else []
    found = {}
    for (arm, rate, seed), group in groupby(rows, key=lambda row: (row["arm"], row["rate"], row["seed"])):
        own = list(group)
        accuracy, generated = (np.array([float(row[name]) for row in own]) for name in HEAD[4:])
        sums = {"generated": generated, "trained": generated, "updates": 0}
        found[arm, rate, int(seed)] = Run(arm, rate, int(seed), accuracy, sums)
    paid = {(run.arm, run.rate, run.seed): run for run in (runs_of(bed.paid) if bed.paid else ())}
    return found | (runs(bed.others) if bed.others else {}) | paid


def answer(bed: Bed) -> list[str]:
    """The tuning table; then the test, or which runs it lacks."""
    lines, choice = _choice(bed)
    return lines if choice is None else lines + _test(choice, bed.twice)


def corrected() -> list[str]:
    """The p-values of plan_prefixes.md, by Holm's method over the beds that have been run to the end."""
    tested = {}
    for name in PLANNED:
        choice = _choice(BEDS[name])[1]
        if choice and not choice.missing:
            tested[name] = float(sign_flip(choice.gains(choice.method, choice.control)[1]))
    values = zip(tested, tested.values(), holm(list(tested.values())), strict=True)
    return [
        "",
        *(f"{name}: exact p {p_value(p)}, by Holm over {len(tested)} beds {p_value(q)}" for name, p, q in values),
    ]


def _choice(bed: Bed) -> tuple[list[str], Choice | None]:
    """The tuning table, and what is compared by it; None where tuning runs are missing."""
    found = runs(bed)
    pairs = {(arm, rate) for arm, rate, _ in found}
    whole = [arm for arm, rate in pairs if all((arm, rate, seed) in found for seed in TUNING)]
    described = [arm for arm in bed.described if arm in whole]
    compared = {arm: rates for arm, rates in bed.grids.items() if arm not in bed.described}
    tuned = {key: run for key, run in found.items() if run.seed in TUNING and run.arm in (*compared, *described)}
    wanted = [(arm, rate, seed) for arm, rates in compared.items() for rate in rates for seed in TUNING]
    if not tuned:
        return [f"none of the {len(wanted)} tuning runs is there"], None
    of_compared = [run for run in tuned.values() if run.arm in compared]
    tokens = smallest_end([run for run in of_compared if run.accuracy[-1] > 0] or of_compared)

    def level(arm: str, rate: str) -> float:
        """The mean of the last three evaluations before the tokens that all reach, over the tuning seeds."""
        of_seed = [tuned[arm, rate, seed] for seed in TUNING if (arm, rate, seed) in tuned]
        last = [run.accuracy[run.cost() <= tokens][-3:].mean() for run in of_seed]
        return float(np.mean(last)) if len(last) == len(TUNING) else float("nan")

    levels = {arm: {rate: level(arm, rate) for rate in LADDER} for arm in (*compared, *described)}
    cells = lambda values: [NONE if np.isnan(value) else f"{value:.3f}" for value in values]
    lines = markdown_table(("arm", *LADDER), [(arm, *cells(of_rate.values())) for arm, of_rate in levels.items()])
    best = lambda arm, among: max(
        among, key=lambda rate: np.nan_to_num(levels[arm][rate], nan=-1.0)
    )  # the first of equals
    if not (missing := [key for key in wanted if key not in tuned]) and bed.rates:
        edges = {arm: beyond for arm, rates in compared.items() if (beyond := _beyond(best(arm, rates), rates))}
        wanted += [(arm, rate, seed) for arm, rate in edges.items() for seed in TUNING]
        missing = [key for key in wanted if key not in tuned]
    if missing:
        return [*lines, "", f"{len(missing)} of {len(wanted)} tuning runs are missing: {_names(missing)}"], None
    rates = {arm: best(arm, LADDER) for arm in levels}
    end = lambda arm: np.mean([tuned[arm, rates[arm], seed].at(tokens) for seed in TUNING])
    method = max(bed.methods, key=end)
    control = max((arm for arm in compared if arm not in bed.methods), key=end)
    lines += ["", *(f"{arm}: rate {rates[arm]}, {end(arm):.3f} at {tokens:,.0f} tokens" for arm in levels)]
    lines += ["", f"{method} against {control}, chosen by the tuning seeds"]
    return lines, Choice(method, control, rates, found)


def _beyond(rate: str, grid: tuple[str, ...]) -> str | None:
    """The rate that is asked for once, of an arm whose best is at an edge of its grid."""
    at = LADDER.index(rate)
    return LADDER[at - 1] if rate == grid[0] else LADDER[at + 1] if rate == grid[-1] else None


def _test(choice: Choice, twice: bool) -> list[str]:
    method, control, rates, found = choice
    if missing := choice.missing:
        return [f"{len(missing)} of {2 * len(CONFIRMED)} report runs are missing: {_names(missing)}"]
    said = []
    others = [arm for arm in rates if arm not in (method, control)]
    others = [arm for arm in others if all((arm, rates[arm], seed) in found for seed in CONFIRMED)]
    for one, other in ((method, control), *((ours, arm) for arm in others for ours in (method, control))):
        described, gains = choice.gains(one, other)
        tested = f"exact p {p_value(float(sign_flip(gains)))}" if other == control else f"described: {one} and {other}"
        said.append(f"{described}, {shown(mean(gains))}, {tested}")
    if not twice:
        return said
    longer = choice._replace(rates={arm + TWICE: rates[arm] for arm in (method, control)})
    longer = longer._replace(method=method + TWICE, control=control + TWICE)
    if missing := longer.missing:
        return [*said, f"{len(missing)} of {2 * len(CONFIRMED)} runs of twice the steps are missing: {_names(missing)}"]
    described, gains = longer.gains(longer.method, longer.control)
    return [*said, f"{described}, {shown(mean(gains))}, described: twice the steps"]


def picture() -> bytes:
    """A PNG: on the bed *rarer*, accuracy by generated tokens of the arms that have all report seeds, means with their
    95 % intervals."""
    found = runs(BEDS["prefixes_rarer"])
    pairs = {(arm, rate) for arm, rate, _ in found if not arm.endswith(TWICE)}
    complete = [pair for pair in pairs if all((*pair, seed) in found for seed in CONFIRMED)]
    of_arms = {arm: [found[arm, rate, seed] for seed in CONFIRMED] for arm, rate in complete}
    name = lambda arm: arm.replace("method", "one_rollout_beside_k4").replace("_k", ", K = ").replace("_", " ")
    tokens = np.linspace(0, smallest_end([run for of_arm in of_arms.values() for run in of_arm]), 40)
    with drawing(640, 400) as figure:
        axes = figure.subplots()
        axes.set(xlabel="generated tokens, millions", ylabel="greedy accuracy", xlim=(0, tokens[-1] / 1e6))
        end = lambda item: -np.mean([run.at(tokens[-1]) for run in item[1]])
        for i, (arm, of_arm) in enumerate(sorted(of_arms.items(), key=end)):
            levels = [mean([run.at(at) for run in of_arm]) for at in tokens]
            low, high = zip(*(level.bounds or (level.value, level.value) for level in levels), strict=True)
            curve(axes, tokens / 1e6, [level.value for level in levels], f"m{i}", (low, high), label=name(arm))
        axes.legend(loc="upper left")
        return png(figure)


def _names(keys: list[tuple[str, str, int]]) -> str:
    return first_few([f"{arm} {rate} seed {seed}" for arm, rate, seed in keys])


if __name__ == "__main__":
    sys.exit(main())
