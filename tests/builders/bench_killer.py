"""Runs an evaluation that is killed at random moments: `bench_killer.py KILLS FOLDER -- <run_bench's arguments>`.

Everything heavy is imported once; each attempt is a fork, which is killed by SIGKILL after it has written some lines
and a random moment more, or before it has written any. Prints how many were killed on the way; the last attempt is left
to its end.
"""

from __future__ import annotations

import multiprocessing
import random
import runpy
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import transformers  # noqa: F401

RUN_BENCH = Path(__file__).resolve().parents[2] / "evals" / "run_bench.py"


def main() -> None:
    kills, folder, words = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[4:]
    torch.set_num_threads(1)
    rng = random.Random(0)
    for attempt in range(kills):
        child = fork(words)
        wait(child, folder, rng)
        child.kill()
        child.join()
        if child.exitcode != -signal.SIGKILL:
            raise SystemExit(f"attempt {attempt + 1} had come to its end: too little work for {kills} kills")
    child = fork(words)
    child.join()
    print(f"{kills} killed, then exit status {child.exitcode}")


def fork(words: list[str]) -> BaseProcess:
    sys.argv = [str(RUN_BENCH), *words]
    child = multiprocessing.get_context("fork").Process(
        target=runpy.run_path, args=(str(RUN_BENCH),), kwargs={"run_name": "__main__"}
    )
    child.start()
    return child


def wait(child: BaseProcess, folder: Path, rng: random.Random) -> None:
    """Until the child has written 0, 1 or 2 portions, and up to 50 ms more; or up to 300 ms if it shall write none."""
    portions = rng.randrange(-1, 3)
    if portions < 0:
        time.sleep(rng.uniform(0, 0.3))
        return
    before = size(folder)
    while portions > 0 and child.is_alive():
        time.sleep(0.002)
        if size(folder) != before:
            before, portions = size(folder), portions - 1
    time.sleep(rng.uniform(0, 0.05))


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/samples.jsonl"))


if __name__ == "__main__":
    main()
