"""The picture of one finding: late injection and on-policy training, seed by seed (docs/paired_seeds.png)."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from document import Document, shown

from exgrpo_orlhf.show.charts import PALETTE, drawing, place, png
from exgrpo_orlhf.show.seeds import mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PART, VARIANT, BASELINE = "study_rare_same_rate", "late", "on_policy"
PRETRAINED = Path(__file__).resolve().parents[1] / "smollm2" / "rare" / "runs"  # <variant>-seed<n>.csv


class Pairs(NamedTuple):
    """The last accuracy of both methods by seed, and in which range it is shown."""

    title: str
    late: Mapping[str, float]
    on_policy: Mapping[str, float]
    axis: str
    limits: tuple[float, float]


def picture(document: Document) -> bytes:
    """A PNG: a panel for each model with a row for each seed; above it the mean difference with its interval."""
    late, on_policy = (document.by_seed(PART, name, "final") for name in (VARIANT, BASELINE))
    axis = "greedy accuracy after 200 updates; the axis begins at 0.80"
    panels = [
        Pairs("A tiny model, modular arithmetic", late, on_policy, axis, (0.8, 0.94)),
        Pairs(
            "SmolLM2-135M, word problems of two calculations",
            *(last_accuracy(PRETRAINED, name) for name in ("late_injection", "on_policy")),
            "accuracy of 4 samples after 100 updates; the axis begins at 0.14",
            (0.14, 0.30),
        ),
    ]
    with drawing(1060, 330, layout=None) as figure:
        for column, pairs in enumerate(panels):
            left = 62 + 530 * column
            axes = place(figure, left, 1060 - left - 446, 62, 46, xlabel=pairs.axis)
            draw(axes, pairs)
            differences = [pairs.late[seed] - pairs.on_policy[seed] for seed in pairs.on_policy]
            wins = sum(each > 0 for each in differences)
            words = f"late injection higher with {wins} of {len(differences)} seeds: {shown(mean(differences))}"
            figure.text((left - 44) / 1060, 0.93, pairs.title, fontsize=12, weight="bold")
            figure.text((left - 44) / 1060, 0.865, words)
        axes.legend(loc="lower right", frameon=False)
        return png(figure)


def draw(axes: Axes, pairs: Pairs) -> None:
    """A row for each seed, the highest accuracy of on-policy training above."""
    seeds = sorted(pairs.on_policy, key=pairs.on_policy.__getitem__)
    rows = range(len(seeds))
    axes.set(xlim=pairs.limits, yticks=rows, yticklabels=[f"seed {seed}" for seed in seeds], ylim=(-0.7, len(seeds)))
    axes.grid(visible=False, axis="y")
    late, on_policy = ([values[seed] for seed in seeds] for values in (pairs.late, pairs.on_policy))
    axes.hlines(rows, on_policy, late, color=PALETTE["line"], linewidth=3)
    for name, values, colour in (("on-policy", on_policy, "m7"), ("late injection", late, "m1")):
        axes.plot(values, rows, "o", markersize=8, color=PALETTE[colour], label=name)


def last_accuracy(folder: Path, variant: str) -> dict[str, float]:
    """By seed, from the CSV files that benchmarks/smollm2.py writes."""
    values = {}
    for path in sorted(folder.glob(f"{variant}-seed*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row["accuracy"] for row in csv.DictReader(file) if row["accuracy"]]
        values[path.stem.rpartition("-seed")[2]] = float(rows[-1])
    return values
