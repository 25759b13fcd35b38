"""What vLLM's worker needs without CUDA. Its process is spawned, so that nothing of cpu.install is in it; vLLM imports
this module by the name of the worker extension class before it builds the model."""

from __future__ import annotations

from vllm.model_executor.layers import utils

from ...sampling.vllm_requests import keep_plain_weights
from . import cpu

keep_plain_weights(utils)
cpu.install()
from .weight_sync import WeightReceiver as WeightReceiver  # noqa: E402  (after install)
