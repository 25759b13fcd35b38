"""Responses as verifiers get them, and answers on their way: sent to what grades them as they come, and read when all
are there."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from ..grader.answer import Answer, Written
from ..grader.boxes import last_box
from ..grader.grade import Grade, Verdict
from ..grader.kind import Kind
from ..grader.thoughts import Tags, in_known_tags, in_think_tags, visible
from ..io.terminal import warn_once
from ..questions.prompts import PromptEncoder
from ..questions.special_tokens import response_texts
from ..records import Question, Rollout
from .pool import Pool
from .server import RewardClient

log = logging.getLogger(__name__)


_THINK_ANSWER = re.compile(
    # Atomic groups: possessive ones are matched wrongly by Python before 3.11.5 (gh-106052).
    r"\s*+(?>(<think>)?)(?>((?!</?think>).)*)</think>\s*+<answer>(?!\s*</answer>)(?>((?!</?(think|answer)>).)*)"
    r"</answer>\s*",
    re.DOTALL,
)
FORMATS: dict[str, Callable[[Written], object]] = {
    # One thought, then one answer and nothing else. The opening tag may be part of the prompt.
    "think_answer": lambda written: _THINK_ANSWER.fullmatch(in_think_tags(in_known_tags(written.text, written.tags))),
    # A box after the thought, if there is one, with something in it, as grading finds it: \fbox{9} and \boxed 9 too.
    "boxed": lambda written: last_box(visible(written.to_grade or "")),
}
_UNFINISHED, _NO_ANSWER = b"", Grade("no_answer", 0.0)  # the key and the grade of a thought without an end


def as_in_other_readers(value: Any) -> Any:
    """A column as json and pyarrow read it: a number does not keep how it was written (4.50)."""
    if isinstance(value, dict):
        return {key: as_in_other_readers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_in_other_readers(item) for item in value]
    return float(value) if isinstance(value, float) else value


def in_format(grade: Grade, name: str, written: Written) -> Grade:
    """The grade, with a reward of at most 0 for a response that lacks the format. name: as `Verifier.format`"""
    if grade.reward is None or FORMATS[name](written):
        return grade
    return replace(grade, verdict="wrong" if grade.correct else grade.verdict, reward=min(0.0, grade.reward))


def weighted_sum(grades: Mapping[str, Grade], weights: Mapping[str, float], success_by: str | None) -> Grade:
    """Σ w·r over the rewards that do not abstain. Not gradable where one fails, or all abstain; where the one that
    decides on success abstains, it is none."""
    failed = [grade for grade in grades.values() if grade.reward is None and not grade.abstains]
    rewards = {name: grade.reward for name, grade in grades.items() if grade.reward is not None}
    if failed or not rewards:
        return replace((failed or [*grades.values()])[0], logs=())
    decides = grades[success_by or next(iter(grades))]
    verdict: Verdict = "no_answer" if decides.abstains else decides.verdict
    total = sum(weights[name] * reward for name, reward in rewards.items())
    logs = tuple(pair for grade in grades.values() for pair in grade.logs)
    return Grade(verdict, total, decides.sound, decides.extracted, logs, tuple(rewards.items()))


def written_to(
    prompts: PromptEncoder, question: Question, rollouts: Sequence[Rollout], observations: bool = False
) -> list[Written]:
    """Responses to a question as a verifier gets them. observations: as `written`"""
    prompt = lambda: (prompts.render(question), prompts.encode(question))
    in_thought, tags = prompts.opens_thought(question), prompts.settings.thought_tags
    return written(rollouts, prompt, in_thought, prompts.tokenizer, tags, observations)


def written(
    rollouts: Sequence[Rollout],
    prompt: Callable[[], tuple[str, Sequence[int]]],
    in_thought: bool,
    tokenizer: Any,
    tags: Tags = (),
    observations: bool = False,
) -> list[Written]:
    """As a verifier gets them: of each response; of an episode what the policy wrote, a line for each turn, or with the
    observations all of it; the sequence and the token ids likewise.

    prompt: its text and token ids; tags: own ones of thoughts; observations: whether what the environment said counts
    """

    def read(token_ids: list[int]) -> tuple[str, str]:
        text, ids = prompt()
        query = str(tokenizer.decode([*ids, *token_ids], skip_special_tokens=False))
        begin = tokenizer.bos_token or ""  # where encoding adds it: a query begins with its prompt
        return text, query if text.startswith(begin) else query.removeprefix(begin)

    parts = [_parts(rollout, observations) for rollout in rollouts]
    texts = iter(response_texts(tokenizer, [part.tolist() for of_rollout in parts for part in of_rollout], *tags))
    responses = []
    for rollout, of_rollout in zip(rollouts, parts, strict=True):
        token_ids = np.concatenate(of_rollout).tolist()
        text = "\n".join([next(texts) for _ in of_rollout])
        turns = None if rollout.actions is None else rollout.turns
        responses.append(Written(text, in_thought, partial(read, token_ids), token_ids, turns, tags))
    return responses


def _parts(rollout: Rollout, observations: bool) -> list[npt.NDArray[np.int32]]:
    """The token ids that count, of an episode turn by turn."""
    if rollout.actions is None or observations:
        return [rollout.token_ids]
    return np.split(rollout.token_ids, np.flatnonzero(np.diff(rollout.actions)) + 1)[not rollout.actions[0] :: 2]


class Answers:
    """Answers that are graded together, added in one call or in several. The same answer to the same question is graded
    once."""

    def __init__(
        self,
        kind: Kind,
        as_answer: Callable[[Question, Written], Answer],
        graders: Callable[[], Pool | RewardClient],
        may_abstain: bool,
    ) -> None:
        """As the `Verifier` has them. may_abstain: whether a function that gives no reward is one of several, and needs
        no warning"""
        self.kind, self.as_answer, self.graders, self.may_abstain = kind, as_answer, graders, may_abstain
        self.pairs: list[tuple[Question, Written]] = []
        self.texts: list[str | None] = []  # of each pair, what is graded; None: its thought has no end
        self.keys: list[bytes] = []  # of each pair
        self.sent: dict[bytes, tuple[Answer, Future[Grade]]] = {}
        self.unsent: dict[bytes, Answer] = {}  # of a function that gets the whole batch
        self.pool: Pool | RewardClient | None = None

    def add(self, pairs: Sequence[tuple[Question, Written | str]]) -> None:
        """Raises GradingError if grading has failed already."""
        for _, same in groupby(
            pairs, lambda pair: pair[0].id if self.kind.whole else None
        ):  # those to one question together
            for question, response in same:
                self._add_one(question, response if isinstance(response, Written) else Written(response))
            if self.unsent:
                self.pool = self.pool or self.graders()
                calls = self.pool.calls if self.kind.whole else "response"
                if calls != "batch":
                    self._send(together=calls == "group")

    def _add_one(self, question: Question, written: Written) -> None:
        whole = self.kind.whole or (self.kind.here is not None and not written.in_thought)
        text = written.text if whole else written.to_grade
        text = text if text is None else self.kind.visible(text)
        self.pairs.append((question, written))
        self.texts.append(text)
        if self.kind.here is not None:
            return
        if text is None:
            self.keys.append(_UNFINISHED)
            return
        answer = self.as_answer(question, written._replace(text=text))
        self.keys.append(key := self._key(answer))
        if key not in self.sent:
            self.unsent[key] = answer

    def _send(self, together: bool) -> None:
        assert self.pool is not None
        futures = self.pool.submit([*self.unsent.values()], together=together)
        self.sent |= zip(self.unsent, zip(self.unsent.values(), futures, strict=True), strict=True)
        self.unsent = {}

    def grades(self) -> list[Grade]:
        """Of all pairs, in order. Blocks. Raises as `Verifier.grade`."""
        if (here := self.kind.here) is not None:
            questions = {question.id: question for question, _ in self.pairs}
            questions = {id_: replace(question, answer=question.answer_text) for id_, question in questions.items()}
            return [
                _NO_ANSWER if response is None else here(questions[question.id], response)
                for (question, _), response in zip(self.pairs, self.texts, strict=True)
            ]
        by_key = {**self._graded(), _UNFINISHED: _NO_ANSWER}
        return [by_key[key] for key in self.keys]

    def _graded(self) -> dict[bytes, Grade]:
        """What was sent. A text that could not be graded gets a second try in twice the time, and is wrong after that
        if its gold can be read: no response escapes its 0 by being hard to read. A reason goes to the log too."""
        if self.unsent:
            self._send(together=True)
        graded = {key: future.result() for key, (_, future) in self.sent.items()}
        failed = [key for key, first in graded.items() if first.reward is None and self.kind.once]
        if self.pool and failed:
            answers = [self.sent[key][0] for key in failed]
            again = self.pool.submit(answers, 2)
            golds = self.pool.submit([answer._replace(response=self.kind.readable) for answer in answers], 2)
            for key, second, gold in zip(failed, again, golds, strict=True):
                graded[key] = second.result()
                if graded[key].reward is None and gold.result().reward is not None:
                    graded[key] = Grade("wrong", 0.0)
        for key, grade in graded.items():
            if grade.reward is not None and grade.reason:
                warn_once(grade.reason)
            elif grade.reward is None and not (grade.abstains and self.may_abstain):
                end = self.sent[key][0].response[-120:]
                log.warning("not graded (%s): %s; response %.120r", grade.verdict, grade.reason, end)
        return graded

    def give_up(self) -> None:
        """Drop the answers that no worker has taken yet."""
        for _, future in self.sent.values():
            future.cancel()

    def _key(self, answer: Answer) -> bytes:
        if not self.kind.once:
            return len(self.keys).to_bytes(8, "big")
        meta = [answer.meta.get(name) for name in self.kind.meta]
        return pickle.dumps([answer.gold, answer.response, meta])
