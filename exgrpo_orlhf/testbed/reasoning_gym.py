"""Questions of reasoning-gym, a library of over a hundred generated tasks with graded checkers (arXiv 2505.24760).

A question keeps how it was made (task, settings, seed, index), not the library's own record of it: the grader makes
that again, so a question is the same on disk, in a buffer and in another process. Some tasks go by the order of a set
of texts, which Python's hash seed decides, so all questions are made in a worker: its hash seed is fixed, as the
grader's is. `pip install '.[reasoning-gym]'`.
"""

from __future__ import annotations

import ast
import importlib
import math
import pickle
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import Any

import numpy as np

from ..checks import Count, Natural, check_settings, require
from ..grader.kind import Kind
from ..grader.thoughts import visible
from ..records import Question
from ..workers.fork_server import CallFailed, ForkServer, kept
from .made_questions import Split, split_by_hash

SOURCE = "reasoning_gym"
_SIZE = 10**6  # of each of the library's sets, of which only what is asked for is made
_SMALLER = {"word_ladder": 20_000, "acre": 2_000}  # the one takes no larger size, the other makes all of it at once
_NO_LIMIT = 2**20  # MiB
_PATIENCE = 1000  # questions in a row that are of the other split or not new, before there are taken to be no more


@dataclass(frozen=True)
class ReasoningGym:
    """Distinct questions of one task of reasoning-gym, or of several.

    tasks: a task's name, or weights by name: the shares of the questions
    settings: the library's own settings of the task (its difficulty); of several tasks, by name
    count: number of questions
    seed: which questions are made, and their order
    split: training or validation; every possible question belongs to exactly one of the two, by a hash of its text
        without upper case
    """

    tasks: str | Mapping[str, float] = field(hash=False)
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    count: Count = 1000
    seed: Natural = 0
    split: Split = "train"

    def __post_init__(self) -> None:
        check_settings(type(self), vars(self))
        weights = self._weights() if isinstance(self.tasks, str | Mapping) else {}
        require(
            bool(weights) and all(isinstance(w, int | float) and w > 0 for w in weights.values()),
            f"ReasoningGym.tasks must be a task's name or positive weights by name, got {self.tasks!r}",
        )
        unknown = [] if isinstance(self.tasks, str) else sorted(set(self.settings) - set(weights))
        require(not unknown, f"ReasoningGym.settings has {', '.join(unknown)}, which ReasoningGym.tasks has not")

    def load(self) -> list[Question]:
        """The questions in a shuffled order: the same list in every process and on every machine.

        Raises ValueError for an unknown task or setting, and if there are fewer questions than asked for.
        """
        server = kept(SOURCE, lambda: ForkServer(f"{__name__}:_maker", {"memory": _NO_LIMIT}, "ReasoningGym"))
        worker = server.worker()
        try:
            worker.call(pickle.dumps(self))
            questions: list[Question] = worker.reply(math.inf)
            return questions
        except CallFailed as error:
            reason = str(error).removeprefix("ValueError: ")
            raise ValueError(reason if reason.startswith("ReasoningGym") else f"ReasoningGym: {reason}") from error
        finally:
            worker.close()

    def make(self) -> list[Question]:
        """As `load`, in this process, whose hash seed decides the questions of some tasks."""
        weights = self._weights()
        bounds = np.cumsum(list(weights.values())) / sum(weights.values()) * self.count
        shares = np.diff(np.floor(bounds + 0.5).astype(int), prepend=0)
        questions = [q for task, share in zip(weights, shares, strict=True) for q in self._of(task, int(share))]
        return [questions[i] for i in np.random.default_rng(self.seed).permutation(len(questions))]

    def examples(self) -> list[tuple[Question, str]]:
        """The questions of `load`, in the same order, each with the library's answer in its tags, for a supervised
        start. Raises ValueError as `load`, and for a task that has a checker alone."""
        questions = self.load()
        without = {question.meta[SOURCE]["task"] for question in questions if question.answer == str(None)}
        require(not without, f"ReasoningGym.tasks: {', '.join(sorted(without))} has no answers for a supervised start")
        return [(question, f"<answer>{question.answer}</answer>") for question in questions]

    def _weights(self) -> Mapping[str, float]:
        return {self.tasks: 1.0} if isinstance(self.tasks, str) else self.tasks

    def _of(self, task: str, share: int) -> list[Question]:
        settings = repr(dict(self.settings if isinstance(self.tasks, str) else self.settings.get(task, {})))
        size, questions, index, last = len(entries_of(task, settings, self.seed)), dict[str, Question](), 0, 0
        while len(questions) < share:
            entry = entry_of(task, settings, self.seed, index)
            text = entry["question"]
            meta = {"task": task, "settings": settings, "seed": self.seed, "index": index}
            question = Question.make(SOURCE, text, str(entry["answer"]), {SOURCE: meta})
            index += 1
            if split_by_hash(text.casefold(), SOURCE.encode()) == self.split and question.id not in questions:
                questions[question.id], last = question, index
            if len(questions) < share and (index - last == _PATIENCE or index == size):
                raise ValueError(
                    f"ReasoningGym.count asks for {share} distinct {self.split} questions of {task!r}, and only "
                    f"{len(questions)} were made in {index} tries; ask for fewer, or for more difficult ones"
                )
        return [*questions.values()]


def _maker(settings: Mapping[str, Any]) -> tuple[str, Callable[[ReasoningGym], list[Question]]]:
    _library()
    return "", ReasoningGym.make


def version() -> str:
    """Of the library. Raises ValueError without it."""
    _library()
    return metadata.version("reasoning-gym")


def _library() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ValueError(f"ReasoningGym needs reasoning-gym: pip install '.[reasoning-gym]' ({error})") from error


@cache
def entries_of(task: str, settings: str, seed: int) -> Any:
    """The library's set of questions. settings: a dict, as Python writes it.

    Raises ValueError for an unknown task or setting, or without the library.
    """
    try:
        size = _SMALLER.get(task, _SIZE)
        return _library().create_dataset(task, size=size, seed=seed, **ast.literal_eval(settings))
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"ReasoningGym: {task!r} with {settings}: {error}") from error


def entry_of(task: str, settings: str, seed: int, index: int) -> dict[str, Any]:
    """The library's record of a question. Raises as `entries_of`."""
    entries = entries_of(task, settings, seed)
    random.seed(f"{seed} {index}")  # list_functions draws from this generator too
    entry: dict[str, Any] = entries[index]
    return entry


def _task(meta: Mapping[str, Any]) -> str | None:
    task: str | None = meta.get(SOURCE, {}).get("task")
    return task


KIND = Kind(
    loads="exgrpo_orlhf.testbed.gym_grader:grader",
    settings=("success_at", "memory"),
    once=True,
    meta=(SOURCE,),
    as_text=True,
    any_reward=True,
    visible=visible,  # the library takes the last <answer>, wherever it is
    readable="<answer>0</answer>",
    same=_task,  # each takes as long as it took to make
)
