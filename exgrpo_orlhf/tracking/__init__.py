"""Metrics of a run: `metrics.jsonl` first, then MLflow."""

from .metrics_log import MetricsLog
from .tracker import MlflowTracker

__all__ = ["MetricsLog", "MlflowTracker"]
