#!/usr/bin/env python
"""Train with ExGRPO, or whatever the gin files make of it.

    python scripts/train.py --gin gin/quickstart.gin
    python scripts/train.py --gin gin/ablation_no_entropy.gin --set 'ReplayMixer.rho=0.25' --seed 3
    python scripts/train.py --gin gin/quickstart.gin --smoke     # try everything, estimate time, memory and disk, end
    python scripts/train.py --gin gin/quickstart.gin --resume
    python scripts/train.py --gin gin/quickstart.gin --resume-from checkpoint-50     # an older checkpoint

Runs go to runs/<name>/ of the project: config.gin, metrics.jsonl, checkpoint-<step>/. Ctrl-C, SIGTERM and
SIGHUP (a closed terminal) finish the step and save; --resume continues exactly there. Exit status: 0 for a complete
run, 128 + signal for one that a signal ended, 1 for an error while it trained, 2 for a configuration, a model,
questions, a folder, or a checkpoint to resume from, that cannot be used.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from exgrpo_orlhf import terminal
from exgrpo_orlhf.places import CHECKOUT, WORKPLACE


def main() -> int:
    arguments = _parser().parse_args()
    terminal.messages()

    from exgrpo_orlhf import config, gin_files
    from exgrpo_orlhf.checkpoints import CheckpointError, RunFolderError, UnusableCheckpoint, refuse_earlier
    from exgrpo_orlhf.doctor import finding
    from exgrpo_orlhf.engines.engine import EngineLost
    from exgrpo_orlhf.rewards import GradingError
    from exgrpo_orlhf.run import train
    from exgrpo_orlhf.tracking.client import own_tags

    try:
        experiment = config.load(arguments.gin, arguments.set, arguments.seed)
    except config.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    name = arguments.name or _name(arguments, experiment.settings.seed, config.may_change)
    run = arguments.out or WORKPLACE / "runs" / name
    if not arguments.out and WORKPLACE / "runs" not in Path(os.path.normpath(run)).parents:
        print(f"error: --name {name!r} is no folder in {WORKPLACE / 'runs'}; --out takes any folder", file=sys.stderr)
        return 2
    resume = arguments.resume or arguments.resume_from is not None
    if resume and not run.exists():
        print(f"{run} does not exist yet: there is nothing to resume, the run begins", file=sys.stderr)
    if experiment.openrlhf is not None and not finding.remembered(finding.layout_of(experiment)):
        given = [("--gin", file) for file in arguments.gin] + [("--set", shlex.quote(part)) for part in arguments.set]
        layout = " ".join(f"{option} {value}" for option, value in given)
        print(
            "this layout has not been examined on this host with these versions: python scripts/doctor.py " + layout,
            file=sys.stderr,
        )
    if experiment.local and experiment.local.threads > (cores := len(os.sched_getaffinity(0))):
        print(
            f"LocalEngine.threads = {experiment.local.threads}, but this process has {cores} cores and is slower by "
            f"far than with --set LocalEngine.threads={cores}",
            file=sys.stderr,
        )
    uri = f"sqlite:///{WORKPLACE / 'mlflow.db'}"
    tags = {
        "gin": " ".join(Path(file).name for file in arguments.gin),
        "engine": experiment.settings.engine,
        "seed": str(experiment.settings.seed),
        "git_commit": (commit := _git_commit()),
        "mlflow.source.git.commit": commit.removesuffix("-dirty"),
        **own_tags(__file__),
        **dict(arguments.tag),
    }
    if said := [words for file in arguments.gin if (words := gin_files.hypothesis(gin_files.find(file, None)))]:
        tags["mlflow.note.content"] = "\n\n".join(said)  # the description at the top of the run's page
    try:
        if arguments.smoke:
            refuse_earlier(run, resume)  # before the imports that take seconds
            from exgrpo_orlhf.smoke import smoke

            for line in smoke(experiment, run, uri):
                print(line, flush=True)
            return 0
        outcome = train(
            experiment,
            run,
            resume=resume,
            resume_from=arguments.resume_from,
            tracking_uri=uri,
            tags=tags,
        )
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (CheckpointError, RunFolderError, ArithmeticError, ValueError, OSError, EngineLost) as error:
        print(f"error: {error}", file=sys.stderr)
        unusable = isinstance(error, (UnusableCheckpoint, RunFolderError, ValueError, FileNotFoundError))
        return 2 if unusable and not isinstance(error, GradingError) else 1
    if outcome.stopped_by is not None:
        print(f"stopped after step {outcome.steps} of {outcome.planned}; continue with --resume", file=sys.stderr)
        return 128 + outcome.stopped_by
    print(f"{run}: {outcome.steps} steps done, last checkpoint checkpoint-{outcome.steps}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gin", action="append", required=True, metavar="FILE", help="gin file, as given or in gin/; later ones win"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="BINDING", help="one more binding, such as 'ReplayMixer.rho=0.25'"
    )
    parser.add_argument("--seed", type=int, help="train.seed")
    parser.add_argument(
        "--tag", action="append", default=[], type=_tag, metavar="NAME=VALUE", help="one more tag of the MLflow run"
    )
    parser.add_argument("--name", help="name of the run (default: from gin files, --set and seed)")
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/<name> of the project)")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="load and check everything, make a few small steps in a folder that is removed, estimate the run's time, "
        "memory and disk, and end",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the run from its newest checkpoint, or begin it if it has none"
    )
    parser.add_argument(
        "--resume-from",
        metavar="checkpoint-N",
        help="continue the run from this older checkpoint; newer ones are renamed to checkpoint-M.set-aside",
    )
    return parser


def _name(arguments: argparse.Namespace, seed: int, may_change: Callable[[str], bool]) -> str:
    """The same experiment gets the same name, so that --resume finds its run, also to make it longer."""
    files = [Path(file) for file in arguments.gin]
    parts = [f"{file.parent.name}-again" if file.name == "config.gin" else file.stem for file in files]
    for binding in arguments.set:
        name, _, value = binding.partition("=")
        if not may_change(name.strip()):
            parts.append("".join(c if c.isalnum() or c in "._-" else "_" for c in f"{name.strip()}_{value.strip()}"))
    return "-".join([*parts, f"seed{seed}"])


def _tag(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _git_commit() -> str:
    if CHECKOUT is None:  # git would answer for whatever repository the installation lies in
        return "unknown"
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
