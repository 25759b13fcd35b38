"""The rows of a generation, which grow by one token at a time."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from ..attention.packing import SHARED, Unfit, attention_is, goes_on
from ..attention.shared_prompt import SharedPromptCache, fits, padded, reserve


class Batch:
    """Rows of one length with their keys and values. Each prompt is computed once, whatever the number of its rows.

    On a CPU a prompt's keys and values are kept once too, if the model allows it (`shared_prompt`). Otherwise each row
    has a copy of them in a cache of transformers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        owner: Sequence[int],
        pad: int,
        tokens: int,
        computed: Sequence[Tensor] | None = None,
    ) -> None:
        """Computes P different prompts. `logits` (R, V) are then those of each row's first token.

        owner: the prompt of each of the R rows; tokens: to be appended to a row at most; computed: what `computed`
        returned for the first tokens of each prompt, which are not computed again
        """
        self.model, self._tokens = model, tokens
        self._shared: SharedPromptCache | None = None
        past = [0] * len(prompts) if computed is None else [tensor.shape[2] for tensor in computed]
        begin, width = max(past), max(len(prompt) - length for prompt, length in zip(prompts, past, strict=True))
        ids = torch.full((len(prompts), width), pad)
        attention = torch.zeros(len(prompts), begin + width, dtype=ids.dtype)
        for i, (prompt, length) in enumerate(zip(prompts, past, strict=True)):
            # Padded on the left, what is computed already and the rest: all responses begin in one column.
            new = torch.tensor(prompt[length:])
            ids[i, width - len(new) :] = new
            attention[i, begin - length : begin] = attention[i, begin + width - len(new) :] = 1
        # Without padding no mask is given: attention is faster.
        self.attention = None if bool(attention.all()) else attention.to(model.device)  # (rows, columns)
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.logits, self.cache = self._forward(ids.to(model.device), None if computed is None else padded(computed))
        self._goes_on = goes_on(model) and type(self.cache) is DynamicCache
        if fits(model, self.cache, len(owner)):
            self._shared = SharedPromptCache(self.cache, attention, torch.tensor(owner), tokens)
            self.logits = self.logits[self._shared.owner]
        elif list(owner) != list(range(len(prompts))):
            rows = torch.tensor(owner, device=model.device)
            self._select(rows)
            self.logits = self.logits[rows]
        if self._shared is None:
            self._reserve()

    def append(self, token: Tensor) -> None:
        """token: (R,)"""
        if self._shared is not None:
            try:
                self._append_shared(self._shared, token)
                return
            except Unfit:
                if self._shared.length:  # prompts have been dropped, and the copies would lack the tokens since
                    raise
                rows, self._shared = self._shared.owner, None
                self._select(rows)
                self._reserve()
        if self.attention is not None:
            self.attention = torch.nn.functional.pad(self.attention, (0, 1), value=1)
        self.logits, self.cache = self._forward(token[:, None], self.cache)

    def keep(self, rows: Tensor) -> Tensor:
        """Drops all rows but these, (n,) ascending. Returns them in the order that the rows of the batch have now.

        The logits stay as they were until the next token is appended.
        """
        if self._shared is not None:
            return self._shared.keep(rows)
        self._select(rows)
        return rows

    def computed(self, row: int) -> Tensor | None:
        """(2 · layers, H, T, D): keys and values of all tokens of a row, for a batch in which it goes on. None if the
        model keeps anything else, or they are not all that the next token depends on.
        """
        if not self._goes_on:
            return None
        if self._shared is not None:
            return self._shared.computed(row)
        layers: list[Any] = self.cache.layers
        keys_and_values = [kept for layer in layers for kept in (layer.keys, layer.values)]
        if len({kept.shape for kept in keys_and_values}) > 1:
            return None
        columns = slice(None) if self.attention is None else self.attention[row].bool()
        return torch.stack([kept[row][:, columns] for kept in keys_and_values])

    def _append_shared(self, shared: SharedPromptCache, token: Tensor) -> None:
        with attention_is(self.model, SHARED):
            output = self.model(
                input_ids=token[:, None],
                position_ids=shared.positions()[:, None],
                past_key_values=shared,
                use_cache=True,
                logits_to_keep=1,
                shared_prompt=shared,
            )
        shared.finish()
        if shared.length == 1:
            del self.cache  # the prompts as the model left them, for copies
        self.logits = output.logits[:, -1]

    def _reserve(self) -> None:
        kind = self.model.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if kind != "cpu" or dtype is not None:  # in float32 on a CPU a growing cache is as fast, and faster if small
            reserve(self.cache, self._tokens, dtype)

    def _select(self, indices: Tensor) -> None:
        # Named for beam search; the only selection of rows that every kind of layer has. indices: int64, as it asks for
        self.cache.reorder_cache(indices)  # type: ignore[arg-type]
        if self.attention is not None:
            self.attention = self.attention[indices]

    def _forward(self, ids: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """cache: None lets the model make one"""
        padding, begins = {}, cache is None
        if self.attention is not None:
            padding["attention_mask"] = self.attention
            if self.takes_positions:  # a row's positions begin with its prompt, not with its padding
                positions = (self.attention.cumsum(1) - 1).clamp_(min=0)
                padding["position_ids"] = positions[:, -ids.shape[1] :]
        output = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **padding)
        cache = output.get("past_key_values")
        # Later than 5.15.0 transformers gives Mamba's states too, under this name and without keys.
        if not isinstance(cache, Cache) or (begins and not any(hasattr(layer, "keys") for layer in cache.layers)):
            raise ValueError(
                f"{type(self.model).__name__} keeps no cache whose rows can be selected: the local engine cannot "
                "generate with such a model"
            )
        return output.logits[:, -1], cache


@torch.no_grad()
def check_rows(model: PreTrainedModel, pad: int, turns: bool = False) -> None:
    """Raises ValueError for a model with which rows of a batch do not have the logits of the same rows alone.

    turns: whether rows go on in another batch, from what was computed in this one
    """
    vocabulary = model.config.get_text_config().vocab_size
    rows = [[7 * i % vocabulary for i in range(1, 1 + length)] for length in (4, 6, 5)]
    owner = [0, 1, 1, 2]
    tokens = torch.tensor([rows[i][-2:] for i in owner], device=model.device)
    alone = torch.stack([model(torch.tensor([row], device=model.device)).logits[0, -1].float() for row in rows])
    why = "they differ"
    try:
        batch = Batch(model, [row[:-2] for row in rows], owner, pad, 2)
        computed = [batch.computed(1)]
        batch.append(tokens[:, 0])
        computed.append(batch.computed(3))
        going = batch.keep(torch.tensor([1, 3], device=model.device))
        batch.append(tokens[going, 1])
        gap = (batch.logits.float() - alone[torch.tensor(owner)[going.cpu()]]).abs().max()
        if turns and (past := [states for states in computed if states is not None]):
            logits = Batch(model, rows[1:], [0, 1], pad, 1, past).logits  # of the second row one token less is new
            gap = torch.maximum(gap, (logits.float() - alone[1:]).abs().max())
        wrong = bool(gap > 4 * torch.finfo(model.dtype).eps ** 0.5 * max(1.0, float(alone.abs().max())))  # not if NaN
    except (RuntimeError, IndexError) as error:
        wrong, why = True, str(error).partition("\n")[0]
    if wrong:
        raise ValueError(
            f"the local engine cannot generate with {type(model).__name__}: rows of a batch, padded or without those "
            f"that have ended, do not have the logits of each row alone ({why})"
        )
