"""What vLLM on a CPU must be told before it builds a model whose weights will change. It imports nothing of vLLM."""

from __future__ import annotations

from typing import Any

import torch


def keep_plain_weights(layers: Any) -> None:
    """Linear layers that read their weight at each call. vLLM's CPU backend computes from a repacked copy, which a
    weight sync may leave as it was: rollouts would come from an old policy without notice.

    layers: the module vllm.model_executor.layers.utils, of vLLM 0.29.0
    """

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = keep
