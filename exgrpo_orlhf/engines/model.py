"""What both engines require of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ..records import Measured
from .rows import ForwardRow, probe_rows


class _Backbone(tuple[Tensor, ...]):
    """A backbone's output of hidden states alone; what else a model asks for is None."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


@torch.no_grad()
def changes_logits(model: PreTrainedModel) -> bool:
    """Whether the model scales, caps or masks the logits of its output layer, hidden · weightᵀ + bias.

    The output layer answers with numbers up to 8,192, in which a cap far above ordinary logits shows. The backbone
    computes nothing, so that the weights may be on the meta device. `response_stats` would be wrong for such a model.
    """
    head, backbone = model.get_output_embeddings(), model.base_model
    ids = torch.zeros(1, 4, dtype=torch.long, device=model.device)
    hidden = torch.zeros(1, 4, model.config.get_text_config().hidden_size, device=model.device, dtype=model.dtype)
    output = _Backbone((hidden,))
    values = 64 * torch.arange(-128.0, 128.0).view(1, 4, 64)  # bfloat16 has all of them
    with patch.object(head, "forward", lambda _: values), patch.object(backbone, "forward", lambda *_, **__: output):
        logits = model(input_ids=ids, use_cache=False)["logits"]
    return logits.shape != values.shape or not torch.equal(logits.float(), values)


def mixing_of_rows(measure: Callable[[Sequence[ForwardRow]], Sequence[Measured]], vocabulary: int) -> float | None:
    """By how much the log-probs of a row change if it stands behind another row, nats, or None if only by rounding.

    Rows are mixed by layers that carry a state from token to token, such as Mamba's, and by attention that ignores
    positions: then the row before changes the log-probs, which shows below bfloat16's rounding too. Positions that do
    not restart only show in comparison with the row alone.

    measure: of rows in one pass, in order; vocabulary: its size
    """
    [row], *others = (probe_rows(vocabulary, ((1, 11),), step) for step in (7, 5, 11))
    behind = [measure([*other, row])[1].logprobs for other in others]
    ahead = [measure([row, *other])[0].logprobs for other in others]
    alone = measure([row])[0].logprobs
    # Both orders compute the same tokens. The first row of a pass is right, so its differences are rounding.
    leak, noise = (abs(first - second).max() for first, second in (behind, ahead))
    off, rounding = (abs(first - alone).mean() for first, _ in (behind, ahead))
    mixed = leak > 4 * noise + 1e-3 or off > max(4 * rounding, 0.05)
    return float(max(leak, abs(behind[0] - alone).max())) if mixed else None


def too_few_positions(config: PretrainedConfig, tokens: int, path: object) -> str | None:
    """What is wrong if prompt and response together (`tokens`) may exceed the model's positions, or None."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)  # some architectures have no limit
    if positions is None or tokens <= positions:
        return None
    return (
        f"Prompts.max_tokens + Sampling.max_response_tokens = {tokens} exceeds the {positions} positions of {path}; "
        "lower one of them, or extend the model's positions in its config.json"
    )
