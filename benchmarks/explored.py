#!/usr/bin/env python
"""What a run's log of decisions costs, and its page: of 200 steps of the quickstart, and of 100,000 stored questions.

    python benchmarks/explored.py                       # some minutes on two cores
    python benchmarks/explored.py --pictures FOLDER     # also pictures of both pages, light and dark

The first run is real (gin/quickstart.gin, 200 steps). The second is made here: a log of 200 steps with 800 questions
each, and a buffer with two trajectories of each question. Opening is timed in Chromium, where there is one: until the
page's script has drawn, less what an empty page takes.

Goals: writing the log takes less than 1 % of a step and less than 1 MB per 100 steps, logged texts (rollouts.jsonl) not
counted, and the page of 100,000 questions has less than 16 MB.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import transformers
from command_line import TINY, finish, make_parser

from exgrpo_orlhf import config
from exgrpo_orlhf.explore.explorer_page import page
from exgrpo_orlhf.explore.history import read
from exgrpo_orlhf.explore.run_page import explore
from exgrpo_orlhf.records import Question, Trajectory
from exgrpo_orlhf.replay import ReplayBuffer, RetirementPolicy
from exgrpo_orlhf.tracking.metrics_log import MetricsLog
from exgrpo_orlhf.tracking.step_log import StepLog
from exgrpo_orlhf.training.run import train

LOG_SHARE, LOG_BYTES, PAGE_BYTES = 0.01, 1e6, 16e6
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SMALL = [*TINY, "ModularChains.count = 24", "validation/ModularChains.count = 10", "MAX_RESPONSE_TOKENS = 24"]
SMALL += ["validation/ModularChains.operands = (3, 4)", "train.questions_per_step = 8", "train.group_size = 4"]


def large(folder: Path, n: int, steps: int, per_step: int) -> tuple[list[Question], ReplayBuffer]:
    """A log of `steps` steps with 2 × per_step questions each, and a buffer with two trajectories of each of n."""
    draw, buffer = np.random.default_rng(0), ReplayBuffer(RetirementPolicy())
    questions = [Question.make("synthetic", f"What is {i} times {7 * i % 1013}, modulo 97?", "1") for i in range(n)]
    for question in questions:
        buffer.record(question.id, Fraction(int(draw.integers(0, 8)), 8), steps)
        lengths = draw.integers(20, 40, 2)
        of_question = [
            Trajectory(draw.integers(1, 30, length).astype(np.int32), -draw.random(length).astype(np.float32), 1.0, 5)
            for length in lengths
        ]
        buffer.store((question.id, one) for one in of_question)
    log = StepLog(folder / "decisions.jsonl")
    for step in range(1, steps + 1):
        ids = [questions[i].id[:12] for i in draw.choice(n, 2 * per_step, replace=False)]
        counts = {
            name: draw.integers(0, 3, 2 * per_step).tolist() for name in ("correct", "checked", "lucky", "stored")
        }
        table = {"id": ids, "as": ["fresh"] * per_step + ["replayed"] * per_step, "graded": [8] * 2 * per_step}
        values = {
            name: draw.random(per_step).round(4).tolist() for name in ("entropy", "others", "surprisal", "log_weight")
        }
        whole = {name: draw.integers(1, 40, per_step).tolist() for name in ("age", "tokens", "of", "place")}
        sizes = {"unsolved": 5, "hard": step, "medium": 2 * step, "easy": step, "solved": 0}
        log.write_row(
            {
                "step": step,
                "questions": {**table, **counts, "entropy": draw.random(2 * per_step).round(4).tolist()},
                "replays": {"id": ids[per_step:], **values, **whole, "sound": [None] * per_step},
                **{"retired": ids[:2], "returned": [], "evicted": ids[-3:], "buckets": sizes, "retired_in_all": step},
            },
            compact=True,
        )
    return questions, buffer


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write pictures of the pages there")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    steps, n = (12, 1000) if arguments.small else (200, 100_000)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "empty.html").write_text("<!doctype html><title>empty</title>", encoding="utf-8")
        empty = opening(folder / "empty.html", folder) if CHROMIUM else 0.0
        pages = {f"{steps} steps": folder / "run.html", f"{n:,} questions": folder / "large.html"}
        figures = trained(folder / "run", steps, arguments.small)
        seconds = [timed(lambda: pages[f"{steps} steps"].write_text(of_run(folder / "run"), encoding="utf-8"))]
        (folder / "large").mkdir()
        questions, buffer = large(folder / "large", n, 200, min(400, n // 4))
        history = lambda: read(folder / "large", buffer, 200, questions, lambda ids: " ".join(map(str, ids)))
        seconds.append(timed(lambda: pages[f"{n:,} questions"].write_text(page(history(), "large"), encoding="utf-8")))
        print(f"{'':18}{'CPU s':>8}{'MB':>8}{'s to open':>11}")
        for (name, path), took in zip(pages.items(), seconds, strict=True):
            opens = opening(path, folder) - empty if CHROMIUM else None
            size = path.stat().st_size
            figures[name] = {"cpu_seconds": took, "bytes": size, "open_seconds": opens}
            print(f"{name:18}{took:8.2f}{size / 1e6:8.2f}" + (f"{'–':>11}" if opens is None else f"{opens:11.2f}"))
            if arguments.pictures and CHROMIUM:
                arguments.pictures.mkdir(parents=True, exist_ok=True)
                for scheme in ("light", "dark"):
                    picture(path, folder, arguments.pictures / f"{path.stem}-{scheme}.png", dark=scheme == "dark")
    share, size = figures["log_share"], figures["log_bytes_per_100_steps"]
    largest = figures[f"{n:,} questions"]["bytes"]
    met = size < LOG_BYTES and largest < PAGE_BYTES and (share < LOG_SHARE or arguments.small)
    summary = (
        f"the log takes {share:.2%} of a step (goal {LOG_SHARE:.0%}) and {size / 1e6:.2f} MB per 100 steps (goal "
        f"{LOG_BYTES / 1e6:g}); the large page has {largest / 1e6:.1f} MB (goal {PAGE_BYTES / 1e6:g})"
    )
    return finish(arguments, {**figures, "met": met}, summary)


def trained(run: Path, steps: int, small: bool) -> dict:
    """A run of the quickstart; what its log costs."""
    more = SMALL if small else []
    x = config.load(["quickstart.gin"], [*more, f"train.steps = {steps}", "Tracking.enabled = False"])
    train(x, run, resume=False, tracking_uri="unused", tags={})
    rows = list(MetricsLog(run / "metrics.jsonl").rows(after=0))
    share = sum(row["time/log"] for row in rows) / sum(row["time/step"] for row in rows)
    size = (run / "decisions.jsonl").stat().st_size / steps * 100
    print(f"log                {share:.2%} of a step, {size / 1e6:.2f} MB per 100 steps")
    return {"log_share": share, "log_bytes_per_100_steps": size}


def of_run(run: Path) -> str:
    return explore(run, config.load([run / "config.gin"]).questions.load())


def timed(call) -> float:
    """Seconds of the processor's time."""
    began = time.process_time()
    call()
    return time.process_time() - began


def browse(page: Path, folder: Path, *more: str) -> None:
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", *more]
    command = [str(CHROMIUM), *flags, f"--user-data-dir={folder / 'profile'}", page.as_uri()]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300, check=True)


def opening(page: Path, folder: Path) -> float:
    """Seconds until the page is drawn; the fastest of three."""
    found = []
    for _ in range(3):
        began = time.perf_counter()
        browse(page, folder, "--dump-dom")
        found.append(time.perf_counter() - began)
    return min(found)


def picture(page: Path, folder: Path, out: Path, dark: bool) -> None:
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    browse(page, folder, "--window-size=1400,2200", f"--screenshot={out}", *scheme)


if __name__ == "__main__":
    sys.exit(main())
