#!/usr/bin/env python
"""Seconds of a step, synchronous and one step ahead, estimated by simulation for 8 and 32 GPUs. Nothing is measured.

    python benchmarks/ahead.py                              # print the table, about half a minute
    python benchmarks/ahead.py --page                       # also write docs/ahead/*.csv, docs/ahead.png, docs/ahead.md
    python benchmarks/ahead.py --lengths runs/NAME/rollouts.jsonl --limit 8192     # with the lengths of a run
    python benchmarks/ahead.py --lengths results/NAME/math500/samples.jsonl --limit 32768   # or of an evaluation

Synchronous: all GPUs generate, then all train (the layouts of gin/engines/). One step ahead: some GPUs generate batch
t+1 with the weights of step t−1, while the others train on batch t; then the weights are sent. engine_sim.py has the
assumptions. docs/ahead.md says when to use which.

Goals: the sum of docs/cluster.md is reproduced within 2 % (550 and 210 GPU-hours); with constant lengths the simulation
equals its closed form; no step is faster than its longest response alone, or than its training.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import engine_sim as sim
import numpy as np
from command_line import finish, make_parser

from exgrpo_orlhf.evaluation.plots import PALETTE, drawing
from exgrpo_orlhf.evaluation.results_table import markdown_table
from exgrpo_orlhf.files import write
from exgrpo_orlhf.study.comparison_tables import csv_text

DOCS = Path(__file__).resolve().parent.parent / "docs"
BATCHES = 9  # simulated for each figure
LENGTHS = [sim.Lengths(median, tail, limit)
           for median, limit in ((1600, 8192), (1600, 32768), (6400, 32768)) for tail in (2, 5, 10)]  # fmt: skip
BASE = sim.Lengths(1600, 5, 8192)  # a mean of 2,000, as in docs/cluster.md
STATED = {"A100": 550, "H100": 210}  # GPU-hours of 700 steps in docs/cluster.md
CASE = ("gpu", "gpus", "limit", "median", "tail", "rho")
HEAD = (
    *CASE, "mean_tokens", "cut_share", "layout_seconds", "sync_seconds", "sync_generate", "sync_train", "sync_idle",
    "generating", "training", "ahead_seconds", "ahead_generate", "ahead_train", "ahead_idle", "speedup",
    "any_generating", "any_training", "any_seconds", "any_idle", "any_speedup",
)  # fmt: skip
VARIED = (("", 0.0), ("TRAIN_SHARE", 0.2), ("TRAIN_SHARE", 0.45), ("BANDWIDTH_SHARE", 0.5), ("DECODE_OVERHEAD", 6e-3),
          ("LINK", 10e9), ("OTHER", 15.0), ("ALONE", 0.6))  # fmt: skip
PARTS = ("gpu", "gpus", "estimate", "generate", "score", "measure", "update", "overhead", "seconds")


def batches_of(lengths: sim.Lengths, rho: float, seed: int, count: int = BATCHES) -> list[sim.Batch]:
    rng = np.random.default_rng(seed)
    return [sim.draw_batch(lengths, rho, rng) for _ in range(count)]


def splits(gpu: sim.Gpu, gpus: int, limit: int) -> list[tuple[int, int]]:
    """(generating, training) GPUs; of a cluster of several nodes an even number. Training must fit in their memory."""
    return [(gpus - n, n) for n in range(1 + gpus // 32, gpus, 1 + gpus // 32) if sim.trainer_fits(gpu, n, limit)]


def case(name: str, gpus: int, lengths: sim.Lengths, rho: float, seed: int, count: int = BATCHES) -> dict[str, Any]:
    """A row of cases.csv. The best split is one whose ranks divide an optimiser step's rows; any_…: any split."""
    gpu, batches = sim.GPUS[name], batches_of(lengths, rho, seed, count)
    drawn = [length for batch in batches for group in batch.generated for length in group]
    tokens = sum(drawn) / len(drawn)
    sync = sim.mean([sim.synchronous(gpu, batch, gpus) for batch in batches[1:]])
    found = {split: sim.mean(sim.one_ahead(gpu, batches, *split)) for split in splits(gpu, gpus, lengths.limit)}
    best = min((one for one in found if sim.OPTIMIZER_ROWS % one[1] == 0), key=lambda split: found[split].seconds)
    free = min(found, key=lambda split: found[split].seconds)
    ahead = found[best]
    values = (
        tokens, sum(n == lengths.limit for n in drawn) / len(drawn),
        sim.layout_parts(gpu, gpus, rho, tokens)["seconds"],
        sync.seconds, sync.generate, sync.train, sync.idle,
        *best, ahead.seconds, ahead.generate, ahead.train, ahead.idle, sync.seconds / ahead.seconds,
        *free, found[free].seconds, found[free].idle, sync.seconds / found[free].seconds,
    )  # fmt: skip
    key = (name, gpus, lengths.limit, lengths.median, lengths.tail, rho)
    return dict(zip(HEAD, [*key, *(round(value, 3) for value in values)], strict=True))


def parts(seed: int) -> list[dict[str, Any]]:
    """Rows of parts.csv: a synchronous step by the sum of docs/cluster.md and by the simulation, ρ = 0.5."""
    rows = []
    constant = sim.Lengths(2000, 1, 8192)
    for name, gpus in (("A100", 8), ("H100", 8), ("A100", 32), ("H100", 32)):
        gpu = sim.GPUS[name]
        rows.append({"estimate": "sum", **sim.layout_parts(gpu, gpus, 0.5)})
        for estimate, lengths in (("all 2,000 tokens", constant), ("log-normal", BASE)):
            batches = batches_of(lengths, 0.5, seed)[1:]
            step = sim.mean([sim.synchronous(gpu, batch, gpus) for batch in batches])
            trained = [sim.train(gpu, batch, gpus) for batch in batches]
            row = {field: float(np.mean([getattr(one, field) for one in trained])) for field in PARTS[4:7]}
            row |= {"generate": step.generate, "overhead": step.overhead, "seconds": step.seconds}
            rows.append({"estimate": estimate, **row})
        rows[-3:] = [
            {"gpu": name, "gpus": gpus, **{key: value if key == "estimate" else round(value, 1)
                                          for key, value in row.items()}} for row in rows[-3:]
        ]  # fmt: skip
    return rows


def assumptions(seed: int) -> list[dict[str, Any]]:
    """Rows of assumptions.csv: the base case, ρ = 0.5, with one assumption of engine_sim.py changed at a time."""
    rows = []
    for gpus in (8, 32):
        for name, value in VARIED:
            before = getattr(sim, name) if name else None
            if name:
                setattr(sim, name, value)
            try:
                rows.append(
                    {"assumption": name, "before": before, "value": value, **case("H100", gpus, BASE, 0.5, seed)}
                )
            finally:
                if name:
                    setattr(sim, name, before)
    return rows


def goals(seed: int) -> dict[str, float]:
    """Largest relative differences from docs/cluster.md and from the closed form, and the least distance to a bound."""
    hours = {
        name: 700 * 8 * sim.layout_parts(gpu, 8, 0.5)["seconds"] / 3600 / STATED[name] for name, gpu in sim.GPUS.items()
    }
    gpu, rows, length = sim.GPUS["H100"], 64, 1000
    made = sim.run_engine(gpu, [[length] * sim.GROUP] * (rows // sim.GROUP), 10**6).seconds
    prefill = rows // sim.GROUP * sim.PROMPT * 2 * sim.PARAMETERS / (gpu.flops * sim.GENERATE_SHARE)
    closed = prefill + sim.decode_seconds(gpu, rows, rows * sim.PROMPT, length)
    batches = batches_of(BASE, 0.5, seed, 3)
    slack = []
    for batch, step in zip(batches, sim.one_ahead(gpu, batches, 4, 4), strict=False):
        slack.append(step.seconds - sim.train(gpu, batch, 4).total)
    for following, step in zip(batches[1:], sim.one_ahead(gpu, batches, 4, 4), strict=True):
        slack.append(step.seconds - sim.decode_seconds(gpu, 1, 0, max(map(max, following.generated))))
    return {
        "from_cluster_md": max(abs(share - 1) for share in hours.values()),
        "from_closed_form": abs(made / closed - 1),
        "least_slack": min(slack),
    }


# -- the page ----------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


Rows = Sequence[Mapping[str, str]]


def tables(cases: Rows, steps: Rows, varied: Rows) -> dict[str, str]:
    """The tables of docs/ahead.md by name, from the rows of cases.csv, parts.csv and assumptions.csv."""
    made = {
        "parts": (
            ("GPUs", "estimate", "generation", "scoring", "log-probs", "update", "other", "a step"),
            [(f"{row['gpus']} × {row['gpu']}", row["estimate"], *(row[name] for name in PARTS[3:])) for row in steps],
            2,
        ),
        "assumptions": (
            ("assumption", "GPUs", "synchronous", "one ahead", "split", "faster", "any split", "faster"),
            [(_assumption(row), f"{row['gpus']} × {row['gpu']}", *_line(row)[5:6], *_line(row)[7:9], *_line(row)[10:])
             for row in varied],
            2,
        ),
    }  # fmt: skip
    head = ("longest", "median", "p99 / median", "ρ", "sum", "synchronous", "idle", "one ahead", "split", "idle",
            "faster", "any split", "faster")  # fmt: skip
    for gpu, gpus in (("H100", 8), ("H100", 32), ("A100", 8), ("A100", 32)):
        chosen = [row for row in cases if (row["gpu"], row["gpus"]) == (gpu, str(gpus))]
        made[f"{gpu} {gpus}"] = (head, [_line(row) for row in chosen], 0)
    return {name: "\n".join(markdown_table(*table)) for name, table in made.items()}


def _assumption(row: Mapping[str, str]) -> str:
    name, before, value = row["assumption"], row["before"], row["value"]
    return f"`{name}` = {float(value):g} in place of {float(before):g}" if name else "as above"


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{int(row['limit']):,}", f"{float(row['median']):,.0f}", f"{float(row['tail']):.3g}", f"{float(row['rho']):g}",
        f"{float(row['layout_seconds']):.0f} s", f"{float(row['sync_seconds']):.0f} s",
        f"{float(row['sync_idle']):.0%}", f"{float(row['ahead_seconds']):.0f} s",
        f"{float(row['generating']):.0f} + {float(row['training']):.0f}", f"{float(row['ahead_idle']):.0%}",
        f"{float(row['speedup']):.2f} ×",
        f"{float(row['any_generating']):.0f} + {float(row['any_training']):.0f}", f"{float(row['any_speedup']):.2f} ×",
    )  # fmt: skip


def filled(text: str, made: Mapping[str, str]) -> str:
    """A page with each table between its two comments replaced. Raises ValueError where the comments are missing."""
    for name, table in made.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise ValueError(f"docs/ahead.md has no place for the table {name!r}")
        text = before + begin + table + "\n" + rest[rest.index(end) :]
    return text


def picture(cases: Rows) -> bytes:
    """How much faster one step ahead is by the tail of the lengths, for 8 and for 32 GPUs."""
    with drawing(860, 330) as chart:
        for panel, gpus in enumerate(("8", "32")):
            rows = [row for row in cases if row["gpu"] == "H100" and row["gpus"] == gpus]
            left = 70 + 430 * panel
            axes = chart.axes(
                left, 860 - left - 340, 36, 64, xlim=(1.7, 11.5), ylim=(0.75, 1.65), xscale="log",
                title=f"{gpus} × H100: synchronous / one step ahead", xlabel="p99 / median of the response lengths",
                ylabel="times as fast" if not panel else "",
            )  # fmt: skip
            axes.set_xticks([2, 5, 10], ["2", "5", "10"])
            axes.set_xticks([], minor=True)
            axes.axhline(1, color=PALETTE["quiet"], linewidth=1)
            for colour, (median, limit) in enumerate((("1600", "8192"), ("1600", "32768"), ("6400", "32768"))):
                for rho, line in (("0.0", "--"), ("0.5", "-")):
                    chosen = [r for r in rows if (r["median"], r["limit"], r["rho"]) == (median, limit, rho)]
                    label = f"median {int(median):,}, longest {int(limit):,}" if rho == "0.5" and panel else None
                    points = [(float(r["tail"]), float(r["speedup"])) for r in chosen]
                    axes.plot(*zip(*points, strict=True), line, marker="o", color=PALETTE[f"m{colour}"], label=label)
        axes.legend(fontsize=9, frameon=False, loc="lower right")
        chart.figure.text(0.01, 0.02, "Estimated by simulation, nothing measured. Full lines ρ = 0.5, dashed ρ = 0; "
                          "the best split whose training ranks divide 512.", fontsize=9)  # fmt: skip
        return chart.png()


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", action="store_true", help="write docs/ahead/*.csv, docs/ahead.png and the tables")
    parser.add_argument("--lengths", type=Path, metavar="FILE", help="rollouts.jsonl or samples.jsonl: its lengths")
    parser.add_argument("--limit", type=int, default=8192, help="tokens of a response at most, with --lengths")
    given = parser.parse_args()
    if given.page and (given.lengths or given.small or given.seed):
        parser.error("--page takes neither --lengths, --small nor --seed: the page has one set of figures")
    chosen = [BASE] if given.small else LENGTHS
    if given.lengths:
        try:
            chosen = [sim.Lengths(*sim.fit(given.lengths), given.limit)]
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"--lengths {error}")
    keys = [("H100", gpus, one, rho) for gpus in (8, 32) for one in chosen for rho in (0.0, 0.5)]
    keys += [("A100", gpus, one, 0.5) for gpus in (8, 32) for one in chosen if one == BASE or given.lengths]
    cases = [case(*key, given.seed, 3 if given.small else BATCHES) for key in keys]
    files = (
        ("cases.csv", HEAD, cases),
        ("parts.csv", PARTS, parts(given.seed)),
        ("assumptions.csv", ("assumption", "before", "value", *HEAD), [] if given.small else assumptions(given.seed)),
    )
    texts = [[{name: str(value) for name, value in row.items()} for row in rows] for _, _, rows in files]
    for name, table in tables(*texts).items():
        print(f"{name}\n{table}\n")
    if given.page:
        for name, head, rows in files:
            write(DOCS / "ahead" / name, csv_text(head, rows))
        write(DOCS / "ahead.png", picture(texts[0]))
        page = DOCS / "ahead.md"
        write(page, filled(page.read_text(encoding="utf-8"), tables(*texts)))
    reached = goals(given.seed)
    met = reached["from_cluster_md"] < 0.02 and reached["from_closed_form"] < 1e-9 and reached["least_slack"] > 0
    summary = (
        f"{reached['from_cluster_md']:.1%} from the sum of docs/cluster.md (goal 2 %), "
        f"{reached['from_closed_form']:.0e} from the closed form, {reached['least_slack']:.1f} s above the bound"
    )
    return finish(given, {"cases": cases, "parts": files[1][2], **reached, "met": met}, summary)


if __name__ == "__main__":
    sys.exit(main())
