"""Training runs side by side: a table for the terminal and a PNG of their learning curves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..files import write
from ..tracking.metrics_log import MetricsLog
from .charts import PALETTE, SERIES, drawing
from .tables import aligned

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
    """A run's metrics, one row for each step. Raises FileNotFoundError if there are none."""
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
    """A line for each run: accuracy before, after and best, mean reward of the last 20 steps, cost."""
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
    return "\n".join(aligned(lines, left=len(header)))


def plot(runs: Mapping[str, Rows], path: Path, panels: Sequence[tuple[str, str, str]] = PANELS) -> None:
    """Draw six panels with all runs into a PNG."""
    with drawing(936, 504, layout="constrained") as chart:
        axes = chart.figure.subplots(2, 3)
        for axis, (title, x, y) in zip(axes.flat, panels, strict=True):
            for i, (name, rows) in enumerate(runs.items()):
                look = {"color": PALETTE[f"m{i % SERIES}"], "marker": "o" if y == ACCURACY else "", "markersize": 4}
                axis.plot(*series(rows, x, y), label=name, **look)
            axis.set(title=title, xlabel=x)
            axis.set_ylim(bottom=0)
        axes.flat[0].legend()
        write(path, chart.png())
