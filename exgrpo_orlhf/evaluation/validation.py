"""Evaluation during training on the run's validation questions, with the code of the batch evaluation."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..io.files import write_json
from ..io.provenance import now
from ..questions import fingerprint
from ..questions.overlap import same_questions
from ..questions.text import plain_text
from ..records import Question
from ..rewards import Verifier
from ..settings import Evaluation
from . import sets
from .benchmarks import Benchmark, project_definitions
from .evaluated_model import EvaluatedModel, render_prompt, requests_of
from .responses import Response
from .results import MAJORITY_FROM, RATES, at_k, bound_of, metrics, summarise
from .results_folder import RESULTS, SAMPLES
from .sample_grading import graded
from .samples import SampleFile
from .sets import grouped

if TYPE_CHECKING:
    from ..engines.engine import Engine

log = logging.getLogger(__name__)
_LEVELS = ("operands", "steps")  # fields of the questions that are made here
_CHECK_REASONING = ("modular_chain", "word_problem")  # kinds of the verifier
NAME = "validation"


class Validation:
    """Evaluates the policy of a run on its validation questions."""

    def __init__(
        self,
        questions: Sequence[Question],
        settings: Evaluation,
        verifier: Verifier,
        run: Path,
        seed: int,
        max_tokens: int,
        record: Mapping[str, Any],
    ) -> None:
        """run: the run's folder; samples and results go to its evaluation/<step>/
        seed: of the responses; the same at every step, so that only the policy changes
        max_tokens: of a response; record: what results.json says of the run

        Raises ValueError if a test set has one of the questions.
        """
        self._level = level = _level(questions)
        self.settings, self.fingerprint = settings, fingerprint(questions)
        self.questions = [
            grouped(question, level) if level and _has(question, level) else question for question in questions
        ]
        self._verifier, self._run, self._seed, self._record = verifier, run, seed, {**record, "seed": seed}
        sampling = {"temperature": settings.temperature, "top_p": settings.top_p, "max_tokens": max_tokens}
        decides = verifier.deciding
        kind = {"verifier": decides.kind, "function": decides.function, "url": decides.url}
        benchmark = Benchmark(NAME, "Validation", group=NAME, samples=settings.samples, **kind, **sampling)  # type: ignore[arg-type]
        rows = tuple(enumerate(self.questions))
        self._set = sets.BenchmarkSet(benchmark, rows, len(rows), "Work.validation", ())
        if self.questions and settings.disjoint_from is not None:
            refuse_test_questions(self.questions, settings.disjoint_from)

    def evaluate(self, progress: tuple[int, int], engine: Engine) -> dict[str, float]:
        """Returns metrics for the log, and writes samples and results.json to evaluation/<step>/ of the run.

        progress: steps made, and planned
        """
        settings, rows, step = self.settings, dict(self._set.rows), progress[0]
        prompts = engine.prompts
        requests = list(requests_of(self._set, lambda _, question: render_prompt(prompts, question), self._seed))
        seeds = [
            [request.seed_at(0) for request in same] for _, same in groupby(requests, lambda request: request.key[1])
        ]
        rollouts = engine.generate_for(self.questions, seeds, settings.temperature, settings.top_p)
        responses = [
            Response(
                *(request, engine.decode(rollout.token_ids), rollout.length, rollout.finish),
                engine.written(rows[request.key[1]], rollout),
                grade=rollout.grade,
            )
            for request, rollout in zip(requests, chain.from_iterable(rollouts), strict=True)
        ]
        folder = self._run / "evaluation" / str(step)
        path = folder / NAME / SAMPLES
        path.unlink(missing_ok=True)  # of a step that is run again
        file = SampleFile(path)
        samples = graded(self._verifier, responses, rows, plain=False, progress=progress)
        file.write(samples)
        model = EvaluatedModel(str(self._run), None, None, run=self._run.name, step=step)
        record = {**self._record, "model": model.describe(), "finished": now()}
        facts = {NAME: self._set.facts(ask=None, of_group=[NAME])}
        results = summarise(model.name, record, facts, {}, {NAME: file}, {}, self._verifier.deciding)
        write_json(folder / RESULTS, results)
        entry = results["benchmarks"][NAME]
        values = metrics(results, means=False)
        if any(sample["sound"] is not None for sample in samples):
            values["eval/lucky_guess_rate"] = entry["lucky_guess_rate"] or 0.0
        if settings.temperature == 0:  # short names, in total and by number of operands or steps if they have one
            values["eval/greedy_accuracy"] = entry["avg"]["value"]
            for group, score in entry["by_group"].items():
                values[f"eval/greedy_accuracy_{group}_{self._level}"] = score["value"]
        return values


def _level(questions: Sequence[Question]) -> str | None:
    return next((name for name in _LEVELS if any(_has(question, name) for question in questions)), None)


def _has(question: Question, level: str) -> bool:
    """A field of this name in a user's own file may hold anything: the text of worked steps, say."""
    return type(question.meta.get(level)) is int


def metric_names(settings: Evaluation, questions: Sequence[Question], verifier: Verifier) -> list[str]:
    """What an evaluation of these questions measures. Votes (`maj_at_k`) only if answers can be compared."""
    n, prefix = settings.samples, f"eval/{NAME}"
    average = f"{prefix}/avg_at_{n}"
    names = [average, *(bound_of(average, end) for end in ("low", "high"))]
    names += [f"{prefix}/pass_at_{k}" for k in at_k(n) if k > 1]
    names += [f"{prefix}/maj_at_{k}" for k in at_k(n) if k >= MAJORITY_FROM]
    names += [f"{prefix}/{rate}_rate" for rate in RATES] + [f"{prefix}/response_tokens"]
    names += ["eval/lucky_guess_rate"] if verifier.deciding.kind in _CHECK_REASONING else []
    if settings.temperature == 0:
        level = _level(questions)
        groups = sorted({question.meta[level] for question in questions if _has(question, level)}) if level else []
        names += ["eval/greedy_accuracy", *(f"eval/greedy_accuracy_{group}_{level}" for group in groups)]
    return names


def check_metric(name: str | None, settings: Evaluation, questions: Sequence[Question], verifier: Verifier) -> None:
    """Raises ValueError if the evaluation of these questions has no metric of this name (train.best_metric)."""
    names = metric_names(settings, questions, verifier)
    if name is not None and name not in names:
        nearest = "".join(f"; nearest: {other}" for other in difflib.get_close_matches(name, names, 1))
        raise ValueError(
            f"train.best_metric = {name!r} is not measured by this evaluation{nearest}; measured are {', '.join(names)}"
        )


def refuse_test_questions(questions: Sequence[Question], suite: str) -> None:
    """Raises ValueError if a set of the suite has a validation question. Sets that are not available are logged."""
    absent = []
    for benchmark in project_definitions().suite(suite):
        try:
            tests = sets.load(benchmark, (), None, hub=False)
        except sets.Unavailable:
            absent.append(benchmark.title)
            continue
        shared = same_questions([question for _, question in tests.rows], questions)
        if shared:
            raise ValueError(
                f"{len(shared)} of {len(questions)} validation questions are in {benchmark.title} ({tests.source}), "
                f"such as {plain_text(shared[0][1].prompt)[:80]!r}: a checkpoint chosen by them would be chosen on the "
                "test. Bind another set to Work.validation, or set Evaluation.disjoint_from = None if this is intended"
            )
    if absent:
        log.info("validation was not compared with %s: not in %s", ", ".join(absent), sets.DATASETS)
