"""The cluster: what OpenRLHF is asked for beyond the algorithm and the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...settings import require


@dataclass(frozen=True)
class OpenRLHFSettings:
    """Where and how OpenRLHF runs (gin name `OpenRLHF`).

    flags: OpenRLHF's own command-line flags by name, without dashes: {'actor.num_gpus_per_node': 8}; True for a
        switch, a tuple for several values. Whatever another binding says (batch sizes, lengths, learning rate, …) is
        handed on from there and has no place here; flags.py names the binding
    more_flags: the same, over `flags`: for one flag more than a layout has
    ray_address: of a Ray cluster ('auto': the one this machine belongs to); None: the environment's RAY_ADDRESS, which
        a submitted Ray job has, or else a Ray of this run's own, on this machine
    cpu_bench: run on a machine without CUDA, with pretended GPUs, to test this engine; not for real training
    score_tokens: tokens of one forward pass that scores or measures responses, with padding unless the flag
        ds.packing_samples is given
    seed_requests: give each vLLM request a seed of its own, so that the random numbers of a response do not depend on
        which other requests the engine works on. On CUDA vLLM 0.29's default model runner reads a seed per row in any
        case; its older one (VLLM_USE_V2_MODEL_RUNNER=0) launches one more kernel for each row and token
    timeout: seconds, the longest wait for an answer of an actor or an engine, and for the GPUs at the start
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    more_flags: Mapping[str, Any] = field(default_factory=dict)
    ray_address: str | None = None
    cpu_bench: bool = False
    score_tokens: int = 32768
    seed_requests: bool = True
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        for name in ("flags", "more_flags"):
            flags = getattr(self, name)
            require(
                isinstance(flags, Mapping) and all(isinstance(flag, str) for flag in flags),
                f"OpenRLHF.{name} must be a dict from flag names to values, got {flags!r}",
            )
            dashed = [flag for flag in flags if flag.startswith("-")]
            require(not dashed, f"OpenRLHF.{name}: flags are named without dashes, got {', '.join(dashed)}")
        require(self.score_tokens >= 1, f"OpenRLHF.score_tokens must be at least 1, got {self.score_tokens!r}")
        require(self.timeout > 0, f"OpenRLHF.timeout must be positive seconds, got {self.timeout!r}")

    def all_flags(self) -> dict[str, Any]:
        return {**self.flags, **self.more_flags}
