"""Grades responses: a single one, a list, or the fresh rollouts of a step as they are generated."""

from __future__ import annotations

import logging
import math
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, Any, Literal

from ..records import Grade, Question, Rollout, RolloutGroup, mean
from ..rounding import less_rounding
from ..settings import Bound, Count, Finite, PositiveShare, Share, check, require
from ..tasks import modular_chains, word_problems
from ..tasks.reasoning_gym import SOURCE
from .answer import Answer, Graded, Written, warn_once
from .pool.pool import GradingError, Pool, pool
from .sandbox.code import tests_of
from .server import RewardServer, address_fault, server, shown

log = logging.getLogger(__name__)


def _exact(question: Question, response: str) -> Grade:
    """The response must equal the gold answer, white space around it aside. An empty response is no answer."""
    text = response.strip()
    if not text:
        return Grade("no_answer", 0.0)
    return Grade("correct", 1.0) if text == question.answer.strip() else Grade("wrong", 0.0)


_FORMATS: dict[str, Callable[[str], object]] = {
    # One thought, then one answer and nothing else. The opening <think> may be part of the prompt.
    "think_answer": re.compile(
        # Atomic groups: possessive ones are matched wrongly by Python before 3.11.5 (gh-106052).
        r"\s*+(?>(<think>)?)(?>((?!</?think>).)*)</think>\s*+<answer>(?!\s*</answer>)(?>((?!</?(think|answer)>).)*)"
        r"</answer>\s*",
        re.DOTALL,
    ).fullmatch,
    # A box after the thought, if there is one.
    "boxed": lambda response: "\\boxed{" in response.rpartition("</think>")[2],
}
_Kind = Literal[
    "exact", "modular_chain", "chain_steps", "word_problem", "math", "math_verify", "choice", "function",
    "code", "reasoning_gym", "http",
]  # fmt: skip
_HERE: dict[str, Callable[[Question, str], Grade]] = {  # graded in this process
    "exact": _exact,
    "modular_chain": modular_chains.grade,
    "chain_steps": modular_chains.grade_steps,
    "word_problem": word_problems.grade,
}
# Of these the same answer is graded once. The result of a function or a program may change from call to call.
_TEXTS = ("math", "math_verify", "choice", "reasoning_gym")
_OWN_GRADERS = ("function", "http")  # get the response as it is, with its thought
_THOUGHT_END = re.compile(r"</think(?:ing)?>\s*", re.IGNORECASE)
_UNFINISHED, _NO_ANSWER = b"", Grade("no_answer", 0.0)  # the key and the grade of a thought without an end
_CODE_GRACE = 3.0  # seconds beyond a program's own limit, for the sandbox around it


@dataclass(frozen=True)
class Verifier:
    """How responses are graded.

    kind: 'math' (a mathematical answer, boxed or stated), 'math_verify' (the same by math-verify's plain recipe, as
        most published scores were graded), 'choice' (an option's letter or digit), 'code' (a Python program against
        tests, in a sandbox), 'function' (the user's own), 'reasoning_gym' (the checker of a question's own task),
        'http' (a reward server with OpenRLHF's protocol),
        'exact' (the response is the answer), 'modular_chain' or 'word_problem' (which also check the
        reasoning), 'chain_steps' (modular chains; the reward is the share of right steps)
    success_at: least reward of a success with 'function', 'reasoning_gym' and 'http', whose reward is any number.
        An OpenRLHF function's or server's `scores` decide instead of its rewards, where it returns them.
        Advantages follow the reward; what is stored, retired and counted as accuracy follows success
    function: with kind 'function', 'file.py' or 'file.py:name'; reward_func(queries, prompts, labels) by default
    tool: for which the function is written, 'openrlhf', 'trl' or 'verl'; None: its parameters' names tell
    gets: of what a function that takes several responses gets them at a time, a 'group' (those to one question) or the
        'batch' (of a step); None: as in its tool, a group for TRL and the batch for verl
    url: with kind 'http', the server's address, or several that share the work
    tries: of a request to a server, at most
    format: the format a response must have, or its reward is 0: 'think_answer' (<think>…</think>, <answer>…</answer>)
        or 'boxed'; None: any
    overlong_share: the last part of Sampling.max_response_tokens, as a share of it: in it the reward falls linearly, by
        1 at its end (soft overlong punishment, DAPO, arXiv 2503.14476, equation 13), for the advantage alone. Success,
        difficulty, what is stored and dynamic sampling see the reward itself. None: it does not fall
    timeout: seconds of wall clock for each answer, and for a function that gets several at a time, times their number;
        with kind 'code', for all tests of its program; with kind 'http', for one request, from its begin to the last
        byte of the answer; it has the responses to one question
    memory: MiB for each answer, beyond what the grader itself takes
    workers: grading processes, 0: as many as cores, and one for a function, which may keep something between its calls;
        with kind 'http', requests at a time, 0: 16
    max_failed_share: of a batch's answers that may end in a timeout or an error before training stops
    """

    MAY_CHANGE = ("workers", "max_failed_share")

    kind: _Kind = "exact"
    function: str | None = None
    success_at: Finite = 1.0
    url: str | tuple[str, ...] | None = None
    tries: Count = 3
    format: Literal["think_answer", "boxed"] | None = None
    overlong_share: PositiveShare | None = None
    timeout: Annotated[float, Bound("must be positive and finite (seconds)", lambda value: 0 < value < math.inf)] = 5.0
    memory: Annotated[int, Bound("must be at least 64 (MiB)", lambda value: value >= 64)] = 1024
    workers: Annotated[int, Bound("must be at least 0 (0: one a core)", lambda value: value >= 0)] = 0
    max_failed_share: Share = 0.25
    tool: Literal["openrlhf", "trl", "verl"] | None = None
    gets: Literal["group", "batch"] | None = None

    def __post_init__(self) -> None:
        check(Verifier, vars(self))
        require(
            (self.function is not None) == (self.kind == "function"),
            f"Verifier.function ('file.py:name') must be set with Verifier.kind = 'function', and only then; got "
            f"{self.function!r} with Verifier.kind = {self.kind!r}",
        )
        require(
            self.kind == "function" or (self.tool is None and self.gets is None),
            f"Verifier.tool and Verifier.gets are of Verifier.kind = 'function'; got {self.kind!r}",
        )
        urls = self._urls()
        fault = next(filter(None, map(address_fault, urls)), None)
        require(
            fault is None and bool(urls) == (self.kind == "http"),
            "Verifier.url (an address, or a tuple of several) must be set with Verifier.kind = 'http', and only then; "
            + (fault or f"got {', '.join(map(shown, urls)) or None} with Verifier.kind = {self.kind!r}"),
        )

    def check(self, questions: Iterable[Question]) -> None:
        """Check, before anything is generated, that a user's file, the sandbox or the server is there, that the
        questions have the columns that a function takes, that there is one gold answer for each question where a kind
        takes no list, and that a program's tests can be read. Raises NoGrader, ValueError."""
        questions = [*questions]
        if self.kind in ("function", "code", "http"):
            metas = [set(each.meta) for each in questions]
            self._pool().check(sorted(set.intersection(*metas)) if metas else None)
        for each in questions:
            if self.kind == "code":
                try:
                    tests_of(self._as_answer(each, Written("")))
                except ValueError as error:
                    raise ValueError(f"the question {each.prompt!r:.80} of {each.source!r}: {error}") from error
            elif self.kind not in ("function", "http") and not self.kind.startswith("math"):
                several = f"Verifier.kind = {self.kind!r} takes one gold answer, not the list {each.answer_text:.80}"
                require(not isinstance(each.answer, tuple), several)

    def grade(self, question: Question, response: Written | str) -> Grade:
        """Grade one response. Blocks for little more than `timeout` at most, or three times that for a text (math,
        choice) that cannot be graded in time.

        Raises ValueError if the question is not of this kind, GradingError if grading cannot go on.
        """
        return _Answers(self, [(question, response)]).grades()[0]

    def grade_all(
        self, pairs: Sequence[tuple[Question, Written | str]], progress: tuple[int, int] = (0, 0)
    ) -> list[Grade]:
        """Grade many, in order. Raises as `grade`, and GradingError if more than max_failed_share of them fail.

        Where a prompt opens a thought, the answer begins behind the response's first </think>, and without one there is
        no answer; `function` and `http` judge the response as it is. progress: as `Answer` has it
        """
        grades = _Answers(self, pairs, progress).grades()
        self.check_failed(grades)
        return grades

    def check_failed(self, grades: Sequence[Grade]) -> None:
        """Raises GradingError if more than max_failed_share of them fail."""
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
        written: Callable[[Question, Rollout], Written],
        earlier: Sequence[RolloutGroup] = (),
        progress: tuple[int, int] = (0, 0),
    ) -> list[RolloutGroup]:
        """The same groups with every rollout graded; episodes that their environment has graded, or that it failed to
        play, as they are. Stored trajectories are not among them: they are never re-graded.

        groups: may arrive one by one, while others are still being generated. Kinds that are graded in other processes
            are graded on arrival; the others ('exact', 'modular_chain', 'word_problem') when all have arrived, and so
            are those of a function that gets the whole batch
        written: a rollout as it is graded; progress: as in `grade_all`
        earlier: graded groups of the same step; max_failed_share is taken over them and these together, because a late
            round may have few groups
        Raises as `grade_all`, and whatever `groups` raises; answers that are not graded yet are then dropped.
        """
        answers, arrived = _Answers(self, progress=progress), []
        try:
            for group in groups:
                ungraded = [rollout for rollout in group.rollouts if rollout.grade is None]
                answers.add([(group.question, written(group.question, rollout)) for rollout in ungraded])
                arrived.append(group)
            left = iter(answers.grades())
        except BaseException:
            answers.give_up()
            raise
        groups = [
            replace(group, rollouts=tuple(replace(one, grade=one.grade or next(left)) for one in group.rollouts))
            for group in arrived
        ]
        self.check_failed(
            [one.grade for group in (*earlier, *groups) for one in group.rollouts if one.grade is not None]
        )
        return groups

    def overlong_penalty(self, tokens: int, max_tokens: int) -> float:
        """R_length = min(0, (L_max − L_cache − |y|)/L_cache), from −1 to 0, of a response of that many tokens."""
        if self.overlong_share is None:
            return 0.0
        cache = self.overlong_share * max_tokens
        return min(0.0, (max_tokens - cache - tokens) / cache)

    def metrics(self, groups: Iterable[RolloutGroup], max_tokens: int) -> dict[str, float]:
        """Of the fresh rollouts of a step, where `overlong_share` is set: their mean penalty."""
        lengths = [rollout.length for group in groups for rollout in group.rollouts]
        penalties = [self.overlong_penalty(tokens, max_tokens) for tokens in lengths]
        return {} if self.overlong_share is None else {"reward/overlong_penalty": mean(penalties)}

    def _as_answer(self, question: Question, written: Written, progress: tuple[int, int] = (0, 0)) -> Answer:
        """A gold is text where text is compared, a number as it is written; a user's own grader gets it as it is."""
        golds = [*question.answer] if isinstance(question.answer, tuple) else [question.answer]
        golds = [*map(str, golds)] if self.kind in _TEXTS else golds
        gold = golds if isinstance(question.answer, tuple) else golds[0]
        answer = Answer(gold, written.text, question.prompt, dict(question.meta), question.source)
        if self.kind not in _OWN_GRADERS:
            return answer
        return answer._replace(
            gold=_as_in_other_readers(gold),
            meta=_as_in_other_readers(answer.meta),
            read=written.read() if written.read else None,
            token_ids=written.token_ids,
            turns=written.turns,
            progress=progress,
        )

    def _urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else tuple(self.url or ())

    def _pool(self) -> Pool | RewardServer:
        """The processes, or the server's connections, for the settings on which a verdict depends."""
        if self.kind == "http":
            return server(self._urls(), self.timeout, self.tries, self.workers or 16, less_rounding(self.success_at))
        settings: dict[str, Any] = {"kind": self.kind, "memory": self.memory}
        if self.kind == "function":
            settings |= {"function": self.function, "tool": self.tool, "gets": self.gets}
            return pool({**settings, "success_at": less_rounding(self.success_at)}, self.timeout, self.workers or 1)
        if self.kind == "reasoning_gym":
            settings["success_at"] = less_rounding(self.success_at)
        if self.kind != "code":
            return pool(settings, self.timeout, self.workers)
        return pool({**settings, "timeout": self.timeout}, self.timeout + _CODE_GRACE, self.workers)


def _as_in_other_readers(value: Any) -> Any:
    """A column as json and pyarrow read it: a number does not keep how it was written (4.50)."""
    if isinstance(value, dict):
        return {key: _as_in_other_readers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_in_other_readers(each) for each in value]
    return float(value) if isinstance(value, float) else value


class _Answers:
    """Answers that are graded together, added in one call or in several. The same answer to the same question is graded
    once."""

    def __init__(
        self,
        verifier: Verifier,
        pairs: Sequence[tuple[Question, Written | str]] = (),
        progress: tuple[int, int] = (0, 0),
    ) -> None:
        self.verifier, self.progress = verifier, progress
        self.pairs: list[tuple[Question, Written]] = []
        self.texts: list[str | None] = []  # of each pair, what is graded; None: its thought has no end
        self.keys: list[bytes] = []  # of each pair
        self.sent: dict[bytes, tuple[Answer, Future[Graded]]] = {}
        self.unsent: dict[bytes, Answer] = {}  # of a function that gets the whole batch
        self.pool: Pool | RewardServer | None = None
        by_question = groupby(pairs, lambda pair: pair[0].id if verifier.kind in _OWN_GRADERS else None)
        for _, same in by_question:
            self.add([*same])

    def add(self, pairs: Sequence[tuple[Question, Written | str]]) -> None:
        """To a user's own grader those to one question. Raises GradingError if grading has failed already."""
        verifier = self.verifier
        for question, response in pairs:
            written = response if isinstance(response, Written) else Written(response)
            text: str | None = written.text
            if written.in_thought and verifier.kind not in _OWN_GRADERS:
                _, *behind = _THOUGHT_END.split(written.text, maxsplit=1)
                text = behind[0] if behind else None
            self.pairs.append((question, written))
            self.texts.append(text)
            if verifier.kind in _HERE:
                continue
            if text is None:
                self.keys.append(_UNFINISHED)
                continue
            answer = verifier._as_answer(question, written._replace(text=text), self.progress)
            self.keys.append(key := self._key(answer))
            if key not in self.sent:
                self.unsent[key] = answer
        if self.unsent:
            self.pool = self.pool or verifier._pool()
            calls = self.pool.calls if verifier.kind in _OWN_GRADERS else "response"
            if calls != "batch":
                self._send(together=calls == "group")

    def _send(self, together: bool) -> None:
        assert self.pool is not None
        futures = self.pool.submit([*self.unsent.values()], together=together)
        self.sent |= zip(self.unsent, zip(self.unsent.values(), futures, strict=True), strict=True)
        self.unsent = {}

    def grades(self) -> list[Grade]:
        """Of all pairs, in order. Blocks. Raises as `Verifier.grade`."""
        if here := _HERE.get(self.verifier.kind):
            grades = [
                _NO_ANSWER if response is None else here(replace(one, answer=one.answer_text), response)
                for (one, _), response in zip(self.pairs, self.texts, strict=True)
            ]
        else:
            by_key = {key: self._grade_of(key, graded) for key, graded in self._graded().items()}
            by_key[_UNFINISHED] = _NO_ANSWER
            grades = [by_key[key] for key in self.keys]
        if self.verifier.format is None:
            return grades
        fits = _FORMATS[self.verifier.format]
        return [
            grade
            if grade.reward is None or fits(written.text)
            else replace(grade, verdict="wrong" if grade.correct else grade.verdict, reward=0.0)
            for grade, (_, written) in zip(grades, self.pairs, strict=True)
        ]

    def _grade_of(self, key: bytes, graded: Graded) -> Grade:
        """The reason, if there is one, goes to the log."""
        verdict, reward, extracted, reason, logs, _ = graded
        if reward is None:
            log.warning("not graded (%s): %s; response %.120r", verdict, reason, self.sent[key][0].response[-120:])
        elif reason:
            warn_once(reason)
        return Grade(verdict, reward, extracted=extracted, logs=logs)

    def _graded(self) -> dict[bytes, Graded]:
        """What was sent. A text that could not be graded gets a second try in twice the time, and is wrong after that
        if its gold can be read: no response escapes its 0 by being hard to read."""
        if self.unsent:
            self._send(together=True)
        graded = {key: future.result() for key, (_, future) in self.sent.items()}
        failed = [key for key, each in graded.items() if each.reward is None and self.verifier.kind in _TEXTS]
        if self.pool and failed:
            answers = [self.sent[key][0] for key in failed]
            again = self.pool.submit(answers, 2)
            anything = "<answer>0</answer>" if self.verifier.kind == "reasoning_gym" else "\\boxed{0}"
            golds = self.pool.submit([answer._replace(response=anything) for answer in answers], 2)
            for key, second, gold in zip(failed, again, golds, strict=True):
                graded[key] = second.result()
                if graded[key].reward is None and gold.result().reward is not None:
                    graded[key] = Graded("wrong", 0.0)
        return graded

    def give_up(self) -> None:
        """Drop the answers that no worker has taken yet."""
        for _, future in self.sent.values():
            future.cancel()

    def _key(self, answer: Answer) -> bytes:
        if self.verifier.kind not in _TEXTS:
            return len(self.keys).to_bytes(8, "big")
        # These kinds ignore the prompt, and read nothing else from the meta.
        meta = [answer.meta.get(name) for name in ("options", SOURCE)]
        return pickle.dumps([answer.gold, answer.response, meta])
