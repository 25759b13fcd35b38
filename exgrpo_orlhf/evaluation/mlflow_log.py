"""An evaluation in MLflow: on the training run that made the checkpoint, or on a run of its own."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..tracking.metrics_log import METRICS_PER_CALL, check_name
from ..tracking.tracker import LOG_TAG, MLFLOW_ENVIRONMENT, create_sqlite, experiment_id
from .benchmarks import Definitions
from .folder import CONFIG
from .results import metrics

log = logging.getLogger(__name__)
TAG = "evaluation"  # of a run of its own: a hash of what was evaluated, and how
FILES = ("results.json", "paper.md", "report.html")


def log_results(out: Path, results: Mapping[str, Any], *, default_uri: str, experiment: str) -> str | None:
    """The run's id; None, with a warning, where MLflow does not answer: the files are there all the same.

    On the run that trained the checkpoint, at its step, stand only scores that mean there what their names say: of
    whole sets, sampled as their blocks say, and one for each name and step. All others go to a run of their own.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or default_uri
    for name, value in MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient  # seconds

    try:
        create_sqlite(uri)
        client = MlflowClient(tracking_uri=uri)
        trained = _training_run(client, results)
        why = None if trained is None else _departure(results) or _other_values(client, trained, results)
        if why:
            log.info("MLflow: %s: the results go to a run of their own, not to the training run", why)
        own = trained is None or why is not None
        run_id = _own_run(client, uri, out, results, experiment, trained) if own else trained
        _log_metrics(client, run_id, results, _scores(results, not own))
        for name in FILES:
            if (out / name).exists():
                client.log_artifact(run_id, str(out / name), f"evaluation/{results['name']}")
    except Exception as error:  # whatever MLflow, its database or the network came up with
        log.warning(
            "MLflow at %s: %s: %s. The results are in %s; run the same command again to log them",
            *(uri, type(error).__name__, str(error).partition("\n")[0][:300], out),
        )
        return None
    log.info("MLflow at %s: run %s", uri, run_id)
    return run_id


def _departure(results: Mapping[str, Any]) -> str | None:
    """Why a score is not what its name says."""
    for known in results["benchmarks"].values():
        if not known["whole"]:
            return f"{known['title']} was run in part"
        if known["departures"]:
            return f"{known['title']} with {', '.join(known['departures'])}"
    asked = results["record"]["asked_otherwise"]
    return f"the prompts are not those of training ({', '.join(asked)})" if asked else None


def _scores(results: Mapping[str, Any], trained: bool) -> dict[str, float]:
    """For a training run without the means over whatever was asked for, unless that is the paper's suite."""
    found = metrics(results)
    if trained and set(results["benchmarks"]) != set(Definitions().suites["paper"]):
        return {name: value for name, value in found.items() if name not in ("eval/avg", "eval/micro_avg")}
    return found


def _other_values(client: Any, run_id: str, results: Mapping[str, Any]) -> str | None:
    """A score that the run has already at this step, with another value (another seed, say)."""
    step = results["record"]["model"]["step"] or 0
    for name, value in _scores(results, trained=True).items():
        there = [each for each in client.get_metric_history(run_id, name) if each.step == step]
        if there and all(each.value != value for each in there):
            return f"{name} is {there[-1].value:g} there already"
    return None


def _training_run(client: Any, results: Mapping[str, Any]) -> str | None:
    """The run that trained this checkpoint: by the id in it, or, where MLflow answered only later, by its metrics'."""
    from mlflow.exceptions import MlflowException

    model = results["record"]["model"]
    if model["run"] is None:
        return None
    if model["mlflow_run_id"] is not None:
        try:
            run = client.get_run(model["mlflow_run_id"])
            if run.info.lifecycle_stage == "deleted":
                log.warning("MLflow's run %s, which trained this checkpoint, is deleted", run.info.run_id)
                return None
            return str(run.info.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    everywhere = [experiment.experiment_id for experiment in client.search_experiments()]
    known = client.search_runs(everywhere, filter_string=f"tags.{LOG_TAG} = '{model['metrics_log']}'", max_results=1)
    if known:
        return str(known[0].info.run_id)
    log.warning("MLflow does not know the run %s: its results go to a run of their own", model["run"])
    return None


def _own_run(client: Any, uri: str, out: Path, results: Mapping[str, Any], experiment: str, trained: str | None) -> str:
    """The run of this very evaluation, made where there is none."""
    model = results["record"]["model"]
    tag = hashlib.blake2b((out / CONFIG).read_bytes() + results["name"].encode(), digest_size=16).hexdigest()
    where = experiment_id(client, uri, experiment)
    begun = client.search_runs([where], filter_string=f"tags.{TAG} = '{tag}'", max_results=1)
    if begun:
        return str(begun[0].info.run_id)
    tags = {TAG: tag, "model": str(model["path"]), **({"trained_by": trained} if trained else {})}
    run = client.create_run(where, tags=tags, run_name=results["name"])
    client.set_terminated(run.info.run_id, "FINISHED")
    return str(run.info.run_id)


def _log_metrics(client: Any, run_id: str, results: Mapping[str, Any], scores: Mapping[str, float]) -> None:
    from mlflow.entities import Metric

    step = results["record"]["model"]["step"] or 0
    now = int(time.time() * 1000)
    new = []
    for name, value in scores.items():
        check_name(name)
        there = client.get_metric_history(run_id, name)
        if not any(each.step == step and each.value == value for each in there):
            new.append(Metric(name, value, now, step))
    for begin in range(0, len(new), METRICS_PER_CALL):
        client.log_batch(run_id, metrics=new[begin : begin + METRICS_PER_CALL])
