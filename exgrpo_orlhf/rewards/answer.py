"""The input and the result of a grader."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from ..metric_names import allowed_name
from ..questions.thoughts import Tags, behind, in_known_tags
from ..records import Grade, Message

log = logging.getLogger(__name__)


class Written(NamedTuple):
    """A response as a verifier gets it.

    text: what is graded
    in_thought: whether its prompt opens a thought, so that the answer begins behind the response's first closing tag
    read: the prompt as the model read it, and that with the response, both with their special tokens; None where no
        model is there
    token_ids: of the response; turns: of the model, in an episode; tags: as Prompts.thought_tags
    """

    text: str
    in_thought: bool = False
    read: Callable[[], tuple[str, str]] | None = None
    token_ids: Sequence[int] = ()
    turns: int | None = None
    tags: Tags = ()

    @property
    def to_grade(self) -> str | None:
        """The text in known tags, behind the thought that its prompt opens; None where that has no end."""
        text = in_known_tags(self.text, self.tags)
        return behind(text) if self.in_thought else text


class Answer(NamedTuple):
    """An answer to grade. gold, prompt, meta, source: the question's; some kinds need fields of its meta (options,
    tests), and a user's function may need all of them, and what follows.

    read, token_ids, turns: as `Written` has them, read without the call; progress: steps made, and planned, (0, 1)
    outside training: functions divide by the second
    """

    gold: Any
    response: str
    prompt: str | tuple[Message, ...] = ""
    meta: Mapping[str, Any] = {}
    source: str = ""
    read: tuple[str, str] | None = None
    token_ids: Sequence[int] = ()
    turns: int | None = None
    progress: tuple[int, int] = (0, 1)

    @property
    def as_read(self) -> tuple[str, str]:
        """Where no model is there, the prompt's text, and that with the response."""
        prompt = self.prompt if isinstance(self.prompt, str) else "\n".join(content for _, content in self.prompt)
        return self.read or (prompt, prompt + self.response)


def openrlhf_lists(answers: Sequence[Answer]) -> dict[str, list[Any]]:
    """What OpenRLHF hands to a reward function, and to a server: a query is prompt and response."""
    prompts, queries = zip(*(answer.as_read for answer in answers), strict=True)
    return {"queries": [*queries], "prompts": [*prompts], "labels": [answer.gold for answer in answers]}


def logs_of(extra: Any, count: int) -> tuple[list[tuple[tuple[str, float], ...]], str | None]:
    """OpenRLHF's extra_logs: by name a list, array or tensor with a number for each of `count` queries.

    Returns the names and numbers of each query, and which names have something else and are left out.
    """
    logs: list[tuple[tuple[str, float], ...]] = [()] * count
    bad = [] if isinstance(extra, Mapping) or extra is None else [f"{extra!r:.80}"]
    for name, values in extra.items() if isinstance(extra, Mapping) else ():
        values = values.tolist() if hasattr(values, "tolist") else values
        values = values if isinstance(values, list | tuple) else [values]
        if len(values) == count and all(isinstance(value, int | float) and math.isfinite(value) for value in values):
            metric = allowed_name(str(name), most=200) or "unnamed"
            logs = [(*pairs, (metric, float(value))) for pairs, value in zip(logs, values, strict=True)]
        else:
            bad.append(str(name))
    return logs, f"extra_logs without a finite number for each query: {', '.join(bad)}" if bad else None


def single(value: Any) -> Any:
    """What a tensor, an array or a list of one element holds; of anything else the value, a tensor as a list."""
    value = value.tolist() if hasattr(value, "tolist") else value
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return value


@cache
def warn_once(reason: str) -> None:
    """Log what was left out, once in a process."""
    log.warning("left out: %s", reason)


Grader = Callable[[Answer], Grade]


class Grading(NamedTuple):
    """How a worker grades. calls: of what it takes the answers at a time, 'response', 'group' or 'batch'"""

    calls: str
    grade: Callable[[Sequence[Answer]], list[Grade]]
