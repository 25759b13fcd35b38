#!/usr/bin/env python
"""The whole method in minutes: warm up a tiny model, train it with ExGRPO and on-policy, compare.

    python scripts/quickstart.py            # what `make quickstart` runs
    python scripts/quickstart.py --seed 3
    python scripts/quickstart.py --rare     # where successes are rare, with late injection: about twice as long

The two runs share the machine, one thread each (one after the other on a single core). Started again it continues
what was interrupted, and only shows the comparison if there is nothing left to train.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from exgrpo_orlhf.io import terminal
from exgrpo_orlhf.io.files import write
from exgrpo_orlhf.io.paths import PROJECT, WORKPLACE

RUNS = {"ExGRPO": ["quickstart.gin"], "on-policy": ["quickstart.gin", "baselines/on_policy.gin"]}
RARE = {
    "late injection": ["testbed/quickstart_rare.gin", "recipes/late_injection.gin"],
    "on-policy": ["testbed/quickstart_rare.gin", "baselines/on_policy.gin"],
}
OVER_SEEDS = "one seed does not show which method is better: over eight seeds "
SHOWN = (
    OVER_SEEDS + "the paper's replay was worse than on-policy training here; replay pays where successes are very rare "
    "(docs/choosing.md)"
)
SHOWN_RARE = OVER_SEEDS + "late injection ends 5 points above on-policy training (docs/study.md)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="train.seed of both runs (default 0)")
    parser.add_argument("--rare", action="store_true", help="train where successes are rare, with late injection")
    parser.add_argument("--out", type=Path, default=WORKPLACE / "runs", help="folder of the runs (default runs/)")
    arguments = parser.parse_args()
    began = time.perf_counter()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    terminal.messages()

    import torch
    import transformers

    from exgrpo_orlhf import config
    from exgrpo_orlhf.io.redaction import without_password
    from exgrpo_orlhf.study import comparison_charts, comparison_tables
    from exgrpo_orlhf.study.comparison import compare
    from exgrpo_orlhf.study.curve import logged_curve
    from exgrpo_orlhf.tracking.client import address, connect, experiment_id, first_line, page
    from exgrpo_orlhf.tracking.metrics_log import MetricsLog

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    print("1. A tiny model learns the procedure, and false beliefs with it (once, then cached)", flush=True)
    files, start, verdict = (RARE, "quickstart-rare", SHOWN_RARE) if arguments.rare else (RUNS, "quickstart", SHOWN)
    experiment = config.load(files["on-policy"])
    experiment.model.prepare()

    print("2. It is trained by reward, with experience replay and without", flush=True)
    names = {name: f"{start}-{name.lower().replace(' ', '-')}-seed{arguments.seed}" for name in files}
    folders = {name: arguments.out / folder for name, folder in names.items()}
    failed = _train(folders, files, arguments.seed)
    if failed:
        print(f"not complete: {', '.join(failed)}; what was said above tells why", file=sys.stderr)
        return 1

    rows = {name: list(MetricsLog(folder / "metrics.jsonl").rows()) for name, folder in folders.items()}
    picture = arguments.out / f"{start}-seed{arguments.seed}.png"
    write(picture, comparison_charts.training_picture(rows))
    curves = [logged_curve(name, arguments.seed, of_run, comparison_charts.ACCURACY) for name, of_run in rows.items()]
    print(f"\n3. Greedy accuracy on {len(experiment.validation.load())} validation questions\n")
    print(comparison_tables.terminal([compare(comparison_charts.ACCURACY, curves, "on-policy")], []) + "\n")
    for curve in curves:
        first, last = curve.values[0], curve.final
        times = f", {last / first:.1f} times" if first else ""
        print(f"{curve.run.name}: {first:.3f} before, {last:.3f} after{times}")
    print(f"\nlearning curves  {picture}")
    print(f"runs             {', '.join(map(str, folders.values()))}")
    uri = address(experiment.tracking, f"sqlite:///{WORKPLACE}/mlflow.db")
    try:
        where = page(uri, experiment_id(connect(uri), uri, experiment.tracking.experiment))
    except Exception as error:  # whatever MLflow, its database or the network came up with; the runs are done
        where = f"MLflow at {without_password(uri)}: {first_line(error)}"
    print(f"compare them     {where.replace('mlflow ui', f'{Path(sys.executable).parent}/mlflow ui', 1)}")
    print(f"{verdict}. {(time.perf_counter() - began) / 60:.1f} minutes in all")
    return 0


def _train(folders: dict[str, Path], files: dict[str, list[str]], seed: int) -> list[str]:
    """Train all runs, at the same time where there is a core for each; returns those that did not complete.

    folders, files: by name, where a run goes and the gin files that it has
    """
    at_once = len(folders) if len(os.sched_getaffinity(0)) >= len(folders) else 1
    with ThreadPoolExecutor(at_once) as pool:
        runs = {}
        for name, folder in folders.items():
            command = [sys.executable, str(PROJECT / "scripts" / "train.py"), "--resume", "--seed", str(seed)]
            words = [part for file in files[name] for part in ("--gin", file)]
            runs[name] = pool.submit(subprocess.run, [*command, "--out", str(folder), *words])
        try:
            wait(runs.values())
        except KeyboardInterrupt:  # the runs got it too: they finish their step and save
            pool.shutdown(cancel_futures=True)
    return [name for name, run in runs.items() if run.cancelled() or run.result().returncode]


if __name__ == "__main__":
    sys.exit(main())
