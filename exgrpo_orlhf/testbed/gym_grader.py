"""Questions of reasoning-gym: the text in the last <answer>…</answer>, scored by the task's own checker.

Some checkers evaluate the text as a Python expression. One without any of _PARTS calls nothing and changes nothing. All
other texts are scored in the sandbox, in a process of their own, which takes a hundred times as long.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import reasoning_gym
import sympy
from reasoning_gym.utils import extract_answer

from ..grader.answer import Answer, Grader
from ..grader.grade import Grade
from ..sandbox import sandbox
from .reasoning_gym import SOURCE, entries_of, entry_of

_PARTS = ("(", "for", "__")  # [0 for x.y in z] assigns
_NAMES = re.compile(r"\b(?:entry|oracle_answer|valid_solutions)\b")  # of checkers, which hold the answer
_FOLDERS = [str(Path(module.__path__[0]).parent) for module in (reasoning_gym, sympy)]
_LONGEST = 3600.0  # seconds; the pool's limit ends this process and the sandbox before


def grader(success_at: float, memory: int) -> Grader:
    """success_at: least score of a success; memory: MiB of a checker. Raises NoSandbox if this machine has none."""
    sandbox.check_available()
    return partial(grade, success_at=success_at, memory=memory)


def grade(answer: Answer, success_at: float = 1.0, memory: int = 1024) -> Grade:
    """The library's score is the reward. A response on which its checker fails scores 0, unless it fails on the right
    answer too: no response escapes its 0 by being hard to read.

    Raises ValueError for a question that is not ReasoningGym's, or that its library makes otherwise today, and whatever
    the checker raises on the right answer.
    """
    source = answer.meta.get(SOURCE)
    if source is None:
        raise ValueError("Verifier.kind = 'reasoning_gym' grades questions of ReasoningGym alone")
    made = source["task"], source["settings"], source["seed"]
    entries, entry = entries_of(*made), entry_of(*made, source["index"])
    if entry["question"] != answer.prompt:
        raise ValueError("another version of reasoning-gym made this question")
    text = extract_answer(answer.response)
    if text is None:
        return Grade("no_answer", 0.0)
    if _NAMES.search(text) and text != entry["answer"]:
        return Grade("wrong", 0.0, extracted=text)

    def score() -> float:
        return float(entries.score_answer(text, entry))

    try:
        reward = _enclosed(score, memory) if any(part in text for part in _PARTS) else score()
    except (MemoryError, sandbox.NoSandbox):
        raise
    except Exception:
        entries.score_answer(entry["answer"], entry)
        reward = 0.0
    return Grade("correct" if reward >= success_at else "wrong", reward, extracted=text)


def _enclosed(score: Callable[[], float], memory: int) -> float:
    """The score, from the sandbox. Raises ValueError where the checker fails there, or an answer has changed it."""
    run = sandbox.call(lambda: repr(score()), _LONGEST, memory, _FOLDERS)
    reward = float(run.output)
    if run.how != "exit 0" or not 0 <= reward <= 1:
        raise ValueError(f"no score from 0 to 1 but {run}")
    return reward
