"""From responses to samples: verdicts by the benchmark's verifier and by math-verify's plain recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..records import Question
from ..rewards import GradingError, Verifier, Written
from ..tracking.samples import Answered, Sample
from ..tracking.samples import graded as samples_of
from ..workers.fork_server import NotLoaded
from .benchmarks import BenchmarkError
from .responses import Response
from .sets import BenchmarkSet

_TWO_GRADERS = ("math", "choice")  # verifiers whose responses math-verify's plain recipe can grade too


def check_golds(sets: Sequence[BenchmarkSet], graders: Mapping[str, Verifier]) -> None:
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
        verifier = graders[test_set.benchmark.name]
        where = f"benchmark {test_set.benchmark.name!r}, verifier {verifier.kind!r}"
        try:
            replace(verifier, max_failed_share=0.0).check_questions([question for _, question in test_set.rows])
        except (ValueError, GradingError) as error:
            raise BenchmarkError(f"{where}: {error}") from error


def graded(
    verifier: Verifier, responses: Sequence[Response], questions: Mapping[int, Question], plain: bool
) -> list[Sample]:
    """The samples of responses to one benchmark. questions: by row; plain: as for `plain_verdicts`"""
    answered = []
    for response in responses:
        request = response.request
        _, row, sample = request.key
        prompt_tokens = response.prompt_tokens or len(request.prompt_ids)
        answered.append(
            Answered(
                *(row, sample, request.seed_at(0), questions[row], request.prompt, prompt_tokens),
                text=response.text,
                tokens=response.tokens,
                finish=response.finish,
                written=response.written,
                grade=response.grade,
            )
        )
    samples = samples_of(verifier, answered)
    others = plain_verdicts(verifier, [(one.question, one.written) for one in answered], plain)
    for sample_row, other in zip(samples, others, strict=True):
        sample_row["plain"] = other
    return samples


def plain_verdicts(verifier: Verifier, pairs: Sequence[tuple[Question, Written]], plain: bool) -> Sequence[str | None]:
    """Of math-verify's plain recipe; None where they are not requested or cannot differ."""
    if not plain or verifier.kind not in _TWO_GRADERS:
        return [None] * len(pairs)
    return [grade.verdict for grade in replace(verifier, kind="math_verify").grade_all(pairs)]
