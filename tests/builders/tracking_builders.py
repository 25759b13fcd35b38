"""Trackers of metrics logs, and what MLflow has got."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from exgrpo_orlhf.settings import Tracking
from exgrpo_orlhf.tracking.metrics_log import MetricsLog
from exgrpo_orlhf.tracking.tracker import MlflowTracker, RunDescription


def tracker(log: MetricsLog | Path, uri: str, settings: Tracking | None = None, **other: Any) -> MlflowTracker:
    """Of a log, or of that of a run's folder. other: `start`, and of the description"""
    log = MetricsLog(log / "metrics.jsonl") if isinstance(log, Path) else log
    start = other.pop("start", None)
    return MlflowTracker(log, settings or Tracking(), uri, RunDescription(**{"name": "run", **other}), start)


def tracked_runs(uri: str, experiment: str = "exgrpo") -> list[Run]:
    client = MlflowClient(uri)
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
