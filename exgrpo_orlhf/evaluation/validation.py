"""Evaluation during training, by the code of the batch evaluation, on the run's own validation questions."""

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
from ..questions.records import fingerprint
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


Answer = Callable[[Sequence[Question], Sequence[Sequence[int]], float, float], list[list[Rollout]]]


class Validation:
    """The questions of a run, and what the policy makes of them at some steps."""

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
        """run: its folder, where evaluation/<step>/ keeps samples and results; seed: of the responses, the same at
        every step, so that what changes is the policy; record: what results.json says of the run

        Raises ValueError for questions that a test set has too.
        """
        self._record = {**record, "seed": seed}
        self.questions, self.settings, self._verifier, self._run = (
            list(map(_grouped, questions)),
            settings,
            verifier,
            run,
        )
        self._seeds = [
            [response_seed(seed, NAME, row, question.id, sample) for sample in range(settings.samples)]
            for row, question in enumerate(questions)
        ]
        self._facts = {
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
        self, step: int, answer: Answer, decode: Callable[[np.ndarray], str], prompts: PromptEncoder
    ) -> dict[str, float]:
        """Metrics for the log; the samples and results.json go to evaluation/<step>/ of the run.

        answer: from questions, the seeds of each one's responses, temperature and top-p to the responses of each
        """
        settings, tokens = self.settings, self._facts["max_tokens"]
        rollouts = answer(self.questions, self._seeds, settings.temperature, settings.top_p)
        responses = [
            Response(
                GenerationRequest(
                    (NAME, row, sample),
                    prompts.render(question),
                    tuple(prompts.encode(question)),
                    tuple(prompts.turns(question)),
                    self._seeds[row][sample],
                    tokens,
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
        path.unlink(missing_ok=True)  # of a step that is run again: nothing in it is wanted
        file = SampleFile(path)
        file.write(samples)
        model = {"path": str(self._run), "hash": None, "revision": None, "run": self._run.name, "step": step}
        record = {**self._record, "model": {**model, "mlflow_run_id": None, "metrics_log": None}, "finished": now()}
        results = summarise(f"{self._run.name}-{step}", record, {NAME: self._facts}, {}, {NAME: file}, {})
        write_json(folder / RESULTS, results)
        return {**metrics(results, means=False), **self._greedy(results["benchmarks"][NAME])}

    def _greedy(self, measured: dict[str, Any]) -> dict[str, float]:
        """The plain names of a greedy evaluation, in all and by number of operands where questions have one."""
        lucky = measured["lucky_guess_rate"]
        found = {"eval/lucky_guess_rate": 0.0 if lucky is None else lucky}
        if self.settings.temperature:
            return found
        found["eval/greedy_accuracy"] = measured["avg"]["value"]
        for group, score in measured["by_group"].items():
            found[f"eval/greedy_accuracy_{group}_operands"] = score["value"]
        return found


def refuse_test_questions(questions: Sequence[Question], suite: str) -> None:
    """Raises ValueError for a validation question that a set of the suite has too; sets that are not here are named
    in the log."""
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
                "test. Bind another set to Work.validation, or set Evaluation.disjoint_from = None if that is meant"
            )
    if absent:
        log.info("validation was not compared with %s: not in %s", ", ".join(absent), sets.DATASETS)


def _grouped(question: Question) -> Question:
    """Chains are scored by their length too."""
    if "operands" not in question.meta:
        return question
    return replace(question, meta={**question.meta, "group": str(question.meta["operands"])})
