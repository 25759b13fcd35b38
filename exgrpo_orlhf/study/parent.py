"""A group's parent run in MLflow, with its runs below it. Best effort: an outage is said once and stops nothing."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import write
from ..settings import Tracking
from ..tracking.metrics_log import STEP_METRIC
from ..tracking.tracker import LOG_TAG, MLFLOW_ENVIRONMENT, create_sqlite, experiment_id
from .runs import Measured, Run

log = logging.getLogger(__name__)
PARENT_TAG = "mlflow.parentRunId"
_SUITE_TAG = "suite_id"  # of the parent: by it a group's folder finds its parent again


class Parent:
    """id: of the parent run; None while MLflow has not answered, or where tracking is off."""

    def __init__(self, out: Path, group: str, settings: Tracking, default_uri: str) -> None:
        """out: the group's folder, which keeps the parent's identity (`mlflow.id`)"""
        self.id: str | None = None
        self._out, self._group, self._settings = out, group, settings
        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or settings.uri or default_uri
        self._client: Any = None
        self._said = False

    def open(self, tags: Mapping[str, str]) -> None:
        """Find the parent or make it. Its identity is on the disk before: a kill in between makes no second one."""
        self._attempt(lambda: self._open(tags))

    def lacking(self, runs: Sequence[Run]) -> list[Run]:
        """Of finished runs, those that MLflow does not have to their end: a kill or an outage came before that.

        None of them where MLflow does not answer.
        """
        return self._attempt(lambda: self._lacking(runs)) or []

    def close(self, runs: Sequence[Run], status: str) -> None:
        """Take in what began while MLflow did not answer, name the runs, and set the parent's status.

        status: FINISHED, FAILED or KILLED
        """
        self._attempt(lambda: self._close(runs, status))

    def _attempt(self, action: Callable[[], Any]) -> Any:
        if not self._settings.enabled:
            return None
        try:
            return action()
        except Exception as error:  # whatever MLflow, its database or the network came up with
            if not self._said:
                text = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
                log.warning(
                    "MLflow: %s. The runs go on; start the same command again when it answers, and what it lacks of "
                    "them is sent",
                    text,
                )
            self._said = True
            return None

    def _open(self, tags: Mapping[str, str]) -> None:
        for name, value in MLFLOW_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient  # seconds

        create_sqlite(self._uri)
        self._client = MlflowClient(tracking_uri=self._uri)
        experiment = experiment_id(self._client, self._uri, self._settings.experiment)
        found = self._client.search_runs([experiment], f"tags.{_SUITE_TAG} = '{self._identity()}'", max_results=1)
        if found:
            self.id = found[0].info.run_id
            for name, value in tags.items():
                self._client.set_tag(self.id, name, value)
            self._client.update_run(self.id, status="RUNNING")
        else:
            tags = {**tags, "group": self._group, _SUITE_TAG: self._identity()}
            self.id = self._client.create_run(experiment, tags=tags, run_name=self._group).info.run_id

    def _identity(self) -> str:
        path = self._out / "mlflow.id"
        if not path.exists():
            write(path, uuid.uuid4().hex)
        return path.read_text(encoding="ascii")

    def _lacking(self, runs: Sequence[Run]) -> list[Run]:
        if self.id is None:
            return []
        known = self._children()
        lacking = []
        for run in runs:
            child = known.get(_log_identity(run))
            there = None if child is None else child.data.metrics.get(STEP_METRIC)
            if there is None or there < Measured.of(run).step or child.info.status != "FINISHED":
                lacking.append(run)
        return lacking

    def _close(self, runs: Sequence[Run], status: str) -> None:
        if self.id is None:
            return
        known = self._children()
        for run in runs:
            child = known.get(_log_identity(run))
            if child is not None and child.data.tags.get(PARENT_TAG) != self.id:
                self._client.set_tag(child.info.run_id, PARENT_TAG, self.id)
            if child is not None and child.info.run_name != run.name:  # there, each bears its folder's: seed0
                self._client.update_run(child.info.run_id, name=run.name)
        self._client.set_terminated(self.id, status)

    def _children(self) -> dict[str, Any]:
        """The group's MLflow runs by the identity of their metrics log."""
        experiment = experiment_id(self._client, self._uri, self._settings.experiment)
        found: dict[str, Any] = {}
        token = None
        while True:
            page = self._client.search_runs([experiment], f"tags.group = '{self._group}'", page_token=token)
            found |= {run.data.tags[LOG_TAG]: run for run in page if LOG_TAG in run.data.tags}
            token = page.token
            if not token:
                return found


def _log_identity(run: Run) -> str:
    """Of the run's metrics.jsonl (metrics_log.py), '' where it has not begun."""
    try:
        return (run.folder / "metrics.id").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""
