"""The picture of one finding: late injection and on-policy training, seed by seed (docs/paired_seeds.png)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exgrpo_orlhf.evaluation.plots import PALETTE, drawing

if TYPE_CHECKING:
    from document import Document

PART, VARIANT, BASELINE = "study_rare_same_rate", "late", "on_policy"


def picture(document: Document) -> bytes:
    """A PNG: a row for each seed with the last accuracy of both; above them the mean difference with its interval."""
    late, on_policy = (document.by_seed(PART, name, "final") for name in (VARIANT, BASELINE))
    seeds = sorted(on_policy, key=on_policy.__getitem__)
    rows = range(len(seeds))
    with drawing(620, 290) as chart:
        axes = chart.axes(62, 24, 58, 46, xlabel="greedy accuracy after 200 updates; the axis begins at 0.80")
        axes.set(xlim=(0.8, 0.94), yticks=rows, yticklabels=[f"seed {seed}" for seed in seeds], ylim=(-0.7, len(seeds)))
        axes.grid(visible=False, axis="y")
        axes.hlines(rows, [on_policy[s] for s in seeds], [late[s] for s in seeds], color=PALETTE["line"], linewidth=3)
        for name, values, colour in (("on-policy", on_policy, "m7"), ("late injection", late, "m1")):
            axes.plot([values[s] for s in seeds], rows, "o", markersize=8, color=PALETTE[colour], label=name)
        axes.legend(loc="upper left", frameon=False)
        effect = document.difference(PART, VARIANT, BASELINE, "final")
        wins = sum(late[seed] > on_policy[seed] for seed in seeds)
        heading = f"Late injection ends higher with {wins} of {len(seeds)} seeds: mean {effect}"
        chart.figure.text(0.02, 0.93, heading, fontsize=12, weight="bold")
        chart.figure.text(
            0.02, 0.86, "one task with rare successes; the same learning rate, questions, updates and tokens"
        )
        return chart.png()
