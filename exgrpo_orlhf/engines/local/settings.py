"""The machine of the local engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...settings import require


@dataclass(frozen=True)
class LocalSettings:
    """The machine (gin name `LocalEngine`).

    device: 'auto' takes the GPU if there is one
    dtype: of the computation; master weights and optimiser are float32 always. 'auto': float32 on a CPU, bfloat16 on
        a GPU
    threads: torch's CPU threads; more than the free cores is ruinous
    micro_batch_tokens: padded tokens of one forward and backward pass
    generation_rows: responses generated at a time
    gradient_checkpointing: compute activations again in the backward pass instead of keeping them
    """

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int = 1
    micro_batch_tokens: int = 16384
    generation_rows: int = 256
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        require(
            self.dtype in ("auto", "float32", "bfloat16"),
            f"LocalEngine.dtype must be 'auto', 'float32' or 'bfloat16', got {self.dtype!r}",
        )
        for name in ("threads", "micro_batch_tokens", "generation_rows"):
            require(getattr(self, name) >= 1, f"LocalEngine.{name} must be at least 1, got {getattr(self, name)!r}")
