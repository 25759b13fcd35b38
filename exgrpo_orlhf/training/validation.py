"""Evaluation during training: responses to the run's validation questions, graded, with their metrics and files."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..io.files import write_json
from ..io.provenance import now
from ..io.redaction import address_only
from ..questions import fingerprint
from ..questions.overlap import same_questions
from ..questions.test_sets import sets_of
from ..questions.text import plain_text
from ..records import Question
from ..rewards import Verifier
from ..settings import Evaluation
from ..tracking.samples import SAMPLES, Answered, Sample, SampleFile, graded, grouped, response_seed
from ..tracking.scores import MAJORITY_FROM, RATES, RESULTS, at_k, bound_of, metrics, summarise
from ..workers.user_file import source_hash

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
        self._verifier, self._run, self._seed, self._tokens = verifier, run, seed, max_tokens
        self._record = {**record, "seed": seed}
        if self.questions and settings.disjoint_from is not None:
            refuse_test_questions(self.questions, settings.disjoint_from)

    def evaluate(self, progress: tuple[int, int], engine: Engine) -> dict[str, float]:
        """Returns metrics for the log, and writes samples and results.json to evaluation/<step>/ of the run.

        progress: steps made, and planned
        """
        step = progress[0]
        folder = self._run / "evaluation" / str(step)
        path = folder / NAME / SAMPLES
        path.unlink(missing_ok=True)  # of a step that is run again
        file = SampleFile(path)
        samples = graded(self._verifier, self._responses(engine), progress)
        file.write(samples)
        model = {"path": str(self._run), "hash": None, "revision": None, "run": self._run.name, "step": step}
        model |= {"mlflow_run_id": None, "metrics_log": None}
        record = {**self._record, "model": model, "finished": now()}
        name, facts = f"{self._run.name}-{step}", {NAME: self._facts()}
        results = summarise(name, record, facts, {}, {NAME: file}, {}, self._verifier.deciding)
        write_json(folder / RESULTS, results)
        return self._metrics(results, samples)

    def _responses(self, engine: Engine) -> list[Answered]:
        """By question and sample. Raises EngineLost."""
        settings, samples = self.settings, range(self.settings.samples)
        seeds = [
            [response_seed(self._seed, NAME, row, question, sample) for sample in samples]
            for row, question in enumerate(self.questions)
        ]
        rollouts = engine.generate_for(self.questions, seeds, settings.temperature, settings.top_p)
        answered = []
        for row, question in enumerate(self.questions):
            prompt_ids = engine.prompts.encode(question)
            prompt = str(engine.prompts.tokenizer.decode(prompt_ids))
            responses = engine.written(question, rollouts[row])
            answered += [
                Answered(
                    *(row, sample, seeds[row][sample], question, prompt, len(prompt_ids)),
                    text=engine.decode(rollout.token_ids),
                    tokens=rollout.length,
                    finish=rollout.finish,
                    written=written,
                    grade=rollout.grade,
                )
                for sample, (rollout, written) in enumerate(zip(rollouts[row], responses, strict=True))
            ]
        return answered

    def _facts(self) -> dict[str, Any]:
        """What the entry in results.json says besides what is measured, as of a benchmark."""
        settings, decides = self.settings, self._verifier.deciding
        urls = (decides.url,) if isinstance(decides.url, str) else decides.url
        return {
            "title": "Validation",
            "group": NAME,
            "samples": settings.samples,
            "verifier": decides.kind,
            "function": decides.function,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": self._tokens,
            "by": None,
            "function_sha256": decides.function and source_hash(decides.source),
            "url": urls and [*map(address_only, urls)],
            "ask": None,
            "of_group": [NAME],
            "in_mean": True,
            "departures": [],
            "source": "Work.validation",
            "fingerprint": fingerprint(self.questions),
            "questions": len(self.questions),
            "rows": len(self.questions),
            "official_rows": None,
            "whole": True,
            "notes": [],
        }

    def _metrics(self, results: Mapping[str, Any], samples: Sequence[Sample]) -> dict[str, float]:
        entry = results["benchmarks"][NAME]
        values = metrics(results, means=False)
        if any(sample["sound"] is not None for sample in samples):
            values["eval/lucky_guess_rate"] = entry["lucky_guess_rate"] or 0.0
        if self.settings.temperature == 0:  # short names, in total and by number of operands or steps if they have one
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
    absent: dict[str, list[str]] = {}
    for test_set in sets_of(suite):
        if test_set.questions is None:
            absent.setdefault(test_set.source, []).append(test_set.title)
        elif shared := same_questions(test_set.questions, questions):
            raise ValueError(
                f"{len(shared)} of {len(questions)} validation questions are in {test_set.title} ({test_set.source}), "
                f"such as {plain_text(shared[0][1].prompt)[:80]!r}: a checkpoint chosen by them would be chosen on the "
                "test. Bind another set to Work.validation, or set Evaluation.disjoint_from = None if this is intended"
            )
    for place, titles in absent.items():
        log.info("validation was not compared with %s: not in %s", ", ".join(titles), place)
