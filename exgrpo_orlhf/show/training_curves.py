"""The learning curves of training runs as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..files import write
from ..progress import score_name
from .charts import SERIES, curve, drawing, png

Rows = Sequence[Mapping[str, float]]  # of metrics.jsonl
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


def plot(runs: Mapping[str, Rows], path: Path) -> None:
    """Draw six panels with all runs into a PNG. runs: by name"""
    with drawing(936, 504) as figure:
        panels = figure.subplots(2, 3)
        for axes, (title, x, y) in zip(panels.flat, PANELS, strict=True):
            for i, (name, rows) in enumerate(runs.items()):
                metric = (score_name(key for row in rows for key in row) or y) if y == ACCURACY else y
                points = [
                    (row[x] / (1e6 if x == TOKENS else 1), row[metric]) for row in rows if {x, metric} <= row.keys()
                ]
                along, values = zip(*points, strict=True) if points else ((), ())
                curve(
                    axes, along, values, f"m{i % SERIES}", label=name, marker="o" if y == ACCURACY else "", markersize=4
                )
            axes.set(title=title, xlabel="million generated tokens" if x == TOKENS else x)
            axes.locator_params(axis="x", nbins=4)  # labels of tokens are long
            axes.set_ylim(bottom=0)
        panels.flat[0].legend()
        write(path, png(figure))
