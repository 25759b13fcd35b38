"""ExGRPO: reinforcement learning from verifiable rewards with experience replay."""

__version__ = "0.2.0"
