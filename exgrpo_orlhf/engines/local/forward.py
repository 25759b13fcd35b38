"""The policy's forward pass over rows of prompt and response: log-probs and entropies of the response tokens.

Rows are padded, or packed with each distinct prompt once (`attention/packing.py`): on a CPU where prompts are much of
the work. What saves memory, and says that there is too little of it, is here too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...attention.packing import (
    PACKED,
    WORTHWHILE,
    Packed,
    PackedRow,
    Unfit,
    attention_is,
    hidden_states,
    is_plain,
    packed_batches,
    repeated_share,
)
from ...objective.token_stats import response_stats
from ...records import Measured
from ...sampling import EngineLost
from ..model import changes_logits
from ..rows import MAX_PADDING, micro_batches, padded, probe_rows

_warn_once = cache(logging.getLogger(__name__).warning)  # a reference policy has the same cause


class PolicyForward:
    """Computes the hidden states with the backbone, and the statistics from the output layer in chunks."""

    def __init__(self, model: PreTrainedModel, temperature: float, compute_dtype: torch.dtype) -> None:
        """compute_dtype: float32, or bfloat16 for autocast over float32 master weights.

        Raises ValueError if the model computes its logits in another way than hidden · weightᵀ + bias.
        """
        self.model, self.temperature, self.compute_dtype = model, temperature, compute_dtype
        self.device, self.head = model.device, model.get_output_embeddings()
        self._check()
        self.one_call = self.device.type != "cpu"  # attention of packed rows
        self.least_repeated = 0.0 if self.one_call else WORTHWHILE  # share in copies of prompts
        self.packs = is_plain(model) and self._packs()
        if self.packs:  # for good: a checkpointed layer calls attention again in the backward pass
            model.config._attn_implementation = PACKED
        elif self.one_call:
            _warn_once("rows are padded, not packed: that needs LocalEngine.dtype = 'bfloat16' and full attention")

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, self.compute_dtype, enabled=self.compute_dtype != torch.float32)

    def batches(self, rows: Sequence[PackedRow], token_budget: int) -> Iterator[tuple[list[int], bool]]:
        """Positions of rows in batches of at most `token_budget` tokens, and whether to pack them. Of packed rows a
        prompt counts once, of others the padding too."""
        pack = self.packs and repeated_share(rows) >= self.least_repeated
        limit = 1.0 if self.one_call else MAX_PADDING  # a GPU computes padding sooner than it starts another pass
        for part in packed_batches(rows, token_budget) if pack else micro_batches(rows, token_budget, limit):
            yield part, pack

    def __call__(self, rows: Sequence[PackedRow], pack: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs (at the sampling temperature) and entropies (at 1) of the rows' actions, end to end: (A,).

        The hidden state before a token predicts it: for a prompt of P tokens, positions P−1 … P+T−2 of the row. No
        token of a prompt or an environment and no padding enters the statistics.
        """
        targets = torch.from_numpy(np.concatenate([row.targets for row in rows])).to(self.device, torch.long)
        with self.autocast():
            hidden = hidden_states(self.model, Packed(rows, self.device, self.one_call)) if pack else self._padded(rows)
        return response_stats(self.head, hidden.to(self.compute_dtype), targets, self.temperature)

    def _padded(self, rows: Sequence[PackedRow]) -> Tensor:
        """The hidden states that predict the rows' actions, (A, D). Causal attention never looks at the padding on the
        right, so no mask is needed."""
        ids, actions = padded(rows)  # (R, W)
        predicts = np.roll(actions, -1, axis=1)  # a row begins with a prompt token, so nothing wraps around
        output = self.model.base_model(input_ids=torch.from_numpy(ids).to(self.device), use_cache=False)
        hidden: Tensor = output.last_hidden_state[torch.from_numpy(predicts).to(self.device)]
        return hidden

    @torch.no_grad()
    def measure(self, rows: Sequence[PackedRow], token_budget: int) -> list[Measured]:
        """Each row, without gradient, in batches of at most `token_budget` tokens."""
        measured: dict[int, Measured] = {}
        for part, pack in self.batches(rows, token_budget):
            batch = [rows[i] for i in part]
            measured.update(zip(part, per_row(batch, *self(batch, pack)), strict=True))
        return [measured[i] for i in range(len(rows))]

    @torch.no_grad()
    def _check(self) -> None:
        """Raises ValueError for an architecture that caps or scales logits, or hidden states before the output layer.
        Compared in float32, whatever the run computes in, because rounding would hide a difference."""
        ids = torch.arange(1, 9, device=self.device)[None] % self.head.weight.shape[0]
        logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        logprobs, _ = response_stats(self.head, hidden.float(), ids[0, 1:], self.temperature)
        expected = (logits / self.temperature).log_softmax(1).gather(1, ids[0, 1:, None]).squeeze(1)
        if changes_logits(self.model) or not torch.allclose(logprobs, expected, atol=1e-3, rtol=1e-3):
            raise ValueError(
                f"{type(self.model).__name__} does more to its logits than the output layer does, such as scaling or "
                "capping them: the local engine cannot train it"
            )

    @torch.no_grad()
    def _packs(self) -> bool:
        """Whether packed rows have the hidden states of padded ones. They would not with a model that ignores positions
        or has an attention of its own."""
        rows = probe_rows(self.head.weight.shape[0], ((5, 4), (3, 2), (5, 1), (3, 6), (5, 2)))
        expected = self._padded(rows)
        try:
            with attention_is(self.model, PACKED):
                packed = hidden_states(self.model, Packed(rows, self.device))
                same = torch.allclose(packed, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
                return same and (not self.one_call or self._only_rounds(rows))
        except (Unfit, RuntimeError):
            return False

    @torch.enable_grad()
    def _only_rounds(self, rows: Sequence[PackedRow]) -> bool:
        """Whether attention in one call changes hidden states, and their gradient in the embedded tokens, by at
        most three times what the compute dtype changes where attention has tables."""
        embedding = self.model.get_input_embeddings()

        def results(one_call: bool) -> list[Tensor]:
            packed = Packed(rows, self.device, one_call)
            embedded = embedding(packed.ids).detach().requires_grad_()
            with patch.object(embedding, "forward", lambda *_, **__: embedded):
                hidden = hidden_states(self.model, packed)
            return [hidden, *torch.autograd.grad(hidden.sin().sum(), embedded)]

        exact = results(one_call=False)
        with self.autocast():
            in_one, rounded = results(one_call=True), results(one_call=False)
        return all((a - e).norm() <= 3 * (b - e).norm() for a, b, e in zip(in_one, rounded, exact, strict=True))


class Recomputing:
    """Within its context, activations are computed again in the backward pass (LocalEngine.gradient_checkpointing).

    transformers does that only for layers in training mode. They are in it when they are called, and back in
    evaluation mode while they compute: some call dropout themselves. Generation keeps its cache.
    """

    def __init__(self, model: PreTrainedModel, wanted: bool) -> None:
        """Raises ValueError for a model that cannot do it."""
        self._layers: list[GradientCheckpointingLayer] = []
        if not wanted:
            return
        model.gradient_checkpointing_enable({"use_reentrant": False})
        self._layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not self._layers:
            raise ValueError(f"LocalEngine.gradient_checkpointing: {type(model).__name__} has no layers that can do it")
        for layer in self._layers:
            checkpoint: Any = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = partial(_evaluating, layer, checkpoint)  # type: ignore[assignment]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        for layer in self._layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer.training = False


def _evaluating(
    layer: GradientCheckpointingLayer, checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any
) -> Any:
    def evaluate(*args: Any) -> Any:
        with patch.object(layer, "training", False):
            return forward(*args)

    return checkpoint(evaluate, *args)


@contextmanager
def within_memory() -> Iterator[None]:
    """Raises EngineLost, with the settings that need less, if the GPU's memory is too small for the block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineLost(
            f"the GPU's memory is too small ({' '.join(str(error).split())[:200]}): lower "
            "LocalEngine.micro_batch_tokens, bind LocalEngine.gradient_checkpointing = True, or lower "
            "LocalEngine.sampler_memory if vLLM samples"
        ) from error


def per_row(rows: Sequence[PackedRow], logprobs: Tensor, entropies: Tensor) -> list[Measured]:
    """What `PolicyForward` returned for these rows, split into one entry per row, on the CPU."""
    lengths = [len(row.targets) for row in rows]
    parts = (values.detach().cpu().split(lengths) for values in (logprobs, entropies))
    return [Measured(logprob.numpy().copy(), float(entropy.mean())) for logprob, entropy in zip(*parts, strict=True)]
