"""Sampling responses with transformers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from ...replay import Rollout


def chunk_seed(seed: int, step: int, chunk: int) -> int:
    """The seed of one generated chunk: a resumed run samples what an undisturbed one does."""
    return int(np.random.SeedSequence([seed, step, chunk]).generate_state(1, np.uint64)[0])


def end_tokens(model: PreTrainedModel, tokenizer_eos: int | None) -> list[int]:
    """All tokens that end a response: a model's generation config may name more of them than its tokenizer does."""
    configured = model.generation_config.eos_token_id
    named = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in (*named, tokenizer_eos) if token is not None})


def clean_generation_config(end: Sequence[int], pad: int) -> GenerationConfig:
    """A config that says nothing but how a response ends.

    `generate` fills whatever a call leaves open from the model's own config, and many come with top-k, top-p or a
    repetition penalty: the samples would not be the policy's, and every importance weight would be wrong.
    """
    return GenerationConfig(eos_token_id=list(end), pad_token_id=pad)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    end: Sequence[int],
    pad: int,
    max_new_tokens: int,
    temperature: float | None,
) -> list[Rollout]:
    """One ungraded response per prompt, sampled at `temperature` from torch's global generator; None: greedy.

    The end token stays in the response; a response without one has finish 'length'.
    """
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad)
    attention = torch.zeros(len(prompts), width, dtype=torch.long)
    for i, prompt in enumerate(prompts):  # padded on the left: all responses begin in one column
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        attention[i, width - len(prompt) :] = 1
    config = clean_generation_config(end, pad)
    config.max_new_tokens = max_new_tokens
    config.do_sample = temperature is not None
    if temperature is not None:
        config.temperature, config.top_k, config.top_p = temperature, 0, 1.0
    sequences = model.generate(
        ids.to(model.device), attention_mask=attention.to(model.device), generation_config=config
    )
    responses = sequences[:, width:].to("cpu", torch.int32).numpy()
    rollouts = []
    for response in responses:
        ended = np.isin(response, end)
        if ended.any():
            rollouts.append(Rollout(response[: int(ended.argmax()) + 1].copy(), "stop"))
        else:
            rollouts.append(Rollout(response.copy(), "length"))
    return rollouts
