#!/usr/bin/env python
"""Steps of the OpenRLHF engine, synchronous and one step ahead, in turns, with the timeline of both.

On a machine without CUDA that has the stack (make openrlhf-cpu): runs of `--steps` steps with one actor and one vLLM
engine, each on a pretended GPU of its own, on-policy and otherwise alike, synchronous and with
train.generate_ahead = True in turns, `--turns` times. Generation is made the longer part: few responses, and long
ones. A tiny model that has seen a little of long chains writes them. Seconds of a step are medians; the first 3 steps
of a run never count.

A timeline is drawn with --png from a run's own begin and end of each generation and update (time/rollout_from and so on
in metrics.jsonl). Other processes on these two cores distort the timings.

Goal: a step ahead takes less time than a synchronous one, and at least the half of each update falls into a generation.
With --small the local engine runs in both places, which has nothing to do at the same time: the goal does not count.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from command_line import TINY, finish, make_parser

from exgrpo_orlhf import config

ROOT = Path(__file__).resolve().parent.parent
WARM = 3
MODES = {"synchronous": 0, "ahead": 1}
SHAPE = (
    "ChainModel.steps = 200",
    "ChainModel.width = 64",
    "ChainModel.layers = 8",  # a token of vLLM costs by the layer, an update by the weight
    "ChainModel.operands = (24,)",
    "ModularChains.operands = (24,)",
    "Work.model = @PretrainedModel()",
    "Work.validation = None",
    "train.eval_every = None",
    "train.questions_per_step = 4",
    "train.group_size = 4",
    "Prompts.max_tokens = 64",
    "MAX_RESPONSE_TOKENS = 160",
    "Optimizer.learning_rate = 1e-7",  # so that the responses stay as they are
    "Tracking.enabled = False",
)
Span = tuple[float, float]


def run(folder: Path, bindings: list[str], layout: list[str], ahead: int) -> list[dict[str, float]]:
    """The rows of a run's steps. Raises RuntimeError with its last words."""
    given = [*bindings, f"train.generate_ahead = {bool(ahead)}"]
    command = [sys.executable, f"{ROOT}/scripts/train.py", "--gin", "baselines/on_policy.gin", *layout]
    command += ["--out", str(folder), *(part for binding in given for part in ("--set", binding))]
    environment = {**os.environ, "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "time/step" in row]


def spans(rows: list[dict[str, float]], part: str) -> list[Span]:
    """Begin and end of each step's generation or update, in seconds since the first of the rows began. A synchronous
    step's row, written when it ends, has the seconds of its parts alone: they follow one another."""

    def span(row: dict[str, float], part: str) -> Span:
        if f"time/{part}_from" in row:
            return row[f"time/{part}_from"], row[f"time/{part}_to"]
        before = ("plan",) if part == "rollout" else ("plan", "rollout", "grade", "score", "inject", "assemble")
        begin = row["time"] - row["time/step"] + sum(row[f"time/{name}"] for name in before)
        return begin, begin + row[f"time/{part}"]

    zero = min(span(rows[0], "rollout")[0], span(rows[0], "update")[0])
    return [(begin - zero, end - zero) for begin, end in (span(row, part) for row in rows)]


def overlap(rows: list[dict[str, float]]) -> float:
    """Share of the time of all updates in which a generation was under way."""
    rollouts, updates = spans(rows, "rollout"), spans(rows, "update")
    shared = sum(max(0.0, min(u[1], r[1]) - max(u[0], r[0])) for u in updates for r in rollouts)
    return shared / sum(end - begin for begin, end in updates)


def medians(runs: list[list[dict[str, float]]]) -> dict[str, float]:
    rows = [row for one in runs for row in one[WARM:]]
    names = ("time/step", "time/rollout", "time/update", "time/wait", "time/sync", "rollout/response_tokens")
    return {name.rpartition("/")[2]: statistics.median(row.get(name, 0.0) for row in rows) for name in names}


def draw(runs: dict[str, list[dict[str, float]]], steps: int, path: Path) -> None:
    """The same number of steps of each mode below one another: two rows of bars each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(runs), 1, figsize=(9, 3.4), sharex=True, layout="constrained")
    for axis, (mode, rows) in zip(axes, runs.items(), strict=True):
        # A step's row has the generation that ran in it: one ahead, that is the next batch.
        shown = rows[WARM : WARM + steps]
        for height, part, colour in ((1, "rollout", "#4c78a8"), (0, "update", "#f58518")):
            for i, (begin, end) in enumerate(spans(shown, part)):
                batch = shown[i]["step"] + (mode == "ahead" and part == "rollout")
                axis.barh(height, end - begin, left=begin, height=0.7, color=colour, edgecolor="white")
                axis.text((begin + end) / 2, height, f"{batch:.0f}", ha="center", va="center", fontsize=7)
        axis.set_yticks([0, 1], ["actor trains", "vLLM generates"])
        axis.set_title({"synchronous": "synchronous", "ahead": "one step ahead"}[mode], loc="left", fontsize=10)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[-1].set_xlabel("seconds; the number is the batch's")
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="of each run (default 20)")
    parser.add_argument("--turns", type=int, default=2, help="runs of each mode (default 2)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the timeline there")
    arguments = parser.parse_args()
    steps, turns, bindings = arguments.steps, arguments.turns, list(SHAPE)
    layout = ["--gin", "engines/openrlhf_cpu.gin"]
    if arguments.small:
        steps, turns, bindings, layout = WARM + 2, 1, [*SHAPE, *TINY, "MAX_RESPONSE_TOKENS = 24"], []
    elif importlib.util.find_spec("openrlhf") is None:
        parser.error("needs the OpenRLHF stack (make openrlhf-cpu); --small runs on the local engine")
    model = config.load(["base.gin"], [*bindings, "Work.model = @ChainModel()"]).model.prepare()
    bindings += [f"PretrainedModel.path = {str(model)!r}", f"train.steps = {steps}"]
    runs: dict[str, list[list[dict[str, float]]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="generate-ahead-") as temporary:
        for turn in range(turns):
            for mode, ahead in MODES.items():
                runs[mode].append(run(Path(temporary) / f"{mode}-{turn}", bindings, layout, ahead))
                print(f"{mode}, turn {turn + 1}: {medians(runs[mode][-1:])['step']:.2f} s a step", flush=True)
    columns = {mode: {**medians(done), "overlap": overlap(done[-1][WARM:])} for mode, done in runs.items()}
    print(f"\nseconds, medians of {steps - WARM} steps of {turns} runs each")
    print(f"{'':18}" + "".join(f"{mode:>14}" for mode in columns))
    for name in next(iter(columns.values())):
        print(f"{name:18}" + "".join(f"{column[name]:14.2f}" for column in columns.values()))
    ratio = columns["ahead"]["step"] / columns["synchronous"]["step"]
    met = arguments.small or (ratio < 1 and columns["ahead"]["overlap"] >= 0.5)
    if arguments.png:
        draw({mode: done[-1] for mode, done in runs.items()}, 6, arguments.png)
    wall = {mode: [spans(rows, "update")[-1][1] for rows in done] for mode, done in runs.items()}
    shown = "; ".join(f"{mode} {', '.join(f'{seconds:.1f}' for seconds in each)}" for mode, each in wall.items())
    print(f"seconds from the first generation to the end of the last update: {shown}")
    share = columns["ahead"]["overlap"]
    summary = f"a step ahead takes {ratio:.2f} of a synchronous one, {share:.0%} of its updates beside a generation"
    return finish(arguments, {"medians": columns, "ratio": ratio, "wall_seconds": wall, "met": met}, summary)


if __name__ == "__main__":
    sys.exit(main())
