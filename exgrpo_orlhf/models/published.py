"""The sizes of the paper's models, as their config.json has them: for a plan where the hub is out of reach."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..lazy import transformers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_QWEN_1B = {
    "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "vocab_size": 151936, "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "vocab_size": 152064, "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}  # fmt: skip
# The last part of a name in gin/paper/ -> its configuration.
_MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-Math-7B-16k-think": {**_QWEN_7B, "max_position_embeddings": 16384},
    "LUFFY-Qwen-Math-7B-Zero": {**_QWEN_7B, "max_position_embeddings": 16384},
    "Qwen2.5-Math-1.5B-16k": {**_QWEN_1B, "max_position_embeddings": 16384},
    "Qwen2.5-7B-Instruct": {**_QWEN_7B, "max_position_embeddings": 32768},
    "Llama-3.1-8B": _LLAMA_8B,
    "Llama-3.1-8B-Instruct": _LLAMA_8B,
}


def published_config(name: str) -> PretrainedConfig | None:
    """The configuration of a model of gin/paper/. name: a hub id or a folder; None for any other model"""
    sizes = _MODELS.get(Path(name).name)
    return None if sizes is None else transformers.AutoConfig.for_model(**sizes)
