"""Sampling responses: a loop over a transformers model and its cache.

`model.generate` gives the same distribution, but computes a question's prompt once per rollout and goes on with every
row until the last one has ended. Here each distinct prompt is computed once and its cache repeated, and a row leaves
the batch with its end token. Both are one operation on the cache, the selection of its rows. Waiting with that until
enough rows have ended gains nothing: the cache is copied at every step anyway, by the append of the new token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from ...replay import Rollout


def chunk_seed(seed: int, step: int, chunk: int) -> int:
    """The seed of one generated chunk: a resumed run samples what an undisturbed one does."""
    return int(np.random.SeedSequence([seed, step, chunk]).generate_state(1, np.uint64)[0])


def end_tokens(model: PreTrainedModel, tokenizer_eos: int | None) -> list[int]:
    """All tokens that end a response: a model's generation config may name more of them than its tokenizer does."""
    configured = model.generation_config.eos_token_id
    named = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in (*named, tokenizer_eos) if token is not None})


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

    The model's own generation config has no say: with its top-k, top-p or repetition penalty the samples would not be
    the policy's, and every importance weight would be wrong.
    The end token stays in the response; a response without one has finish 'length'. Each token takes one number from
    the generator, row by row and for all rows, ended ones included: what a row samples does not depend on when the
    others end. Raises ArithmeticError if logits are not finite, ValueError if the model's cache has no rows to select.
    """
    n, device = len(prompts), model.device
    ends = torch.tensor(end, device=device)
    distinct = list(dict.fromkeys(map(tuple, prompts)))
    batch = _Batch(model, distinct, pad)
    if len(distinct) < n:
        index = {prompt: i for i, prompt in enumerate(distinct)}
        batch.select(torch.tensor([index[tuple(prompt)] for prompt in prompts], device=device))
    tokens = torch.full((n, max_new_tokens), pad, device=device)
    rows = torch.arange(n, device=device)  # (R,) the responses that have not ended
    for position in range(max_new_tokens):
        if not batch.logits.amax(1).isfinite().all():
            raise ArithmeticError(f"the logits of token {position + 1} of a response are not finite")
        if temperature is None:
            token = batch.logits.argmax(1)
        else:
            uniform = torch.rand(n, dtype=torch.float64, device=device)
            token = sample(batch.logits, temperature, uniform[rows])
        tokens[rows, position] = token
        going = torch.isin(token, ends, invert=True).nonzero().squeeze(1)
        if not len(going) or position + 1 == max_new_tokens:
            break
        if len(going) < len(rows):
            batch.select(going)
            rows, token = rows[going], token[going]
        batch.append(token)
    rollouts = []
    for response in tokens.to("cpu", torch.int32).numpy():
        ended = np.isin(response, end)
        if ended.any():
            rollouts.append(Rollout(response[: int(ended.argmax()) + 1].copy(), "stop"))
        else:
            rollouts.append(Rollout(response.copy(), "length"))
    return rollouts


def sample(logits: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """logits (R, V), uniform (R,) float64 in [0, 1) → tokens (R,): the first whose cumulative probability exceeds it.

    One number a row instead of V: with a large vocabulary, drawing numbers for all rows costs nothing.
    """
    probabilities = (logits.float() / temperature).softmax(1)
    cumulative = probabilities.cumsum(1, dtype=torch.float64)  # float32 would swallow tokens rarer than 1e-7
    total = cumulative[:, -1:]  # 1 but for rounding
    token = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
    return token.clamp_(max=logits.shape[1] - 1).squeeze(1)  # rounding can make uniform · total the total itself


class _Batch:
    """Rows of one length in a model's cache. logits: (R, V) of each row's next token."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad: int) -> None:
        self.model = model
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), pad)
        attention = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):  # padded on the left: all responses begin in one column
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            attention[i, width - len(prompt) :] = 1
        # Without padding no mask is given: attention is faster.
        self.attention = None if bool(attention.all()) else attention.to(model.device)  # (R, W)
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.cache: Cache | None = None  # the model makes its own
        self._forward(ids.to(model.device))

    def append(self, token: Tensor) -> None:
        """token: (R,)"""
        if self.attention is not None:
            self.attention = torch.nn.functional.pad(self.attention, (0, 1), value=1)
        self._forward(token[:, None])

    def select(self, indices: Tensor) -> None:
        """Make these rows the batch, in this order; a row may come several times."""
        self.cache.reorder_cache(indices)  # named for beam search: the one selection that every kind of layer has
        self.logits = self.logits[indices]
        if self.attention is not None:
            self.attention = self.attention[indices]

    def _forward(self, ids: Tensor) -> None:
        padding = {}
        if self.attention is not None:
            padding["attention_mask"] = self.attention
            if self.takes_positions:  # a row's positions begin with its prompt, not with its padding
                positions = (self.attention.cumsum(1) - 1).clamp_(min=0)
                padding["position_ids"] = positions[:, -ids.shape[1] :]
        output = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **padding)
        self.logits, self.cache = output.logits[:, -1], output.get("past_key_values")
        if not isinstance(self.cache, Cache):
            raise ValueError(
                f"{type(self.model).__name__} keeps no cache whose rows can be selected: the local engine cannot "
                "generate with such a model"
            )
