"""A group's parent run in MLflow, with the group's runs below it. An outage is reported once and stops nothing."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..files import write
from ..settings import Tracking
from ..tracking.client import LOG_TAG, all_runs, connect, experiment_id, first_line, tagged_run
from ..tracking.metrics_log import STEP_METRIC
from .runs import Measured, StudyRun

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)
PARENT_TAG = "mlflow.parentRunId"
_SUITE_TAG = "suite_id"  # of the parent: by it a group's folder finds its parent again


_Found = TypeVar("_Found")


class Parent:
    """The parent run. id: its MLflow id; None while MLflow has not answered, or where tracking is off"""

    def __init__(self, out: Path, group: str, settings: Tracking, default_uri: str) -> None:
        """out: the group's folder, which keeps the parent's identity (`mlflow.id`)"""
        self.id: str | None = None
        self._out, self._group, self._settings = out, group, settings
        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or settings.uri or default_uri
        self._client: MlflowClient | None = None
        self._experiment = ""
        self._said = False

    def open(self, tags: Mapping[str, str]) -> None:
        """Find the parent or make it. Its identity is written first, so a kill in between makes no second one."""
        self._attempt(lambda: self._open(tags))

    def lacking(self, runs: Sequence[StudyRun]) -> list[StudyRun]:
        """The finished runs that MLflow lacks in part, after a kill or an outage; [] if it does not answer."""
        return self._attempt(lambda: self._lacking(runs)) or []

    def close(self, runs: Sequence[StudyRun], status: str) -> None:
        """Put runs that began during an outage below the parent, name all runs, and set the parent's status.

        status: FINISHED, FAILED or KILLED
        """
        self._attempt(lambda: self._close(runs, status))

    def _attempt(self, action: Callable[[], _Found]) -> _Found | None:
        if not self._settings.enabled:
            return None
        try:
            return action()
        except Exception as error:  # of MLflow, its database or the network, of any class
            if not self._said:
                log.warning(
                    "MLflow: %s. Training continues. Start the same command again later to send what is missing",
                    first_line(error),
                )
            self._said = True
            return None

    def _open(self, tags: Mapping[str, str]) -> None:
        self._client = connect(self._uri)
        self._experiment = experiment_id(self._client, self._uri, self._settings.experiment)
        identity = self._identity()
        if found := tagged_run(self._client, [self._experiment], _SUITE_TAG, identity):
            self.id = str(found.info.run_id)
            for name, value in tags.items():
                self._client.set_tag(self.id, name, value)
            self._client.update_run(self.id, status="RUNNING")
        else:
            tags = {**tags, "group": self._group, _SUITE_TAG: identity}
            self.id = str(self._client.create_run(self._experiment, tags=tags, run_name=self._group).info.run_id)

    def _identity(self) -> str:
        path = self._out / "mlflow.id"
        if not path.exists():
            write(path, uuid.uuid4().hex)
        return path.read_text(encoding="ascii")

    def _lacking(self, runs: Sequence[StudyRun]) -> list[StudyRun]:
        if self._client is None or self.id is None:
            return []
        known = self._children(self._client)
        lacking = []
        for run in runs:
            child = known.get(_log_identity(run))
            there = -1 if child is None or child.info.status != "FINISHED" else child.data.metrics.get(STEP_METRIC, -1)
            if there < 0 or there < Measured.of(run).step:
                lacking.append(run)
        return lacking

    def _close(self, runs: Sequence[StudyRun], status: str) -> None:
        if self._client is None or self.id is None:
            return
        known = self._children(self._client)
        for run in runs:
            child = known.get(_log_identity(run))
            if child is not None and child.data.tags.get(PARENT_TAG) != self.id:
                self._client.set_tag(child.info.run_id, PARENT_TAG, self.id)
            if child is not None and child.info.run_name != run.name:  # scripts/train.py names it by its folder: seed0
                self._client.update_run(child.info.run_id, name=run.name)
        self._client.set_terminated(self.id, status)

    def _children(self, client: MlflowClient) -> dict[str, Run]:
        """The group's MLflow runs by the identity of their metrics log."""
        found = all_runs(client, self._experiment, f"tags.group = '{self._group}'")
        return {run.data.tags[LOG_TAG]: run for run in found if LOG_TAG in run.data.tags}


def _log_identity(run: StudyRun) -> str:
    """The identity of the run's metrics.jsonl (metrics_log.py); '' if the run has not begun."""
    try:
        return (run.folder / "metrics.id").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""
