"""Where a model is computed: its device, its dtype, and how its weights get there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...attention.products import use_onednn
from ..model import too_few_positions


def device_of(name: str, setting: str = "LocalEngine.device") -> torch.device:
    """The device of this name; 'auto' is the GPU if there is one. Raises ValueError, which names `setting`, if torch
    has no such device here."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name if name != "auto" else "cuda" if gpus else "cpu")
    except RuntimeError as error:
        raise ValueError(f"{setting} = {name!r}: {str(error).partition(chr(10))[0]}; use 'auto' or 'cpu'") from error
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ValueError(f"{setting} = {name!r}, but torch sees {gpus or 'no'} GPU here; use 'auto' or 'cpu'")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{setting} = {name!r} is neither a CPU nor a GPU of CUDA; use 'auto', 'cpu' or 'cuda'")
    return device


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the computation; 'auto' is float32 on a CPU and bfloat16 on a GPU."""
    auto = "bfloat16" if device.type != "cpu" else "float32"
    dtype: torch.dtype = getattr(torch, auto if name == "auto" else name)
    return dtype


def load(path: str | Path, device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A causal language model, for training and for evaluation. `weights.check_model_files` has compared its files."""
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False)
    loaded: PreTrainedModel = model.to(device).eval()  # with dropout, the log-probs would be those of another policy
    use_onednn(loaded)
    return loaded


def end_and_pad(model: PreTrainedModel, tokenizer: Any, turn_ends: Sequence[int] = ()) -> tuple[list[int], int]:
    """The tokens that end a response, and the one that fills up the rows of a batch. A model's generation config may
    name more end tokens than its tokenizer.

    turn_ends: further tokens that end a response. Raises ValueError if nothing names an end token.
    """
    configured = model.generation_config.eos_token_id
    named = configured if isinstance(configured, list) else [configured]
    end = sorted({token for token in (*named, tokenizer.eos_token_id, *turn_ends) if token is not None})
    if not end:
        path = model.config.name_or_path
        raise ValueError(f"{path}: neither the tokenizer nor the generation config names an end token")
    return end, end[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def check_model(model: PreTrainedModel, path: str | Path, tokens: int) -> None:
    """Raises ValueError now for what would fail later, in a forward pass or when the model is saved.

    tokens: of prompt and response together, at most
    """
    try:
        model.generation_config.validate(strict=True)
    except ValueError as error:
        raise ValueError(f"{path}: its generation config could not be saved with a checkpoint: {error}") from error
    if wrong := too_few_positions(model.config, tokens, path):
        raise ValueError(wrong)
