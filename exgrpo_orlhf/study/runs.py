"""The runs of a study as they lie on the disk: which there are, how far each is, how long the rest takes.

runs/<group>/<variant>/seed<k>/     a run's folder, as scripts/train.py makes it, and beside its files
    run.log                         what its processes said
    failed.json                     exit status and configuration of a process that failed, until it is tried again
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import checkpoints
from ..experiment import Experiment
from ..settings import ConfigError
from ..tracking.metrics_log import MetricsLog
from .suite import Variant

_SCORE = re.compile(r"eval/greedy_accuracy|eval/validation/avg_at_\d+")  # by Evaluation.temperature; the first wins


@dataclass(frozen=True, eq=False)
class StudyRun:
    """experiment: of the variant, built with the first seed; only its seed differs in the others"""

    variant: Variant
    seed: int
    experiment: Experiment
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.variant.name}/seed{self.seed}"

    @property
    def steps(self) -> int:
        """Planned ones."""
        return self.experiment.settings.steps

    @property
    def identity(self) -> dict[str, str]:
        return {**self.experiment.identity, "train.seed": repr(self.seed)}

    def finished(self) -> bool:
        """The checkpoint of the last step is there. CheckpointError if the newest has another configuration."""
        found = checkpoints.find(self.folder)
        if not found:
            return False
        checkpoints.read_state(found[max(found)], self.identity)
        return max(found) >= self.steps

    def failure(self) -> int | None:
        """The exit status with which this configuration failed here."""
        try:
            failed = json.loads((self.folder / "failed.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return failed["status"] if failed["identity"] == self.identity else None

    def note_failure(self, status: int | None) -> None:
        path = self.folder / "failed.json"
        if status is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(json.dumps({"status": status, "identity": self.identity}) + "\n", encoding="utf-8")

    def log_tail(self, lines: int = 12) -> str:
        try:
            text = (self.folder / "run.log").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return "(no log)"
        return "\n".join(text.splitlines()[-lines:])


@dataclass(frozen=True)
class Measured:
    """What metrics.jsonl says. step: the last one, −1 for none; seconds: of all steps; score: the last evaluation's"""

    step: int = -1
    seconds: float = 0.0
    score: float | None = None
    score_name: str = ""

    @classmethod
    def of(cls, run: StudyRun) -> Measured:
        """Raises ValueError for a file that is not a metrics log."""
        rows = list(MetricsLog(run.folder / "metrics.jsonl").rows())
        seconds = sum(row.get("time/step", 0.0) + row.get("time/evaluation", 0.0) for row in rows)
        step = rows[-1]["step"] if rows else -1
        for row in reversed(rows):
            if name := min(filter(_SCORE.fullmatch, row), default=None):
                return cls(step, seconds, row[name], name)
        return cls(step, seconds)


def plan(
    variants: Sequence[Variant], seeds: Sequence[int], out: Path, load: Callable[..., Experiment]
) -> list[StudyRun]:
    """All runs, those of the first seed first; every configuration is built.

    load: config.load

    Raises ConfigError, with the variant's name, also for two variants that are the same.
    """
    experiments = {}
    for variant in variants:
        try:
            experiments[variant.name] = load(variant.files, variant.bindings, seed=seeds[0])
        except ConfigError as error:
            raise ConfigError(f"variant {variant.name}: {error}") from error
    _refuse_alike(experiments)
    return [
        StudyRun(variant, seed, experiments[variant.name], out / variant.name / f"seed{seed}")
        for seed in seeds
        for variant in variants
    ]


def _refuse_alike(experiments: dict[str, Experiment]) -> None:
    """The same run under two names would count twice in every comparison."""
    first: dict[str, str] = {}
    for name, experiment in experiments.items():
        other = first.setdefault(experiment.config_hash, name)
        if other == name:
            continue
        theirs = experiments[other].params
        changed = sorted(key for key, value in experiment.params.items() if theirs.get(key) != value)
        but = f", but for {', '.join(changed)}, which makes no other experiment" if changed else ""
        raise ConfigError(
            f"the variants {other} and {name} are the same configuration ({experiment.config_hash}){but}; leave one "
            "out, or see whether a later file or --set takes back what makes the difference"
        )
    uris = {(x.tracking.experiment, x.tracking.uri) for x in experiments.values()}
    if len(uris) > 1:
        raise ConfigError("the variants differ in Tracking.experiment or Tracking.uri; a group has one of each")


def seconds_left(runs: Sequence[StudyRun], measured: Mapping[str, Measured], jobs: int) -> float | None:
    """Of the runs, `jobs` at a time, at the pace of their variant's steps so far, or of all steps where it has none.

    measured: by the name of a run, also of finished ones. None where no step has been measured.
    """
    steps: defaultdict[str, int] = defaultdict(int)
    seconds: defaultdict[str, float] = defaultdict(float)
    for name, each in measured.items():
        for key in (name.rpartition("/")[0], ""):
            steps[key] += max(0, each.step)
            seconds[key] += each.seconds
    if not steps[""]:
        return None
    work = []
    for run in runs:
        pace = run.variant.name if steps[run.variant.name] else ""
        done = max(0, measured.get(run.name, Measured()).step)
        work.append(max(0, run.steps - done) * seconds[pace] / steps[pace])
    return max(sum(work) / jobs, *work, 0.0)


def table(runs: Sequence[StudyRun], finished: Collection[str], measured: Mapping[str, Measured]) -> str:
    """A line a variant: finished runs, for each seed the last evaluation's score or how far it is, their mean.

    finished, measured: by the name of a run
    """
    seeds = list(dict.fromkeys(run.seed for run in runs))
    by_variant: dict[str, dict[int, StudyRun]] = {}
    for run in runs:
        by_variant.setdefault(run.variant.name, {})[run.seed] = run
    lines = [("variant", "finished", *(f"seed {seed}" for seed in seeds), "mean")]
    for variant, of_seed in by_variant.items():
        done = [run for run in of_seed.values() if run.name in finished]
        scores = [score for run in done if (score := measured[run.name].score) is not None]
        cells = [_cell(of_seed[seed], of_seed[seed] in done, measured) for seed in seeds]
        mean = f"{sum(scores) / len(scores):.3f}" if scores else "–"
        lines.append((variant, f"{len(done)} of {len(of_seed)}", *cells, mean))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


def _cell(run: StudyRun, finished: bool, measured: Mapping[str, Measured]) -> str:
    each = measured.get(run.name, Measured())
    if finished:
        return "done" if each.score is None else f"{each.score:.3f}"
    if run.failure() is not None:
        return "failed"
    return f"{each.step}/{run.steps}" if each.step > 0 else "–"
