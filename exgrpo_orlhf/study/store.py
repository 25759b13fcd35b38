"""Read runs and their curves from an MLflow store: a local database or a tracking server.

Runs are selected by the server's filter. Histories are fetched for the selected runs only, by MLflow's public client:
the bulk endpoint of its servers silently cuts at 25,000 values, and local stores lack it.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import numpy as np

from ..io.redaction import without_password
from ..show.tables import count, first_few
from ..tracking.client import READING, connect, sqlite_file
from ..tracking.set_aside import cuts_of, history
from .comparison import named_by_settings, newest
from .curve import SECONDS, TOKENS, Curve, History, Params, TrackedRun, curve_of

PAGE = 100  # runs: about 25,000 params, metrics and tags, all of which MLflow sends
AT_ONCE = 8  # histories


class StoreError(ValueError):
    """The store does not answer, or lacks what was requested. The message names what it has."""


class Store:
    """An MLflow store. Every call raises StoreError if it does not answer, or lacks the experiment, group or metric."""

    def __init__(
        self, uri: str, variant_of: Callable[[Params], Params] = dict, defaults: Mapping[str, str] = {}
    ) -> None:
        """variant_of: of a run's params those that tell variants apart (config.variant_of); by default all of them

        defaults: as `named_by_settings` has them
        """
        database = sqlite_file(uri)
        if database and not database.is_file():
            raise StoreError(f"there is no MLflow database at {database}; give --uri or MLFLOW_TRACKING_URI")
        self.uri, self._uri = without_password(uri), uri
        self._variant_of, self._defaults = variant_of, defaults
        with self._one_line_errors():
            self._client = connect(uri, create=False, environment=READING)

    def select(
        self, experiment: str, group: str | None, metrics: Sequence[str], more: str | None, unfinished: bool
    ) -> tuple[list[TrackedRun], list[str]]:
        """The runs to compare, one for each variant and seed: the children of a group (runs with a tag `variant`), else
        all runs that have a number as last value of one of the metrics; and notes: which were left out, and why.

        more: a further filter in MLflow's language; unfinished: include runs that did not end well
        """
        with self._one_line_errors():
            listed, unnamed = self._named_runs(self._runs(experiment, group, metrics, more))
        present = Counter(name for run in listed for name in run.metrics)
        for metric in metrics:
            if metric not in present and listed:
                near = get_close_matches(metric, present, 3)  # similar names first, then those of evaluations
                others = sorted(present.keys() - set(near), key=lambda name: (not name.startswith("eval/"), name))
                names = first_few([f"{name} ({count(present[name])})" for name in near + others], 12) or "none"
                raise StoreError(f"none of {count(listed)} has the metric {metric!r}; metrics: {names}")
        notes = []
        if strange := [run.info for run in unnamed if any(metric in run.data.metrics for metric in metrics)]:
            names = first_few([f"{info.run_name} ({info.run_id})" for info in strange])
            notes.append(f"left out, because they have no variant (tag variant or gin) or no seed: {names}")
        incomplete = [run for run in listed if run.status != "FINISHED"]
        if incomplete and unfinished:
            statuses = Counter(run.status for run in incomplete)
            counts = ", ".join(f"{number} {status}" for status, number in sorted(statuses.items()))
            notes.append(f"unfinished runs are compared too: {counts}")
        elif incomplete:
            names = first_few([f"{run}: {run.status}" for run in incomplete])
            notes.append(f"{count(incomplete)} not finished and left out (--unfinished takes such runs): {names}")
            listed = [run for run in listed if run.status == "FINISHED"]
        measured = [run for run in listed if not run.metrics.isdisjoint(metrics)]
        chosen, repetitions = newest(named_by_settings(measured, self._variant_of, self._defaults))
        for metric in metrics:
            if without := [str(run) for run in listed if metric not in run.metrics]:
                notes.append(f"without {metric}: {first_few(without)}")
            if not any(metric in run.metrics for run in chosen):
                runs = count(len(listed) + (0 if unfinished else len(incomplete)))
                raise StoreError(f"none of {runs} can be compared by {metric!r}: {'; '.join(notes)}")
        return chosen, [*notes, *repetitions]

    def curves(self, runs: Sequence[TrackedRun], metrics: Sequence[str]) -> dict[str, list[Curve]]:
        """The curves of each metric, of the runs that have it. StoreError where none has, but in what was set aside."""
        names = dict.fromkeys((*metrics, TOKENS, SECONDS))
        wanted = [(run, name) for run in runs for name in names if name in run.metrics]
        with self._one_line_errors(), ThreadPoolExecutor(AT_ONCE) as threads:
            read = threads.map(self._history, *zip(*wanted, strict=True))
            histories: dict[str, dict[str, History]] = defaultdict(dict)
            for (run, name), (steps, values) in zip(wanted, read, strict=True):
                if len(steps):
                    histories[run.id][name] = steps, values
        curves = {m: [curve_of(run, m, histories[run.id]) for run in runs if m in histories[run.id]] for m in metrics}
        if void := [metric for metric in metrics if not curves[metric]]:
            raise StoreError(f"{', '.join(void)}: all values are of attempts that were set aside by --resume-from")
        return curves

    def _runs(self, experiment: str, group: str | None, metrics: Sequence[str], more: str | None) -> list[Any]:
        """The runs of MLflow that pass the filter, at least one; without a group and with none of the metrics, all."""
        where, clauses = self._experiment(experiment), [more] if more else []
        if group is None:  # MLflow's filters have no "or", and this is the only way to say "has"
            queries = [[*clauses, f'metrics."{metric}" >= -1.7976931348623157e308'] for metric in metrics]
        else:
            quote = '"' if "'" in group else "'"
            queries = [[*clauses, f"tags.`group` = {quote}{group}{quote}", "tags.`variant` LIKE '%'"]]
        runs = {run.info.run_id: run for clauses in queries for run in self._pages(where, " and ".join(clauses))}
        if runs:
            return list(runs.values())
        if group is None:
            if others := list(self._pages(where, more or "")):
                return others
            raise StoreError(f"experiment {experiment!r} has no runs{f' that pass {more!r}' if more else ''}")
        children = self._pages(where, "tags.`group` LIKE '%' and tags.`variant` LIKE '%'")
        groups = Counter(run.data.tags["group"] for run in children)
        if group in groups:
            raise StoreError(f"none of {count(groups[group])} of the group {group!r} passes {more!r}")
        names = ", ".join(f"{name} ({count(groups[name])})" for name in sorted(groups)) or "none"
        raise StoreError(f"experiment {experiment!r} has no runs in the group {group!r}; groups: {names}")

    def _experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None and experiment.lifecycle_stage == "active":
            return str(experiment.experiment_id)
        names = [experiment.name for experiment in self._client.search_experiments(max_results=1000)]
        nearest = ", ".join(get_close_matches(name, names, 5, cutoff=0.4) or names[:10]) or "none"
        deleted = " (it is deleted)" if experiment else ""
        raise StoreError(f"{self.uri} has no experiment {name!r}{deleted}; the nearest are {nearest}")

    def _pages(self, where: str, clauses: str) -> Iterator[Any]:
        token = None
        while True:
            runs = self._client.search_runs([where], clauses, max_results=PAGE, page_token=token)
            yield from runs
            if not (token := runs.token):
                return

    def _history(self, run: TrackedRun, name: str) -> History:
        """As the run's log has it: of several values at a step the latest one, and none that was set aside."""
        points = history(self._client, run.id, name, cuts_of(self._client, run.id, run.metrics))
        at = {step: point.value for step, point in points.items()}
        for step, value in at.items():
            if not abs(value) < sys.float_info.max:  # MLflow stores an infinity as this number
                raise StoreError(
                    f"{run}: {name} is {value} at step {step}: no number to compare; leave it out by --filter"
                )
        return np.array(list(at), np.float64), np.array(list(at.values()), np.float64)

    def _named_runs(self, runs: Sequence[Any]) -> tuple[list[TrackedRun], list[Any]]:
        """(runs with variant and seed, runs without, such as evaluations of a released model)."""
        named, unnamed = [], []
        for run in runs:
            info, tags = run.info, run.data.tags
            variant, seed = tags.get("variant") or tags.get("gin"), tags.get("seed", "")
            if variant is None or not seed.lstrip("-").isdigit():
                unnamed.append(run)
                continue
            page = f"{self.uri}/#/experiments/{info.experiment_id}/runs/{info.run_id}"
            url = page if self.uri.startswith("http") else None
            engine, metrics = tags.get("engine", "unknown engine"), frozenset(run.data.metrics)
            facts = {"engine": engine, "status": info.status, "started": info.start_time, "params": run.data.params}
            named.append(TrackedRun(info.run_id, info.run_name, variant, int(seed), metrics=metrics, url=url, **facts))
        return named, unnamed

    @contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        """Errors of MLflow, its database or the network become a StoreError of one line."""
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (MlflowException, SQLAlchemyError, OSError) as error:
            first = without_password(str(error).strip().partition("\n")[0].replace(self._uri, self.uri))[:600]
            raise StoreError(f"MLflow at {self.uri}: {first}") from error
