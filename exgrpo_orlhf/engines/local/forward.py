"""The policy's forward pass over prompt + response rows: log-probs and entropies of response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...objective import token_stats
from ..rows import ForwardRow, micro_batches

LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")  # of model configs


class PolicyForward:
    """Hidden states from the backbone, statistics from the output layer in chunks."""

    def __init__(self, model: PreTrainedModel, temperature: float, compute_dtype: torch.dtype) -> None:
        """compute_dtype: float32, or bfloat16 for autocast over float32 master weights.

        Raises ValueError if the model computes its logits in another way than hidden · weightᵀ + bias.
        """
        self.model, self.temperature, self.compute_dtype = model, temperature, compute_dtype
        self.device = model.device
        self._check()

    def autocast(self) -> AbstractContextManager[object]:
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype)

    def __call__(self, rows: Sequence[ForwardRow]) -> tuple[Tensor, Tensor]:
        """Log-probs (at the sampling temperature) and entropies (at 1) of the rows' response tokens, end to end: (T,).

        Rows are padded on the right, where causal attention never looks: no mask is needed. The hidden state before a
        token predicts it: for a prompt of P tokens, positions P−1 … P+T−2 of the row. Nothing else of the row enters,
        no prompt token and no padding.
        """
        width = max(map(len, rows))
        ids = np.zeros((len(rows), width), np.int64)
        predicts = np.zeros((len(rows), width), bool)  # (R, W)
        for i, row in enumerate(rows):
            prompt, length = len(row.prompt), len(row)
            ids[i, :prompt], ids[i, prompt:length] = row.prompt, row.response
            predicts[i, prompt - 1 : length - 1] = True
        targets = torch.from_numpy(np.concatenate([row.response for row in rows])).to(self.device, torch.long)
        with self.autocast():
            output = self.model.base_model(
                input_ids=torch.from_numpy(ids).to(self.device),
                use_cache=False,
            )
        return self._stats(output.last_hidden_state[torch.from_numpy(predicts).to(self.device)], targets)

    def _stats(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self._token_stats(hidden, targets, self.compute_dtype)

    def _token_stats(self, hidden: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return token_stats(
            hidden.to(dtype),
            head.weight.to(dtype),
            targets,
            bias=None if bias is None else bias.to(dtype),
            temperature=self.temperature,
        )

    @torch.no_grad()
    def _check(self) -> None:
        """Some architectures cap or scale the logits after the output layer: `token_stats` would be wrong for them.

        In float32 whatever the run computes in, or rounding would hide it. A cap far above the logits of these few
        tokens would show only later, so the config is asked too.
        """
        settings = self.model.config.get_text_config().to_dict()
        named = [name for name in LOGIT_SETTINGS if settings.get(name) not in (None, 1, 1.0)]
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        ids = torch.arange(1, 9, device=self.device)[None] % vocabulary
        logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        ours, _ = self._token_stats(hidden, ids[0, 1:], torch.float32)
        theirs = (logits / self.temperature).log_softmax(1).gather(1, ids[0, 1:, None]).squeeze(1)
        if named or not torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3):
            why = ", ".join(named) or f"log-probs differ by {(ours - theirs).abs().max():.2g}"
            raise ValueError(
                f"{type(self.model).__name__} does more to its logits than the output layer does ({why}): such a model "
                "cannot be trained by the local engine"
            )


@torch.no_grad()
def measure(
    forward: PolicyForward, rows: Sequence[ForwardRow], token_budget: int
) -> tuple[list[np.ndarray], list[float]]:
    """Log-probs, float32 (T,), and mean response entropy of each row, without gradient, in token-budget batches."""
    logprobs: dict[int, np.ndarray] = {}
    entropies: dict[int, float] = {}
    for part in micro_batches(rows, token_budget):
        lengths = [len(rows[i].response) for i in part]
        lp, entropy = forward([rows[i] for i in part])
        for i, row_lp, row_entropy in zip(part, lp.cpu().split(lengths), entropy.cpu().split(lengths), strict=True):
            logprobs[i], entropies[i] = row_lp.numpy().copy(), float(row_entropy.mean())
    return [logprobs[i] for i in range(len(rows))], [entropies[i] for i in range(len(rows))]
