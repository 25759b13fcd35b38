#!/usr/bin/env python
"""Train with ExGRPO, or whatever the gin files make of it.

    python scripts/train.py --gin gin/quickstart.gin
    python scripts/train.py --gin gin/ablation_no_entropy.gin --set 'ReplayMixer.rho=0.25' --seed 3
    python scripts/train.py --gin gin/quickstart.gin --smoke     # try everything, estimate time, memory and disk, end
    python scripts/train.py --gin gin/quickstart.gin --dry-run   # the plan and what is missing; trains nothing
    python scripts/train.py --gin gin/quickstart.gin --resume
    python scripts/train.py --gin gin/quickstart.gin --resume-from checkpoint-50     # an older checkpoint

Runs go to runs/<name>/ of the project: config.gin, metrics.jsonl, checkpoint-<step>/. Ctrl-C, SIGTERM and
SIGHUP (a closed terminal) finish the step and save; --resume continues exactly there. Exit status: 0 for a complete
run, 128 + signal for one that a signal ended, 1 for an error while it trained, 2 for a configuration, a model,
questions, a reward function, a folder, or a checkpoint to resume from, that cannot be used.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo_orlhf.io import terminal
from exgrpo_orlhf.io.metric_names import check_name
from exgrpo_orlhf.io.paths import WORKPLACE
from exgrpo_orlhf.io.redaction import REDACTED, without_password

if TYPE_CHECKING:
    from exgrpo_orlhf.experiment import Experiment

_LONGEST = 180  # bytes of a run's name; what is longer ends in a hash
_HIGH_RATE = 0.1  # weights of trained models are mostly smaller


def main() -> int:
    arguments, unknown = _parser().parse_known_args()
    terminal.messages()

    from exgrpo_orlhf import config

    if unknown:
        name, _, value = " ".join(unknown).lstrip("-").replace(" ", "=", 1).partition("=")
        bindings = [f"--set {setting}={value}" for setting in config.all_settings() if setting.endswith(f".{name}")]
        if own := config.here(name):
            setting, _, remark = own.partition(" ")
            option = setting if setting.startswith("--") else f"--set {setting}={value}"
            bindings = [f"{option} {remark}".rstrip()]
        hint = f"; a setting is bound by {' or '.join(bindings)}" if bindings else ""
        _parser().error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        begun_with = _begun_with(arguments)
        experiment = config.load(arguments.gin, [*arguments.set, *begun_with], arguments.seed)
    except (config.ConfigError, _NoStart) as error:
        print(f"error: {without_password(str(error))}", file=sys.stderr)
        return 2
    overrides = config.overrides_as_bound([*arguments.set, *begun_with])
    name = arguments.name or _name(arguments, experiment.settings.seed, config.may_change, overrides)
    run = arguments.out or WORKPLACE / "runs" / name
    if not arguments.out and WORKPLACE / "runs" not in Path(os.path.normpath(run)).parents:
        print(f"error: --name {name!r} is no folder in {WORKPLACE / 'runs'}; --out takes any folder", file=sys.stderr)
        return 2
    if arguments.resume and arguments.resume_from is None and not run.exists():
        print(f"{run} does not exist yet: there is nothing to resume, the run begins", file=sys.stderr)
    if experiment.local and experiment.local.threads > (cores := len(os.sched_getaffinity(0))):
        print(
            f"LocalEngine.threads = {experiment.local.threads}, but this process has {cores} cores and is slower by "
            f"far than with --set LocalEngine.threads={cores}",
            file=sys.stderr,
        )
    if (rate := experiment.optimizer.learning_rate) > _HIGH_RATE:
        print(f"Optimizer.learning_rate = {rate:g}: AdamW moves each weight by up to that an update", file=sys.stderr)
    if arguments.dry_run:
        from exgrpo_orlhf.preflight.dry_run import dry_run

        earlier = arguments.resume_from
        return dry_run(experiment, run, resume=arguments.resume or earlier is not None, resume_from=earlier)
    return _run(arguments, experiment, run, _tags(arguments, experiment, overrides))


class _NoStart(Exception):
    """A checkpoint that no run can begin with."""


def _begun_with(arguments: argparse.Namespace) -> list[str]:
    """The bindings of --from and --with-buffer; says what the new run takes, and what not. Raises _NoStart."""
    if arguments.start is None:
        if arguments.with_buffer:
            raise _NoStart("--with-buffer needs --from CHECKPOINT, whose buffer it takes")
        return []
    from exgrpo_orlhf.checkpoints import find, manifest

    start = arguments.start.expanduser().resolve()
    if saved := find(start):
        raise _NoStart(
            f"--from {start} is the folder of a run; give one of its checkpoints: --from {max(saved.items())[1]}"
        )
    bound = [text for text in arguments.set if text.partition("=")[0].strip() in ("PretrainedModel.path", "Work.model")]
    if bound:
        raise _NoStart(f"--set {bound[0]!r} and --from both say with which model the run begins; leave one out")
    if arguments.with_buffer and any(text.partition("=")[0].strip() == "Work.experience" for text in arguments.set):
        raise _NoStart("--set Work.experience and --with-buffer both say with which buffer it begins; leave one out")
    try:
        manifest.verify(start)
    except manifest.ManifestError as error:
        raise _NoStart(f"--from: {error}") from error
    taken = "its weights, also as a KL term's reference" + (", and its replay buffer" if arguments.with_buffer else "")
    left = "its optimiser state, schedule, steps, metrics and order of questions, retired questions"
    left += "" if arguments.with_buffer else " and the replay buffer (--with-buffer takes it)"
    print(f"from {start}: {taken}; not {left}", file=sys.stderr)
    bindings = ["Work.model = @PretrainedModel()", f"PretrainedModel.path = {str(start)!r}"]
    return [*bindings, *([f"Work.experience = {str(start)!r}"] if arguments.with_buffer else [])]


def _tags(arguments: argparse.Namespace, experiment: Experiment, overrides: list[str]) -> dict[str, str]:
    """Of the MLflow run. overrides: the bindings of --set as they may be written"""
    from exgrpo_orlhf.config import gin_files
    from exgrpo_orlhf.io.provenance import git_commit
    from exgrpo_orlhf.tracking.client import own_tags

    tags = {
        "gin": " ".join(Path(file).name for file in arguments.gin),
        "engine": experiment.settings.engine,
        "seed": str(experiment.settings.seed),
        "git_commit": (commit := git_commit()),
        "mlflow.source.git.commit": commit.removesuffix("-dirty"),
        **own_tags(__file__),
        **({"set": "\n".join(overrides)} if overrides else {}),
        **dict(arguments.tag),
    }
    if hypotheses := [text for file in arguments.gin if (text := gin_files.hypothesis(gin_files.find(file, None)))]:
        tags["mlflow.note.content"] = "\n\n".join(hypotheses)  # the description at the top of the run's page
    return tags


def _run(arguments: argparse.Namespace, experiment: Experiment, run: Path, tags: dict[str, str]) -> int:
    """Trains, or tries it (--smoke). Returns the exit status."""
    from exgrpo_orlhf.checkpoints import (
        CheckpointError,
        RunFolderError,
        UnusableCheckpoint,
        refuse_earlier,
        refuse_other,
    )
    from exgrpo_orlhf.engines.openrlhf.stack import refuse_wrong_versions
    from exgrpo_orlhf.rewards import GradingError, NoGrader
    from exgrpo_orlhf.sampling import EngineLost
    from exgrpo_orlhf.training.run import train

    earlier, uri = arguments.resume_from, f"sqlite:///{WORKPLACE / 'mlflow.db'}"
    resume = arguments.resume or earlier is not None
    try:
        if experiment.openrlhf is not None:  # before a model is made and questions are loaded
            refuse_wrong_versions()
        if arguments.smoke:
            refuse_earlier(run, resume)  # before the imports that take seconds
            refuse_other(run)
            from exgrpo_orlhf.preflight.smoke import smoke

            for line in smoke(experiment, run, uri):
                print(line, flush=True)
            return 0
        outcome = train(experiment, run, resume=resume, resume_from=earlier, tracking_uri=uri, tags=tags)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (CheckpointError, RunFolderError, ArithmeticError, ValueError, OSError, EngineLost) as error:
        print(f"error: {without_password(str(error))}", file=sys.stderr)
        unusable = isinstance(error, (UnusableCheckpoint, RunFolderError, ValueError, FileNotFoundError))
        return 2 if isinstance(error, NoGrader) or (unusable and not isinstance(error, GradingError)) else 1
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
        help="load and check everything, make a few small steps in a folder that is removed unless they fail, estimate "
        "the run's time, memory and disk, and end",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan of the run (model, a prompt, batch, steps, replay, memory, disk, hours) and what is "
        "missing or wrong, and end; nothing is trained and no weights are loaded",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the run from its newest checkpoint, or begin it if it has none"
    )
    parser.add_argument(
        "--from",
        dest="start",
        type=Path,
        metavar="CHECKPOINT",
        help="begin a new run with the weights of a checkpoint of another run, such as runs/x/checkpoint-40, with any "
        "settings",
    )
    parser.add_argument("--with-buffer", action="store_true", help="with --from: with its replay buffer too")
    parser.add_argument(
        "--resume-from",
        metavar="checkpoint-N",
        help="continue the run from this older checkpoint; newer ones are renamed to checkpoint-M.set-aside",
    )
    return parser


def _name(arguments: argparse.Namespace, seed: int, may_change: Callable[[str], bool], overrides: list[str]) -> str:
    """The same experiment gets the same name, so that --resume finds its run, also to make it longer.

    overrides: the bindings of --set as they may be written; one with a secret is no part of the name
    """
    hidden = {text.partition(" = ")[0] for text in overrides if REDACTED in text}
    hidden |= {text.partition("=")[0].strip() for text in arguments.set if without_password(text) != text}
    files = [Path(file) for file in arguments.gin]
    parts = [f"{file.parent.name}-again" if file.name == "config.gin" else file.stem for file in files]
    for binding in arguments.set:
        name, _, value = binding.partition("=")
        if name.strip() not in hidden and not may_change(name.strip()):
            parts.append("".join(c if c.isalnum() or c in "._-" else "_" for c in f"{name.strip()}_{value.strip()}"))
    if arguments.start is not None:
        start = arguments.start.resolve()
        parts += [f"from-{start.parent.name}-{start.name}", *["buffer"] * arguments.with_buffer]
    name = "-".join([*parts, f"seed{seed}"])
    if len(name.encode()) <= _LONGEST:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{name.encode()[:_LONGEST].decode(errors='ignore')}-{digest}"


def _tag(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        check_name(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name, value


if __name__ == "__main__":
    sys.exit(main())
