"""Trackers of metrics logs, and what MLflow has got."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from exgrpo_orlhf.settings import Tracking
from exgrpo_orlhf.tracking.metrics_log import MetricsLog
from exgrpo_orlhf.tracking.tracker import MlflowTracker


def tracker(log: MetricsLog | Path, uri: str, settings: Tracking | None = None, **other: Any) -> MlflowTracker:
    """Of a log, or of that of a run's folder. other: arguments beside the address"""
    log = MetricsLog(log / "metrics.jsonl") if isinstance(log, Path) else log
    settings = settings or Tracking()
    return MlflowTracker(log, settings, **{"default_uri": uri, "run_name": "run", "params": {}, "tags": {}, **other})


def tracked_runs(uri: str, experiment: str = "exgrpo") -> list[Run]:
    client = MlflowClient(uri)
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
