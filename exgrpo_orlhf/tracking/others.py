"""Sends a run's metrics from `metrics.jsonl` to other trackers too, by accelerate's classes: W&B, TensorBoard, ….

As with MLflow, the log is the record, and no failure stops training. What has arrived is noted beside the log, and is
not sent again when the run goes on. Most trackers say so only by their end: W&B's offline file lacks all steps of a
killed run. Such steps are sent again, and a tracker that has them already drops them, as W&B's server does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from ..io.files import write
from ..settings import Tracking
from .client import first_line
from .metrics_log import MetricsLog

logger = logging.getLogger(__name__)
SENT = "trackers.json"  # in a run's folder: the log's identity, and by tracker the last step that it surely has
_WRITES_AT_ONCE = ("tensorboard",)


def _arguments(name: str, folder: str, identity: str, sent: int) -> dict[str, dict[str, Any]]:
    """Of accelerate's class for each tracker; the project is Tracking.experiment. sent: it has the steps up to it"""
    return {
        "wandb": {"name": name, "id": identity, "resume": "allow", "dir": folder},
        # Events of later steps, which a killed run has written and not noted, are hidden.
        "tensorboard": {"logging_dir": folder, "purge_step": sent + 1},
        "trackio": {"name": name, "resume": "allow"},
        "swanlab": {"name": name, "id": identity, "resume": "allow", "log_dir": folder},
        "comet_ml": {"experiment_key": identity, "mode": "get_or_create"},
    }


def refuse_absent(settings: Tracking) -> None:
    """Raises ValueError for a tracker whose package is not installed."""
    absent = [name for name in ("accelerate", *settings.also) if settings.also and find_spec(name) is None]
    if absent:
        raise ValueError(f"Tracking.also = {settings.also!r}: pip install {' '.join(absent)}")


class OtherTrackers:
    """Those that `Tracking.also` names. An error of one causes a warning; it is tried again at the next checkpoint."""

    def __init__(self, log: MetricsLog, settings: Tracking, run_name: str, params: Mapping[str, str]) -> None:
        self._log, self._project, self._run_name, self._params = log, settings.experiment, run_name, params
        self._file, self._trackers = log.path.with_name(SENT), dict[str, Any]()
        self._kept = log.last_step  # of a resumed run; the steps behind it are made again
        self._failed: set[str] = set()
        self._sent = dict.fromkeys(settings.also, -1)
        self._noted: dict[str, int] = {}

    def send(self, again: bool = False) -> None:
        """The steps that they lack. again: also to those that have failed"""
        for name in self._sent:
            if again or name not in self._failed:
                self._attempt(name, self._send_steps)

    def close(self) -> None:
        self.send(again=True)
        for name in {*self._trackers} - self._failed:
            self._attempt(name, self._finish)

    def _attempt(self, name: str, part: Callable[[str], None]) -> None:
        try:
            part(name)
            self._failed.discard(name)
        except Exception as error:  # whatever the tracker or the network came up with
            if name not in self._failed:
                safe = "the metrics are safe in %s, and are sent later where that is possible"
                logger.warning(f"%s: %s. Training goes on, {safe}.", name, first_line(error, 500), self._log.path)
            self._failed.add(name)

    def _send_steps(self, name: str) -> None:
        tracker = self._trackers.get(name) or self._start(name)
        for row in self._log.rows(after=self._sent[name]):
            step = row.pop("step")
            tracker.log({key: value for key, value in row.items() if key != "time"}, step=step)
            self._sent[name] = step
            if name in _WRITES_AT_ONCE:
                self._note(name)

    def _finish(self, name: str) -> None:
        self._trackers.pop(name).finish()
        self._note(name)

    def _note(self, name: str) -> None:
        self._noted[name] = self._sent[name]
        write(self._file, json.dumps({"log": self._log.identity, "steps": self._noted}))

    def _start(self, name: str) -> Any:
        from accelerate import tracking

        with suppress(FileNotFoundError):
            try:
                before = json.loads(self._file.read_text(encoding="utf-8"))
                if before["log"] == self._log.identity:  # else of a run that was here before
                    self._noted = {**before["steps"], **self._noted}
                    if self._sent[name] < 0:
                        self._sent[name] = min(int(before["steps"].get(name, -1)), self._kept)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{self._file} is damaged; without it all steps are sent again") from error
        sent = self._sent[name]
        arguments = _arguments(self._run_name, str(self._log.path.parent), self._log.identity, sent)
        project = "tensorboard" if name == "tensorboard" else self._project  # its folder's name in the run's
        tracker: Any = tracking.LOGGER_TYPE_TO_CLASS[name](project, **arguments[name])
        tracker.start()
        if sent < 0:
            tracker.store_init_configuration(dict(self._params))
        self._trackers[name] = tracker
        return tracker
