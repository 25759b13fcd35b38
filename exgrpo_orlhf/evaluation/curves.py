"""Runs side by side: a table in the terminal and a picture of their learning curves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, never a window
import matplotlib.pyplot as plt

from ..tracking.metrics_log import MetricsLog

Rows = list[dict[str, float]]
ACCURACY = "eval/greedy_accuracy"  # where validation is sampled: eval/validation/avg_at_<k> in its place

# Title, metric on the x axis, metric on the y axis.
PANELS = (
    ("Validation accuracy by step", "step", ACCURACY),
    ("Validation accuracy by generated tokens", "cost/generated_tokens", ACCURACY),
    ("Reward of fresh rollouts", "step", "reward/mean"),
    ("Lucky guesses among correct rollouts", "step", "reward/lucky_guess_rate"),
    ("Share of replayed questions", "step", "replay/actual_share"),
    ("Retired questions", "step", "replay/retired"),
)


def read(run: Path) -> Rows:
    """A run's metrics, one row a step. Raises FileNotFoundError if there are none."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: {run} is not the folder of a run")
    return list(MetricsLog(path).rows())


def series(rows: Rows, x: str, y: str) -> tuple[list[float], list[float]]:
    """The points at which both metrics were measured."""
    if y == ACCURACY and not any(ACCURACY in row for row in rows):
        y = next((name for row in rows for name in row if re.fullmatch(r"eval/validation/avg_at_\d+", name)), y)
    points = [(row[x], row[y]) for row in rows if x in row and y in row]
    return [a for a, _ in points], [b for _, b in points]


def table(runs: Mapping[str, Rows]) -> str:
    """One line a run: accuracy before, after and best, the reward of the last 20 steps, cost."""
    header = ("run", "accuracy before", "after", "best", "reward", "lucky", "tokens", "minutes")
    lines = [header]
    for name, rows in runs.items():
        accuracy = series(rows, "step", ACCURACY)[1]
        steps = [row for row in rows if "reward/mean" in row]
        last = steps[-20:]
        lines.append(
            (
                name,
                f"{accuracy[0]:.3f}" if accuracy else "",
                f"{accuracy[-1]:.3f}" if accuracy else "",
                f"{max(accuracy):.3f}" if accuracy else "",
                f"{sum(row['reward/mean'] for row in last) / max(1, len(last)):.3f}",
                f"{sum(row['reward/lucky_guess_rate'] for row in last) / max(1, len(last)):.3f}",
                f"{rows[-1]['cost/generated_tokens'] / 1e6:.2f} M",
                f"{sum(row['time/step'] for row in steps) / 60:.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def plot(runs: Mapping[str, Rows], path: Path, panels: Sequence[tuple[str, str, str]] = PANELS) -> None:
    """Draw the panels for all runs into a PNG."""
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    for axis, (title, x, y) in zip(axes.flat, panels, strict=True):
        for name, rows in runs.items():
            axis.plot(*series(rows, x, y), label=name, marker="o" if y == ACCURACY else "", markersize=4)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel(x)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
