"""What packed rows (`packing`) and shared prompts (`shared_prompt`) have in common: each computes attention itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

PACKED, SHARED = "packed_rows", "shared_prompt"  # names of the attention functions
# Models pass these to every attention function, and full causal attention does not depend on them.
UNUSED = {"is_causal", "position_ids", "use_cache", "cache_position"}


class Unfit(Exception):
    """The model asks for more than full causal attention."""


def is_plain(model: PreTrainedModel) -> bool:
    """Whether the model calls transformers' general attention (`sdpa`), as far as its configuration and its signature
    tell: full in every layer, without a window or chunks, for positions that it is given.

    What a layer asks for beyond that shows when attention is called (`refuse`).
    """
    text = model.config.get_text_config()  # of a model of images and text: its part for text
    takes = [inspect.signature(part.forward).parameters for part in (model, model.base_model)]
    return (
        model._supports_attention_backend
        and model.config._attn_implementation in ("sdpa", PACKED)  # PACKED computes padded rows by sdpa
        and all(getattr(text, name, None) is None for name in ("sliding_window", "attention_chunk_size"))
        and set(getattr(text, "layer_types", None) or ()) <= {"full_attention"}
        and all("position_ids" in arguments for arguments in takes)
        and all(any(parameter.kind is parameter.VAR_KEYWORD for parameter in arguments.values()) for arguments in takes)
    )


def goes_on(model: PreTrainedModel) -> bool:
    """Whether keys and values stay right in another batch: not where a layer sees the columns of a window, or where
    positions are rotated otherwise in a longer row."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return is_plain(model) and rope.get("rope_type") not in ("dynamic", "longrope")


def refuse(arguments: Mapping[str, Any]) -> None:
    """Raises Unfit if a model passed more to an attention function than full causal attention needs.

    arguments: further ones of the function. Those that are None, False or 0 ask for nothing.
    """
    asked = [name for name, value in arguments.items() if name not in UNUSED and (isinstance(value, Tensor) or value)]
    if asked:
        raise Unfit(f"attention is called with {', '.join(asked)}")


@contextmanager
def attention_is(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model's attention is the function of that name; afterwards it is again what it was."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before
