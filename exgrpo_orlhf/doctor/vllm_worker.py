"""OpenRLHF's extension of vLLM's worker with one more method, for CUDA. vLLM imports it by its name."""

from __future__ import annotations

from typing import Any

from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap


class DoctorWorker(WorkerWrap):  # type: ignore[misc]
    def model_weights(self) -> dict[str, Any]:
        """Each parameter as a float32 array, because numpy has no bfloat16."""
        return {
            name: weight.detach().float().cpu().numpy() for name, weight in self.model_runner.model.named_parameters()
        }
