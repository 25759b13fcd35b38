#!/usr/bin/env python
"""Where replay pays, on the test beds: tables by plan_pays.md from the runs that are there so far.

    python docs/study/pays.py --add runs/pays_rare    # keeps a bed's complete runs in pays_runs.csv
    python docs/study/pays.py                         # what is missing, or the table of each bed, as Markdown

docs/study/build.py --document writes them into the study's pages, and draws what explains the ranking.
A bed is the name of a group's folder after `pays_`. Exit status: 0, or 2 for files that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

from combined import rows_of  # noqa: E402  (in this folder)
from document import shown  # noqa: E402

from exgrpo_orlhf import config  # noqa: E402
from exgrpo_orlhf.experiment import Experiment  # noqa: E402
from exgrpo_orlhf.io.files import write  # noqa: E402
from exgrpo_orlhf.show.charts import PALETTE, drawing, png  # noqa: E402
from exgrpo_orlhf.show.seeds import holm, mean, sign_flip  # noqa: E402
from exgrpo_orlhf.show.tables import NONE, csv_text, first_few, markdown_table, number, p_value  # noqa: E402

FILE = HERE / "pays_runs.csv"
BEDS = ("rare", "rarer", "once")
RATES, TUNING = ("1e-4", "2e-4", "4e-4"), (100, 101)
CONFIRMED = tuple(range(10, 18))  # seeds of the two arms that are compared
DESCRIBED = {"rare": CONFIRMED[:5], "rarer": TUNING, "once": TUNING}  # of every arm in the table
CONTROL = "on_policy"  # how the arms without replay begin
# Seconds of a trained token and of an optimiser step, where a generated token is 1. On an H200 512 responses of at most
# 80 tokens of SmolLM2-135M take 1.18 s to generate (vLLM in the process) and 0.26 s to train on
# (docs/dev/performance.md, 28 November 2026; a step's own cost is in the latter): generation is 82 % of a step.
# The other price is assumed: where generation is 60 % of an on-policy step.
TOKENS = (0.0, 0.0)
SHORT, DEAR = "H200, short responses", "generation 60 % of a step"
PRICES = {SHORT: (0.26 / 1.18, 0.0), DEAR: (0.40 / 0.60, 0.0)}
# Summed since the run's start, at each evaluation: tokens generated and trained on (in each pass), optimiser steps;
# groups, those with a signal; questions, different ones; rows trained on, replayed ones; successes, lucky ones of those
# that were checked; what `rows_and_pulls` returns
SUMS = (
    *("generated", "trained", "updates", "groups", "with_signal", "questions", "different"),
    *("rows", "replayed", "correct", "checked", "lucky", "pull", "pull_replayed"),
)
HEAD = ("bed", "arm", "rate", "seed", "step", "accuracy", *SUMS)


class Run(NamedTuple):
    """Of an arm at a rate: accuracy and SUMS at each evaluation, (N,) each"""

    arm: str
    rate: str
    seed: int
    accuracy: np.ndarray
    sums: dict[str, np.ndarray]

    def cost(self, prices: tuple[float, float] = TOKENS) -> np.ndarray:
        return self.sums["generated"] + prices[0] * self.sums["trained"] + prices[1] * self.sums["updates"]

    def at(self, cost: float, prices: tuple[float, float] = TOKENS) -> float:
        """The accuracy for that cost, linear between evaluations."""
        return float(np.interp(cost, self.cost(prices), self.accuracy))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, metavar="FOLDER", help="of a group's runs: runs/pays_<bed>")
    arguments = parser.parse_args()
    try:
        if arguments.add:
            add(arguments.add)
        for bed in BEDS:
            print(*tables(bed), sep="\n")
    except (OSError, KeyError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def add(folder: Path) -> None:
    """Adds a bed's runs that have made all their steps and are not in the file yet."""
    bed = folder.name.removeprefix("pays_")
    if bed not in BEDS:
        raise ValueError(f"{folder}: a group's folder is named pays_ and one of {', '.join(BEDS)}")
    rows: list[dict[str, Any]] = [*rows_of(FILE)] if FILE.exists() else []
    there = {(row["bed"], row["arm"], row["rate"], int(row["seed"])) for row in rows}
    for run in sorted(folder.glob("*/seed*")):
        experiment = config.load([run / "config.gin"])
        rate = next(rate for rate in RATES if float(rate) == experiment.optimizer.learning_rate)
        key = (bed, run.parent.name.partition("-learning_rate=")[0], rate, experiment.settings.seed)
        if key not in there and (measured := list(evaluations(run, experiment))):
            rows += [dict(zip(HEAD[:4], key, strict=True)) | row for row in measured]
    rows.sort(key=lambda row: (*(str(row[name]) for name in HEAD[:3]), int(row["seed"]), int(row["step"])))
    write(FILE, csv_text(HEAD, rows))


def evaluations(run: Path, experiment: Experiment) -> Iterator[dict[str, Any]]:
    """Rows of a finished run, from its metrics and decisions; none of one that has steps left."""
    file = run / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else ()
    steps = {row["step"]: row for row in map(json.loads, lines)}
    if max(steps, default=0) < experiment.settings.steps:
        return
    decisions = {row["step"]: row for row in map(json.loads, (run / "decisions.jsonl").open(encoding="utf-8"))}
    optimizer, reincarnation = experiment.optimizer, experiment.mixer.reincarnation
    mixed = (reincarnation and reincarnation.after_step) or experiment.settings.steps  # batches gone through repeatedly
    sums, different = Counter[str](), set[str]()
    for step, metrics in sorted(steps.items()):
        if step:
            questions, replays = decisions[step]["questions"], decisions[step]["replays"]
            stored = replays.get("tokens", [])
            n, length = len(questions["id"]), metrics["rollout/response_tokens"]
            of_rows = rows_and_pulls(experiment, questions, replays, length)
            different.update(questions["id"])
            passes = optimizer.passes_per_batch if step <= mixed else 1
            sums.update(  # a rollout that gave way to a stored one counts with the mean length
                trained=((of_rows["rows"] - len(stored)) * length + sum(stored)) * passes,
                updates=optimizer.steps_per_batch * passes,
                groups=n,
                with_signal=metrics["reward/groups_with_signal"] * n,
                questions=n,
                replayed=len(stored),
                correct=sum(questions["correct"]),
                checked=sum(questions["checked"]),
                lucky=sum(questions["lucky"]),
                **of_rows,
            )
        if "eval/greedy_accuracy" in metrics:
            of_step = {**sums, "generated": metrics["cost/generated_tokens"], "different": len(different)}
            yield {"step": step, "accuracy": metrics["eval/greedy_accuracy"], **dict.fromkeys(SUMS, 0), **of_step}


def rows_and_pulls(
    experiment: Experiment, questions: dict[str, list[Any]], replays: dict[str, list[Any]], length: float
) -> dict[str, float]:
    """Rows of a step; Σ |A · dw| over their tokens, and over the replayed ones: how hard they pull at their log-probs.

    dw is the slope of a token's weight in its log-prob: 1 of a fresh token, and of a replayed one f'(w)·w = f·(1 − f)
    where it is shaped, else w, at most `max_weight`, with the row's mean log w; not known (nan) of rows that are added
    to whole groups, whose rewards are not logged. length: tokens of a fresh row, the mean
    """
    if experiment.mixer.injection.added_rows:
        rows = sum(questions["rollouts"]) + len(replays.get("id", []))
        return {"rows": rows, "pull": math.nan, "pull_replayed": math.nan}
    loss, size = experiment.loss, experiment.settings.group_size
    stored = {
        id_: rest for id_, *rest in zip(*(replays.get(x, []) for x in ("id", "tokens", "log_weight")), strict=True)
    }
    sums = {"rows": 0, "pull": 0.0, "pull_replayed": 0.0}
    for id_, n, correct in zip(*(questions[name] for name in ("id", "rollouts", "correct")), strict=True):
        rows = min(size, n + (id_ in stored))
        right = min(correct + (id_ in stored), rows)
        share = right / rows
        scale = math.sqrt(share * (1 - share) * rows / (rows - 1)) + 1e-6 if experiment.advantages.scale_by_std else 1.0
        fresh = length * (correct * (1 - share) + (rows - right) * share) / scale
        replayed = 0.0
        if id_ in stored:
            tokens, log_weight = stored[id_]
            w = math.exp(log_weight) if loss.importance_weights else 1.0
            shaped = w / (w + loss.beta)
            slope = shaped * (1 - shaped) if loss.shaping else min(w, loss.max_weight or math.inf)
            replayed = tokens * (1 - share) * slope / scale
        sums["rows"] += rows
        sums["pull"] += fresh + replayed
        sums["pull_replayed"] += replayed
    return sums


def runs_of(bed: str) -> list[Run]:
    rows = [row for row in rows_of(FILE) if row["bed"] == bed] if FILE.exists() else []
    return [
        Run(*key[:2], int(key[2]), _column(own := list(group), "accuracy"), {name: _column(own, name) for name in SUMS})
        for key, group in groupby(rows, key=lambda row: (row["arm"], row["rate"], row["seed"]))
    ]


def best_rates(runs: list[Run], arms: list[str]) -> dict[str, str]:
    """By arm, the rate with the highest mean over the tuning seeds and the last three evaluations; of equal ones the
    lowest. None of an arm whose tuning runs are not all there."""
    last: dict[tuple[str, str], dict[int, float]] = {}
    for run in runs:
        if run.seed in TUNING:
            last.setdefault((run.arm, run.rate), {})[run.seed] = float(run.accuracy[-3:].mean())
    complete = {key: np.mean([*seeds.values()]) for key, seeds in last.items() if len(seeds) == len(TUNING)}
    tuned = [arm for arm in arms if all((arm, rate) in complete for rate in RATES)]
    return {arm: max(RATES, key=lambda rate: complete[arm, rate]) for arm in tuned}


class Result(NamedTuple):
    """Of a bed: the rates of all arms, the reported runs by arm and seed, the two arms that are compared, and the rates
    of those that are described beside them, of pays_others.gin."""

    rates: dict[str, str]
    runs: dict[tuple[str, int], Run]
    control: str
    method: str
    others: dict[str, str]

    def end(self, prices: tuple[float, float]) -> float:
        """The largest cost that all runs of `rates` have reached: where arms are compared."""
        return smallest_end([run for (arm, _), run in self.runs.items() if arm in self.rates], prices)

    @property
    def tokens(self) -> float:
        return self.end(TOKENS)

    @property
    def p(self) -> float:
        """Exact, not corrected."""
        return float(sign_flip(self.gains(TOKENS)))

    def of(self, arm: str, seeds: Sequence[int]) -> list[Run]:
        return [self.runs[arm, seed] for seed in seeds]

    def gains(self, prices: tuple[float, float]) -> list[float]:
        """The method's accuracy less the control's at equal cost, of each seed."""
        pairs = zip(self.of(self.method, CONFIRMED), self.of(self.control, CONFIRMED), strict=True)
        at = self.end(prices), prices
        return [method.at(*at) - control.at(*at) for method, control in pairs]


def result_of(bed: str) -> Result | str:
    """Or what is missing of its runs."""
    arms = list(config.load_suite("docs/study/suites/pays.gin").variants)
    tuning_runs = runs_of(BEDS[0])
    rates = best_rates(tuning_runs, arms)
    if len(rates) < len(arms):
        return f"rates are tuned on {BEDS[0]}: {len(rates)} of {len(arms)} arms are tuned"
    others = best_rates(tuning_runs, [*config.load_suite("docs/study/suites/pays_others.gin").variants])
    own = {(run.arm, run.seed): run for run in runs_of(bed) if run.rate == (rates | others).get(run.arm)}
    if missing := {(arm, seed) for arm in arms for seed in TUNING} - own.keys():
        return f"{len(missing)} tuning runs are missing: {first_few([f'{a} seed {s}' for a, s in sorted(missing)])}"
    # The two that are compared, and with more seeds: the best arm without replay and the best with it.
    tuning = {arm: [own[arm, seed] for seed in TUNING] for arm in arms}
    tokens = smallest_end([run for of_arm in tuning.values() for run in of_arm])
    best = lambda of: max(of, key=lambda arm: np.mean([run.at(tokens) for run in tuning[arm]]))
    control = best([arm for arm in arms if arm.startswith(CONTROL)])
    method = best([arm for arm in arms if not arm.startswith(CONTROL)])
    needed = {(arm, seed) for arm in arms for seed in DESCRIBED[bed]}
    needed |= {(arm, seed) for arm in (control, method) for seed in CONFIRMED}
    if missing := needed - own.keys():
        there = f"{len(needed) - len(missing)} of {len(needed)} runs are there"
        return f"by the tuning seeds: {method} against {control}; {there}"
    others = {arm: rate for arm, rate in others.items() if all((arm, seed) in own for seed in DESCRIBED[bed])}
    needed |= {(arm, seed) for arm in others for seed in DESCRIBED[bed]}
    return Result(rates, {key: own[key] for key in needed}, control, method, others)


def tables(bed: str) -> Iterator[str]:
    """A bed's test and its table, or what is missing."""
    result = result_of(bed)
    yield f"\n## {bed}\n"
    if isinstance(result, str):
        yield result
        return
    yield f"{result.method} against {result.control}, chosen by the tuning seeds"
    gain, corrected = shown(mean(result.gains(TOKENS))), p_value(answers().get(bed))
    yield f"at {result.tokens:,.0f} tokens, {len(CONFIRMED)} seeds: {gain}, exact p {result.p:.4f}"
    yield f"p by Holm's method over the {len(BEDS)} beds: {corrected}"
    for name, prices in PRICES.items():
        yield f"at equal seconds ({name}): {shown(mean(result.gains(prices)))}"
    yield from ("", *table(bed, result))


def table(bed: str, result: Result) -> list[str]:
    """Markdown: of each arm its rate, accuracy at equal tokens and at equal seconds, and what explains it."""
    head, rows = ("arm", "rate", "at equal tokens", f"less {result.control}", *PRICES, *WHY), []
    for arm, rate in (result.rates | result.others).items():
        runs, gain = result.of(arm, DESCRIBED[bed]), mean(described_gains(bed, result, arm))
        at = [
            float(np.mean([run.at(result.end(prices), prices) for run in runs]))
            for prices in ((0, 0), *PRICES.values())
        ]
        values = [measure(mean_sums(runs)) for measure in WHY.values()]
        why = [NONE if math.isnan(value) else number(value) for value in values]
        less = NONE if arm == result.control else shown(gain) if len(runs) > 2 else number(gain.value, sign="+")
        rows.append((arm, rate, f"{at[0]:.3f}", less, *(f"{value:.3f}" for value in at[1:]), *why))
    return markdown_table(head, rows)


def described_gains(bed: str, result: Result, arm: str) -> list[float]:
    """An arm's accuracy less the control's at equal tokens, of each seed that all arms have."""
    pairs = zip(*(result.of(one, DESCRIBED[bed]) for one in (arm, result.control)), strict=True)
    return [one.at(result.tokens) - other.at(result.tokens) for one, other in pairs]


# What the texts of the study take of a bed.
FIGURES: dict[str, Callable[[str, Result], str]] = {
    "gain": lambda bed, result: shown(mean(result.gains(TOKENS))),
    "start": lambda bed, result: levels(result, 0.0)[-1],  # all arms begin with the same model
    "half": lambda bed, result: " and ".join(reversed(levels(result, 0.5))),
    "end": lambda bed, result: " and ".join(reversed(levels(result, 1.0))),
    "seconds": lambda bed, result: shown(mean(result.gains(PRICES[SHORT]))),
    "dear": lambda bed, result: shown(mean(result.gains(PRICES[DEAR]))),
    "p_exact": lambda bed, result: p_value(result.p),
    "p": lambda bed, result: p_value(answers()[bed]),
    "late_k4": lambda bed, result: shown(mean(described_gains(bed, result, "late_injection_k4"))),
    "arms": lambda bed, result: f"`{result.method}` against `{result.control}`",
    "tokens": lambda bed, result: f"{result.tokens / 1e6:.2f}",
    "table": lambda bed, result: "\n".join(table(bed, result)),
    "others": lambda bed, result: " and ".join(
        f"`{arm}` {number(np.mean([run.at(result.tokens) for run in result.of(arm, DESCRIBED[bed])]))}, "
        f"{shown(mean(described_gains(bed, result, arm)))}"
        for arm in result.others
    ),
}


def levels(result: Result, share: float) -> list[str]:
    """Accuracies of the control and the method at a share of the tokens, means over the seeds of the comparison."""
    runs = (result.of(arm, CONFIRMED) for arm in (result.control, result.method))
    return [f"{np.mean([run.at(share * result.tokens) for run in of_arm]):.3f}" for of_arm in runs]


def answers() -> dict[str, float]:
    """By bed the p of its question, by Holm's method; none while a bed lacks runs."""
    results = [result for bed in BEDS if isinstance(result := result_of(bed), Result)]
    return dict(zip(BEDS, holm([result.p for result in results]), strict=True)) if len(results) == len(BEDS) else {}


def picture() -> bytes:
    """A PNG: for each bed that has its runs, the arms' accuracy at equal tokens by the signal that tokens bought."""
    results = {bed: result for bed in BEDS if isinstance(result := result_of(bed), Result)}
    if not results:
        raise ValueError(f"{FILE.name}: no bed has all its runs yet")
    with drawing(480 * len(results), 400) as figure:
        panels = figure.subplots(1, len(results), squeeze=False)[0]
        for axes, (bed, result) in zip(panels, results.items(), strict=True):
            axes.set(title=bed, xlabel=SIGNAL, ylabel="greedy accuracy at equal tokens")
            of_arms = {arm: result.of(arm, DESCRIBED[bed]) for arm in result.rates}
            dots = {
                arm: (float(np.mean([run.at(result.tokens) for run in runs])), WHY[SIGNAL](mean_sums(runs)))
                for arm, runs in of_arms.items()
            }
            height = 0.036 * (max(dots.values())[0] - min(dots.values())[0])  # of a name, in accuracy
            above, right = -1.0, max(x for _, x in dots.values())
            for arm, (y, x) in sorted(dots.items(), key=lambda item: item[1]):
                colour = PALETTE["m7" if arm.startswith(CONTROL) else "m1"]
                axes.plot(x, y, "o", color=colour, markersize=6)
                above = max(y, above + height)  # no name lies upon another
                name = arm.replace("_", " ").replace(" k", ", K = ")
                axes.annotate(name, (x, y), (x + right / 60, above), va="center", color=colour, fontsize=8.5)
            axes.set_xlim(0, 1.45 * right)
        return png(figure)


# What explains the ranking, of a run's sums. At w = 1 a shaped replayed token's gradient is f' = β/(1+β)², 0.083, of a
# fresh one's.
SIGNAL = "groups with a signal per million tokens"
WHY: dict[str, Callable[[dict[str, float]], float]] = {
    SIGNAL: lambda sums: 1e6 * sums["with_signal"] / sums["generated"],
    "groups with a signal": lambda sums: sums["with_signal"] / sums["groups"],
    "steps per million tokens": lambda sums: 1e6 * sums["updates"] / sums["generated"],
    "times a question came": lambda sums: sums["questions"] / sums["different"],
    "replayed rows": lambda sums: sums["replayed"] / sums["rows"],
    "their share of the gradient": lambda sums: sums["pull_replayed"] / sums["pull"],
    "trained tokens of generated": lambda sums: sums["trained"] / sums["generated"],
    "lucky successes": lambda sums: sums["lucky"] / max(sums["checked"], 1),
}


def mean_sums(runs: list[Run]) -> dict[str, float]:
    """At the end of the runs."""
    return {name: float(np.mean([run.sums[name][-1] for run in runs])) for name in SUMS}


def smallest_end(runs: list[Run], prices: tuple[float, float] = TOKENS) -> float:
    """The largest cost that all of them have reached."""
    return float(min(run.cost(prices)[-1] for run in runs))


def _column(rows: list[dict[str, str]], name: str) -> np.ndarray:
    return np.array([float(row[name] or "nan") for row in rows])


if __name__ == "__main__":
    sys.exit(main())
