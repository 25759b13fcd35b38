"""Questions of reasoning-gym: the text in the last <answer>…</answer>, scored by the task's own checker."""

from __future__ import annotations

from reasoning_gym.utils import extract_answer

from ...records import Grade
from ...tasks.reasoning_gym import SOURCE, entries_of
from ..answer import Answer


def grade(answer: Answer, success_at: float = 1.0) -> Grade:
    """The library's score is the reward. A response on which its checker fails scores 0, unless it fails on the right
    answer too: no response escapes its 0 by being hard to read.

    Raises ValueError for a question that is not ReasoningGym's, or that its library makes otherwise today, and whatever
    the checker raises on the right answer.
    """
    source = answer.meta.get(SOURCE)
    if source is None:
        raise ValueError("Verifier.kind = 'reasoning_gym' grades questions of ReasoningGym alone")
    entries = entries_of(source["task"], source["settings"], source["seed"])
    entry = entries[source["index"]]
    if entry["question"] != answer.prompt:
        raise ValueError("another version of reasoning-gym made this question")
    text = extract_answer(answer.response)
    if text is None:
        return Grade("no_answer", 0.0)
    try:
        reward = float(entries.score_answer(text, entry))
    except MemoryError:
        raise
    except Exception:
        entries.score_answer(entry["answer"], entry)
        reward = 0.0
    return Grade("correct" if reward >= success_at else "wrong", reward, extracted=text)
