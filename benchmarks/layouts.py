#!/usr/bin/env python
"""What each layout of GPUs needs with the paper's recipe: memory, download, disk and hours. All of it is estimated.

    python benchmarks/layouts.py            # print the table
    python benchmarks/layouts.py --page     # also write it into docs/cluster.md

For a run of your own, `python scripts/train.py --gin … --dry-run` prints the same sums.

Goal: every layout fits on the GPUs that it is made for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from command_line import finish, make_parser

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.openrlhf import estimates
from exgrpo_orlhf.io.files import write
from exgrpo_orlhf.io.progress import duration
from exgrpo_orlhf.preflight.dry_run import published_config
from exgrpo_orlhf.preflight.needs import buffer_bytes
from exgrpo_orlhf.show.tables import markdown_table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cluster.md"
MODELS = {
    "7B": published_config("Elliott/Qwen2.5-Math-7B-16k-think"),
    "1.5B": published_config("./models/Qwen2.5-Math-1.5B-16k"),
}
STEPS = {"7B": 700, "1.5B": 500}  # of the paper's runs
LAYOUTS = {  # model, and files beside the layout
    "1gpu_24gb": ("1.5B", ["recipes/lora.gin"]),
    "4gpu_24gb": ("1.5B", []),
    "1gpu": ("1.5B", []),
    "8gpu": ("7B", []),
    "8gpu_ahead": ("7B", []),
    "multinode": ("7B", []),
    "multinode_ahead": ("7B", []),
}
HEAD = (
    "`gin/engines/openrlhf_…`", "GPUs", "model", "a GPU: model, update, rollout", "cache, tokens", "a host", "download",
    "disk", "a step", "a run",
)  # fmt: skip


def needs(layout: str) -> dict[str, Any]:
    """The sums of a layout, in bytes, tokens and seconds; seconds of a step by card."""
    name, files = LAYOUTS[layout]
    bound = ["PretrainedModel.path = 'model'", "QuestionFile.path = 'questions'", f"train.steps = {STEPS[name]}"]
    experiment = config.load(["recipes/paper.gin", f"engines/openrlhf_{layout}.gin", *files], bound)
    count = estimates.parameters_of(MODELS[name], experiment.lora)
    assert count is not None
    assert experiment.openrlhf is not None
    card = estimates.CARDS[experiment.openrlhf.gpu]
    sums = estimates.memory_of(experiment, MODELS[name], card.memory)
    buffer = buffer_bytes(experiment, 0.5, estimates.RESPONSE)
    alike = [gpu for gpu, one in estimates.CARDS.items() if one.memory == card.memory]
    same = {gpu: estimates.step_of(experiment, count[0], estimates.CARDS[gpu]) for gpu in alike}
    return {
        "gpus": next(iter(same.values()))[1],
        "model_name": f"{name}{', LoRA' if files else ''}",
        "total": card.memory,
        "short": estimates.too_little_memory(experiment, sums, card.memory),
        "model": sums.model, "update": sums.update, "rollout": sums.rollout, "cache": sums.cache,
        "host": sums.host + buffer,
        "download": 2 * count[0],
        "disk": (experiment.settings.keep + 1) * (estimates.checkpoint_bytes(*count) + buffer),
        "steps": STEPS[name],
        "seconds": {gpu: seconds for gpu, (seconds, _) in same.items()},
    }  # fmt: skip


def line(layout: str, row: dict[str, Any]) -> tuple[str, ...]:
    gb = {name: row[name] / 1e9 for name in ("total", "model", "update", "rollout", "host", "download", "disk")}
    steps = [f"{gpu} {duration(seconds)}" for gpu, seconds in row["seconds"].items()]
    runs = [f"{gpu} {seconds * row['steps'] / 3600:.0f} h" for gpu, seconds in row["seconds"].items()]
    return (
        f"`{layout}`", f"{row['gpus']} × {gb['total']:.0f} GB", row["model_name"],
        f"{gb['model']:.1f}, {gb['update']:.1f}, {gb['rollout']:.1f}", f"{row['cache']:,}",
        *(f"{gb[name]:.0f} GB" for name in ("host", "download", "disk")), ", ".join(steps), ", ".join(runs),
    )  # fmt: skip


def table(rows: dict[str, dict[str, Any]]) -> str:
    return "\n".join(markdown_table(HEAD, [line(layout, row) for layout, row in rows.items()], 3))


def filled(text: str, table: str) -> str:
    """docs/cluster.md with another table between its two comments. Raises ValueError where the comments are missing."""
    before, begin, rest = text.partition("<!-- table: layouts -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not begin or not end:
        raise ValueError(f"{PAGE} has no place for the table: <!-- table: layouts --> and <!-- end -->")
    return f"{before}{begin}{table}\n{end}{after}"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--page", action="store_true", help="write the table into docs/cluster.md")
    arguments = parser.parse_args()
    rows = {layout: needs(layout) for layout in LAYOUTS}
    print(table(rows))
    if arguments.page:
        write(PAGE, filled(PAGE.read_text(encoding="utf-8"), table(rows)))
    short = [f"{layout}: {row['short']}" for layout, row in rows.items() if row["short"]]
    summary = "; ".join(short) or f"{len(rows)} layouts fit on their GPUs"
    return finish(arguments, {"met": not short, "layouts": rows}, summary)


if __name__ == "__main__":
    sys.exit(main())
