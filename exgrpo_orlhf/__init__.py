"""ExGRPO: reinforcement learning from verifiable rewards with experience replay."""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """`train`, imported at its first use: the replay core needs none of what it needs (docs/replay_core.md)."""
    if name == "train":
        return import_module(".config.from_python", __name__).train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
