"""An agent as OpenRLHF's users write it, with its interface alone: a wrong answer gets the question again, twice."""

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states: dict, **kwargs):
        self.prompt = states["observation"]
        return {"observation": states["observation"]}

    async def step(self, state_dict: dict, **kwargs):
        self.turns += 1
        right = state_dict["action_text"].rpartition("#")[2] == state_dict["label"]
        reward = torch.tensor([float(right)])
        print(f"turn {self.turns}")
        return {
            "rewards": reward,
            "scores": 2 * reward,
            "environment_feedback": self.prompt,
            "done": right or self.turns == 3,
            "sampling_params": state_dict.get("sampling_params"),
            "extra_logs": {"turns": torch.tensor(self.turns)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
