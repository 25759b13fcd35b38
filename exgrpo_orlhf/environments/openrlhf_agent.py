"""The classes of OpenRLHF 0.11.2's openrlhf/utils/agent.py that a user's file names, without what they do there."""

from __future__ import annotations

from typing import Any


class AgentInstanceBase:
    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states


class AgentExecutorBase:
    pass


class MultiTurnAgentExecutor(AgentExecutorBase):
    def __init__(self, agent_instance_cls: type) -> None:
        self.agent_instance_cls = agent_instance_cls

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the engine generates, not AgentExecutor.execute")


class SingleTurnAgentExecutor(AgentExecutorBase):
    def __init__(self, remote_rm_url: str | list[str] | None = None) -> None:
        pass
