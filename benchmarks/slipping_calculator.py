"""The chain calculator with a slip now and then, so that the episodes of a question differ. For tests and the campaign
of kills: an episode is the same again only if its seed is."""

from __future__ import annotations

import random
from typing import Any

from exgrpo_orlhf.testbed.chain_calculator import Calculator


class SlippingCalculator(Calculator):
    def step(self, states: dict[str, Any]) -> dict[str, Any]:
        result = super().step(states)
        if not result["done"] and random.random() < 0.3:
            result["environment_feedback"] = str(random.randrange(10))
        return result
