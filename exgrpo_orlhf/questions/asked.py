"""What the questions of a training have in common, so that a checkpoint is asked on benchmarks as it was trained."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from typing import Any

from ..grader.grade import Message

log = logging.getLogger(__name__)
_SAYS_HOW = re.compile(r"boxed|####|<answer>|answer:|(?:final|your) answer", re.IGNORECASE)


def asked_in_training(questions: Sequence[Sequence[Message]], system: str | None) -> dict[str, Any]:
    """What a checkpoint records of the questions of its training, as far as there is something.

    questions: the messages of each; system: Prompts.system
    Returns `around`, the words before and below each question that say how to answer; `other_turns`, the roles of
    questions that are not one message of the user, two at most; and, where Prompts.system replaces none, `row_systems`,
    the system messages (None: no message), two at most.
    """
    record: dict[str, Any] = {}
    if any(words := _words_around([next((t for role, t in m[::-1] if role == "user"), "") for m in questions])):
        record["around"] = [*words]
        log.info("benchmarks will be asked with the words around every question of training: %r … %r", *words)
    roles = {", ".join(role for role, _ in messages if role != "system") for messages in questions}
    if other := sorted(roles - {"user"})[:2]:
        record["other_turns"] = other
    systems = {messages[0][1] if messages[0][0] == "system" else None: None for messages in questions}
    return {**record, "row_systems": [*systems][:2]} if any(systems) and system is None else record


def _words_around(texts: Sequence[str]) -> tuple[str, str]:
    """The words that all texts begin with, and those that all end with; '' where these do not say how to answer. The
    first ones are whole sentences or lines if there are some: questions may begin alike."""
    before = re.sub(r"\S*\Z", "", os.path.commonprefix(texts))  # noqa: RUF071, by characters
    reversed_ends = [text[len(before) :][::-1] for text in texts]
    below = re.sub(r"\A\S*", "", os.path.commonprefix(reversed_ends)[::-1])  # noqa: RUF071
    if len(set(texts)) < 2:
        return "", ""
    sentences = re.sub(r"\A(.*(?:[.!?:]\s|\n)\s*)?.*", r"\1", before, flags=re.DOTALL)
    first, last = (next(filter(_SAYS_HOW.search, words), "") for words in ((sentences, before), (below,)))
    return first, last
