"""From responses to samples: verdicts by the benchmark's verifier and by math-verify's plain recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..grader.grade import Grade
from ..questions.text import normalised_answer, plain_text
from ..records import Question
from ..rewards import GradingError, Verifier, Written
from ..workers.fork_server import NotLoaded
from .benchmarks import BenchmarkError
from .responses import Response
from .samples import Sample
from .sets import BenchmarkSet

_TWO_GRADERS = ("math", "choice")  # verifiers whose responses math-verify's plain recipe can grade too

COMPARED = ("math", "math_verify")  # verifiers whose equality is more than that of texts


def check_golds(sets: Sequence[BenchmarkSet], timeout: float, workers: int) -> None:
    """Check, before anything is generated, that every reference answer can be graded against, and every environment
    loaded. Raises BenchmarkError."""
    for test_set in sets:
        if environment := test_set.benchmark.environment:
            try:
                environment.check_file()
            except NotLoaded as error:
                raise BenchmarkError(f"benchmark {test_set.benchmark.name!r}: {error}") from error
            if environment.reward == "environment":
                continue
        verifier = test_set.benchmark.grader(timeout, workers)
        where = f"benchmark {test_set.benchmark.name!r}, verifier {verifier.kind!r}"
        try:
            replace(verifier, max_failed_share=0.0).check_questions([question for _, question in test_set.rows])
        except (ValueError, GradingError) as error:
            raise BenchmarkError(f"{where}: {error}") from error


def verdicts(
    verifier: Verifier, pairs: Sequence[tuple[Question, Written]], grades: Sequence[Grade], plain: bool
) -> list[dict[str, Any]]:
    """The fields of a sample that grading gives: extracted, verdict, sound, and plain, which is the verdict of
    math-verify's plain recipe, None if it is not requested or cannot differ.
    """
    others: list[str | None] = [None] * len(grades)
    if plain and verifier.kind in _TWO_GRADERS:
        others = [grade.verdict for grade in replace(verifier, kind="math_verify").grade_all(pairs)]
    return [
        {"extracted": grade.extracted, "verdict": grade.verdict, "sound": grade.sound, "plain": other}
        for grade, other in zip(grades, others, strict=True)
    ]


def graded(
    verifier: Verifier,
    responses: Sequence[Response],
    questions: Mapping[int, Question],
    plain: bool,
    progress: tuple[int, int] = (0, 1),
) -> list[Sample]:
    """The samples of responses to one benchmark. questions: by row; progress: as `Answer` has it"""
    pairs = [(questions[item.request.key[1]], item.written) for item in responses]
    ungraded = [pair for pair, item in zip(pairs, responses, strict=True) if item.grade is None]
    new_grades = iter(verifier.grade_all(ungraded, progress))
    grades = [item.grade or next(new_grades) for item in responses]
    verifier.check_failed(grades)
    samples = []
    fields = verdicts(verifier, pairs, grades, plain)
    for response, (question, _), grade, graded_fields in zip(responses, pairs, grades, fields, strict=True):
        request = response.request
        _, row, sample = request.key
        parts = {"rewards": dict(grade.parts)} if grade.parts else {}
        line: Any = {
            "row": row,
            "sample": sample,
            "id": question.id,
            "seed": request.seed_at(0),
            "question": plain_text(question.prompt),
            "prompt": request.prompt,
            "gold": question.answer_text,
            "response": response.text,
            **graded_fields,
            "prompt_tokens": response.prompt_tokens or len(request.prompt_ids),
            "response_tokens": response.tokens,
            "finish": response.finish,
            "group": question.meta.get("group"),
            **parts,
        }
        samples.append(line)
    return samples


def votes(answers: Sequence[Sequence[str | None]], grader: Verifier | None) -> list[list[str | None]]:
    """A key for each answer to each question, the same for answers that differ in typesetting only or that the grader
    finds equal (1/2 and 0.5). None for no answer."""
    keys = [[None if text is None else normalised_answer(text) for text in row] for row in answers]
    if grader is None:
        return keys
    groups: list[dict[str, str]] = [{} for _ in keys]  # of each question: from a key to that of its group
    texts = [{k: t for k, t in zip(*row, strict=True) if k and t} for row in zip(keys, answers, strict=True)]
    while any(texts):  # the first answer left to each question, against all others left
        pairs, places = [], []
        for group, remaining in zip(groups, texts, strict=True):
            if remaining:
                first = next(iter(remaining))
                gold = Question.make("votes", "", remaining.pop(first))
                pairs += [(gold, f"\\boxed{{{text}}}") for text in remaining.values()]
                places += [(group, remaining, key, first) for key in remaining]
        for (group, remaining, key, first), grade in zip(places, grader.grade_all(pairs), strict=True):
            if grade.correct:
                group[key] = first
                del remaining[key]
    return [[key and group.get(key, key) for key in row] for row, group in zip(keys, groups, strict=True)]
