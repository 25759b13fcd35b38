"""Where a model is computed: its device, its dtype, and how its weights get there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...settings import LocalEngine
from ..model import too_few_positions


def device_of(settings: LocalEngine) -> torch.device:
    """Raises ValueError for a GPU where torch sees none."""
    name = settings.device if settings.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"LocalEngine.device = {settings.device!r}, but torch sees no GPU here; use 'auto' or 'cpu'")
    return device


def dtype_of(settings: LocalEngine, device: torch.device) -> torch.dtype:
    """The dtype of the computation."""
    name = settings.dtype if settings.dtype != "auto" else ("bfloat16" if device.type != "cpu" else "float32")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def load(path: str | Path, device: torch.device) -> PreTrainedModel:
    """A causal language model with float32 weights."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )
    model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides the signature
    model.eval()  # with dropout, the behaviour log-probs would be those of another policy
    return model


def check(model: PreTrainedModel, path: str | Path, tokens: int) -> None:
    """Raises ValueError now for what would fail later, in a forward pass or when the model is saved.

    tokens: of prompt and response together, at most
    """
    try:
        model.generation_config.validate(strict=True)
    except ValueError as error:
        raise ValueError(f"{path}: its generation config could not be saved with a checkpoint: {error}") from error
    if wrong := too_few_positions(model.config, tokens, path):
        raise ValueError(wrong)


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
        before, layer.training = layer.training, False
        try:
            return forward(*args)
        finally:
            layer.training = before

    return checkpoint(evaluate, *args)
