"""Responses of the sampling loop to prompts, without questions and settings around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from exgrpo_orlhf.records import Rollout
from exgrpo_orlhf.sampling.request import Request
from exgrpo_orlhf.sampling.torch_loop import generate


def generated(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float | None,
    top_p: float = 1.0,
    stop: tuple[str, ...] = (),
    limits: Sequence[int] = (),
    sessions: Sequence[int] = (),
    last_turn: bool = False,
    **arguments: Any,
) -> list[Rollout]:
    """temperature: None: greedy; limits: tokens of each, instead of max_new_tokens; sessions: of turns"""
    rows = zip(prompts, limits or [max_new_tokens] * len(prompts), sessions or [None] * len(prompts), strict=True)
    requests = [
        Request(prompt, 0, limit, temperature or 0.0, top_p, stop=stop, session=session, last_turn=last_turn)
        for prompt, limit, session in rows
    ]
    return generate(model, requests, **arguments)
