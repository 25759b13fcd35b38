"""What all samplers with vLLM share: the parameters of a request, its output, and how vLLM runs without a GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..io.lazy import torch
from ..records import Rollout
from .request import EngineLost, Request

# Set before vLLM is imported, for this process and its own; values that the user has set stay.
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
_CPU = {
    "TORCH_COMPILE_DISABLE": "1",  # 15 s for the sampler alone
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker runs in its engine's process, not in a further one
}
_CPU_CACHE_BYTES = 256 * 2**20  # for keys and values; by default vLLM takes a share of the machine's memory


def settings(memory: float) -> dict[str, Any]:
    """Prepare this process for vLLM's first import. Returns arguments of its engines: for all, and those for a CPU.

    memory: share of each GPU's memory. Raises EngineLost if vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise EngineLost("vLLM is not installed: pip install -e '.[vllm]', or bind LocalEngine.sampler = 'loop'")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    from vllm.platforms import current_platform

    common = {
        "seed": 0,  # of everything that has no seed of its own
        "enable_prefix_caching": True,
        "generation_config": "vllm",  # of the model's own only the end tokens are used, no sampling setting
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if not current_platform.is_cpu():
        return common | {"gpu_memory_utilization": memory}
    for name, value in _CPU.items():
        os.environ.setdefault(name, value)
    return common | {
        "kv_cache_memory_bytes": _CPU_CACHE_BYTES,
        "enforce_eager": True,
        # With chunked prefill vLLM 0.29 rewinds a request's generator. On a CPU that kills the engine.
        "enable_chunked_prefill": False,
    }


def keep_plain_weights(layers: Any) -> None:
    """Linear layers that read their weight at each call. vLLM's CPU backend computes from a repacked copy, which a
    weight sync may leave as it was: rollouts would come from an old policy without notice.

    layers: the module vllm.model_executor.layers.utils, of vLLM 0.29.0, before it builds a model
    """

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = keep


def sampling_params(request: Request, seed: int) -> Any:
    """vLLM gives each of the n responses a generator of its own, made from consecutive seeds.

    Rollouts are not detokenised, unless texts end them: whoever needs the text decodes it, once.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=request.n,
        temperature=request.temperature,
        seed=seed if request.temperature else None,  # greedy decoding draws no numbers
        top_p=request.top_p,
        max_tokens=request.max_tokens,
        stop_token_ids=list(request.end),  # they stay in the response, as the model's own do
        logprobs=1 if request.logprobs else None,
        stop=list(request.stop),
        include_stop_str_in_output=True,
        detokenize=bool(request.stop),  # to see the texts in it, special tokens too
        skip_special_tokens=not request.stop,
        output_kind=RequestOutputKind.FINAL_ONLY,  # other kinds return n > 1 responses in pieces
    )


def rollouts_of(request: Request, output: Any, who: str) -> list[Rollout]:
    """The responses in vLLM's output to a request. who: names the engine in messages. Raises EngineLost."""
    rollouts = []
    for reply in sorted(output.outputs, key=lambda response: response.index):
        if reply.finish_reason not in ("stop", "length"):
            raise EngineLost(f"{request.name}: {who} ended it by {reply.finish_reason!r}")
        logprobs = None
        if request.logprobs:
            of_tokens = zip(reply.token_ids, reply.logprobs, strict=True)
            logprobs = np.array([entries[token].logprob for token, entries in of_tokens], np.float32)
        rollouts.append(Rollout(np.asarray(reply.token_ids, np.int32), reply.finish_reason, sampler_logprobs=logprobs))
    if len(rollouts) != request.n:
        raise EngineLost(f"{request.name}: {who} gave {len(rollouts)} of {request.n} responses")
    return rollouts
