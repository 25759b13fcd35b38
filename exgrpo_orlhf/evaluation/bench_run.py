"""A batch evaluation: generate, grade and write the missing responses, then compute the results."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from ..checkpoints import claim
from ..files import write_json
from ..records import Question
from ..rewards import Verifier, close_pools
from ..stopping import Stop
from .backends import GenerationEngine, GenerationRequest, Key, Response
from .evaluated_model import Asker
from .folder import (
    CONFIG,
    RESULTS,
    SAMPLES,
    SESSIONS,
    FolderError,
    Times,
    progress,
    read_config,
    read_results,
    read_sessions,
    settle,
    total_times,
    with_samples,
)
from .grading import GradingThread, check_golds, verdicts_of
from .results import summarise
from .samples import Sample, SampleFile, asked
from .session import git_commit, now, versions
from .sets import BenchmarkSet

log = logging.getLogger(__name__)
_SAID_EVERY = 5.0  # seconds
_UNFINISHED = "it was extended and did not come to its end"
_BATCH = 256  # responses regraded at a time


@dataclass(frozen=True)
class EvaluationPlan:
    """What is evaluated. It is built and checked before anything is generated.

    sets: in the order of the suite; not_run: name → {"title", "group", "reason"} of sets that are not available
    limit: on questions, None for all; plain: also grade by math-verify's plain recipe
    timeout: seconds for a verdict; workers: grading processes, 0 for one per core
    engine: settings of the engine that must stay the same when the evaluation is continued
    groups: all benchmarks of each group, requested or not
    suite: the names of the suite, over which the means are; None: they are over all but the user's own benchmarks
    record: further facts for results.json; session: of this process (environment.py)
    """

    asker: Asker
    sets: Sequence[BenchmarkSet]
    not_run: Mapping[str, Mapping[str, str]]
    limit: int | None
    plain: bool
    timeout: float
    workers: int
    engine: Mapping[str, Any]
    groups: Mapping[str, Sequence[str]]
    suite: Sequence[str] | None
    record: Mapping[str, Any]
    session: Mapping[str, Any]

    def config(self) -> dict[str, dict[str, Any]]:
        """What all responses and verdicts depend on, and what those to each benchmark depend on, with GROWS."""
        model = self.asker.subject.describe()
        names = ("verifier", "function", "samples", "temperature", "top_p", "max_tokens", "rows")
        return {
            "model": model["path"],
            "common": {
                "model": {name: model[name] for name in ("hash", "revision") if model[name]} or {"path": model["path"]},
                "template": self.asker.describe(),
                "engine": dict(self.engine),
                "seed": self.asker.seed,
                "plain": self.plain,
            },
            "benchmarks": {
                benchmark: {**{name: known[name] for name in names}, "limit": self.limit}
                for benchmark, known in self.facts().items()
            },
        }

    def facts(self) -> dict[str, dict[str, Any]]:
        """What the entry of each benchmark in results.json says besides what is measured."""
        return {
            known.name: each.facts(
                self.asker.instruction(known),
                self.groups[known.group],
                in_mean=not known.own if self.suite is None else known.name in self.suite,
            )
            for each in self.sets
            for known in [each.benchmark]
        }


def evaluate(
    evaluation: EvaluationPlan, out: Path, engine: Callable[[], GenerationEngine], stop: Stop
) -> dict[str, Any] | None:
    """Evaluate, or continue the evaluation in a folder.

    Args:
        evaluation: what to evaluate.
        out: the folder.
        engine: makes the engine; called only if a response is missing.
        stop: a signal ends the evaluation after the responses under way.

    Returns:
        The results, which are also written to out/results.json; None if a signal came before the last response.

    Raises:
        BenchmarkError, SubjectError, FolderError, SampleError: before anything is generated.
        EngineFailure, GradingError: the responses finished before are saved.
    """
    try:
        check_golds(evaluation.sets, evaluation.timeout, evaluation.workers)
        requests = {request.key: request for request in evaluation.asker.requests(evaluation.sets)}
        with claim(out, resume=True):
            config = settle(out, evaluation.config())
            files = {asked.benchmark.name: _file(out, asked.benchmark.name) for asked in evaluation.sets}
            done = _done(files, requests)
            write_json(out / CONFIG, config)
            if len(done) < len(requests):
                _generate(evaluation, out, list(requests.values()), done, files, engine, stop)
            if sum(len(file.done) for file in files.values()) < len(requests):
                return None
            for file in files.values():
                file.sort()
            facts, not_run, graded_with = _with_earlier(out, evaluation, files)
            sessions = read_sessions(out)
            record = {**evaluation.record, **sessions[-1], **graded_with, "finished": now()}
            record |= {"sessions": sessions} if len(sessions) > 1 else {}
            results = summarise(out.resolve().name, record, facts, not_run, files, total_times(out))
            write_json(out / RESULTS, results)
            return results
    finally:
        close_pools()


def regrade(out: Path, timeout: float, workers: int, plain: bool) -> dict[str, Any]:
    """Grade the saved responses again, without a model, and compute new results.

    If this is interrupted, each file of samples is either the old one or the new one. Raises FolderError, SampleError,
    GradingError.
    """
    with claim(out, resume=True):
        before = read_results(out)
        config = read_config(out)
        files = {name: _file(out, name) for name in before["benchmarks"]}
        for name in _extended(files, before["benchmarks"]):
            said = "was extended and did not come to its end; continue that first"
            raise FolderError(f"{out}: {name} {said} ({progress(out)})")
        try:
            for name, facts in before["benchmarks"].items():
                kind, function = facts["verifier"], facts["function"]
                verifier = Verifier(kind, function=function, timeout=timeout, workers=workers, max_failed_share=1.0)
                files[name].write(_regraded(files[name], verifier, plain, name))
        finally:
            close_pools()
        config["common"]["plain"] = plain
        write_json(out / CONFIG, config)
        record = {**before["record"], "graded_with": {"versions": versions(), "git_commit": git_commit(), "at": now()}}
        results = summarise(before["name"], record, before["benchmarks"], before["not_run"], files, total_times(out))
        write_json(out / RESULTS, results)
        return results


def _regraded(file: SampleFile, verifier: Verifier, plain: bool, name: str) -> Iterator[Sample]:
    samples, graded = file.read(), 0
    while batch := list(islice(samples, _BATCH)):
        pairs = [(Question(each["id"], each["question"], each["gold"], name), each["response"]) for each in batch]
        for sample, verdicts in zip(batch, verdicts_of(verifier, pairs, plain), strict=True):
            yield {**sample, **verdicts}  # type: ignore[typeddict-item]
        graded += len(batch)
        log.info("%s: %d/%d responses graded", name, graded, len(file.done))


def _generate(
    evaluation: EvaluationPlan,
    out: Path,
    requests: Sequence[GenerationRequest],
    done: set[Key],
    files: Mapping[str, SampleFile],
    make_engine: Callable[[], GenerationEngine],
    stop: Stop,
) -> None:
    """Generate, grade and write. Finished responses are graded and written however this ends."""
    if done:
        log.info("%d of %d responses exist already", len(done), len(requests))
    engine = make_engine()
    try:
        described = {**engine.describe(), "reproducible": engine.reproducible}
        _begin_session(out, {"engine": described, **evaluation.session})
        progress, limits = _Progress(requests, done), (evaluation.timeout, evaluation.workers)
        with (
            closing(GradingThread(evaluation.sets, files, Times(out), *limits, evaluation.plain)) as grading,
            closing(engine.generate(requests, done)) as portions,
        ):
            while not stop.signal and (portion := next(portions, None)) is not None:
                grading.put(portion)
                progress.show(portion)
    finally:
        engine.close()


def _begin_session(out: Path, session: dict[str, Any]) -> None:
    """Record the session that generates from now on. Raises FolderError if its dtype is not that of the responses."""
    path = out / SESSIONS
    sessions = read_sessions(out) if with_samples(out) and path.exists() else []
    now = session["engine"].get("dtype")
    if sessions and (before := sessions[-1]["engine"].get("dtype")) != now:
        raise FolderError(
            f"{out}: its responses were computed in {before}, now it would be {now}; give --dtype {before}, or --out "
            "another folder"
        )
    write_json(path, [*(each for each in sessions if each != session), session])


class _Progress:
    """Logs a line every few seconds: responses done, speed, time left."""

    def __init__(self, requests: Sequence[GenerationRequest], done: set[Key]) -> None:
        self._of = Counter(request.key[0] for request in requests)
        self._done = Counter(key[0] for key in done)
        self._began = self._said = time.perf_counter()
        self._new = self._tokens = 0

    def show(self, portion: Sequence[Response]) -> None:
        self._done.update(response.request.key[0] for response in portion)
        self._new += len(portion)
        self._tokens += sum(response.tokens for response in portion)
        now, left = time.perf_counter(), self._of.total() - self._done.total()
        if now - self._said < _SAID_EVERY and left:
            return
        self._said = now
        under_way = [name for name, n in self._done.items() if n < self._of[name]]
        rest = timedelta(seconds=round((now - self._began) / self._new * left))
        log.info(
            "%d/%d responses%s  %.0f tokens/s  %s left",
            *(self._done.total(), self._of.total()),
            "".join(f"  {name} {self._done[name]}/{self._of[name]}" for name in under_way[:2]),
            *(self._tokens / (now - self._began), rest),
        )


def _with_earlier(
    out: Path, evaluation: EvaluationPlan, files: dict[str, SampleFile]
) -> tuple[dict[str, dict[str, Any]], dict[str, Mapping[str, str]], dict[str, Any]]:
    """(facts, not_run, graded_with), with benchmarks that were run in this folder before, in the same way (`settle`).
    Their files are added. graded_with: how they were regraded, {} if they were not"""
    facts, not_run, graded_with = evaluation.facts(), dict(evaluation.not_run), {}
    if (out / RESULTS).exists():
        before = read_results(out)
        earlier = {name: known for name, known in before["benchmarks"].items() if name not in facts}
        files |= {name: _file(out, name) for name in earlier}
        for name in _extended(files, earlier):
            log.warning("%s was extended and did not come to its end: it is left out of the results", name)
            known = earlier.pop(name)
            not_run[name] = {"title": known["title"], "group": known["group"], "reason": _UNFINISHED}
        facts, not_run = {**earlier, **facts}, {**before["not_run"], **not_run}
        graded_with = {name: known for name, known in before["record"].items() if name == "graded_with"}
    return facts, {name: why for name, why in not_run.items() if name not in facts}, graded_with


def _extended(files: Mapping[str, SampleFile], facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The benchmarks whose files do not hold as many samples as there were when results.json was written."""
    return [name for name, of in facts.items() if len(files[name].done) != of["questions"] * of["samples"]]


def _file(out: Path, benchmark: str) -> SampleFile:
    return SampleFile(out / benchmark / SAMPLES)


def _done(files: Mapping[str, SampleFile], requests: Mapping[Key, GenerationRequest]) -> set[Key]:
    """Keys of the responses that exist. Raises FolderError if one answers another prompt."""
    done = set()
    for name, file in files.items():
        for (row, sample), what in file.done.items():
            request = requests.get((name, row, sample))
            if request is None or asked(request.seed, request.prompt) != what:
                raise FolderError(
                    f"{file.path}: row {row}, sample {sample} answers another prompt than would be asked now: the set, "
                    "the template or the instruction has changed; give --out another folder"
                )
            done.add((name, row, sample))
    return done
