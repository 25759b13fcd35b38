"""Metrics of a run: `metrics.jsonl` first, then MLflow."""
