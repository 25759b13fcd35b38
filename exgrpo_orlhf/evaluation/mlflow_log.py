"""An evaluation in MLflow: on the training run that made the checkpoint, or on a run of its own."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..metrics_log import METRICS_PER_CALL, check_name
from ..tracking import LOG_TAG, MLFLOW_ENVIRONMENT, create_sqlite, experiment_id
from .results import metrics

log = logging.getLogger(__name__)
TAG = "evaluation"  # of a run of its own: the folder's name and the model's hash
FILES = ("results.json", "paper.md", "report.html")


def log_results(out: Path, results: Mapping[str, Any], *, default_uri: str, experiment: str) -> str | None:
    """The run's id; None, with a warning, where MLflow does not answer: the files are there all the same.

    Metrics stand at the checkpoint's step. What the run has already with the same value is not logged twice.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or default_uri
    for name, value in MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient  # seconds

    try:
        create_sqlite(uri)
        client = MlflowClient(tracking_uri=uri)
        run_id = _training_run(client, results) or _own_run(client, uri, results, experiment)
        _log_metrics(client, run_id, results)
        for name in FILES:
            client.log_artifact(run_id, str(out / name), f"evaluation/{results['name']}")
    except Exception as error:  # whatever MLflow, its database or the network came up with
        log.warning(
            "MLflow at %s: %s: %s. The results are in %s; run the same command again to log them",
            *(uri, type(error).__name__, str(error).partition("\n")[0][:300], out),
        )
        return None
    log.info("MLflow at %s: run %s", uri, run_id)
    return run_id


def _training_run(client: Any, results: Mapping[str, Any]) -> str | None:
    """The run that trained this checkpoint: by the id in it, or, where MLflow answered only later, by its metrics'."""
    from mlflow.exceptions import MlflowException

    model = results["record"]["model"]
    if model["run"] is None:
        return None
    if model["mlflow_run_id"] is not None:
        try:
            return str(client.get_run(model["mlflow_run_id"]).info.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    everywhere = [experiment.experiment_id for experiment in client.search_experiments()]
    known = client.search_runs(everywhere, filter_string=f"tags.{LOG_TAG} = '{model['metrics_log']}'", max_results=1)
    if known:
        return str(known[0].info.run_id)
    log.warning("MLflow does not know the run %s: its results go to a run of their own", model["run"])
    return None


def _own_run(client: Any, uri: str, results: Mapping[str, Any], experiment: str) -> str:
    model = results["record"]["model"]
    tag = f"{results['name']} {model['hash'] or model['revision'] or model['path']}"
    where = experiment_id(client, uri, experiment)
    begun = client.search_runs([where], filter_string=f"tags.{TAG} = '{tag}'", max_results=1)
    if begun:
        return str(begun[0].info.run_id)
    run = client.create_run(where, tags={TAG: tag, "model": str(model["path"])}, run_name=results["name"])
    client.set_terminated(run.info.run_id, "FINISHED")
    return str(run.info.run_id)


def _log_metrics(client: Any, run_id: str, results: Mapping[str, Any]) -> None:
    from mlflow.entities import Metric

    step = results["record"]["model"]["step"] or 0
    now = int(time.time() * 1000)
    new = []
    for name, value in metrics(results).items():
        check_name(name)
        there = client.get_metric_history(run_id, name)
        if not any(each.step == step and each.value == value for each in there):
            new.append(Metric(name, value, now, step))
    for begin in range(0, len(new), METRICS_PER_CALL):
        client.log_batch(run_id, metrics=new[begin : begin + METRICS_PER_CALL])
