"""Training runs side by side: a table for the terminal and a PNG of their learning curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..files import write
from ..progress import score_name
from ..tracking.metrics_log import MetricsLog
from .plots import PALETTE, SERIES, drawing
from .results_table import aligned

Rows = list[dict[str, float]]
TOKENS = "cost/generated_tokens"
ACCURACY = "eval/greedy_accuracy"  # where validation is sampled: eval/validation/avg_at_<k> in its place

# Title, metric on the x axis, metric on the y axis.
PANELS = (
    ("Validation accuracy by step", "step", ACCURACY),
    ("Validation accuracy by generated tokens", TOKENS, ACCURACY),
    ("Reward of fresh rollouts", "step", "reward/mean"),
    ("Lucky guesses among correct rollouts", "step", "reward/lucky_guess_rate"),
    ("Share of replayed questions", "step", "replay/actual_share"),
    ("Retired questions", "step", "replay/retired"),
)


def read(run: Path) -> Rows:
    """A run's metrics, one row for each step."""
    return list(MetricsLog(run / "metrics.jsonl").rows())


def series(rows: Rows, x: str, y: str) -> tuple[list[float], list[float]]:
    """The points at which both metrics were measured."""
    if y == ACCURACY:
        y = score_name(name for row in rows for name in row) or y
    points = [(row[x], row[y]) for row in rows if x in row and y in row]
    return [a for a, _ in points], [b for _, b in points]


def table(runs: Mapping[str, Rows]) -> str:
    """A line for each run: accuracy before, after and best, mean reward of the last 20 steps, cost."""
    lines: list[tuple[str, ...]] = [("run", "accuracy before", "after", "best", "reward", "lucky", "tokens", "minutes")]
    for name, rows in runs.items():
        accuracy = series(rows, "step", ACCURACY)[1]
        steps = [row for row in rows if "reward/mean" in row]
        shares = [accuracy[0], accuracy[-1], max(accuracy)]
        for metric in ("reward/mean", "reward/lucky_guess_rate"):
            last = [row.get(metric, 0.0) for row in steps[-20:]]
            shares.append(sum(last) / len(last))
        tokens, minutes = rows[-1]["cost/generated_tokens"] / 1e6, sum(row["time/step"] for row in steps) / 60
        lines.append((name, *(f"{share:.3f}" for share in shares), f"{tokens:.2f} M", f"{minutes:.1f}"))
    return "\n".join(aligned(lines, left=len(lines[0])))


def plot(runs: Mapping[str, Rows], path: Path) -> None:
    """Draw six panels with all runs into a PNG."""
    with drawing(936, 504, layout="constrained") as chart:
        axes = chart.figure.subplots(2, 3)
        for axis, (title, x, y) in zip(axes.flat, PANELS, strict=True):
            for i, (name, rows) in enumerate(runs.items()):
                look = {"color": PALETTE[f"m{i % SERIES}"], "marker": "o" if y == ACCURACY else "", "markersize": 4}
                along, values = series(rows, x, y)
                axis.plot([each / 1e6 for each in along] if x == TOKENS else along, values, label=name, **look)
            axis.set(title=title, xlabel="million generated tokens" if x == TOKENS else x)
            axis.locator_params(axis="x", nbins=4)  # labels of tokens are long
            axis.set_ylim(bottom=0)
        axes.flat[0].legend()
        write(path, chart.png())
