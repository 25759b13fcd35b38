"""Samplers: responses to prompts, for training and for evaluation.

`LoopSampler` (torch_loop.py) is torch in this process, `VllmSampler` (vllm_here.py) vLLM in this process, `RaySampler`
(ray_engines.py) OpenRLHF's vLLM engines, `ServerSampler` (openai_server.py) a server with OpenAI's protocol. vLLM and
Ray are imported by their modules alone.
"""

from .request import EngineLost, Portion, Request, Sampler, ServedRollout, StepSeed

__all__ = ["EngineLost", "Portion", "Request", "Sampler", "ServedRollout", "StepSeed"]
