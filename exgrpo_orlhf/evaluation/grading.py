"""Verdicts for finished responses while the engine works on the next ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from ..questions.text import plain_text
from ..replay import Grade, Question
from ..rewards import Verifier
from .engines import Response
from .samples import Sample

_TWO_GRADERS = ("math", "choice")  # kinds that are published with math-verify's plain recipe too
_WAITING = 64  # portions: a grader that falls behind holds up the engine, not the memory


class Grading:
    """One thread, which waits for the graders' processes. Portions come back in the order they went in."""

    def __init__(self, verifiers: Mapping[str, Verifier], questions: Mapping[tuple[str, int], Question], plain: bool):
        """verifiers: by benchmark; questions: by benchmark and row; plain: ask math-verify's plain recipe too"""
        self._verifiers, self._questions, self._plain = verifiers, questions, plain
        self._thread = ThreadPoolExecutor(1, "grading")
        self._pending: deque[Future[list[tuple[str, Sample]]]] = deque()

    def put(self, responses: Sequence[Response]) -> Iterator[list[tuple[str, Sample]]]:
        """Hand in a portion; what comes back is graded by now: (benchmark, sample) pairs. Raises GradingError."""
        self._pending.append(self._thread.submit(self._grade, responses))
        while self._pending and (self._pending[0].done() or len(self._pending) > _WAITING):
            yield self._pending.popleft().result()

    def rest(self) -> Iterator[list[tuple[str, Sample]]]:
        """Wait for all that was handed in."""
        while self._pending:
            yield self._pending.popleft().result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _grade(self, responses: Sequence[Response]) -> list[tuple[str, Sample]]:
        graded: dict[int, tuple[str, Sample]] = {}
        for benchmark in dict.fromkeys(response.request.key[0] for response in responses):
            mine = [i for i, response in enumerate(responses) if response.request.key[0] == benchmark]
            pairs = [(self._questions[responses[i].request.key[:2]], responses[i].text) for i in mine]
            verdicts = verdicts_of(self._verifiers[benchmark], pairs, self._plain)
            for i, (question, _), (grade, plain) in zip(mine, pairs, verdicts, strict=True):
                graded[i] = benchmark, _sample(responses[i], question, grade, plain)
        return [graded[i] for i in range(len(responses))]


def verdicts_of(
    verifier: Verifier, pairs: Sequence[tuple[Question, str]], plain: bool
) -> list[tuple[Grade, str | None]]:
    """Our verdict on each response, and the plain recipe's, or None where the two cannot differ or it is not asked."""
    grades = verifier.grade_all(pairs)
    if not plain or verifier.kind not in _TWO_GRADERS:
        return [(grade, None) for grade in grades]
    others = replace(verifier, kind="math_verify").grade_all(pairs)
    return [(grade, other.verdict) for grade, other in zip(grades, others, strict=True)]


def _sample(response: Response, question: Question, grade: Grade, plain: str | None) -> Sample:
    request = response.request
    _, row, sample = request.key
    return {
        "row": row,
        "sample": sample,
        "id": question.id,
        "seed": request.seed,
        "question": plain_text(question.prompt),
        "prompt": request.prompt,
        "gold": question.answer,
        "response": response.text,
        "extracted": grade.extracted,
        "verdict": grade.verdict,
        "sound": grade.sound,
        "plain": plain,
        "prompt_tokens": response.prompt_tokens or len(request.prompt_ids),
        "response_tokens": response.tokens,
        "finish": response.finish,
        "group": question.meta.get("group"),
    }
