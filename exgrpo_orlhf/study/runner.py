"""Runs a study: a process of scripts/train.py for each run, a bounded number at a time.

The state of a study is on disk only (runs.py), so a study that was stopped or killed continues when started again.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from ..checkpoints import in_use
from ..io.progress import duration
from ..io.stopping import StopRequest, described
from .runs import RunProgress, StudyRun, seconds_left

log = logging.getLogger(__name__)
LOOK_AT_STEPS_EVERY = 5.0  # seconds
LINES = 20  # of progress in a study, besides those when a run starts or ends
LOOK_EVERY = 0.1  # seconds between two looks at the processes


class Runner:
    """waiting, running, finished, failed: the runs, failed ones with status; stopped_by: the signal that ended it"""

    def __init__(
        self,
        group: str,
        waiting: Sequence[StudyRun],
        progress: Mapping[str, RunProgress],
        *,
        script: Path,
        jobs: int,
        threads: int | None,
    ) -> None:
        """progress: by name, of runs that have begun or finished; script: scripts/train.py"""
        self.waiting, self.running = list(waiting), dict[StudyRun, subprocess.Popen[bytes]]()
        self.finished, self.failed = list[StudyRun](), dict[StudyRun, int]()
        self.stopped_by: signal.Signals | None = None
        self.progress = dict(progress)
        self._group, self._script, self._jobs, self._threads = group, script, jobs, threads
        self._total = len(self.waiting)
        self._news: tuple[object, ...] = ()
        self._in_use = set[StudyRun]()  # runs for which the warning was logged

    def run(self) -> None:
        """Run all. After a first Ctrl-C, SIGTERM or SIGHUP, and after an error of this program, the running ones finish
        their step and save. A second Ctrl-C or SIGTERM kills them: steps after their last checkpoint are repeated
        later. A run whose folder cannot be written or read has failed."""
        looked = time.monotonic()
        with StopRequest("the running ones finish their step and save; the same command continues later") as stop:
            try:
                while self.running or (self.waiting and not stop.signal):
                    if not stop.signal:
                        self._start()
                    elif self.stopped_by is None:
                        self._stop(stop.signal)
                    self._collect()
                    if time.monotonic() - looked >= LOOK_AT_STEPS_EVERY:
                        looked = time.monotonic()
                        self._log_news()
                    time.sleep(LOOK_EVERY)
            except KeyboardInterrupt:
                log.warning("the running ones are killed")
            except Exception as error:
                log.error("%s: %s; the running ones finish their step and save", type(error).__name__, error)
                if self.stopped_by is None:  # or a second signal would end them unsaved
                    self._stop(signal.SIGINT)
                for process in self.running.values():
                    process.wait()
                raise
            finally:
                for process in self.running.values():
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
            self.stopped_by = stop.signal if self.running or self.waiting else None

    def _stop(self, by: signal.Signals) -> None:
        self.stopped_by = by
        for process in self.running.values():
            process.send_signal(signal.SIGINT)

    def command(self, run: StudyRun) -> list[str]:
        words = [sys.executable, str(self._script), "--resume", "--seed", str(run.seed), "--out", str(run.folder)]
        for file in run.variant.files:
            words += ["--gin", file]
        for binding in run.variant.bindings:
            words += ["--set", binding]
        return [*words, "--tag", f"group={self._group}", "--tag", f"variant={run.variant.name}"]

    def _start(self) -> None:
        for run in list(self.waiting):
            if len(self.running) == self._jobs:
                return
            try:
                self._start_one(run)
            except OSError as error:
                self.waiting.remove(run)
                self._fail(run, 1, f"{type(error).__name__}: {error}")

    def _start_one(self, run: StudyRun) -> None:
        """Unless its folder is in use. Raises OSError, while the run still waits."""
        run.folder.mkdir(parents=True, exist_ok=True)
        if in_use(run.folder):  # by a dying process of a killed study, or one started by hand
            if run not in self._in_use:
                log.warning("%s waits: another process trains in %s", run.name, run.folder)
                self._in_use.add(run)
            return
        run.note_failure(None)
        threads = self._threads or (run.experiment.local.threads if run.experiment.local else None)
        environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        # In its own process group: else Ctrl-C in the terminal would reach it too, and two end it without saving.
        with (run.folder / "run.log").open("ab") as file:
            self.running[run] = subprocess.Popen(
                [sys.executable, "-P", "-m", "exgrpo_orlhf.workers.parent", str(os.getpid()), *self.command(run)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                process_group=0,
            )
        self.waiting.remove(run)
        log.info("%s starts, log in %s", run.name, run.folder / "run.log")

    def _collect(self) -> None:
        for run, process in list(self.running.items()):
            status = process.poll()
            if status is None:
                continue
            del self.running[run]
            if fault := self._note_progress(run):
                self._fail(run, status or 1, fault)
            elif status == 0:
                self.finished.append(run)
                log.info("%s is finished", run.name)
            elif self.stopped_by is not None:
                self.waiting.append(run)
                log.info("%s stopped after step %d", run.name, max(0, self.progress[run.name].step))
            else:
                self._fail(run, status, described(status))

    def _fail(self, run: StudyRun, status: int, why: str) -> None:
        self.failed[run] = status
        log.error("%s failed (%s); the others continue", run.name, why)
        try:
            run.note_failure(status)
        except OSError as error:
            log.error("%s: its failure cannot be noted (%s): the same command runs it again", run.name, error)

    def _note_progress(self, run: StudyRun) -> str | None:
        """What is wrong where it cannot be read; then the progress of before stands."""
        try:
            self.progress[run.name] = RunProgress.of(run)
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _log_news(self) -> None:
        """A line when a run has started or ended, and when another part of the steps is done."""
        for run in self.running:
            self._note_progress(run)
        runs = [*self.finished, *self.failed, *self.running, *self.waiting]
        steps = {run: max(0, self.progress.get(run.name, RunProgress()).step) for run in runs}
        part = LINES * sum(steps.values()) // max(1, sum(run.steps for run in runs))
        news = (part, frozenset(self.running), len(self.finished), len(self.failed))
        if news == self._news:
            return
        self._news = news
        seconds = seconds_left([*self.running, *self.waiting], self.progress, self._jobs)
        log.info(
            "%s: %d of %d done, %d running (%s), %d failed, %d waiting%s",
            *(self._group, len(self.finished), self._total, len(self.running)),
            ", ".join(f"{run.name} {steps[run]}/{run.steps}" for run in self.running),
            *(len(self.failed), len(self.waiting)),
            ""
            if seconds is None
            else f"; {duration(seconds)} left, until {datetime.now() + timedelta(seconds=seconds):%a %H:%M}",
        )
