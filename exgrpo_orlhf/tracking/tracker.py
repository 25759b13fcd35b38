"""Sends a run's metrics from `metrics.jsonl` to MLflow, in the main flow and without stopping training.

The log is the record, and is written first. After a failure there is no other attempt before the next checkpoint or the
end of the run, so a server that does not answer costs one timeout a checkpoint. Every step carries the metric
`train/step` in the same atomic call, and its highest value is read back at each (re)connection. So the steps of an
outage are sent later, and no step is logged twice: not after a kill, and not when the log was cut back to a checkpoint,
unless its steps came out otherwise when they were made again, or fewer were made (set_aside.py). The
curve of a supervised start, which counts steps of its own, goes the same way with `supervised/step`.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..io.files import write
from ..io.metric_names import check_name
from ..io.redaction import redacted, without_password
from ..questions.reading import fingerprint
from ..records import Question
from ..settings import Tracking
from .client import (
    LOG_TAG,
    address,
    batches,
    connect,
    experiment_id,
    find_run,
    first_line,
    page,
    tagged_run,
)
from .metrics_log import ARRIVED, START_METRIC, STEP_METRIC, MetricsLog
from .others import OtherTrackers
from .set_aside import EarlierSteps

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

logger = logging.getLogger(__name__)

TABLES = '[{"path": "responses.json", "type": "table"}]'  # tag: the artifacts that MLflow shows as tables
DESCRIPTION = "mlflow.note.content"  # shown at the top of a run's page
KILLED = "killed"  # tag: how often the run was resumed after a kill, which MLflow never heard of
SYSTEM_SECONDS = 10.0  # between two measurements of the machine
SOURCES = 3  # that a dataset's name lists
NAME_LENGTH = 500  # characters of a dataset's name; MLflow refuses a longer one
PARAM_LENGTH = 6000  # characters; MLflow cuts longer values, and two long ones may then look the same


@dataclass(frozen=True)
class RunDescription:
    """What MLflow knows of a run beside its metrics.

    params: logged once, when the run is made or lacks them
    tags: those of the latest session
    questions: by context ('training', 'validation'), logged as datasets
    id: of the run to continue, from the checkpoint. Without it, a run that this log has begun on that server is found
        by the log's identity
    step: of the checkpoint from which the run goes on, 0 for none
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    questions: Mapping[str, Sequence[Question]] = field(default_factory=dict)
    id: str | None = None
    step: int = 0


class MlflowTracker:
    """Sends a log's rows to one MLflow run, and to what `Tracking.also` names. No failure of it stops training.

    Raises ValueError for a name of a param or a tag that MLflow would refuse.
    run_id: of the run in MLflow; None until the server has answered
    enabled: whether MLflow gets anything at all
    start: the finished curve of the supervised start that the run began with

    An outage (any error while sending) causes one warning when it begins, and one when it is over.
    """

    def __init__(
        self,
        log: MetricsLog,
        settings: Tracking,
        default_uri: str,
        run: RunDescription,
        start: MetricsLog | None = None,
    ) -> None:
        for name in (*run.params, *run.tags):
            check_name(name)
        self._log = log
        self._settings, self.enabled = settings, settings.enabled
        self._uri = address(settings, default_uri) if self.enabled else ""
        self._run_name, self._questions, self._resumed_at = run.name, run.questions, run.step
        self.run_id = run.id
        self._params = {name: _param_text(value) for name, value in run.params.items()}
        self._others = OtherTrackers(log, settings, run.name, self._params)
        self._tags = {name: str(redacted(name, value)) for name, value in run.tags.items()}
        if self.enabled:
            self._tags |= {LOG_TAG: log.identity, "mlflow.loggedArtifacts": TABLES}
        self._started = int(time.time() * 1000)
        self._client: Any = None
        self._system: Any = None
        self._first = True
        self._connected = False  # false again after steps could not be sent: the server is then asked what has arrived
        self._logs = {STEP_METRIC: log} | ({} if start is None else {START_METRIC: start})
        self._cursors = dict.fromkeys(self._logs, -1)  # of each the highest step known to be in MLflow
        self._begun = {metric: one.last_step for metric, one in self._logs.items()}  # after a resume: what is kept
        self._earlier = EarlierSteps()
        self._failure: str | None = None
        self._artifacts: list[Path] = []
        self._experiment = ""  # the id
        if self.enabled:
            log.path.with_name(ARRIVED).unlink(missing_ok=True)

    def artifact(self, path: Path) -> None:
        """Notes a file for the next `catch_up`, which uploads it as it then is."""
        if self.enabled and path not in self._artifacts:
            self._artifacts.append(path)

    def send(self) -> None:
        """After a step: one attempt to send the steps that MLflow lacks, unless the latest one has failed."""
        self._others.send()
        if self._connected:
            self._attempt(self._send_steps)

    def catch_up(self) -> None:
        """At the start and at each checkpoint: one attempt to send all steps and files that MLflow lacks."""
        self._others.send(again=True)
        self._attempt(self._send_steps, self._send_files)

    def close(self, status: Literal["FINISHED", "KILLED", "FAILED"]) -> None:
        """One attempt to send what is left and to set the run's status. A warning says what could not be sent."""
        self._others.close()
        self._attempt(self._send_steps, self._end_steps, lambda: self._terminate(status), self._send_files)
        if self._failure is not None:
            steps = sum(1 for metric, log in self._logs.items() for _ in log.rows(after=self._cursors[metric]))
            logger.warning(
                "MLflow at %s: %d steps of %s and %d artifacts are not known to have arrived (%s). Both are safe on "
                "disk; resume this run when the server answers, and the steps are sent first.",
                *(without_password(self._uri), steps, self._log.path, len(self._artifacts), self._failure),
            )
            return
        if not self.enabled:
            return
        if status == "FINISHED":
            with contextlib.suppress(OSError):  # without the file, all is sent again
                arrived = f"{without_password(self._uri)}\n{self._settings.experiment}\n"
                write(self._log.path.with_name(ARRIVED), arrived)
        logger.info("look at it: %s", page(self._uri, self._experiment))

    def _attempt(self, *parts: Callable[[], None]) -> None:
        if not self.enabled:
            return
        connected, self._connected = self._connected, False
        try:
            if not connected:
                self._connect()
            for part in parts:
                part()
        except Exception as error:  # whatever MLflow, its database or the network came up with
            if self._failure is None:
                logger.warning(
                    "MLflow at %s: %s. Training goes on, the metrics are safe in %s; what is missing is sent at a "
                    "checkpoint or at the end.",
                    *(without_password(self._uri), first_line(error, 500), self._log.path),
                )
            self._failure = first_line(error, 500)
            return
        if self._failure is not None and not self._artifacts:
            answer = "MLflow at %s answers again and has all steps up to %d"
            logger.warning(answer, without_password(self._uri), self._cursors[STEP_METRIC])
            self._failure = None

    def _send_steps(self) -> None:
        for metric, log in self._logs.items():
            rows = [*log.rows(after=self._cursors[metric])]
            new = [*dropwhile(partial(self._earlier.has, metric=metric), rows)]
            if new and new[0]["step"] <= self._earlier.last.get(metric, -1):
                self._earlier.set_aside(metric, new[0]["step"], new[0]["time"])
            for batch in batches(new, step_metric=metric):
                self._client.log_batch(self.run_id, metrics=batch)
                self._cursors[metric] = batch[-1].step
            if rows:
                self._cursors[metric] = rows[-1]["step"]
        self._connected = True  # also where the files then fail, whose store may be another one

    def _end_steps(self) -> None:
        """What MLflow has beyond the last step is of a longer attempt."""
        last = max(self._cursors[STEP_METRIC], self._resumed_at)  # the log may have lost rows
        if last < self._earlier.last.get(STEP_METRIC, -1):
            self._earlier.set_aside(STEP_METRIC, last + 1, time.time())

    def _send_files(self) -> None:
        while self._artifacts:
            if self._artifacts[0].exists():
                self._client.log_artifact(self.run_id, str(self._artifacts[0]))
            else:
                logger.warning("%s is gone, so it could not be uploaded to MLflow", self._artifacts[0])
            del self._artifacts[0]

    def _terminate(self, status: str) -> None:
        if self._system is not None:
            self._system.finish()
        self._client.set_terminated(self.run_id, status)

    def _connect(self) -> None:
        """Finds or makes the run, completes its params, and reads back how far it got."""
        if self._client is None:
            self._client = connect(self._uri)
        from mlflow.entities import Param, RunTag

        run = self._run()
        if run.info.lifecycle_stage == "deleted":
            raise RuntimeError(
                f"run {run.info.run_id} is deleted; `mlflow runs restore --run-id {run.info.run_id}` brings it back"
            )
        missing = [Param(name, value) for name, value in self._params.items() if name not in run.data.params]
        changed = [n for n, value in self._params.items() if _param_text(run.data.params.get(n, value)) != value]
        if changed:
            logger.info("MLflow run %s keeps its first values of %s", run.info.run_id, ", ".join(changed))
        described = bool(run.data.tags.get(DESCRIPTION))  # by its user, perhaps
        tags = [RunTag(name, value) for name, value in self._tags.items() if name != DESCRIPTION or not described]
        if self._first and run.info.status == "RUNNING" and STEP_METRIC in run.data.metrics:
            tags.append(RunTag(KILLED, str(int(run.data.tags.get(KILLED, 0)) + 1)))
        self._first = False
        self._client.log_batch(run.info.run_id, params=missing, tags=tags)
        if not run.inputs.dataset_inputs:
            bound = {"training": "Work.questions", "validation": "Work.validation"}
            sources = {context: self._params[name] for context, name in bound.items() if name in self._params}
            self._client.log_inputs(run.info.run_id, datasets(self._questions, sources))
        self._client.update_run(run.info.run_id, status="RUNNING")
        self._earlier = EarlierSteps(self._client, run, self._logs)
        self._cursors = {metric: min(step, self._begun[metric]) for metric, step in self._earlier.last.items()}
        self.run_id, self._experiment = run.info.run_id, run.info.experiment_id
        if self._settings.system_metrics:
            self._watch_system()

    def _watch_system(self) -> None:
        """MLflow's own thread; it ends in an outage, and is then started again."""
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        if self._system is not None:
            self._system.finish()
        monitor: Any = SystemMetricsMonitor
        self._system = monitor(self.run_id, SYSTEM_SECONDS, resume_logging=True, tracking_uri=self._uri)
        self._system.start()

    def _run(self) -> Any:
        """The run of the checkpoint, else the one that this log has begun in this experiment, else a new one."""
        run = None if self.run_id is None else find_run(self._client, self.run_id)
        if run and run.info.lifecycle_stage == "deleted":
            return run
        experiment = experiment_id(self._client, self._uri, self._settings.experiment)
        if run and run.info.experiment_id == experiment:
            return run
        if self.run_id is not None:
            missing = f"no run {self.run_id}" + f" in the experiment {self._settings.experiment}" * bool(run)
            logger.warning(
                "MLflow at %s has %s; all steps go to another run there", without_password(self._uri), missing
            )
        begun = tagged_run(self._client, [experiment], LOG_TAG, self._tags[LOG_TAG])
        return begun or self._client.create_run(experiment, self._started, self._tags, self._run_name)


def _param_text(value: Any) -> str:
    """A param as text, a string without its quotes. A long one is cut and gets its length and hash."""
    text = str(value)
    if text[:1] in "'\"":
        with contextlib.suppress(ValueError, SyntaxError):
            text = str(ast.literal_eval(text))
    if len(text) <= PARAM_LENGTH:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    note = f" … cut here: {len(text)} characters, blake2b {digest}"
    return text[: PARAM_LENGTH - len(note)] + note


def datasets(sets: Mapping[str, Sequence[Question]], bindings: Mapping[str, str]) -> list[DatasetInput]:
    """The questions as MLflow's datasets: one for each set that has any, by a hash that their order does not change.

    sets: by context, 'training' and 'validation'; bindings: where each comes from, as bound
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    return [
        DatasetInput(
            Dataset(
                name=_name(questions),
                digest=fingerprint(sorted(questions, key=lambda question: question.id)),
                source_type="gin",
                source=json.dumps({"binding": bindings.get(context, "")}),
                profile=json.dumps({"questions": len(questions)}),
            ),
            [InputTag("mlflow.data.context", context)],
        )
        for context, questions in sets.items()
        if questions
    ]


def _name(questions: Sequence[Question]) -> str:
    sources = list(dict.fromkeys(question.source for question in questions))
    rest = f" and {len(sources) - SOURCES} more" if len(sources) > SOURCES else ""
    return ", ".join(sources[:SOURCES])[: NAME_LENGTH - len(rest)] + rest
