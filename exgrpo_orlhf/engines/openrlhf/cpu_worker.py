"""What vLLM's worker needs without CUDA. Its process is spawned, so that nothing of cpu.install is in it; vLLM imports
this module by the name of the worker extension class before it builds the model."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers import utils as vllm_layers

from . import cpu

cpu.install()
from .weight_sync import WeightReceiver as WeightReceiver  # noqa: E402  (after install)


def _keep_plain_weight(layer: Any, remove_weight: bool) -> None:
    """A linear layer that reads its weight at each call. vLLM's CPU backend computes from a repacked copy, which a
    weight sync may leave as it was: rollouts would come from an old policy without notice."""
    layer.cpu_linear = torch.nn.functional.linear


vllm_layers.dispatch_cpu_unquantized_gemm = _keep_plain_weight
