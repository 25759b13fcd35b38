"""Grades responses: a single one, a list, or the fresh rollouts of a step as they are generated."""

from __future__ import annotations

import hashlib
import logging
import pickle
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from ..records import Grade, Question, RolloutGroup
from ..settings import require
from ..tasks import countdown, modular_chains
from .answer import Answer
from .pool.pool import Grading, GradingError, Pool, pool
from .text.format import FORMATS, exact

log = logging.getLogger(__name__)

_HERE: dict[str, Callable[[Question, str], Grade]] = {  # graded in this process
    "exact": exact,
    "modular_chain": modular_chains.grade,
    "countdown": countdown.grade,
}
_IN_POOL = ("math", "math_verify", "choice", "function", "code")
_CACHED = ("math", "math_verify", "choice")  # the result of a function or a program may change from call to call
_CACHE_SIZE = 65_536  # verdicts, about 20 MiB
_CODE_GRACE = 3.0  # seconds beyond a program's own limit, for the sandbox around it


@dataclass(frozen=True)
class Verifier:
    """How responses are graded.

    kind: 'math' (a mathematical answer, boxed or stated), 'math_verify' (the same by math-verify's plain recipe, as
        most published scores were graded), 'choice' (an option's letter or digit), 'code' (a Python program against
        tests, in a sandbox), 'function' (the user's own), 'exact' (the response is the answer), 'modular_chain' or
        'countdown' (which also check the reasoning)
    function: with kind 'function', 'file.py' or 'file.py:name'; reward_func(queries, prompts, labels) by default
    format: the format a response must have, or its reward is 0: 'think_answer' (<think>…</think>, <answer>…</answer>)
        or 'boxed'; None: any
    timeout: seconds of wall clock for each answer; with kind 'code', for all tests of its program
    memory: MiB for each answer, beyond what the grader itself takes
    workers: grading processes; 0: as many as cores
    max_failed_share: of a batch's answers that may end in a timeout or an error before training stops
    """

    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("workers", "max_failed_share")

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
            f"Verifier.function ('file.py:name') must be set with Verifier.kind = 'function', and only then; got "
            f"{self.function!r} with Verifier.kind = {self.kind!r}",
        )
        require(
            self.format is None or self.format in FORMATS,
            f"Verifier.format must be {' or '.join(map(repr, FORMATS))}, or None; got {self.format!r}",
        )
        require(self.timeout > 0, f"Verifier.timeout must be positive (seconds), got {self.timeout!r}")
        require(self.memory >= 64, f"Verifier.memory must be at least 64 (MiB), got {self.memory!r}")
        require(self.workers >= 0, f"Verifier.workers must be at least 0 (0: one a core), got {self.workers!r}")
        require(
            0 <= self.max_failed_share <= 1,
            f"Verifier.max_failed_share must be a share from 0 to 1, got {self.max_failed_share!r}",
        )

    def grade(self, question: Question, response: str) -> Grade:
        """Grade one response. Blocks for little more than `timeout` at most.

        Raises ValueError if the question is not of this kind, GradingError if grading cannot go on.
        """
        return self._graded([(question, response)])[0]

    def grade_all(self, pairs: Sequence[tuple[Question, str]]) -> list[Grade]:
        """Grade many, in order. Raises as `grade`, and GradingError if more than max_failed_share of them fail."""
        grades = self._graded(pairs)
        self._check(grades)
        return grades

    def _graded(self, pairs: Sequence[tuple[Question, str]]) -> list[Grade]:
        answers = _Answers(self)
        answers.add(pairs)
        return answers.grades()

    def _check(self, grades: Sequence[Grade]) -> None:
        failed = Counter(grade.verdict for grade in grades if grade.reward is None)
        if failed.total() > self.max_failed_share * len(grades):
            raise GradingError(
                f"{failed.total()} of {len(grades)} answers could not be graded ({failed['timeout']} timeouts, "
                f"{failed['error']} errors): more than Verifier.max_failed_share = {self.max_failed_share:g}; the log "
                f"has the reasons"
            )

    def grade_groups(
        self,
        groups: Iterable[RolloutGroup],
        decode: Callable[[np.ndarray], str],
        earlier: Sequence[RolloutGroup] = (),
    ) -> list[RolloutGroup]:
        """The same groups with every rollout graded. Stored trajectories are not among them: they are never re-graded.

        groups: may arrive one by one, while others are still being generated. Kinds that are graded in other processes
            are graded on arrival; the others ('exact', 'modular_chain', 'countdown') when all groups have arrived
        earlier: graded groups of the same step; max_failed_share is taken over them and these together, because a late
            round may have few groups
        Raises as `grade_all`, and whatever `groups` raises; answers that are not graded yet are then dropped.
        """
        answers, arrived = _Answers(self), []
        try:
            for group in groups:
                answers.add([(group.question, decode(rollout.token_ids)) for rollout in group.rollouts])
                arrived.append(group)
            grades = answers.grades()
        except BaseException:
            answers.give_up()
            raise
        before = [rollout.grade for group in earlier for rollout in group.rollouts if rollout.grade is not None]
        self._check([*before, *grades])
        left = iter(grades)
        return [
            replace(group, rollouts=tuple(replace(rollout, grade=next(left)) for rollout in group.rollouts))
            for group in arrived
        ]

    @property
    def checks_reasoning(self) -> bool:
        """Whether grades tell if the reasoning of a correct response holds (`Grade.sound`)."""
        return self.kind in ("modular_chain", "countdown")

    def _pool(self) -> Pool:
        return pool(self._settings(), self.timeout + (_CODE_GRACE if self.kind == "code" else 0), self.workers)

    def _settings(self) -> dict[str, Any]:
        """The settings on which a verdict depends, as the workers get them."""
        settings: dict[str, Any] = {"kind": self.kind, "memory": self.memory}
        if self.kind == "function":
            settings["function"] = self.function
        if self.kind == "code":
            settings["timeout"] = self.timeout
        return settings

    def _key(self, answer: Answer, index: int) -> bytes:
        if self.kind not in _CACHED:
            return index.to_bytes(8, "big")
        # These kinds ignore the prompt, and read nothing but the options from the meta.
        relevant = [self.kind, answer.gold, answer.response, answer.meta.get("options")]
        return hashlib.blake2b(pickle.dumps(relevant), digest_size=16).digest()

    def _formatted(self, response: str, grade: Grade) -> Grade:
        """The grade, with reward 0 if the response lacks the required format."""
        if self.format is None or grade.reward is None or FORMATS[self.format](response):
            return grade
        return replace(grade, verdict="wrong" if grade.verdict == "correct" else grade.verdict, reward=0.0)


class _Answers:
    """Answers that are graded together, added in one call or in several. They go through the cache and the pool; the
    same answer to the same question is graded once."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        self.pairs: list[tuple[Question, str]] = []
        self.keys: list[bytes] = []  # of each pair
        self.known: dict[bytes, Grade] = {}
        self.sent: dict[bytes, Answer] = {}
        self.grading: Grading | None = None  # of the answers sent

    def add(self, pairs: Sequence[tuple[Question, str]]) -> None:
        """Raises GradingError if grading has failed already."""
        self.pairs += pairs
        if self.verifier.kind in _HERE:
            return
        new: dict[bytes, Answer] = {}
        for question, response in pairs:
            answer = Answer(question.answer, response, _text(question.prompt), dict(question.meta))
            key = self.verifier._key(answer, len(self.keys))
            self.keys.append(key)
            if grade := _cache.get(key):
                self.known[key] = grade
            elif key not in self.sent:
                new[key] = answer
        if new:
            self.grading = self.grading or Grading(self.verifier._pool())
            self.grading.send(list(new.values()))
            self.sent |= new

    def grades(self) -> list[Grade]:
        """Of all pairs, in order. Blocks. Raises as `Verifier.grade`."""
        verifier = self.verifier
        if grade := _HERE.get(verifier.kind):
            return [verifier._formatted(response, grade(question, response)) for question, response in self.pairs]
        graded = self.grading.wait() if self.grading else []
        for (key, answer), (verdict, reward, extracted, reason) in zip(self.sent.items(), graded, strict=True):
            self.known[key] = Grade(verdict, reward, extracted=extracted)
            if reward is None:
                log.warning("not graded (%s): %s; response %.120r", verdict, reason, answer.response[-120:])
            elif verifier.kind in _CACHED:
                _cache.put(key, self.known[key])
        return [
            verifier._formatted(response, self.known[key])
            for key, (_, response) in zip(self.keys, self.pairs, strict=True)
        ]

    def give_up(self) -> None:
        """Drop the answers that no worker has taken yet."""
        if self.grading:
            self.grading.fail(GradingError("these answers were given up"))


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
    """A prompt as one text, as a reward function gets it."""
    return prompt if isinstance(prompt, str) else "\n".join(content for _, content in prompt)
