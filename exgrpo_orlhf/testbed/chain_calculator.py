"""A calculator for modular chains, to learn when to trust it: a step that is written as `7*8==` gets its result. With
`Environment.stop = ('=',)` every step gets it.

For three facts in ten it returns a wrong value, always the same one, and the policy has wrong beliefs about other
facts: it is right where it calls for what it does not know and calculates what the calculator does not. The episode
ends with the first turn that is no call, whose answer, behind the last `#`, decides.
"""

from __future__ import annotations

import re
from typing import Any

from exgrpo_orlhf.testbed.modular_chains import Beliefs, result

FALSE = Beliefs(false_share=0.3, strength=1.0, slip=0.0, seed=1).false_facts
_CALL = re.compile(r"(\d)([-+*])(\d)={1,2}$")


class Calculator:
    def step(self, states: dict[str, Any]) -> dict[str, Any]:
        text = states["action_text"]
        if call := _CALL.search(text):
            fact = int(call[1]), call[2], int(call[3])
            return {"rewards": 0.0, "environment_feedback": str(FALSE.get(fact, result(fact))), "done": False}
        right = "#" in text and text.rpartition("#")[2] == states["label"]
        return {"rewards": float(right), "environment_feedback": "", "done": True}
