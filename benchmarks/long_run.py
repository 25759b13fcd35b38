#!/usr/bin/env python
"""Memory of a run of ten thousand steps with the caps on.

Goal: flat. The resident memory at the end is at most 5 % above that after the first tenth of the run. A real run with
everything that could grow (buffer with all three caps, returning questions, reused scores, checkpoints, evaluation,
MLflow) on a setting so small that a step takes some 50 ms: the chain model at width 32, 8 questions × 4 rollouts of 3
and 4 operands. Takes about a quarter of an hour on one core; `--steps` makes it shorter. Writes a curve with --plot.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import transformers
from command_line import TINY, finish, make_parser

from exgrpo_orlhf import config
from exgrpo_orlhf.tracking.metrics_log import MetricsLog
from exgrpo_orlhf.training.run import train

GOAL = 1.05
BINDINGS = [
    *TINY,
    "ModularChains.count = 400",
    "validation/ModularChains.count = 20",
    "validation/ModularChains.operands = (3, 4)",
    "MAX_RESPONSE_TOKENS = 30",
    "train.questions_per_step = 8",
    "train.group_size = 4",
    "train.eval_every = 500",
    "train.save_every = 500",
    "Optimizer.learning_rate = 1e-5",
    "ReplayMixer.start_at_accuracy = None",
    "ReplayBuffer.per_question = 4",
    "ReplayBuffer.max_age = 200",
    "ReplayBuffer.max_bytes = 60000",
    "RetirementPolicy.returns_after = 100",
]
SMALL_STEPS = 50
SMALL = [  # all of it happens within these steps
    "train.eval_every = 25",
    "train.save_every = 25",
    "ReplayBuffer.max_age = 20",
    "ReplayBuffer.max_bytes = 10000",
    "RetirementPolicy.returns_after = 10",
]


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--plot", type=Path, help="write the curve to this PNG")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the run (default 10,000)")
    arguments = parser.parse_args()
    if arguments.steps < 1000:
        parser.error("--steps: at least 1000, or there is nothing to compare")
    steps = SMALL_STEPS if arguments.small else arguments.steps
    logging.basicConfig(level=logging.ERROR)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    transformers.utils.logging.disable_progress_bar()
    samples: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        bindings = [*BINDINGS, *SMALL] if arguments.small else BINDINGS
        experiment = config.load(["toy.gin"], [*bindings, f"train.steps = {steps}"])
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.02 if arguments.small else 1.0):
                path = run / "metrics.jsonl"
                if path.exists():
                    with path.open("rb") as file:
                        file.seek(max(0, path.stat().st_size - 8000))
                        rows = file.read().split(b"\n")[1:-1]
                    if rows:
                        samples.append((json.loads(rows[-1])["step"], resident()))

        watcher = threading.Thread(target=watch)
        samples.append((0, resident()))
        watcher.start()
        began = time.perf_counter()
        try:
            train(experiment, run, resume=False, tracking_uri=f"sqlite:///{folder}/mlflow.db", tags={})
        finally:
            done.set()
            watcher.join()
        samples.append((steps, resident()))
        seconds = time.perf_counter() - began
        stored = [(row["step"], row["replay/stored_bytes"]) for row in MetricsLog(run / "metrics.jsonl").rows(after=0)]
    early = max(size for step, size in samples if step <= steps // 10)
    late = max(size for step, size in samples if step > steps * 9 // 10)
    most, cap = max(stored_bytes for _, stored_bytes in stored), experiment.buffer.max_bytes
    met = (late <= GOAL * early or arguments.small) and 0 < most <= cap
    print(f"{'step':>8}{'resident MB':>13}")
    for i in range(0, len(samples), max(1, len(samples) // 12)):
        print(f"{samples[i][0]:>8}{samples[i][1] / 1e6:>13.1f}")
    print(f"{steps} steps in {seconds:.0f} s; at most {most:.0f} bytes stored (cap {cap})")
    if arguments.plot:
        plot(samples, stored, arguments.plot)
    figures = {"samples": samples, "early": early, "late": late, "stored_bytes": most, "seconds": seconds, "met": met}
    summary = (
        f"{late / 1e6:.0f} MB in the last tenth, {early / 1e6:.0f} MB in the first: {late / early:.3f} times "
        f"(goal {GOAL:g})"
    )
    return finish(arguments, figures, summary)


def plot(samples: list[tuple[int, int]], stored: list[tuple[int, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 3.5), layout="constrained")
    axes[0].plot([step for step, _ in samples], [size / 1e6 for _, size in samples])
    axes[0].set_title("Resident memory, MB")
    axes[1].plot([step for step, _ in stored], [size / 1e3 for _, size in stored], linewidth=0.5)
    axes[1].set_title("Stored trajectories, kB (cap 60)")
    for axis in axes:
        axis.set_xlabel("step")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
