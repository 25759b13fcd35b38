"""Plain linear layers for vLLM on a CPU. vLLM must not have built a model before this module is imported."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers import utils as vllm_layers


def _keep_plain_weight(layer: Any, remove_weight: bool) -> None:
    """A linear layer that reads its weight at each call. vLLM's CPU backend computes from a repacked copy, which a
    weight sync may leave as it was: rollouts would come from an old policy without notice."""
    layer.cpu_linear = torch.nn.functional.linear


vllm_layers.dispatch_cpu_unquantized_gemm = _keep_plain_weight
