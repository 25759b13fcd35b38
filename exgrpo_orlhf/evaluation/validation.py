"""Evaluation during training on the run's validation questions, with the code of the batch evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..files import write_json
from ..questions.overlap import same_questions
from ..questions.prompts import PromptEncoder
from ..questions.reading import fingerprint
from ..questions.text import plain_text
from ..records import Question, Rollout
from ..rewards import Verifier
from ..settings import Evaluation
from . import sets
from .benchmarks import Definitions
from .engines import GenerationRequest, Response
from .environment import now
from .folder import RESULTS, SAMPLES
from .grading import sample_of
from .results import metrics, summarise
from .samples import SampleFile
from .seeds import response_seed

log = logging.getLogger(__name__)
NAME = "validation"
Responder = Callable[[Sequence[Question], Sequence[Sequence[int]], float, float], list[list[Rollout]]]


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
        """Check the questions.

        Args:
            questions: the validation questions.
            settings: how to sample and grade.
            verifier: grades the responses.
            run: the run's folder; samples and results go to its evaluation/<step>/.
            seed: of the responses; the same at every step, so that only the policy changes.
            max_tokens: of a response.
            record: what results.json says of the run.

        Raises:
            ValueError: a test set has some of the questions.
        """
        self._record = {**record, "seed": seed}
        self.questions, self.settings = list(map(_grouped, questions)), settings
        self._verifier, self._run = verifier, run
        self._seeds = [
            [response_seed(seed, NAME, row, question.id, sample) for sample in range(settings.samples)]
            for row, question in enumerate(questions)
        ]
        self._max_tokens = max_tokens
        self._facts: dict[str, Any] = {
            "title": "Validation",
            "group": NAME,
            "samples": settings.samples,
            "verifier": verifier.kind,
            "function": verifier.function,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": max_tokens,
            "ask": None,
            "of_group": [NAME],
            "departures": [],
            "source": "Work.validation",
            "fingerprint": fingerprint(questions),
            "questions": len(self.questions),
            "rows": len(self.questions),
            "official_rows": None,
            "whole": True,
            "notes": [],
        }
        if self.questions and settings.disjoint_from is not None:
            refuse_test_questions(self.questions, settings.disjoint_from)

    def evaluate(
        self, step: int, answer: Responder, decode: Callable[[np.ndarray], str], prompts: PromptEncoder
    ) -> dict[str, float]:
        """Returns metrics for the log, and writes samples and results.json to evaluation/<step>/ of the run.

        answer: maps (questions, seeds of the responses to each, temperature, top-p) to the responses to each
        """
        settings = self.settings
        rollouts = answer(self.questions, self._seeds, settings.temperature, settings.top_p)
        responses = [
            Response(
                GenerationRequest(
                    (NAME, row, sample),
                    prompts.render(question),
                    tuple(prompts.encode(question)),
                    tuple(prompts.turns(question)),
                    self._seeds[row][sample],
                    self._max_tokens,
                    settings.temperature,
                    settings.top_p,
                ),
                decode(rollout.token_ids),
                len(rollout.token_ids),
                rollout.finish,
            )
            for row, (question, own) in enumerate(zip(self.questions, rollouts, strict=True))
            for sample, rollout in enumerate(own)
        ]
        asked = [self.questions[response.request.key[1]] for response in responses]
        grades = self._verifier.grade_all([(q, response.text) for q, response in zip(asked, responses, strict=True)])
        samples = [sample_of(*each, None) for each in zip(responses, asked, grades, strict=True)]
        folder = self._run / "evaluation" / str(step)
        path = folder / NAME / SAMPLES
        path.unlink(missing_ok=True)  # of a step that is run again
        file = SampleFile(path)
        file.write(samples)
        model = {"path": str(self._run), "hash": None, "revision": None, "run": self._run.name, "step": step}
        record = {**self._record, "model": {**model, "mlflow_run_id": None, "metrics_log": None}, "finished": now()}
        results = summarise(f"{self._run.name}-{step}", record, {NAME: self._facts}, {}, {NAME: file}, {})
        write_json(folder / RESULTS, results)
        return {**metrics(results, means=False), **self._greedy(results["benchmarks"][NAME])}

    def _greedy(self, measured: dict[str, Any]) -> dict[str, float]:
        """Short metric names of a greedy evaluation, in total and by number of operands if questions have one."""
        lucky = measured["lucky_guess_rate"]
        found = {"eval/lucky_guess_rate": 0.0 if lucky is None else lucky}
        if self.settings.temperature:
            return found
        found["eval/greedy_accuracy"] = measured["avg"]["value"]
        for group, score in measured["by_group"].items():
            found[f"eval/greedy_accuracy_{group}_operands"] = score["value"]
        return found


def refuse_test_questions(questions: Sequence[Question], suite: str) -> None:
    """Raises ValueError if a set of the suite has a validation question. Sets that are not available are logged."""
    absent = []
    for benchmark in Definitions().suite(suite):
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


def _grouped(question: Question) -> Question:
    """Put modular chains into groups by their number of operands, so that each length gets a score."""
    if "operands" not in question.meta:
        return question
    return replace(question, meta={**question.meta, "group": str(question.meta["operands"])})
