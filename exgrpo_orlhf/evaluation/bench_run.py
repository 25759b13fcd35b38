"""A batch evaluation: generate, grade and write the missing responses, then compute the results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from ..checkpoints import claim
from ..grader.thoughts import opens_thought
from ..io.files import write_json
from ..io.json_lines import JsonLines
from ..io.progress import duration
from ..io.provenance import git_commit, now, versions
from ..io.stopping import Stop
from ..records import Question
from ..rewards import Verifier, Written
from ..rewards.kinds import kind_named
from ..sampling import EngineLost, Request, Sampler
from ..tracking.samples import SAMPLES, Sample, SampleFile, prompt_hash
from ..tracking.scores import RESULTS, summarise
from ..workers.fork_server import close_workers
from . import results_folder
from .evaluated_model import RequestBuilder
from .responses import Episodes, Key, respond
from .results_folder import ResultsFolder
from .sample_grading import check_golds, graded, plain_verdicts
from .sets import BenchmarkSet

log = logging.getLogger(__name__)
GO_ON = "the responses so far are kept; run the same command again to continue"
_LOG_EVERY = 5.0  # seconds
_NOTHING: results_folder.Results = {"benchmarks": {}, "not_run": {}, "record": {}}
_BATCH = 256  # responses regraded at a time
_NEED_MORE = ("function", "http", "reasoning_gym", "code")  # verifiers that read more of a question than a sample has

_OF_A_SERVER = {  # by the api, what a user's own grader does not get
    "completions": "graded without token ids and end tokens: a server does not return them",
    "chat": "graded without token ids and chat template: a server does not return them, a prompt is its messages' text",
}


@dataclass(frozen=True)
class EvaluationPlan:
    """What is evaluated. It is built and checked before anything is generated.

    sets: in the order of the suite; not_run: name → {"title", "group", "reason"} of sets that are not available
    limit: on questions, None for all; plain: also grade by math-verify's plain recipe
    timeout: seconds for a verdict; workers: grading processes, 0 for one per core
    engine: settings of the engine that must stay the same when the evaluation is continued
    groups: all benchmarks of each group, requested or not
    suite: the names of the suite; the means are over those of all suites that were evaluated in the folder, and
        without one over all but the user's own benchmarks
    record: further facts for results.json; provenance: of this process
    """

    builder: RequestBuilder
    sets: Sequence[BenchmarkSet]
    not_run: Mapping[str, Mapping[str, str]]
    limit: int | None
    plain: bool
    timeout: float
    workers: int
    engine: Mapping[str, Any]
    groups: Mapping[str, Sequence[str]]
    suite: Sequence[str]
    record: Mapping[str, Any]
    provenance: Mapping[str, Any]

    def config(self) -> dict[str, Any]:
        """What all responses and verdicts depend on, and what those to each benchmark depend on, with GROWS; the names
        over which the means are."""
        names = ("verifier", "function", "samples", "temperature", "top_p", "max_tokens", "rows", "by", "url")
        return {
            "model": self.builder.model.path,
            "suite": [*self.suite],
            "common": {
                "model": self.builder.model.identity(),
                "template": self.builder.describe(),
                "engine": dict(self.engine),
                "seed": self.builder.seed,
                "plain": self.plain,
            },
            "benchmarks": {
                benchmark: {
                    **{name: facts[name] for name in (*names, "function_sha256")},
                    **{name: facts[name] for name in ("environment", "meta") if name in facts},
                    **{"limit": self.limit, "timeout": self.timeout},
                }
                for benchmark, facts in self.facts().items()
            },
        }

    @cached_property
    def graders(self) -> dict[str, Verifier]:
        """By benchmark. A function's file is read once: an edit while responses are generated changes nothing."""
        return {each.benchmark.name: each.benchmark.grader(self.timeout, self.workers) for each in self.sets}

    def facts(self) -> dict[str, dict[str, Any]]:
        """What the entry of each benchmark in results.json says besides what is measured."""
        facts = {}
        for test_set in self.sets:
            benchmark = test_set.benchmark
            ask, group = self.builder.instruction(benchmark), self.groups[benchmark.group]
            own_code = self.graders[benchmark.name].own_code.values()
            facts[benchmark.name] = {**test_set.facts(ask, group), "function_sha256": next(iter(own_code), None)}
            if self.engine["name"] == "openai" and kind_named(benchmark.verifier).whole:
                facts[benchmark.name]["notes"].append(_OF_A_SERVER[self.engine["api"]])
        return facts

    def episodes(self) -> Episodes:
        """The benchmarks that have an environment."""
        players = [self.builder.player(test_set.benchmark) for test_set in self.sets]
        return {
            test_set.benchmark.name: (
                player,
                {row: self.builder.question(test_set.benchmark, question) for row, question in test_set.rows},
            )
            for test_set, player in zip(self.sets, players, strict=True)
            if player
        }


def evaluate(plan: EvaluationPlan, out: Path, engine: Callable[[], Sampler], stop: Stop) -> dict[str, Any] | None:
    """Evaluate, or continue the evaluation in a folder.

    Args:
        engine: makes the engine; called only if a response is missing.
        stop: a signal ends the evaluation after the responses under way.

    Returns:
        The results, which are also written to out/results.json; None if a signal came before the last response.

    Raises:
        BenchmarkError, ModelError, FolderError, ValueError: before anything is generated.
        EngineLost, GradingError: the responses finished before are saved.
    """
    try:
        check_golds(plan.sets, plan.graders)
        requests = {request.key: request for request in plan.builder.requests(plan.sets)}
        with claim(out, resume=True):
            config = results_folder.settle(out, plan.config())
            names = [test_set.benchmark.name for test_set in plan.sets]
            files = {name: SampleFile(out / name / SAMPLES) for name in names}
            done = _done(files, requests)
            has_results = (out / RESULTS).exists()
            finished = ResultsFolder.read(out, without=files) if has_results else ResultsFolder(out, _NOTHING, {}, {})
            earlier, others = finished.results, finished.files
            write_json(out / results_folder.CONFIG, config)
            if len(done) < len(requests):
                _generate(plan, out, list(requests.values()), done, files, engine, stop)
            if sum(len(file.keys) for file in files.values()) < len(requests):
                return None
            for file in files.values():
                file.sort()
            facts = {**{name: earlier["benchmarks"][name] for name in others}, **plan.facts()}
            if suite := config.get("suite"):
                facts = {name: {**entry, "in_mean": name in suite} for name, entry in facts.items()}
            not_run = {**earlier["not_run"], **plan.not_run}
            not_run = {name: reason for name, reason in not_run.items() if name not in facts}
            sessions = results_folder.read_sessions(out)
            regraded = {name: value for name, value in earlier["record"].items() if name == "graded_with"}
            record = {**plan.record, **sessions[-1], **regraded, "finished": now()}
            record |= {"sessions": sessions} if len(sessions) > 1 else {}
            asked = [*earlier["record"].get("asked_otherwise", ()), *plan.record.get("asked_otherwise", ())]
            record["asked_otherwise"] = list(dict.fromkeys(asked))
            files, seconds = {**others, **files}, results_folder.total_times(out)
            grader = Verifier("math", timeout=plan.timeout, workers=plan.workers, max_failed_share=1.0)
            results = summarise(out.resolve().name, record, facts, not_run, files, seconds, grader)
            write_json(out / RESULTS, results)
            return results
    finally:
        close_workers()


def regrade(out: Path, timeout: float, workers: int, plain: bool) -> dict[str, Any]:
    """Grade the saved responses again, without a model, and compute new results. A benchmark whose samples do not hold
    what its verdicts depend on is left as it is, which the log says.

    If this is interrupted, each file of samples is either the old one or the new one. Raises FolderError, ValueError,
    GradingError.
    """
    with claim(out, resume=True):
        finished = ResultsFolder.read(out)
        before, files = finished.results, finished.files
        config = results_folder.read_config(out)
        tags = config["common"]["template"].get("thought_tags", ())
        grader = Verifier("math", timeout=timeout, workers=workers, max_failed_share=1.0)
        try:
            for name, facts in before["benchmarks"].items():
                by = facts.get("environment", {}).get("reward")
                if by in ("environment", "verifier") or facts["verifier"] in _NEED_MORE:
                    log.warning(
                        "%s: left as it is: a sample lacks what its verdicts depend on (docs/evaluation.md)", name
                    )
                    continue
                verifier = replace(grader, kind=facts["verifier"], function=facts["function"])
                files[name].write(_regraded(files[name], verifier, plain, name, tags))
                config["benchmarks"][name]["timeout"] = timeout
            config["common"]["plain"] = plain
            write_json(out / results_folder.CONFIG, config)
            regraded = {"versions": versions(), "git_commit": git_commit(), "at": now()}
            record, seconds = {**before["record"], "graded_with": regraded}, results_folder.total_times(out)
            facts, not_run = before["benchmarks"], before["not_run"]
            results = summarise(before["name"], record, facts, not_run, files, seconds, grader)
        finally:
            close_workers()
        write_json(out / RESULTS, results)
        return results


def _regraded(file: SampleFile, verifier: Verifier, plain: bool, name: str, tags: Any) -> Iterator[Sample]:
    samples, count = file.read(), 0
    while batch := list(islice(samples, _BATCH)):
        pairs = [
            (
                Question(old["id"], old["question"], old["gold"], name, {"options": old.get("options")}),
                Written(old["response"], opens_thought(old["prompt"], own=tags), tags=tags),
            )
            for old in batch
        ]
        grades, others = verifier.grade_all(pairs), plain_verdicts(verifier, pairs, plain)
        for old, grade, other in zip(batch, grades, others, strict=True):
            new = {"extracted": grade.extracted, "verdict": grade.verdict, "sound": grade.sound, "plain": other}
            yield {**old, **new}  # type: ignore[typeddict-item]
        count += len(batch)
        log.info("%s: %d/%d responses graded", name, count, len(file.keys))


def _generate(
    plan: EvaluationPlan,
    out: Path,
    requests: Sequence[Request],
    done: set[Key],
    files: Mapping[str, SampleFile],
    make_engine: Callable[[], Sampler],
    stop: Stop,
) -> None:
    """Generate, grade and write. Finished responses are graded and written however this ends."""
    engine, tokenizer = make_engine(), plan.builder.model.tokenizer
    try:
        description = {**engine.describe(), "reproducible": engine.reproducible}
        _begin_session(out, {"engine": description, **plan.provenance})
        questions = {test_set.benchmark.name: dict(test_set.rows) for test_set in plan.sets}
        times, finished, tokens = JsonLines(out / results_folder.TIMES), len(done), 0
        times.cut(len(times.keys))
        begin = last = logged = time.perf_counter()
        tags = plan.builder.prompts.thought_tags
        with closing(respond(engine, requests, done, tokenizer, plan.episodes(), tags)) as portions:
            while not stop.signal and (portion := next(portions, None)) is not None:
                counts = {}
                for name in dict.fromkeys(response.request.key[0] for response in portion):
                    responses = [response for response in portion if response.request.key[0] == name]
                    files[name].append(graded(plan.graders[name], responses, questions[name], plan.plain))
                    counts[name] = sum(response.tokens for response in responses)
                time_now, new = time.perf_counter(), sum(counts.values())
                pace, last = (time_now - last) / max(1, new), time_now  # its time is shared among benchmarks by tokens
                times.add({name: round(pace * count, 4) for name, count in counts.items()})
                finished, tokens = finished + len(portion), tokens + new
                remaining = len(requests) - finished
                if time_now - logged >= _LOG_EVERY or not remaining:
                    logged, seconds = time_now, time_now - begin
                    rest = duration(seconds / (finished - len(done)) * remaining)
                    log.info("%d/%d responses  %.0f tokens/s  %s left", finished, len(requests), tokens / seconds, rest)
    except EngineLost as error:
        raise EngineLost(f"{error}; {GO_ON}") from error
    finally:
        engine.close()


def _begin_session(out: Path, session: dict[str, Any]) -> None:
    """Record the session that generates from now on. Raises FolderError if its dtype is not that of the responses."""
    path, dtype = out / results_folder.SESSIONS, session["engine"].get("dtype")
    sessions = results_folder.read_sessions(out) if results_folder.with_samples(out) and path.exists() else []
    if sessions and (before := sessions[-1]["engine"].get("dtype")) != dtype:
        raise results_folder.FolderError(
            f"{out}: its responses were computed in {before}, now it would be {dtype}; give --dtype {before}, or --out "
            "another folder"
        )
    write_json(path, [*(earlier for earlier in sessions if earlier != session), session])


def _done(files: Mapping[str, SampleFile], requests: Mapping[Key, Request]) -> set[Key]:
    """Keys of the responses that exist. Raises FolderError if one answers another prompt."""
    done = set()
    for name, file in files.items():
        for row, sample, *_, digest in file.keys:
            request = requests.get((name, row, sample))
            if request is None or prompt_hash(request.seed_at(0), request.prompt) != digest:
                raise results_folder.FolderError(
                    f"{file.path}: row {row}, sample {sample} answers another prompt than would be asked now: the set, "
                    "the template or the instruction has changed; give --out another folder"
                )
            done.add((name, row, sample))
    return done
