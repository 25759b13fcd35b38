"""Responses as verifiers get them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..grader.answer import Written
from ..grader.thoughts import Tags
from ..questions.prompts import PromptEncoder
from ..questions.special_tokens import response_text
from ..records import Question, Rollout


def written_to(prompts: PromptEncoder, question: Question, rollout: Rollout, observations: bool = False) -> Written:
    """A response to a question as a verifier gets it. observations: as `written`"""
    prompt = lambda: (prompts.render(question), prompts.encode(question))
    in_thought, tags = prompts.opens_thought(question), prompts.settings.thought_tags
    return written(rollout, prompt, in_thought, prompts.tokenizer, tags, observations)


def written(
    rollout: Rollout,
    prompt: Callable[[], tuple[str, Sequence[int]]],
    in_thought: bool,
    tokenizer: Any,
    tags: Tags = (),
    observations: bool = False,
) -> Written:
    """As a verifier gets it: a response; of an episode what the policy wrote, a line for each turn, or with the
    observations all of it; the sequence and the token ids likewise.

    prompt: its text and token ids; tags: own ones of thoughts; observations: whether what the environment said counts
    """
    parts = [rollout.token_ids]
    if rollout.actions is not None and not observations:
        parts = np.split(rollout.token_ids, np.flatnonzero(np.diff(rollout.actions)) + 1)[not rollout.actions[0] :: 2]
    token_ids = np.concatenate(parts).tolist()

    def read() -> tuple[str, str]:
        text, ids = prompt()
        query = str(tokenizer.decode([*ids, *token_ids], skip_special_tokens=False))
        begin = tokenizer.bos_token or ""  # where encoding adds it: a query begins with its prompt
        return text, query if text.startswith(begin) else query.removeprefix(begin)

    text = "\n".join(response_text(tokenizer, part.tolist(), *tags) for part in parts)
    return Written(text, in_thought, read, token_ids, None if rollout.actions is None else rollout.turns, tags)
