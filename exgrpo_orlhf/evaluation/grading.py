"""Grade finished responses while the engine generates the next ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Semaphore

from ..questions.text import plain_text
from ..records import Grade, Question
from ..rewards import GradingError, Verifier
from .benchmarks import BenchmarkError
from .engines import Response
from .samples import Sample
from .sets import BenchmarkSet

_TWO_GRADERS = ("math", "choice")  # verifiers whose responses math-verify's plain recipe can grade too
_WAITING = 64  # portions: when grading falls behind, the engine waits and memory does not grow

Graded = list[tuple[str, Sample]]  # (benchmark, sample)


class GradingThread:
    """A thread that waits for the graders' processes and writes each portion as soon as it is graded."""

    def __init__(
        self,
        verifiers: Mapping[str, Verifier],
        questions: Mapping[tuple[str, int], Question],
        plain: bool,
        write: Callable[[Graded], None],
    ) -> None:
        """verifiers: by benchmark; questions: by (benchmark, row); plain: also grade by math-verify's plain recipe"""
        self._verifiers, self._questions, self._plain, self._write = verifiers, questions, plain, write
        self._thread = ThreadPoolExecutor(1, "grading")
        self._room = Semaphore(_WAITING)
        self._failed: BaseException | None = None  # the first error; nothing is graded or written after it

    def put(self, responses: Sequence[Response]) -> None:
        """Add a portion. Raises the error of an earlier one: GradingError, OSError."""
        self._room.acquire()
        self._raise()
        self._thread.submit(self._work, responses)

    def close(self) -> None:
        """Wait for all portions. Raises as `put` does."""
        self._thread.shutdown(wait=True)
        self._raise()

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _work(self, responses: Sequence[Response]) -> None:
        try:
            if self._failed is None:
                self._grade(responses)
        except BaseException as error:  # for the main thread
            self._failed = error
        finally:
            self._room.release()

    def _grade(self, responses: Sequence[Response]) -> None:
        graded: dict[int, tuple[str, Sample]] = {}
        for benchmark in dict.fromkeys(response.request.key[0] for response in responses):
            mine = [i for i, response in enumerate(responses) if response.request.key[0] == benchmark]
            pairs = [(self._questions[responses[i].request.key[:2]], responses[i].text) for i in mine]
            verdicts = verdicts_of(self._verifiers[benchmark], pairs, self._plain)
            for i, (question, _), (grade, plain) in zip(mine, pairs, verdicts, strict=True):
                graded[i] = benchmark, sample_of(responses[i], question, grade, plain)
        self._write([graded[i] for i in range(len(responses))])


def check_golds(sets: Sequence[BenchmarkSet], timeout: float, workers: int) -> None:
    """Check, before anything is generated, that every reference answer can be graded against. Raises BenchmarkError."""
    for asked in sets:
        verifier = asked.benchmark.grader(timeout, workers)
        where = f"benchmark {asked.benchmark.name!r}, verifier {verifier.kind!r}"
        try:
            grades = verifier.grade_all([(question, "") for _, question in asked.rows])
        except (ValueError, GradingError) as error:
            raise BenchmarkError(f"{where}: {error}") from error
        for (row, question), grade in zip(asked.rows, grades, strict=True):
            if grade.verdict == "error":
                raise BenchmarkError(f"{where}: row {row} has no answer of that kind: {question.answer!r:.80}")


def verdicts_of(
    verifier: Verifier, pairs: Sequence[tuple[Question, str]], plain: bool
) -> list[tuple[Grade, str | None]]:
    """Our verdict on each response, and the plain recipe's: None if it is not asked or cannot differ."""
    grades = verifier.grade_all(pairs)
    if not plain or verifier.kind not in _TWO_GRADERS:
        return [(grade, None) for grade in grades]
    others = replace(verifier, kind="math_verify").grade_all(pairs)
    return [(grade, other.verdict) for grade, other in zip(grades, others, strict=True)]


def sample_of(response: Response, question: Question, grade: Grade, plain: str | None) -> Sample:
    """The line of a graded response. plain: the verdict of math-verify's plain recipe, None if it was not asked"""
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
