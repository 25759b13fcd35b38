"""For `run_bench.py table`: the runs of a suite beside a table of the ExGRPO paper, and which of the differences of the
paper one run could show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from scipy.special import ndtri

from exgrpo_orlhf import checkpoints
from exgrpo_orlhf.evaluation.benchmarks import project_definitions
from exgrpo_orlhf.evaluation.paper import Paper, bounds_text, score, value_text
from exgrpo_orlhf.evaluation.results_folder import Results
from exgrpo_orlhf.show.seeds import mean
from exgrpo_orlhf.show.tables import NONE, aligned, percent
from exgrpo_orlhf.tracking.bootstrap import LEVEL


def runs_of(folder: Path, variants: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """The runs of a suite, variant by variant and seed by seed; of a variant without any, that of seed 0."""
    for variant in variants:
        runs = sorted((folder / variant).glob("seed*"), key=lambda run: (len(run.name), run.name))
        yield from ((variant, run) for run in runs or [folder / variant / "seed0"])


def last_checkpoint(run: Path) -> Path | None:
    """Of a run that has made all of its steps; None of another one."""
    saved, file = checkpoints.find(run), run / "config.gin"
    planned = re.search(r"(?m)^train\.steps = (\d+)", file.read_text("utf-8") if file.exists() else "")
    return saved[max(saved)] if saved and planned and max(saved) >= int(planned[1]) else None


def suite_table(
    paper: Paper, name: str, baseline: str | None, backbone: str, runs: Mapping[str, Mapping[str, Results]]
) -> str:
    """The variants of a suite, for each one the paper's row and ours, with intervals and notes.

    name: of the suite's file, as in evals/paper.toml; baseline: the variant that Suite.baseline names
    backbone: of the paper's rows; runs: variant -> seed -> results
    """
    rows = {v: paper.rows.get((name, backbone, v)) or paper.rows.get((None, backbone, v), {}) for v in runs}
    base, benchmarks = rows.get(baseline or "", {}), project_definitions().benchmarks
    sizes = {column: paper.questions.get(column) or benchmarks[column].rows or 0 for column in paper.samples}
    z2 = float(ndtri((1 + LEVEL) / 2)) ** 2
    shares = {column: (base[column] / 100, n) for column, n in sizes.items() if base}
    squares = {
        c: (z2 * p * (1 - p) / n + (z2 / n / 2) ** 2) / (1 + z2 / n) ** 2 for c, (p, n) in shares.items()
    }  # Wilson
    widths = {
        c: 100 * sum(squares[k] for k in columns) ** 0.5 / len(columns)
        for c in base
        for columns in [paper.averages.get(c, [c])]
    }

    def line(name: str, cells: dict[str, str]) -> tuple[str, ...]:
        return (name, *(cells.get(column, NONE) for column in paper.titles))

    lines = [line("", paper.titles)]
    lines.append(line("questions · samples", {c: f"{sizes[c]:,} · {n}" for c, n in paper.samples.items()}))
    lines += [line("± of one run", {c: f"{width:.1f}" for c, width in widths.items()})] if base else []
    footnotes: dict[str, None] = {}
    for variant, row in rows.items():
        near = {c for c in row.keys() & widths if variant != baseline and abs(row[c] - base[c]) <= widths[c]}
        lines.append(line(f"{variant}, the paper", {c: f"{value:.1f}{' ~' * (c in near)}" for c, value in row.items()}))
        by_seed = []
        for seed, results in runs[variant].items():
            by_seed.append(scores := {c: score(results, paper, c) for c in paper.titles})
            lines.append(line(f"  {seed}", {c: value_text(value, why) for c, (value, _, why) in scores.items()}))
            footnotes |= {f"{paper.titles[c]}: {why}.": None for c, (*_, why) in scores.items() if why}
        bounds = {c: interval for run in by_seed for c, (_, interval, _) in run.items()}
        if len(by_seed) > 1:
            values = {c: [value for run in by_seed if (value := run[c][0]) is not None] for c in paper.titles}
            means = {c: mean(sample) for c, sample in values.items() if len(sample) == len(by_seed)}
            lines.append(line("  mean of the seeds", {c: percent(estimate.value) for c, estimate in means.items()}))
            bounds = {c: estimate.bounds for c, estimate in means.items()}
        lines += [line("    95 %", {c: bounds_text(ends) for c, ends in bounds.items()})] if by_seed else []
    notes = [
        f"±: half of the 95 % interval (Wilson's) of one run with the accuracies of the paper's {baseline}. By "
        "question, variance p (1 − p): exact for one sample, the worst case for avg@32 (no figures by question exist).",
        f"~: within ± of {baseline}: one run may not show it. Two runs have a difference with that interval if "
        "their results on a question correlate by 0.5; training seeds add to it.",
    ]
    text = [
        *aligned(lines, left=1),
        f"\nIn %. The paper: {paper.source}, one run a row. {NONE}: none. *: not as in the paper.",
        *(notes if base else ["The suite binds no Suite.baseline that is in the paper: no ± of one run, no ~."]),
        *footnotes,
    ]
    return "\n".join(text).replace("\\*", "*")
