"""OpenRLHF's extension of vLLM's worker with one method more; vLLM imports it by its name, under CUDA."""

from __future__ import annotations

from typing import Any

from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap


class DoctorWorker(WorkerWrap):  # type: ignore[misc]
    def model_weights(self) -> dict[str, Any]:
        """Each parameter as a float32 array: bfloat16 does not survive every way between processes."""
        return {
            name: weight.detach().float().cpu().numpy() for name, weight in self.model_runner.model.named_parameters()
        }
