"""A batch evaluation: generate, grade and write the missing responses, then compute the results."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ..checkpoints import claim
from ..files import write_json
from ..records import Question
from ..rewards import Verifier, close_pools
from ..stopping import Stop
from .engines import GenerationEngine, GenerationRequest, Key
from .environment import git_commit, now, versions
from .folder import (
    CONFIG,
    RESULTS,
    SAMPLES,
    SESSIONS,
    FolderError,
    Times,
    has_samples,
    read_config,
    read_results,
    settle,
)
from .grading import GradingThread, check_golds, verdicts_of
from .results import summarise
from .samples import Sample, SampleFile, asked
from .sets import BenchmarkSet
from .subject import Asker

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
    record: Mapping[str, Any]
    session: Mapping[str, Any]

    def common(self) -> dict[str, Any]:
        """What all responses and verdicts depend on."""
        model = self.asker.subject.describe()
        return {
            "model": {name: model[name] for name in ("hash", "revision") if model[name]} or {"path": model["path"]},
            "template": self.asker.describe(),
            "engine": dict(self.engine),
            "seed": self.asker.seed,
            "plain": self.plain,
        }

    def facts(self) -> dict[str, dict[str, Any]]:
        """What the entry of each benchmark in results.json says besides what is measured."""
        names = ("title", "group", "samples", "verifier", "function", "temperature", "top_p", "max_tokens")
        return {
            asked.benchmark.name: {
                **{name: getattr(asked.benchmark, name) for name in names},
                "ask": self.asker.instruction(asked.benchmark),
                "of_group": list(self.groups[asked.benchmark.group]),
                "departures": list(asked.benchmark.departures),
                "source": asked.source,
                "fingerprint": asked.fingerprint,
                "questions": len(asked.rows),
                "rows": asked.found,
                "official_rows": asked.benchmark.rows,
                "whole": asked.whole,
                "notes": list(asked.notes),
            }
            for asked in self.sets
        }

    def each(self) -> dict[str, dict[str, Any]]:
        """What the responses to each benchmark depend on, and GROWS."""
        names = ("verifier", "function", "samples", "temperature", "top_p", "max_tokens", "rows")
        return {
            benchmark: {**{name: known[name] for name in names}, "limit": self.limit}
            for benchmark, known in self.facts().items()
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
            config = settle(out, evaluation.common(), evaluation.each())
            files = {asked.benchmark.name: _file(out, asked.benchmark.name) for asked in evaluation.sets}
            done = _done(files, requests)
            continues = any(has_samples(out, name) for name in config["benchmarks"])
            write_json(out / CONFIG, config)
            times = Times(out)
            try:
                if len(done) < len(requests):
                    begin = partial(_begin_session, out, evaluation.session, continues)
                    _generate(evaluation, list(requests.values()), done, _Writer(files, times), begin, engine, stop)
            finally:
                times.flush()
            if sum(len(file.done) for file in files.values()) < len(requests):
                return None
            for file in files.values():
                file.sort()
            facts, not_run, graded_with = _with_earlier(out, evaluation)
            files = {name: files.get(name) or _file(out, name) for name in facts}
            record = {**evaluation.record, **_sessions(out), **graded_with, "finished": now()}
            results = summarise(out.resolve().name, record, facts, not_run, files, times.totals())
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
        for name, facts in before["benchmarks"].items():
            if len(files[name].done) != facts["questions"] * facts["samples"]:
                raise FolderError(f"{out}: {name} was extended and did not come to its end; continue that first")
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
        results = summarise(before["name"], record, before["benchmarks"], before["not_run"], files, Times(out).totals())
        write_json(out / RESULTS, results)
        return results


def _regraded(file: SampleFile, verifier: Verifier, plain: bool, name: str) -> Iterator[Sample]:
    samples, graded = file.read(), 0
    while batch := list(islice(samples, _BATCH)):
        pairs = [(Question(each["id"], each["question"], each["gold"], name), each["response"]) for each in batch]
        for sample, (grade, other) in zip(batch, verdicts_of(verifier, pairs, plain), strict=True):
            changed = {"extracted": grade.extracted, "verdict": grade.verdict, "sound": grade.sound, "plain": other}
            yield {**sample, **changed}  # type: ignore[typeddict-item]
        graded += len(batch)
        log.info("%s: %d/%d responses graded", name, graded, len(file.done))


def _generate(
    evaluation: EvaluationPlan,
    requests: Sequence[GenerationRequest],
    done: set[Key],
    writer: _Writer,
    begin: Callable[[dict[str, Any]], None],
    make_engine: Callable[[], GenerationEngine],
    stop: Stop,
) -> None:
    """Generate, grade and write. Finished responses are graded and written however this ends.

    begin: is called with the engine's description before it generates
    """
    if done:
        log.info("%d of %d responses exist already", len(done), len(requests))
    limits = evaluation.timeout, evaluation.workers
    verifiers = {asked.benchmark.name: asked.benchmark.grader(*limits) for asked in evaluation.sets}
    questions = {(asked.benchmark.name, row): question for asked in evaluation.sets for row, question in asked.rows}
    engine = make_engine()
    try:
        begin({**engine.describe(), "reproducible": engine.reproducible})
        progress = _Progress(requests, done)
        with (
            closing(GradingThread(verifiers, questions, evaluation.plain, writer.write)) as grading,
            closing(engine.generate(requests, done)) as portions,
        ):
            writer.begin()
            while not stop.signal and (portion := next(portions, None)) is not None:
                grading.put(portion)
                progress.show(Counter(response.request.key[0] for response in portion), sum(r.tokens for r in portion))
    finally:
        engine.close()


def _begin_session(out: Path, session: Mapping[str, Any], continues: bool, engine: dict[str, Any]) -> None:
    """Record the session that generates from now on. Raises FolderError if its dtype is another than before."""
    path = out / SESSIONS
    sessions = json.loads(path.read_text(encoding="utf-8")) if continues and path.exists() else []
    if sessions and (before := sessions[-1]["engine"].get("dtype")) != engine.get("dtype"):
        raise FolderError(
            f"{out}: its responses were computed in {before}, now it would be {engine.get('dtype')}; give --dtype "
            f"{before}, or --out another folder"
        )
    new = {"engine": engine, **session}
    write_json(path, [*(each for each in sessions if each != new), new])


def _sessions(out: Path) -> dict[str, Any]:
    """The record of the last session, and of all sessions if they differ."""
    sessions = json.loads((out / SESSIONS).read_text(encoding="utf-8"))
    return {**sessions[-1], **({"sessions": sessions} if len(sessions) > 1 else {})}


class _Writer:
    """Writes graded samples to their files, and the time they took."""

    def __init__(self, files: Mapping[str, SampleFile], times: Times) -> None:
        self._files, self._times = files, times
        self.begin()

    def begin(self) -> None:
        """Start measuring time, when the engine is ready."""
        self._last = time.perf_counter()

    def write(self, graded: Sequence[tuple[str, Sample]]) -> None:
        tokens: Counter[str] = Counter()
        for name in dict.fromkeys(name for name, _ in graded):
            mine = [sample for owner, sample in graded if owner == name]
            self._files[name].append(mine)
            tokens[name] = sum(sample["response_tokens"] for sample in mine)
        now = time.perf_counter()
        self._times.add(now - self._last, tokens)
        self._last = now


class _Progress:
    """Logs a line every few seconds: responses done, speed, time left."""

    def __init__(self, requests: Sequence[GenerationRequest], done: set[Key]) -> None:
        self._of = Counter(request.key[0] for request in requests)
        self._done = Counter(key[0] for key in done)
        self._began = self._said = time.perf_counter()
        self._new = self._tokens = 0

    def show(self, finished: Counter[str], tokens: int) -> None:
        self._done += finished
        self._new += finished.total()
        self._tokens += tokens
        now, left = time.perf_counter(), self._of.total() - self._done.total()
        if now - self._said < _SAID_EVERY and left:
            return
        self._said = now
        under_way = [name for name, n in self._done.items() if n < self._of[name]]
        rest = round((now - self._began) / self._new * left)
        log.info(
            "%d/%d responses%s  %.0f tokens/s  %d:%02d:%02d left",
            *(self._done.total(), self._of.total()),
            "".join(f"  {name} {self._done[name]}/{self._of[name]}" for name in under_way[:2]),
            self._tokens / (now - self._began),
            *(rest // 3600, rest // 60 % 60, rest % 60),
        )


def _with_earlier(
    out: Path, evaluation: EvaluationPlan
) -> tuple[dict[str, dict[str, Any]], dict[str, Mapping[str, str]], dict[str, Any]]:
    """(facts, not_run, graded_with), including benchmarks that were run in this folder before.

    `settle` has checked that they were run in the same way. graded_with: how they were regraded, {} if they were not
    """
    facts, not_run, graded_with = evaluation.facts(), dict(evaluation.not_run), {}
    if (out / RESULTS).exists():
        before = read_results(out)
        earlier = {name: known for name, known in before["benchmarks"].items() if name not in facts}
        for name, known in list(earlier.items()):
            if len(_file(out, name).done) != known["questions"] * known["samples"]:
                log.warning("%s was extended and did not come to its end: it is left out of the results", name)
                del earlier[name]
                not_run[name] = {**{key: known[key] for key in ("title", "group")}, "reason": _UNFINISHED}
        facts, not_run = {**earlier, **facts}, {**before["not_run"], **not_run}
        graded_with = {name: known for name, known in before["record"].items() if name == "graded_with"}
    return facts, {name: why for name, why in not_run.items() if name not in facts}, graded_with


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
