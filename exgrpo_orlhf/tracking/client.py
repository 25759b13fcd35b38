"""What all users of MLflow share: connecting, finding experiments and runs, sending metrics, messages."""

from __future__ import annotations

import getpass
import importlib.metadata
import logging
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoints import identities, in_use
from ..io.files import locked
from ..io.redaction import without_password
from ..settings import Tracking
from .metrics_log import METRICS_PER_CALL

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)
LOG_TAG = "metrics_log"  # the tag that holds MetricsLog.identity

# Set where the user has not set them, for this process and those it starts. MLflow's own retries (7, up to 120 s each)
# would block for minutes. Telemetry is off unless the user turns it on.
MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",  # seconds, which training waits
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
# Of a process that only reads: nothing waits but the reader, and a busy server has the time it needs.
READING = {**MLFLOW_ENVIRONMENT, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}

SCHEMES = ("file", "http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks", "databricks-uc", "uc")


def address(settings: Tracking, default: str) -> str:
    """Where a run is tracked: MLFLOW_TRACKING_URI, Tracking.uri, or the caller's default, in this order.

    Raises ValueError for an address with a scheme that neither MLflow nor an installed plugin of it has.
    """
    variable = os.environ.get("MLFLOW_TRACKING_URI")
    uri = variable or settings.uri or default
    scheme = uri.partition("://")[0].partition("+")[0] if "://" in uri else ""
    known = not scheme or scheme in SCHEMES
    if not known and scheme not in importlib.metadata.entry_points(group="mlflow.tracking_store").names:
        where = "the environment variable MLFLOW_TRACKING_URI" if variable else "Tracking.uri"
        raise ValueError(
            f"{where} = {without_password(uri)!r}: MLflow has no store for {scheme}://; give sqlite:///FILE, "
            f"http://HOST:PORT, or another of {', '.join(SCHEMES)}"
        )
    return uri


def connect(uri: str, create: bool = True, environment: Mapping[str, str] = MLFLOW_ENVIRONMENT) -> MlflowClient:
    """A client of a tracking server or database; MLflow's import takes seconds.

    create: make an SQLite database that does not exist; environment: set where the user has not set it
    """
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    if "sql" in uri.partition("://")[0]:
        from mlflow.store.db import utils

        # In MLflow 3.17 it is 10: opening a database that is not there would be tried for 101 s.
        utils.MAX_RETRY_COUNT = 1
    if create:
        create_sqlite(uri)
    return MlflowClient(tracking_uri=uri)


def experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    """The id of the experiment with this name, which is made if there is none. RuntimeError if it is deleted."""
    from mlflow.exceptions import MlflowException

    experiment, database = client.get_experiment_by_name(name), sqlite_file(uri)
    if experiment is None:
        # Beside the database: MLflow's default would be ./mlruns of whatever folder the run was started in.
        location = (database.parent / "mlartifacts" / name).absolute().as_uri() if database else None
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        experiment = client.get_experiment_by_name(name)  # another process was first
    if experiment is None:
        raise RuntimeError(f"experiment {name!r} vanished while it was looked up")
    if experiment.lifecycle_stage == "deleted":
        raise RuntimeError(
            f"experiment {name!r} is deleted; `mlflow experiments restore --experiment-id "
            f"{experiment.experiment_id}` brings it back, or choose another by Tracking.experiment"
        )
    return str(experiment.experiment_id)


def own_tags(script: str) -> dict[str, str]:
    """MLflow's own tags of a run that a program has made: the columns User and Source of its table of runs."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, in a container
        user = "unknown"
    return {"mlflow.user": user, "mlflow.source.name": str(Path(script).resolve()), "mlflow.source.type": "LOCAL"}


def page(uri: str, experiment: str) -> str:
    """How to look at an experiment. MLflow 3 opens on an empty page for language models' traces without the last part.

    experiment: its id
    """
    part = f"#/experiments/{experiment}?workflowType=machine_learning"
    if uri.startswith(("http://", "https://")):
        return f"{without_password(uri).rstrip('/')}/{part}"
    return f"mlflow ui --backend-store-uri {without_password(uri)}, then http://127.0.0.1:5000/{part}"


def find_run(client: MlflowClient, run_id: str) -> Run | None:
    """The run with this id, deleted or not; None if there is none."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def tagged_run(client: MlflowClient, experiments: Sequence[str], tag: str, value: str) -> Run | None:
    """A run of these experiments with this tag; None if there is none."""
    runs = client.search_runs(list(experiments), filter_string=f"tags.{tag} = '{value}'", max_results=1)
    return runs[0] if runs else None


def mark_killed(settings: Tracking, default_uri: str, folders: Iterable[Path]) -> None:
    """Runs that MLflow calls running, though no process trains in their folders, were killed: they are marked as such.

    folders: of the runs. A copy is left out: its run may train where it was copied from, on another machine say. An
        outage of MLflow causes one warning.
    """
    own = [run for run in folders if identities(run)[1:2] == [str(run.resolve())] and not in_use(run)]
    names = [identities(run)[0] for run in own]
    if not settings.enabled or not names:
        return
    try:
        uri = address(settings, default_uri)
        if (database := sqlite_file(uri)) and not database.is_file():
            return
        client = connect(uri, create=False)
        if (experiment := client.get_experiment_by_name(settings.experiment)) is None:
            return
        for name in names:
            run = tagged_run(client, [experiment.experiment_id], LOG_TAG, name)
            if run and run.info.status == "RUNNING":
                client.set_terminated(run.info.run_id, "KILLED")
    except Exception as error:  # of MLflow, its database or the network, of any class: nobody waits for the mark
        log.warning("MLflow: %s; it may call runs running that were killed", first_line(error))


def batches(rows: Iterable[Mapping[str, float]], step_metric: str | None = None) -> Iterator[list[Metric]]:
    """Rows of metrics as the calls in which MLflow takes them. A row is in one call, so that no step arrives in part,
    unless it has more metrics than a call.

    rows: 'step', 'time' (seconds since 1970; of a repeated request MLflow drops a metric equal in name, step, time and
        value) and metrics of each
    step_metric: the name of one more metric of each row, its step
    """
    from mlflow.entities import Metric

    batch: list[Metric] = []
    for row in rows:
        step, milliseconds = int(row["step"]), round(row["time"] * 1000)
        metrics = {name: value for name, value in row.items() if name not in ("step", "time")}
        metrics |= {step_metric: step} if step_metric else {}
        if batch and len(batch) + len(metrics) > METRICS_PER_CALL:
            yield batch
            batch = []
        batch += [Metric(name, value, milliseconds, step) for name, value in metrics.items()]
        while len(batch) > METRICS_PER_CALL:
            yield batch[:METRICS_PER_CALL]
            batch = batch[METRICS_PER_CALL:]
    if batch:
        yield batch


def first_line(error: Exception, most: int = 300) -> str:
    """Class and first line of an error, without a URI's password."""
    return without_password(f"{type(error).__name__}: {error}".partition("\n")[0])[:most]


def create_sqlite(uri: str) -> None:
    """Makes MLflow's database where there is none, whole or not at all, by one process at a time.

    MLflow itself builds it in place by some dozens of migrations without a lock: of two processes starting at once one
    fails, and a kill on the way can leave a database that no later start opens.
    """
    from mlflow.tracking import MlflowClient

    database = sqlite_file(uri)
    if database is None or database.exists():
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with locked(database.with_name(database.name + ".lock")):
        for leftover in database.parent.glob(f"{database.name}.*.new*"):  # of processes killed on the way
            leftover.unlink()
        fresh = database.with_name(f"{database.name}.{uuid.uuid4().hex}.new")
        if not database.exists():
            MlflowClient(tracking_uri=f"sqlite:///{fresh}").search_experiments(max_results=1)
            os.replace(fresh, database)


def sqlite_file(uri: str) -> Path | None:
    """The database of an address, if it is a file."""
    name = uri.removeprefix("sqlite:///").partition("?")[0]
    return Path(name) if uri.startswith("sqlite:///") and name not in ("", ":memory:") else None
