"""A group's parent run in MLflow, with the group's runs below it. An outage is reported once and stops nothing."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import write
from ..redaction import redacted
from ..settings import Tracking
from ..tracking.client import LOG_TAG, address, all_runs, connect, experiment_id, first_line, tagged_run
from ..tracking.metrics_log import STEP_METRIC
from .runs import RunProgress, StudyRun, in_use

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)
PARENT_TAG = "mlflow.parentRunId"
PLANNED = "planned/"  # tags of the parent, a variant's name behind it: the seeds
SUITE_TAG = "suite_id"  # of the parent: by it a group's folder finds its parent again


class Parent:
    """The parent run. id: its MLflow id; None while MLflow has not answered, or where tracking is off"""

    def __init__(self, out: Path, group: str, settings: Tracking, default_uri: str) -> None:
        """out: the group's folder, which keeps the parent's identity (`mlflow.id`)"""
        self.id: str | None = None
        self._out, self._group, self._settings = out, group, settings
        self._uri = address(settings, default_uri)
        self._client: MlflowClient | None = None
        self._experiment = ""
        self._is_reported = False

    def open(self, tags: Mapping[str, str], runs: Sequence[StudyRun]) -> None:
        """Find the parent or make it. Its identity is written first, so a kill in between makes no second one.

        runs: that are planned, beside those of earlier calls
        """
        if not self._settings.enabled:
            return
        with self._outages_reported():
            client = connect(self._uri)
            self._experiment = experiment_id(client, self._uri, self._settings.experiment)
            path = self._out / "mlflow.id"
            if not path.exists():
                write(path, uuid.uuid4().hex)
            identity = path.read_text(encoding="ascii")
            run = tagged_run(client, [self._experiment], SUITE_TAG, identity) or client.create_run(
                self._experiment, tags={"group": self._group, SUITE_TAG: identity}, run_name=self._group
            )
            self._client, self.id = client, str(run.info.run_id)
            seeds = {name: {*value.split()} for name, value in run.data.tags.items() if name.startswith(PLANNED)}
            for each in runs:
                seeds.setdefault(PLANNED + each.variant.name, set()).add(str(each.seed))
            planned = {name: " ".join(sorted(each)) for name, each in seeds.items()}
            for name, value in {**redacted("tags", tags), **planned}.items():
                client.set_tag(self.id, name, value)
            client.update_run(self.id, status="RUNNING")

    def lacking(self, runs: Sequence[StudyRun]) -> list[StudyRun]:
        """The finished runs that MLflow lacks in part, after a kill or an outage; [] if it does not answer."""
        lacking: list[StudyRun] = []
        with self._outages_reported():
            children = self._children(runs)
            for run in runs if self._client else ():
                child = children.get(run)
                step = child.data.metrics.get(STEP_METRIC, -1) if child and child.info.status == "FINISHED" else -1
                if step < max(0, RunProgress.of(run).step):
                    lacking.append(run)
        return lacking

    def mark_killed(self, waiting: Sequence[StudyRun]) -> None:
        """Runs that MLflow calls running, though they wait: their processes were killed. They are marked as killed."""
        if self._client is None:
            return
        with self._outages_reported():
            for run, child in self._children(waiting).items():
                if child.info.status == "RUNNING" and not in_use(run.folder):
                    self._client.set_terminated(child.info.run_id, "KILLED")

    def close(self, runs: Sequence[StudyRun], status: str) -> None:
        """Put runs that began during an outage below the parent, and set the parent's status.

        status: FINISHED, FAILED or KILLED
        """
        if self._client is None or self.id is None:
            return
        with self._outages_reported():
            for child in self._children(runs).values():
                if child.data.tags.get(PARENT_TAG) != self.id:
                    self._client.set_tag(child.info.run_id, PARENT_TAG, self.id)
            self._client.set_terminated(self.id, status)

    @contextmanager
    def _outages_reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of MLflow, its database or the network, of any class
            if not self._is_reported:
                log.warning(
                    "MLflow: %s. Training continues. Start the same command again later to send what is missing",
                    first_line(error),
                )
            self._is_reported = True

    def _children(self, runs: Sequence[StudyRun]) -> dict[StudyRun, Run]:
        """Those of the runs that MLflow has, found by the identity of their metrics logs (metrics_log.py)."""
        if self._client is None:
            return {}
        query = f"tags.group = '{self._group}'"
        logged = {run.data.tags.get(LOG_TAG): run for run in all_runs(self._client, self._experiment, query)}
        begun = ((run, run.folder / "metrics.id") for run in runs)
        identities = {run: path.read_text(encoding="ascii").strip() for run, path in begun if path.exists()}
        return {run: logged[identity] for run, identity in identities.items() if identity in logged}
