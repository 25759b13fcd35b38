"""Runs an evaluation that is killed at random moments: `bench_killer.py KILLS FOLDER -- <run_bench's arguments>`.

Everything heavy is imported once; each attempt is a fork, which is killed by SIGKILL after it has written some lines
and a random moment more, or before it has written any. Prints how many were killed on the way; the last attempt is left
to its end.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
import time
from pathlib import Path

import torch
import transformers  # noqa: F401

import exgrpo_orlhf.config
import exgrpo_orlhf.evaluation.mlflow_log
import exgrpo_orlhf.evaluation.paper
import exgrpo_orlhf.evaluation.report
import exgrpo_orlhf.evaluation.run  # noqa: F401

RUN_BENCH = Path(__file__).resolve().parents[2] / "evals" / "run_bench.py"


def main() -> None:
    kills, folder, words = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[4:]
    torch.set_num_threads(1)
    rng = random.Random(0)
    killed = 0
    while killed < kills:
        child = _fork(words)
        _wait(child, folder, rng)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"attempt {killed + 1} had come to its end: too little work for {kills} kills")
        killed += 1
    child = _fork(words)
    _, status = os.waitpid(child, 0)
    print(f"{killed} killed, then exit status {os.waitstatus_to_exitcode(status)}")


def _wait(child: int, folder: Path, rng: random.Random) -> None:
    """Until the child has written 0, 1 or 2 portions, and up to 50 ms more; or up to 300 ms if it shall write none."""
    portions = rng.randrange(-1, 3)
    if portions < 0:
        time.sleep(rng.uniform(0, 0.3))
        return
    size = _size(folder)
    while portions > 0 and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.002)
        if _size(folder) != size:
            size, portions = _size(folder), portions - 1
    time.sleep(rng.uniform(0, 0.05))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/samples.jsonl"))


def _fork(words: list[str]) -> int:
    child = os.fork()
    if child == 0:
        sys.argv = [str(RUN_BENCH), *words]
        try:
            runpy.run_path(str(RUN_BENCH), run_name="__main__")
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 1)
        finally:
            os._exit(1)
    return child


if __name__ == "__main__":
    main()
