#!/usr/bin/env python
"""Run a study: variants × seeds, each run a process of scripts/train.py of its own.

    python scripts/ablate.py --suite gin/paper/table6.gin --with gin/testbed/rare.gin --seeds 0-4
    python scripts/ablate.py --gin base.gin ablation_no_entropy.gin --with engines/local_gpu.gin --seeds 0,1 --group a
    python scripts/ablate.py --gin base.gin --grid 'ReplayMixer.rho=0.25,0.5,0.75' --seeds 0-2 --group rho --dry-run

Runs go to runs/<group>/<variant>/seed<k>/ and to MLflow, with the tags group, variant and seed. The same command
continues a study that was stopped or killed: finished runs are skipped, failed ones are tried again with --retry. After
Ctrl-C, SIGTERM or SIGHUP the running ones finish their step and save; a second Ctrl-C or SIGTERM kills them.
Exit status: 0 if all runs are finished, 1 if one failed, 128 + signal if a signal ended it, 2 if something is wrong
before anything starts.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo_orlhf.io import terminal
from exgrpo_orlhf.io.paths import PROJECT, WORKPLACE
from exgrpo_orlhf.io.redaction import without_password
from exgrpo_orlhf.io.terminal import positive

if TYPE_CHECKING:
    from exgrpo_orlhf.settings import Tracking
    from exgrpo_orlhf.study.runs import StudyRun


def main() -> int:
    arguments = _parser().parse_args()
    terminal.messages()

    from exgrpo_orlhf import config
    from exgrpo_orlhf.checkpoints import CheckpointError, RunFolderError, claim
    from exgrpo_orlhf.engines.openrlhf.stack import refuse_wrong_versions
    from exgrpo_orlhf.study.runs import plan
    from exgrpo_orlhf.study.suite import check_name, of_files, of_suite, over_grid, seeds

    try:
        suite = config.load_suite(arguments.suite) if arguments.suite else None
        variants = of_suite(suite, arguments.suite) if suite else of_files(arguments.gin)
        threads = [f"LocalEngine.threads = {arguments.threads}"] if arguments.threads is not None else []
        variants = [
            replace(v, files=(*v.files, *arguments.with_), bindings=(*v.bindings, *arguments.set, *threads))
            for v in over_grid(variants, arguments.grid)
        ]
        if not suite and not arguments.group:
            raise ValueError("a list of gin files has no name: give --group NAME")
        group = arguments.group or Path(arguments.suite).stem
        check_name(group, "--group")
        out = arguments.out or WORKPLACE / "runs" / group
        chosen = seeds(arguments.seeds) if arguments.seeds is not None else suite.seeds if suite else (0,)
        runs = plan(variants, chosen, out, config.load)
        if arguments.seeds is None:
            _check_seed({file for variant in variants for file in variant.files})
        if any(run.experiment.openrlhf for run in runs):
            refuse_wrong_versions()
        baseline = suite.baseline if suite and any(v.name == suite.baseline for v in variants) else None
        if arguments.dry_run:
            return _study(arguments, runs, group, out, baseline)
        with claim(out, resume=True):
            return _study(arguments, runs, group, out, baseline)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (CheckpointError, RunFolderError, ArithmeticError, ValueError, OSError) as error:
        print(f"error: {without_password(str(error))}", file=sys.stderr)
        return 2


def _check_seed(files: set[str], included_by: str | None = None) -> None:
    """Raises ValueError for a file that binds train.seed, also in an included file, which the seeds would replace."""
    from exgrpo_orlhf.config.gin_files import find

    beside = Path(included_by).parent if included_by else None
    for path in (find(file, included_by, beside) for file in sorted(files)):
        if path.name in ("base.gin", "config.gin"):  # the default, and that of a run
            continue
        text = path.read_text("utf-8-sig")
        for number, line in enumerate(text.splitlines(), 1):
            if re.match(r"\s*train\.seed\s*=", line):
                what = "binds train.seed, which the study's seeds replace: give --seeds, or take it out"
                raise ValueError(f"{path}, line {number} {what}")
        _check_seed({*re.findall(r"""^\s*include\s+['"](.+?)['"]""", text, re.MULTILINE)}, str(path))


def _study(arguments: argparse.Namespace, runs: list[StudyRun], group: str, out: Path, baseline: str | None) -> int:
    import torch

    from exgrpo_orlhf.io.progress import duration
    from exgrpo_orlhf.io.stopping import described
    from exgrpo_orlhf.study.runner import Runner
    from exgrpo_orlhf.study.runs import RunProgress, seconds_left, table
    from exgrpo_orlhf.tracking.client import address, mark_killed

    progress = {run.name: RunProgress.of(run) for run in runs}
    finished = [run for run in runs if run.finished()]
    tracking, default_uri = runs[0].experiment.tracking, f"sqlite:///{WORKPLACE / 'mlflow.db'}"
    if tracking.enabled and not arguments.dry_run:
        uri = address(tracking, default_uri)
        for run in [run for run in finished if not run.sent(uri, tracking.experiment)]:
            finished.remove(run)
            print(f"{run.name} is trained, but MLflow may lack some of it: it is sent again", file=sys.stderr)
    waiting = [run for run in runs if run not in finished]
    failed = {run: status for run in waiting if not arguments.retry and (status := run.failure()) is not None}
    waiting = [run for run in waiting if run not in failed]
    if not arguments.dry_run:
        mark_killed(tracking, default_uri, [run.folder for run in (*waiting, *failed)])
    jobs = arguments.jobs or _jobs(runs)
    counts = f"{len(finished)} finished, {len(failed)} failed, {len(waiting)} to run, {jobs} at a time"
    left = seconds_left(waiting, progress, jobs)
    pace = "" if left is None else f", {duration(left)} at the pace so far"
    print(f"{group}: {len(runs)} runs, {counts}{pace}", file=sys.stderr)
    script = PROJECT / "scripts" / "train.py"
    runner = Runner(group, waiting, progress, script=script, jobs=jobs, threads=arguments.threads)
    if arguments.dry_run:
        if left is None and waiting:
            trial = shlex.join([*runner.command(waiting[0]), "--smoke"])
            print(
                f"no step has been measured, so the time is not known; this estimates a run's: {trial}", file=sys.stderr
            )
        print(table(runs, {run.name for run in finished}, progress))
        print(*(shlex.join(runner.command(run)) for run in waiting), sep="\n")
        return 0

    torch.set_num_threads(arguments.threads or 1)
    for run in waiting:  # each model is made once, here: else each of the first processes would make it
        run.experiment.model.prepare()
    runner.run()
    failed |= runner.failed
    finished += runner.finished
    for run, status in failed.items():
        print(f"\n{run.name} failed ({described(status)}); the end of {run.folder / 'run.log'}:", file=sys.stderr)
        print(run.log_tail(), file=sys.stderr)
    if failed:
        print("\nthe same command with --retry runs them again", file=sys.stderr)
    print(table(runs, {run.name for run in finished}, runner.progress))
    metric = next((m.score_name for m in runner.progress.values() if m.score_name), "eval/greedy_accuracy")
    print(_comparison(tracking, default_uri, group, baseline, metric))
    return 128 + runner.stopped_by if runner.stopped_by else int(bool(failed))


def _comparison(tracking: Tracking, default_uri: str, group: str, baseline: str | None, metric: str) -> str:
    """The command that compares the variants. It names the store that the runs were sent to, unless compare.py finds it
    by itself: the default, and an address with a password that is in the environment, which is not printed."""
    from exgrpo_orlhf.tracking.client import address

    if not tracking.enabled:
        return "Tracking.enabled = False: MLflow has nothing of this study to compare"
    command = ["python", "scripts/compare.py", "--experiment", tracking.experiment, "--group", group]
    uri, variable = address(tracking, default_uri), os.environ.get("MLFLOW_TRACKING_URI")
    shown = without_password(uri)
    command += ["--uri", shown] if uri != default_uri and (shown == uri or not variable) else []
    return shlex.join([*command, *(["--baseline", baseline] if baseline else []), "--metric", metric])


def _jobs(runs: list[StudyRun]) -> int:
    """As many runs as there are cores for their threads; one if a run uses a GPU or a cluster."""
    import torch

    local = [run.experiment.local for run in runs]
    on_gpu = ("cuda", "auto") if torch.cuda.is_available() else ("cuda",)
    if any(settings is None or settings.device.startswith(on_gpu) for settings in local):
        return 1
    return max(1, len(os.sched_getaffinity(0)) // max(settings.threads for settings in local))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--suite", metavar="FILE", help="gin file that binds Suite.variants, such as gin/paper/table6.gin"
    )
    what.add_argument(
        "--gin", nargs="+", metavar="FILE", help="one variant per FILE; FILE+FILE combines files, the later one wins"
    )
    parser.add_argument(
        "--with", dest="with_", nargs="+", default=[], metavar="FILE", help="gin files for every run, such as a layout"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="BINDING", help="a binding for every run; wins over all files"
    )
    parser.add_argument(
        "--grid", action="append", default=[], metavar="NAME=VALUE,…",
        help="every variant with each of these values; repeated: with each combination",
    )  # fmt: skip
    parser.add_argument("--seeds", help="0-7 or 0,3,5 (default: the suite's, else 0)")
    parser.add_argument(
        "--jobs",
        type=positive,
        help="runs at a time (default: as many as there are cores for; 1 on GPU and OpenRLHF)",
    )
    parser.add_argument("--threads", type=positive, help="CPU threads of each process (default: LocalEngine.threads)")
    parser.add_argument("--group", help="name of the study on disk and in MLflow (default: that of the suite's file)")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: runs/<group> of the project)")
    parser.add_argument("--retry", action="store_true", help="run failed ones again from their last checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="show what is done, what would run, and for how long")
    return parser


if __name__ == "__main__":
    sys.exit(main())
