"""Prompts that hold their solution, which a policy would learn to copy, and prompts that lack their options."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ..grader.boxes import last_box
from ..grader.options import options_of
from ..records import Question
from .text import normalised_answer

_FEW, _SHARE = 3, 0.001  # of the questions: some mark a number that is their answer by chance
_EXAMPLE = 0.9  # of the prompts with the same mark: an example in all of them, or a label that some answers are
_SHORT = 2  # characters of an answer that stands in a text by chance: it counts in the last line alone


def refuse_solutions(questions: Sequence[Question], where: Callable[[Question], str], remedy: str) -> None:
    """Raises ValueError if prompts end in a turn of the assistant with the gold answer, or more than a few have it in a
    box or behind ####. A turn or a box that mostly stands with other answers is the beginning of a response, or an
    example; so is a box in nearly all prompts that is not the answer of all of them. where: of a question's row;
    remedy: for the message
    """
    turns: dict[str, list[Question | None]] = {}  # None: with another answer
    marked: dict[str, list[Question | None]] = {}
    for question in questions:
        messages = [("user", question.prompt)] if isinstance(question.prompt, str) else [*question.prompt]
        answers = question.answer if isinstance(question.answer, tuple) else (question.answer,)
        golds = [gold for answer in answers for gold in _texts(answer)]
        if messages[-1][0] == "assistant":
            text = messages.pop()[1]
            turns.setdefault(text, []).append(question if _holds(text, golds) else None)
        for mark in {mark for _, text in messages for mark in _marks(text)}:
            marked.setdefault(mark, []).append(question if mark in map(normalised_answer, golds) else None)
    # The same turn for different answers, such as "Yes or no?", is the beginning of a response.
    turns = {text: each for text, each in turns.items() if len({one.answer_text for one in each if one}) < 2}
    marked = {mark: each for mark, each in marked.items() if all(each) or len(each) < _EXAMPLE * len(questions)}
    few = max(_FEW, _SHARE * len(questions))
    for texts, least, what in ((turns, 0, "end in a turn of the assistant with"), (marked, few, "have in a box")):
        own = [one for each in texts.values() if len(each) < 2 * max(1, len([*filter(None, each)])) for one in each]
        if len(solved := [*filter(None, own)]) > least and 2 * len(solved) > len(own):
            raise ValueError(
                f"{where(solved[0])}: {len(solved)} of {len(questions)} prompts, this one first, {what} the gold "
                f"answer, which the model would copy; {remedy}"
            )


def hides_its_options(question: Question) -> bool:
    """Whether a question has options for the verifier, and its prompt has the text of none of them."""
    prompt = question.prompt if isinstance(question.prompt, str) else "\n".join(text for _, text in question.prompt)
    texts = options_of(question.meta.get("options")).values()
    parts = [r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", text))) for text in texts if text.strip()]
    return bool(parts) and not any(re.search(rf"(?<!\w){part}(?!\w)", prompt) for part in parts)


def _texts(answer: Any) -> list[str]:
    """A gold answer as a turn may have it: alone, and what it has in a box or behind ####; 7.0 of a column is 7."""
    text = str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer).strip()
    return [_without_commas(text), *_marks(text)]


def _holds(text: str, golds: Sequence[str]) -> bool:
    if not _marks(text).isdisjoint(map(normalised_answer, golds)):
        return True
    whole, last = _without_commas(text), _without_commas(text.rstrip().rpartition("\n")[2])
    places = [(gold, last if len(gold) <= _SHORT else whole) for gold in golds]
    return any(re.search(rf"(?<![\w.]){re.escape(gold)}(?!\w|\.\d)", place) for gold, place in places)


def _marks(text: str) -> set[str]:
    """What stands in boxes or behind ####, normalised."""
    boxes = map(last_box, re.split(r"(?=\\f?box)", text)) if "box" in text else ()
    marks = [*filter(None, boxes), *re.findall(r"####[ \t]*(.*\S)", text)]
    return {normalised_answer(_without_commas(mark)) for mark in marks}


def _without_commas(text: str) -> str:
    """Anywhere in a text; `text.without_thousands` takes a whole answer, of which 1,200,3 is none."""
    return re.sub(r"(?<=\d),(?=\d{3})", "", text)
