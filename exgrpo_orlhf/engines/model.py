"""What both engines require of a model, and how they use its output layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from ..objective.token_stats import token_stats

# Settings with which a model scales or caps its logits after the output layer.
LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


def changed_logits(config: PretrainedConfig) -> list[str]:
    """The settings by which this model's logits are not hidden · weightᵀ + bias. `response_stats` would be wrong."""
    text = config.get_text_config()
    return [name for name in LOGIT_SETTINGS if getattr(text, name, None) not in (None, 1, 1.0)]


def too_few_positions(config: PretrainedConfig, tokens: int, path: object) -> str | None:
    """What is wrong if prompt and response together (`tokens`) may exceed the model's positions, or None."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)  # some architectures have no limit
    if positions is None or tokens <= positions:
        return None
    return (
        f"Prompts.max_tokens + Sampling.max_response_tokens = {tokens} exceeds the {positions} positions of {path}; "
        "lower one of them, or extend the model's positions in its config.json"
    )


def response_stats(head: Any, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs at `temperature` and entropies at 1 of response tokens, (N,) each, in the dtype of `hidden`.

    Args:
        head: the model's output layer
        hidden: (N, D), the hidden states that predict the tokens
        targets: (N,), the tokens
    """
    bias = getattr(head, "bias", None)
    return token_stats(
        hidden,
        head.weight.to(hidden.dtype),
        targets,
        bias=None if bias is None else bias.to(hidden.dtype),
        temperature=temperature,
    )
