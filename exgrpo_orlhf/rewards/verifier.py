"""Grades the fresh rollouts of a step."""

from __future__ import annotations

import hashlib
import logging
import pickle
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..replay import Grade, Question, RolloutGroup
from ..settings import require
from ..tasks import countdown, modular_chains
from . import exact, shape
from .pool import GradingError, pool
from .worker import Answer

log = logging.getLogger(__name__)

_HERE: dict[str, Callable[[Question, str], Grade]] = {
    "exact": exact.grade,
    "modular_chain": modular_chains.grade,
    "countdown": countdown.grade,
}
_IN_POOL = ("math", "math_verify", "choice", "function", "code")
_CACHED = ("math", "math_verify", "choice")  # a function may look at anything, a program at the clock
_CACHE_SIZE = 65_536  # verdicts, about 20 MiB
_CODE_GRACE = 3.0  # seconds beyond a program's own limit, for the sandbox around it


@dataclass(frozen=True)
class Verifier:
    """kind: 'math' (a mathematical answer, boxed or stated), 'math_verify' (the same by math-verify's plain recipe, as
        most published scores were graded), 'choice' (an option's letter or digit), 'code' (a Python program against
        tests, in a sandbox), 'function' (the user's own), 'exact' (the response is the answer), 'modular_chain' or
        'countdown' (which also check the reasoning)
    function: with kind 'function', 'file.py' or 'file.py:name'; reward_func(queries, prompts, labels) by default
    format: the shape a response must have or its reward is 0: 'think_answer' (<think>…</think>, <answer>…</answer>) or
        'boxed'; None: any
    timeout: seconds of wall clock for each answer; with kind 'code', for all tests of its program
    memory: MiB for each answer, beyond what the grader itself takes
    workers: grading processes; 0: as many as cores
    max_failed_share: of a batch's answers that may end in a timeout or an error before training stops
    """

    kind: Literal["exact", "modular_chain", "countdown", "math", "math_verify", "choice", "function", "code"] = "exact"
    function: str | None = None
    format: Literal["think_answer", "boxed"] | None = None
    timeout: float = 5.0
    memory: int = 1024
    workers: int = 0
    max_failed_share: float = 0.25

    def __post_init__(self) -> None:
        kinds = (*_HERE, *_IN_POOL)
        require(self.kind in kinds, f"Verifier.kind must be one of {', '.join(map(repr, kinds))}, got {self.kind!r}")
        require(
            (self.function is not None) == (self.kind == "function"),
            f"Verifier.function ('file.py:name') belongs to the kind 'function' and to no other; got {self.function!r} "
            f"with Verifier.kind = {self.kind!r}",
        )
        require(
            self.format is None or self.format in shape.SHAPES,
            f"Verifier.format must be {' or '.join(map(repr, shape.SHAPES))}, or None; got {self.format!r}",
        )
        require(self.timeout > 0, f"Verifier.timeout must be positive (seconds), got {self.timeout!r}")
        require(self.memory >= 64, f"Verifier.memory must be at least 64 (MiB), got {self.memory!r}")
        require(self.workers >= 0, f"Verifier.workers must be at least 0 (0: one a core), got {self.workers!r}")
        require(
            0 <= self.max_failed_share <= 1,
            f"Verifier.max_failed_share must be a share from 0 to 1, got {self.max_failed_share!r}",
        )

    def grade(self, question: Question, response: str) -> Grade:
        """Blocks for at most the limit and a moment.

        Raises ValueError if the question is not of this kind, GradingError if grading cannot go on.
        """
        if self.kind in _IN_POOL:
            return self._in_pool([(question, response)])[0]
        return self._shaped(response, _HERE[self.kind](question, response))

    def grade_all(self, pairs: Sequence[tuple[Question, str]]) -> list[Grade]:
        """Many at once, in order. Raises as `grade`, and GradingError if more than max_failed_share of them fail."""
        grades = self._graded(pairs)
        self._check(grades)
        return grades

    def _graded(self, pairs: Sequence[tuple[Question, str]]) -> list[Grade]:
        if self.kind in _IN_POOL:
            return self._in_pool(pairs)
        return [self.grade(question, response) for question, response in pairs]

    def _check(self, grades: Sequence[Grade]) -> None:
        failed = Counter(grade.verdict for grade in grades if grade.reward is None)
        if failed.total() > self.max_failed_share * len(grades):
            raise GradingError(
                f"{failed.total()} of {len(grades)} answers could not be graded ({failed['timeout']} timeouts, "
                f"{failed['error']} errors): more than Verifier.max_failed_share = {self.max_failed_share:g}; the log "
                f"says why"
            )

    def grade_groups(
        self,
        groups: Sequence[RolloutGroup],
        decode: Callable[[np.ndarray], str],
        earlier: Sequence[RolloutGroup] = (),
    ) -> list[RolloutGroup]:
        """The same groups with every rollout graded. Stored trajectories are not in them: a success stays one.

        earlier: graded groups of the same step, over which and these together max_failed_share is taken: a late round
            of few groups is no sample of its own
        Raises as `grade_all`.
        """
        pairs = [(group.question, decode(rollout.token_ids)) for group in groups for rollout in group.rollouts]
        grades = self._graded(pairs)
        before = [rollout.grade for group in earlier for rollout in group.rollouts if rollout.grade is not None]
        self._check([*before, *grades])
        left = iter(grades)
        return [
            replace(group, rollouts=tuple(replace(rollout, grade=next(left)) for rollout in group.rollouts))
            for group in groups
        ]

    @property
    def checks_reasoning(self) -> bool:
        """Whether a grade says if the reasoning of a correct response holds (`Grade.sound`)."""
        return self.kind in ("modular_chain", "countdown")

    def _in_pool(self, pairs: Sequence[tuple[Question, str]]) -> list[Grade]:
        """Through the cache and the pool; the same answer to the same question goes there once."""
        answers = [
            Answer(question.answer, response, _text(question.prompt), dict(question.meta))
            for question, response in pairs
        ]
        keys = [self._key(answer, i) for i, answer in enumerate(answers)]
        known = {key: grade for key in keys if (grade := _cache.get(key)) is not None}
        asked = {key: answer for key, answer in zip(keys, answers, strict=True) if key not in known}
        if asked:
            limit = self.timeout + (_CODE_GRACE if self.kind == "code" else 0)
            graded = pool(self._settings(), limit, self.workers).grade(list(asked.values()))
            for (key, answer), (verdict, reward, extracted, reason) in zip(asked.items(), graded, strict=True):
                known[key] = Grade(verdict, reward, extracted=extracted)  # type: ignore[arg-type]
                if reward is None:
                    log.warning("not graded (%s): %s; response %.120r", verdict, reason, answer.response[-120:])
                elif self.kind in _CACHED:
                    _cache.put(key, known[key])
        return [self._shaped(response, known[key]) for key, (_, response) in zip(keys, pairs, strict=True)]

    def _settings(self) -> dict[str, Any]:
        """What the verdict depends on besides the answer, as the workers get it."""
        settings: dict[str, Any] = {"kind": self.kind, "memory": self.memory}
        if self.kind == "function":
            settings["function"] = self.function
        if self.kind == "code":
            settings["timeout"] = self.timeout
        return settings

    def _key(self, answer: Answer, index: int) -> bytes:
        if self.kind not in _CACHED:
            return index.to_bytes(8, "big")
        # The prompt plays no part in these kinds, and of the meta only what they look at.
        relevant = [self.kind, answer.gold, answer.response, answer.meta.get("options")]
        return hashlib.blake2b(pickle.dumps(relevant), digest_size=16).digest()

    def _shaped(self, response: str, grade: Grade) -> Grade:
        """A reward needs the shape that is asked for."""
        if self.format is None or grade.reward is None or shape.SHAPES[self.format](response):
            return grade
        return replace(grade, verdict="wrong" if grade.verdict == "correct" else grade.verdict, reward=0.0)


class _Cache:
    """The most recently used verdicts of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.grades: OrderedDict[bytes, Grade] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: bytes) -> Grade | None:
        with self.lock:
            if key in self.grades:
                self.grades.move_to_end(key)
            return self.grades.get(key)

    def put(self, key: bytes, grade: Grade) -> None:
        with self.lock:
            self.grades[key] = grade
            if len(self.grades) > self.size:
                self.grades.popitem(last=False)


_cache = _Cache(_CACHE_SIZE)


def _text(prompt: str | tuple[tuple[str, str], ...]) -> str:
    """A prompt as a reward function gets it."""
    return prompt if isinstance(prompt, str) else "\n".join(content for _, content in prompt)
