"""Runs scripts/doctor.py on a cluster with planted faults. A program, which takes the doctor's arguments.

Rank 1 sees another folder in place of the run folder; a weight changes on its way to vLLM; log-probs are measured at
another temperature than tokens are sampled at; only the last micro-batch of an optimiser step counts.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from exgrpo_orlhf.engines.openrlhf import cpu

cpu.install()

from exgrpo_orlhf.selftest import actors  # noqa: E402  (after install)

WRONG_WEIGHT = "model.layers.1.mlp.down_proj.weight"


class FaultyActor(actors.DoctorActor):
    def init_model_from_pretrained(self, *args, **kwargs):
        super().init_model_from_pretrained(*args, **kwargs)
        self.actor.model.set_gradient_accumulation_boundary = lambda last: None

    def sees(self, marker, paths):
        return super().sees(str(Path(marker).parent / "elsewhere" / "marker") if self._rank == 1 else marker, paths)

    def measure(self, rows):
        self.actor.temperature *= 0.7
        try:
            return super().measure(rows)
        finally:
            self.actor.temperature /= 0.7

    def broadcast_to_vllm(self):
        weight = dict(self.actor.model.module.named_parameters())[WRONG_WEIGHT].data
        right = weight[0, 0].clone()
        weight[0, 0] += 1
        super().broadcast_to_vllm()
        weight[0, 0] = right


if __name__ == "__main__":
    import doctor_faults  # by its name: Ray would ship the class of __main__ by value, bases and globals included

    actors.DoctorActor = doctor_faults.FaultyActor
    sys.argv[0] = str(Path(__file__).resolve().parents[2] / "scripts" / "doctor.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
