"""Grades responses: a single one, a list, or the fresh rollouts of a step as they are generated."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Literal

from ..checks import Constraint, Count, Finite, PositiveShare, Share, check_settings, require
from ..grader.answer import Answer, Written
from ..grader.grade import Grade
from ..grader.kind import Kind
from ..io.entry_points import entry_points_of
from ..io.http_client import address_fault
from ..io.redaction import address_only
from ..records import Question, Rollout, RolloutGroup, mean
from ..rounding import less_rounding
from ..workers.user_file import read_source, source_hash
from .function import is_function, name_of, named
from .grading import Answers, as_in_other_readers, in_format, weighted_sum
from .kinds import GROUP, kind_named
from .pool import GradingError, Pool, pool
from .server import RewardClient, server


@dataclass(frozen=True)
class Verifier:
    """How responses are graded.

    kind: 'math' (a mathematical answer, boxed or stated), 'math_verify' (the same by math-verify's plain recipe, as
        most published scores were graded), 'choice' (an option's letter or digit), 'code' (a Python program against
        tests, in a sandbox), 'function' (the user's own), 'reasoning_gym' (the checker of a question's own task),
        'http' (a reward server with OpenRLHF's protocol),
        'exact' (the response is the answer), 'modular_chain' or 'word_problem' (which also check the
        reasoning), 'chain_steps' (modular chains; the reward is the share of right steps), or one that another
        distribution brings: an entry point of the group `exgrpo_orlhf.graders` (grader/kind.py)
    rewards: several at a time, with their weights, kinds or functions: {'math': 1.0, 'style.py:brief': 0.2}. The reward
        is their weighted sum, without those that abstain (a function's None); `kind` is not read. None: `kind` alone
    success_by: the name of the one that decides on success (a kind's, a function's); None: the first
    success_at: least reward of a success with 'function', 'reasoning_gym' and 'http', whose reward is any number; the
        other kinds say themselves what is correct. An OpenRLHF function's or server's `scores` decide instead of its
        rewards. Advantages follow the reward; what is stored, retired and counted as accuracy follows success
    function: with kind 'function', 'file.py' or 'file.py:name'; reward_func(queries, prompts, labels) by default
    tool: for which the function is written, 'openrlhf', 'trl' or 'verl'; None: its parameters' names tell
    gets: of what a function that takes several responses gets them at a time, a 'group' (those to one question) or the
        'batch' (of a step); None: as in its tool, a group for TRL and the batch for verl
    url: with kind 'http', the server's address, or several that share the work
    tries: of a request to a server, at most
    format: the format a response must have, or its reward is at most 0: 'think_answer' (<think>…</think>
        or other known tags, <answer>…</answer>) or 'boxed'; None: any
    overlong_share: the last part of Sampling.max_response_tokens, as a share of it: in it the reward falls linearly, by
        1 at its end (soft overlong punishment, DAPO, arXiv 2503.14476, equation 13), for the advantage alone. Success,
        difficulty, what is stored and dynamic sampling see the reward itself. None: it does not fall
    timeout: seconds of wall clock for each answer, and for a function that gets several at a time, times their number;
        with kind 'code', for all tests of its program; with kind 'http', for one request, from its begin to the last
        byte of the answer; it has the responses to one question
    memory: MiB for each answer, beyond what the grader itself takes
    workers: grading processes, 0: as many as cores, and one for a function, which may keep something between its calls;
        with kind 'http', requests at a time, 0: 16
    max_failed_share: of a batch's answers, and before a run of its gold answers, that may fail to be graded
    """

    MAY_CHANGE = ("workers", "max_failed_share")

    kind: str = "exact"
    function: str | None = None
    success_at: Finite = 1.0
    url: str | tuple[str, ...] | None = None
    tries: Count = 3
    format: Literal["think_answer", "boxed"] | None = None
    overlong_share: PositiveShare | None = None
    timeout: Annotated[
        float, Constraint("must be positive and finite (seconds)", lambda value: 0 < value < math.inf)
    ] = 5.0
    memory: Annotated[int, Constraint("must be at least 64 (MiB)", lambda value: value >= 64)] = 1024
    workers: Annotated[int, Constraint("must be at least 0 (0: one a core)", lambda value: value >= 0)] = 0
    max_failed_share: Share = 0.25
    tool: Literal["openrlhf", "trl", "verl"] | None = None
    gets: Literal["group", "batch"] | None = None
    rewards: Mapping[str, float] | None = field(default=None, hash=False)
    success_by: str | None = None

    def __post_init__(self) -> None:
        check_settings(Verifier, vars(self))
        alone = {self.kind: kind_named(self.kind)}  # an unknown one is refused, also where it is not read
        kinds = alone if self.rewards is None else self._kinds_of_several()
        urls = self._urls()
        fault = next(filter(None, map(address_fault, urls)), None)
        if self.rewards is None:
            require(
                (self.function is not None) == (self.kind == "function"),
                "Verifier.function ('file.py:name') must be set with Verifier.kind = 'function', and only then; got "
                f"{self.function!r} with Verifier.kind = {self.kind!r}",
            )
            require(self.success_by is None, "Verifier.success_by names one of Verifier.rewards, which is not set")
            require(
                fault is None and bool(urls) == (self.kind == "http"),
                "Verifier.url (an address, or a tuple of several) must be set with Verifier.kind = 'http', and only "
                f"then; {fault or f'got {[*map(address_only, urls)] or None} with Verifier.kind = {self.kind!r}'}",
            )
        require(
            ("function" in kinds or (self.tool is None and self.gets is None)) and ("http" in kinds or not urls),
            "Verifier.tool and .gets are of functions, .url of 'http': "
            + (f"Verifier.kind = {self.kind!r}" if self.rewards is None else f"Verifier.rewards = {self.rewards!r}")
            + " has no such reward",
        )
        if self.success_at != Verifier.success_at and not any(kind.any_reward for kind in kinds.values()):
            readers = [name for name in entry_points_of(GROUP) if kind_named(name).any_reward]
            raise ValueError(
                f"Verifier.success_at = {self.success_at:g} is read by the kinds {', '.join(readers)} alone; "
                f"of {', '.join(sorted(kinds))} a correct answer is a success"
            )

    def _kinds_of_several(self) -> dict[str, Kind]:
        weights = self.rewards
        fine = isinstance(weights, Mapping) and weights and all(isinstance(name, str) for name in weights)
        fine = fine and all(type(value) in (int, float) and math.isfinite(value) for value in (weights or {}).values())
        require(
            bool(fine),
            f"Verifier.rewards has a weight for each reward, {{'math': 1.0, 'style.py:brief': 0.2}}; got {weights!r}",
        )
        require(
            self.function is None,
            f"Verifier.function = {self.function!r} is not called beside Verifier.rewards: make the function one of "
            "the rewards, and set Verifier.function = None",
        )
        require(
            self.success_by in (None, *self.parts),
            f"Verifier.success_by = {self.success_by!r} is none of Verifier.rewards: {', '.join(self.parts)}",
        )
        return {part.kind: kind_named(part.kind) for part in self.parts.values()}

    @cached_property
    def parts(self) -> dict[str, Verifier]:
        """By name what gives each of several rewards, in their order; {} for one."""
        parts: dict[str, Verifier] = {}
        for reward in self.rewards or {}:
            kind, name = "function" if is_function(reward) else reward, name_of(reward)
            require(name not in parts, f"Verifier.rewards: two rewards are called {name!r}; rename a function")
            kinds = ", ".join(entry_points_of(GROUP))
            require(
                kind in entry_points_of(GROUP),
                f"Verifier.rewards: {reward!r} is no kind ({kinds}) and no file.py:name",
            )
            is_own = kind == "function"
            parts[name] = replace(
                self, rewards=None, success_by=None, format=None, overlong_share=None, kind=kind,
                function=reward if is_own else None, url=self.url if kind == "http" else None,
                tool=self.tool if is_own else None, gets=self.gets if is_own else None,
                success_at=self.success_at if kind_named(kind).any_reward else Verifier.success_at,
            )  # fmt: skip
        return parts

    @property
    def weights(self) -> dict[str, float]:
        """Of the parts, by name."""
        return dict(zip(self.parts, (self.rewards or {}).values(), strict=True))

    @property
    def deciding(self) -> Verifier:
        """What decides on success: itself, or one of its parts."""
        parts = self.parts
        return parts[self.success_by or next(iter(parts))] if parts else self

    @property
    def own_code(self) -> dict[str, str]:
        """The hashes of the files of the user's own functions, by their bindings."""
        own = {"Verifier.function": self} | {f"Verifier.rewards.{name}": part for name, part in self.parts.items()}
        return {binding: source_hash(one.source) for binding, one in own.items() if one.source}

    def _answers(self, progress: tuple[int, int]) -> dict[str, Answers]:
        """By name what each of several rewards will grade; with one, that alone."""
        return {
            name: Answers(
                kind_named(part.kind),
                partial(part.as_answer, progress=progress),
                part.graders,
                self.rewards is not None,
            )
            for name, part in (self.parts or {self.kind: self}).items()
        }

    def _grades(self, answers: Mapping[str, Answers]) -> list[Grade]:
        """Of what was added to each of the answers, in order. Blocks."""
        columns, weights = {name: part.grades() for name, part in answers.items()}, self.weights
        grades = []
        for i, (_, written) in enumerate(next(iter(answers.values())).pairs):
            by_name = {name: column[i] for name, column in columns.items()}
            grade = weighted_sum(by_name, weights, self.success_by) if weights else by_name[self.kind]
            grades.append(grade if self.format is None else in_format(grade, self.format, written))
        return grades

    def check_questions(self, questions: Iterable[Question]) -> None:
        """Check, before anything is generated, that a user's file, the sandbox or the server is there, that the
        questions have the columns that a function takes, that there is one gold answer for each question where a kind
        takes no list, and that it, or a program's tests, can be graded against: at most max_failed_share of the
        golds may not, which is logged. Raises NoGrader, ValueError."""
        questions = [*questions]
        for part in self.parts.values():
            part.check_questions(questions)
        if self.rewards is not None:
            return
        kind = kind_named(self.kind)
        if kind.tries_loading:
            metas = [set(item.meta) for item in questions]
            self.graders().check_columns(sorted(set.intersection(*metas)) if metas else None)
        distinct: dict[str, Question] = {}
        for question in questions:
            golds = f"it takes one gold answer, not the list {question.answer_text:.80}"
            is_list = isinstance(question.answer, tuple)
            require(kind.takes_list or not is_list, self._place(question) + golds)
            try:
                if kind.check is not None:
                    kind.check(self.as_answer(question, Written("")))
                if kind.here is not None:
                    kind.here(replace(question, answer=question.answer_text), "")
            except ValueError as error:
                raise ValueError(self._place(question) + str(error)) from error
            fields = [question.meta.get(name) for name in kind.meta]
            distinct.setdefault(kind.same(question.meta) or repr([question.answer, fields]), question)
        if kind.once:
            futures = self.graders().submit([self.as_answer(question, Written("")) for question in distinct.values()])
            graded = zip(distinct.values(), [future.result() for future in futures], strict=True)
            if failed := [f"{self._place(asked)}{grade.reason}" for asked, grade in graded if grade.verdict == "error"]:
                message = f"{len(failed)} of {len(distinct)} gold answers cannot be graded against: {failed[0]}"
                require(len(failed) <= self.max_failed_share * len(distinct), message)
                logging.getLogger(__name__).warning(message)

    def _place(self, question: Question) -> str:
        return f"the question {question.prompt!r:.80} of {question.source!r}, Verifier.kind = {self.kind!r}: "

    def grade(self, question: Question, response: Written | str) -> Grade:
        """Grade one response. Blocks for little more than `timeout` at most, or three times that for a text (math,
        choice) that cannot be graded in time.

        Raises ValueError if the question is not of this kind, GradingError if grading cannot go on.
        """
        return self._graded([(question, response)], (0, 1))[0]

    def grade_all(
        self, pairs: Sequence[tuple[Question, Written | str]], progress: tuple[int, int] = (0, 1)
    ) -> list[Grade]:
        """Grade many, in order. Raises as `grade`, and GradingError if more than max_failed_share of them fail.

        Where a prompt opens a thought, the answer begins behind the response's first closing tag, and without one there
        is no answer; `function` and `http` judge the response as it is. progress: as `Answer` has it
        """
        grades = self._graded(pairs, progress)
        self.check_failed(grades)
        return grades

    def _graded(self, pairs: Sequence[tuple[Question, Written | str]], progress: tuple[int, int]) -> list[Grade]:
        answers = self._answers(progress)
        for part in answers.values():
            part.add(pairs)
        return self._grades(answers)

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
        written: Callable[[Question, Sequence[Rollout]], list[Written]],
        earlier: Sequence[RolloutGroup] = (),
        progress: tuple[int, int] = (0, 1),
    ) -> list[RolloutGroup]:
        """The same groups with every rollout graded; episodes that their environment has graded, or that it failed to
        play, as they are. Stored trajectories are not among them: they are never re-graded.

        groups: may arrive one by one, while others are still being generated. Kinds that are graded in other processes
            are graded on arrival; the others ('exact', 'modular_chain', 'word_problem') when all have arrived, and so
            are those of a function that gets the whole batch
        written: rollouts of a question as they are graded; progress: as in `grade_all`
        earlier: graded groups of the same step; max_failed_share is taken over them and these together, because a late
            round may have few groups
        Raises as `grade_all`, and whatever `groups` raises; answers that are not graded yet are then dropped.
        """
        answers, arrived = self._answers(progress), []
        try:
            for group in groups:
                ungraded = [rollout for rollout in group.rollouts if rollout.grade is None]
                pairs = [(group.question, response) for response in written(group.question, ungraded)]
                for part in answers.values():
                    part.add(pairs)
                arrived.append(group)
            new_grades = iter(self._grades(answers))
        except BaseException:
            for part in answers.values():
                part.give_up()
            raise
        graded = []
        for group in arrived:
            rollouts = (replace(one, grade=one.grade or next(new_grades)) for one in group.rollouts)
            graded.append(replace(group, rollouts=tuple(rollouts)))
        self.check_failed([one.grade for each in (*earlier, *graded) for one in each.rollouts if one.grade is not None])
        return graded

    def overlong_penalty(self, tokens: int, max_tokens: int) -> float:
        """R_length = min(0, (L_max − L_cache − |y|)/L_cache), from −1 to 0, of a response of that many tokens (of an
        episode, with its environment's: they are what the limit bounds)."""
        if self.overlong_share is None:
            return 0.0
        cache = self.overlong_share * max_tokens
        return max(-1.0, min(0.0, (max_tokens - cache - tokens) / cache))

    def metrics(self, groups: Iterable[RolloutGroup], max_tokens: int) -> dict[str, float]:
        """Of the fresh rollouts of a step, where `overlong_share` is set: their mean penalty."""
        if self.overlong_share is None:
            return {}
        penalties = [self.overlong_penalty(len(one.token_ids), max_tokens) for g in groups for one in g.rollouts]
        return {"reward/overlong_penalty": mean(penalties)}

    def as_answer(self, question: Question, written: Written, progress: tuple[int, int] = (0, 1)) -> Answer:
        """What a grader gets. A gold is text where text is compared, and as it is for a user's own grader."""
        kind = kind_named(self.kind)
        golds = [*question.answer] if isinstance(question.answer, tuple) else [question.answer]
        golds = [*map(str, golds)] if kind.as_text else golds
        gold = golds if isinstance(question.answer, tuple) else golds[0]
        answer = Answer(gold, written.text, question.prompt, dict(question.meta), question.source)
        if not kind.whole:
            return answer
        return answer._replace(
            gold=as_in_other_readers(gold),
            meta=as_in_other_readers(answer.meta),
            read=written.read() if written.read else None,
            token_ids=written.token_ids,
            turns=written.turns,
            progress=progress,
        )

    def _urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else tuple(self.url or ())

    def graders(self) -> Pool | RewardClient:
        """The processes, or the server's connections, for the settings on which a verdict depends."""
        kind, success_at = kind_named(self.kind), less_rounding(self.success_at)
        workers = self.workers or kind.workers
        if self.kind == "http":
            return server(self._urls(), self.timeout, self.tries, workers, success_at)
        read = {name: getattr(self, name) for name in ("kind", "memory", *kind.settings)}
        settings = {name: success_at if name == "success_at" else value for name, value in read.items()}
        return pool(settings, self.timeout + kind.grace, workers)

    @cached_property
    def source(self) -> str:
        """The user's file, as it is when it is used first, or '': an edit during a run changes nothing in it."""
        return "" if self.function is None else read_source(named(self.function)[0])
