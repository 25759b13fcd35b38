"""The input of a grader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .grade import Grade, Message
from .thoughts import Tags, behind, in_known_tags


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


Grader = Callable[[Answer], Grade]


class Grading(NamedTuple):
    """How a worker grades. calls: of what it takes the answers at a time, 'response', 'group' or 'batch'"""

    calls: str
    grade: Callable[[Sequence[Answer]], list[Grade]]
