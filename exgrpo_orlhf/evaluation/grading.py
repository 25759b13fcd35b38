"""Grade finished responses while the engine generates the next ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ..questions.text import plain_text
from ..records import Question
from ..rewards import GradingError, Verifier
from .backends import Response
from .benchmarks import BenchmarkError
from .folder import Times
from .samples import Sample, SampleFile
from .sets import BenchmarkSet

_TWO_GRADERS = ("math", "choice")  # verifiers whose responses math-verify's plain recipe can grade too
_WAITING = 64  # portions: when grading falls behind, the engine waits and memory does not grow


class GradingThread:
    """A thread that waits for the graders' processes and writes each portion as soon as it is graded."""

    def __init__(
        self,
        sets: Sequence[BenchmarkSet],
        files: Mapping[str, SampleFile],
        times: Times,
        timeout: float,
        workers: int,
        plain: bool,
    ) -> None:
        """files: benchmark → where its samples go; plain: also grade by math-verify's plain recipe"""
        self._verifiers = {each.benchmark.name: each.benchmark.grader(timeout, workers) for each in sets}
        self._questions = {each.benchmark.name: dict(each.rows) for each in sets}
        self._files, self._times, self._plain = files, times, plain
        self._thread = ThreadPoolExecutor(1, "grading")
        self._waiting: deque[Future[None]] = deque()

    def put(self, responses: Sequence[Response]) -> None:
        """Add a portion. Raises the error of an earlier one: GradingError, OSError."""
        while self._waiting and (self._waiting[0].done() or len(self._waiting) == _WAITING):
            self._waiting.popleft().result()
        before = self._waiting[-1] if self._waiting else None
        self._waiting.append(self._thread.submit(self._grade, responses, before))

    def close(self) -> None:
        """Wait for all portions. Raises as `put` does."""
        self._thread.shutdown(wait=True)
        for portion in self._waiting:
            portion.result()

    def _grade(self, responses: Sequence[Response], before: Future[None] | None) -> None:
        if before:
            before.result()  # raises its error again: after the first one nothing is graded or written
        tokens = {}
        for name in dict.fromkeys(response.request.key[0] for response in responses):
            mine = [response for response in responses if response.request.key[0] == name]
            self._files[name].append(graded(self._verifiers[name], mine, self._questions[name], self._plain))
            tokens[name] = sum(response.tokens for response in mine)
        self._times.add(tokens)


def check_golds(sets: Sequence[BenchmarkSet], timeout: float, workers: int) -> None:
    """Check, before anything is generated, that every reference answer can be graded against. Raises BenchmarkError."""
    for each in sets:
        verifier = each.benchmark.grader(timeout, workers)
        where = f"benchmark {each.benchmark.name!r}, verifier {verifier.kind!r}"
        try:
            grades = verifier.grade_all([(question, "") for _, question in each.rows])
        except (ValueError, GradingError) as error:
            raise BenchmarkError(f"{where}: {error}") from error
        for (row, question), grade in zip(each.rows, grades, strict=True):
            if grade.verdict == "error":
                raise BenchmarkError(f"{where}: row {row} has no answer of that kind: {question.answer!r:.80}")


def verdicts_of(verifier: Verifier, pairs: Sequence[tuple[Question, str]], plain: bool) -> list[dict[str, Any]]:
    """The fields of a sample that grading gives: extracted, verdict, sound, and plain, which is the verdict of
    math-verify's plain recipe, None if it is not requested or cannot differ.
    """
    grades = verifier.grade_all(pairs)
    others: list[str | None] = [None] * len(grades)
    if plain and verifier.kind in _TWO_GRADERS:
        others = [grade.verdict for grade in replace(verifier, kind="math_verify").grade_all(pairs)]
    return [
        {"extracted": grade.extracted, "verdict": grade.verdict, "sound": grade.sound, "plain": other}
        for grade, other in zip(grades, others, strict=True)
    ]


def graded(
    verifier: Verifier, responses: Sequence[Response], questions: Mapping[int, Question], plain: bool
) -> list[Sample]:
    """The samples of responses to one benchmark. questions: by row"""
    pairs = [(questions[response.request.key[1]], response.text) for response in responses]
    samples = []
    for response, (question, _), verdicts in zip(responses, pairs, verdicts_of(verifier, pairs, plain), strict=True):
        request = response.request
        _, row, sample = request.key
        line: Any = {
            "row": row,
            "sample": sample,
            "id": question.id,
            "seed": request.seed,
            "question": plain_text(question.prompt),
            "prompt": request.prompt,
            "gold": question.answer,
            "response": response.text,
            **verdicts,
            "prompt_tokens": response.prompt_tokens or len(request.prompt_ids),
            "response_tokens": response.tokens,
            "finish": response.finish,
            "group": question.meta.get("group"),
        }
        samples.append(line)
    return samples
