"""Log an evaluation to MLflow: to the training run that made the checkpoint, or to a run of its own."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..io.redaction import without_password
from ..tracking.client import LOG_TAG, batches, connect, experiment_id, find_run, first_line, tagged_run
from ..tracking.scores import metrics
from .benchmarks import project_definitions
from .results_folder import CONFIG

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)
TAG = "evaluation"  # of a run of its own: a hash of what was evaluated, and how
FILES = ("results.json", "paper.md", "report.html")


def log_results(out: Path, results: Mapping[str, Any], *, default_uri: str, experiment: str) -> str | None:
    """Log scores and files. Returns the run's id, or None, with a warning, if MLflow does not answer.

    The run that trained the checkpoint gets, at its step, only scores of whole sets that were sampled as their blocks
    say, and one value for each name and step. All other results go to a run of their own.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or default_uri
    try:
        client = connect(uri)
        step = results["record"]["model"]["step"] or 0
        run_id, scores = _training_run(client, results), metrics(results)
        # A training run gets the means over all benchmarks only if they are over the paper's suite.
        if set(results["means"]["macro"]["benchmarks"]) != set(project_definitions().suites["paper"]):
            scores = {name: value for name, value in scores.items() if name not in ("eval/avg", "eval/micro_avg")}
        why = run_id and (_departure(results) or _conflict(client, run_id, step, scores))
        if why:
            log.info("MLflow: %s: the results go to a run of their own, not to the training run", why)
        if run_id is None or why:
            run_id, scores = _own_run(client, uri, out, results, experiment, training_run=run_id), metrics(results)
        new = {name: value for name, value in scores.items() if value not in _values(client, run_id, step, name)}
        for batch in batches([{"step": step, "time": time.time(), **new}]):
            client.log_batch(run_id, metrics=batch)
        for name in FILES:
            if (out / name).exists():
                client.log_artifact(run_id, str(out / name), f"evaluation/{results['name']}")
    except Exception as error:  # of MLflow, its database or the network, of any class
        reason = "MLflow at %s: %s. The results are in %s; run the same command again to log them"
        log.warning(reason, without_password(uri), first_line(error), out)
        return None
    log.info("MLflow at %s: run %s", without_password(uri), run_id)
    return run_id


def _departure(results: Mapping[str, Any]) -> str | None:
    """Why a score is not what its metric's name says; None if all are."""
    for entry in results["benchmarks"].values():
        if not entry["whole"]:
            return f"{entry['title']} was run in part"
        if entry["departures"]:
            return f"{entry['title']} with {', '.join(entry['departures'])}"
    changes = results["record"]["asked_otherwise"]
    return f"the prompts are not those of training ({', '.join(changes)})" if changes else None


def _conflict(client: MlflowClient, run_id: str, step: int, scores: Mapping[str, float]) -> str | None:
    """Names a score that the run has at this step with another value, for example of another seed; None for none."""
    for name, value in scores.items():
        values = _values(client, run_id, step, name)
        if values and value not in values:
            return f"{name} is {values[-1]:g} there already"
    return None


def _values(client: MlflowClient, run_id: str, step: int, name: str) -> list[float]:
    """What a run has of a metric at a step."""
    return [point.value for point in client.get_metric_history(run_id, name) if point.step == step]


def _training_run(client: MlflowClient, results: Mapping[str, Any]) -> str | None:
    """The run that trained this checkpoint, found by the id in it, else by the identity of its metrics log."""
    model = results["record"]["model"]
    if model["run"] is None:
        return None
    if model["mlflow_run_id"] is not None and (run := find_run(client, model["mlflow_run_id"])):
        if run.info.lifecycle_stage == "deleted":
            log.warning("MLflow's run %s, which trained this checkpoint, is deleted", run.info.run_id)
            return None
        return str(run.info.run_id)
    everywhere = [experiment.experiment_id for experiment in client.search_experiments()]
    if run := tagged_run(client, everywhere, LOG_TAG, model["metrics_log"]):
        return str(run.info.run_id)
    log.warning("MLflow does not know the run %s: its results go to a run of their own", model["run"])
    return None


def _own_run(
    client: MlflowClient, uri: str, out: Path, results: Mapping[str, Any], experiment: str, training_run: str | None
) -> str:
    """The run of this evaluation, made if there is none."""
    tag = hashlib.blake2b((out / CONFIG).read_bytes() + results["name"].encode(), digest_size=16).hexdigest()
    where = experiment_id(client, uri, experiment)
    if run := tagged_run(client, [where], TAG, tag):
        return str(run.info.run_id)
    tags = {TAG: tag, "model": str(results["record"]["model"]["path"])}
    tags |= {"trained_by": training_run} if training_run else {}
    run = client.create_run(where, tags=tags, run_name=results["name"])
    client.set_terminated(run.info.run_id, "FINISHED")
    return str(run.info.run_id)
