"""Which of a run's values in MLflow are void: those of an attempt whose steps were made again otherwise, or not again.

MLflow removes no value. So a point of SET_ASIDE_METRIC says from which step on what is from before it is void; whoever
reads a run's values for a comparison leaves those out by `history`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .metrics_log import SET_ASIDE_METRIC, START_METRIC, STEP_METRIC

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient


class EarlierSteps:
    """What a run has in MLflow of steps that were made again after a resume.

    last: of each step metric the highest step there that counts, −1 for none
    """

    def __init__(self, client: Any = None, run: Any = None, metrics: Iterable[str] = ()) -> None:
        self._client, self._run = client, run
        self._names = set(run.data.metrics) if run else set()
        self._cuts = cuts_of(client, run.info.run_id, self._names) if run else []
        self._histories: dict[str, dict[int, Metric]] = {}
        self.last = {metric: max(self._at(metric), default=-1) if metric in self._names else -1 for metric in metrics}

    def has(self, row: Mapping[str, float], metric: str) -> bool:
        """Whether MLflow's latest values of this step are the row's and no others, but for times."""
        step = int(row["step"])
        if step > self.last.get(metric, -1) or (earlier := self._at(metric).get(step)) is None:
            return False
        for name in dict.fromkeys((*row, *sorted(self._names))):
            if name in ("step", "time", metric, SET_ASIDE_METRIC) or name.startswith("time/"):
                continue
            point = self._at(name).get(step)
            if point and name not in row and point.timestamp != earlier.timestamp:
                continue  # another program's value, such as a benchmark's
            if (point.value if point else None) != row.get(name):
                return False
        return True

    def set_aside(self, metric: str, step: int, now: float) -> None:
        """MLflow's values of this step and later ones that are from before now are void."""
        if metric == STEP_METRIC:
            self._client.log_metric(self._run.info.run_id, SET_ASIDE_METRIC, step, round(now * 1000), step)
        self.last[metric] = -1

    def _at(self, name: str) -> dict[int, Metric]:
        if name not in self._histories:
            self._histories[name] = history(self._client, self._run.info.run_id, name, self._cuts)
        return self._histories[name]


def cuts_of(client: MlflowClient, run: str, names: Container[str]) -> list[Metric]:
    """The points that say which values of a run are void, for `history`. run: its id; names: of its metrics"""
    return list(client.get_metric_history(run, SET_ASIDE_METRIC)) if SET_ASIDE_METRIC in names else []


def history(client: MlflowClient, run: str, name: str, cuts: Sequence[Metric]) -> dict[int, Metric]:
    """The points of a metric by step, in order; of several at a step the latest.

    run: its id; cuts: `cuts_of` the run, which are not of its supervised start
    """
    cuts = () if name.startswith(START_METRIC.partition("/")[0] + "/") else cuts
    points = sorted(client.get_metric_history(run, name), key=lambda point: (point.step, point.timestamp))
    return {
        point.step: point
        for point in points
        if not any(point.step >= cut.step and point.timestamp < cut.timestamp for cut in cuts)
    }
