"""The runs of a study on disk: which there are, how far each one is, and the time left.

runs/<group>/<variant>/seed<k>/     a run's folder, as scripts/train.py makes it, and with these files besides its own
    run.log                         the output of its processes
    failed.json                     exit status and configuration of a failed process, until it is tried again
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from .. import checkpoints
from ..checks import ConfigError
from ..experiment import Experiment
from ..io.files import write_json
from ..io.progress import evaluations_left, score_name
from ..io.redaction import without_password
from ..show.tables import aligned
from ..tracking.metrics_log import ARRIVED, MetricsLog
from .suite import Variant


@dataclass(frozen=True, eq=False)
class StudyRun:
    """A run to train. experiment: of the variant, built with the first seed; other runs differ in the seed only"""

    variant: Variant
    seed: int
    experiment: Experiment
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.variant.name}/seed{self.seed}"

    @property
    def steps(self) -> int:
        """Planned steps."""
        return self.experiment.settings.steps

    @property
    def identity(self) -> dict[str, str]:
        return {**self.experiment.identity, "train.seed": repr(self.seed)}

    def finished(self) -> bool:
        """Whether the last step's checkpoint exists. CheckpointError if the newest one has another configuration."""
        saved = checkpoints.find(self.folder)
        if not saved:
            return False
        checkpoints.read_state(saved[max(saved)], self.identity, self.experiment.defaults)
        return max(saved) >= self.steps

    def sent(self, uri: str, experiment: str) -> bool:
        """Whether all of the run is known to have arrived in this experiment of the MLflow at this address."""
        path = self.folder / ARRIVED
        return path.exists() and path.read_text(encoding="utf-8").splitlines() == [without_password(uri), experiment]

    def failure(self) -> int | None:
        """The exit status with which this configuration failed; None if it did not fail, or that cannot be read."""
        try:
            failed = json.loads((self.folder / "failed.json").read_text(encoding="utf-8"))
        except OSError:
            return None
        return failed["status"] if failed["identity"] == self.identity else None

    def note_failure(self, status: int | None) -> None:
        path = self.folder / "failed.json"
        if status is None:
            path.unlink(missing_ok=True)
        else:
            write_json(path, {"status": status, "identity": self.identity})

    def log_tail(self) -> str:
        try:
            text = (self.folder / "run.log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(text.splitlines()[-12:])


@dataclass(frozen=True)
class RunProgress:
    """From metrics.jsonl. step: the last one, −1 for none; pace: seconds of a step, the median, because a machine that
    slept makes one step last for hours; evaluation: seconds of one; score: of the last one"""

    step: int = -1
    pace: float = 0.0
    evaluation: float = 0.0
    score: float | None = None
    score_name: str = ""

    @classmethod
    def of(cls, run: StudyRun) -> RunProgress:
        """Raises ValueError for a file that is not a metrics log."""
        rows = list(MetricsLog(run.folder / "metrics.jsonl").rows())
        steps, evaluations = ([row[name] for row in rows if name in row] for name in ("time/step", "time/evaluation"))
        pace, evaluation = (median(seconds) if seconds else 0.0 for seconds in (steps, evaluations))
        scores = ((row[name], name) for row in reversed(rows) if (name := score_name(row)))
        score, name = next(scores, (None, ""))
        return cls(rows[-1]["step"] if rows else -1, pace, evaluation, score, name)


def plan(
    variants: Sequence[Variant], seeds: Sequence[int], out: Path, load: Callable[..., Experiment]
) -> list[StudyRun]:
    """All runs, first those of the first seed. Every configuration is built.

    load: config.load

    Raises ConfigError with the variant's name, also for two variants with the same configuration.
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
    """Raise ConfigError for two equal variants: the same run would count twice in every comparison."""
    first: dict[str, str] = {}
    for name, experiment in experiments.items():
        other = first.setdefault(experiment.config_hash, name)
        if other != name:
            params = experiments[other].params
            changed = sorted(key for key, value in experiment.params.items() if params.get(key) != value)
            but = f", apart from {', '.join(changed)}, which does not change the experiment" if changed else ""
            raise ConfigError(
                f"the variants {other} and {name} are the same configuration ({experiment.config_hash}){but}; leave "
                "one out, or check whether a later file or --set undoes the difference"
            )
    if len({(experiment.tracking.experiment, experiment.tracking.uri) for experiment in experiments.values()}) > 1:
        raise ConfigError("the variants differ in Tracking.experiment or Tracking.uri; a group has one of each")


def seconds_left(runs: Sequence[StudyRun], progress: Mapping[str, RunProgress], jobs: int) -> float | None:
    """Seconds of steps and evaluations for the runs, `jobs` at a time, at the mean pace of their variant so far, else
    of all variants.

    progress: by name of the run, also of finished ones. Returns None if no step has been measured.
    """
    steps, seconds = defaultdict[str, int](int), defaultdict[str, float](float)
    evaluations = defaultdict[str, list[float]](list)
    for name, of_run in progress.items():
        for key in (name.rpartition("/")[0], ""):
            steps[key] += max(0, of_run.step)
            seconds[key] += of_run.pace * max(0, of_run.step)
            evaluations[key] += [of_run.evaluation] if of_run.evaluation else []
    if not steps[""]:
        return None
    work = []
    for run in runs:
        key = run.variant.name if steps[run.variant.name] else ""
        step, every = progress.get(run.name, RunProgress()).step, run.experiment.settings.eval_every
        done, evaluation = max(0, step), evaluations[key] or [0.0]
        evals = evaluations_left(done, run.steps, every) + (step < 0 and every is not None)  # one before the first step
        work.append(max(0, run.steps - done) * seconds[key] / steps[key] + evals * sum(evaluation) / len(evaluation))
    return max(sum(work) / jobs, *work, 0.0)


def table(runs: Sequence[StudyRun], finished: Collection[str], progress: Mapping[str, RunProgress]) -> str:
    """A line for each variant: finished runs, for each seed the score of the last evaluation or the step, and the mean.

    finished, progress: by name of the run
    """
    lines = [("variant", "finished", *dict.fromkeys(f"seed {run.seed}" for run in runs), "mean")]
    for variant in dict.fromkeys(run.variant.name for run in runs):
        of_seeds = [run for run in runs if run.variant.name == variant]
        names = [run.name for run in of_seeds if run.name in finished]
        scores = [score for name in names if (score := progress[name].score) is not None]
        mean = f"{sum(scores) / len(scores):.3f}" if scores else "–"
        cells = [_cell(run, finished, progress[run.name]) for run in of_seeds]
        lines.append((variant, f"{len(names)} of {len(of_seeds)}", *cells, mean))
    return "\n".join(aligned(lines, left=len(lines[0])))


def _cell(run: StudyRun, finished: Collection[str], progress: RunProgress) -> str:
    if run.name in finished:
        return "done" if progress.score is None else f"{progress.score:.3f}"
    if run.failure() is not None:
        return "failed"
    return f"{progress.step}/{run.steps}" if progress.step > 0 else "–"
