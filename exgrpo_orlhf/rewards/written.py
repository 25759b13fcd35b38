"""Responses as verifiers get them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..grader.answer import Written
from ..grader.thoughts import Tags
from ..questions.prompts import PromptEncoder
from ..questions.special_tokens import response_texts
from ..records import Question, Rollout


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
