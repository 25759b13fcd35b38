"""A calculator for word problems: `<calc>4 * 12</calc>` gets ` = 48.`, with `Environment.stop = ('</calc>',)`. What is
no calculation of two whole numbers with a whole result gets ` = ?.`. The episode ends with the first turn that is no
call. It is graded as a response without calls would be (testbed/word_problems.py).
"""

from __future__ import annotations

import re
from typing import Any

from exgrpo_orlhf.records import Question
from exgrpo_orlhf.testbed.made_questions import OPERATIONS
from exgrpo_orlhf.testbed.word_problems import SOURCE, grade

_CALL = re.compile(r"<calc>\s*(\d{1,6})\s*([-+*/])\s*(\d{1,6})\s*</calc>$")


class Calculator:
    def reset(self, states: dict[str, Any]) -> dict[str, Any]:
        self.prompt = states["observation"]
        return states

    def step(self, states: dict[str, Any]) -> dict[str, Any]:
        action = states["action_text"]
        if action.endswith("</calc>"):
            call = _CALL.search(action)
            feedback = f" = {_result(*call.groups()) if call else '?'}."
            return {"rewards": 0.0, "environment_feedback": feedback, "done": False}
        episode = states["observation_text"].removeprefix(self.prompt) + action
        graded = grade(Question.make(SOURCE, self.prompt, states["label"]), re.sub("</?calc>", "", episode))
        return {"rewards": graded.reward, "environment_feedback": "", "done": True}


def _result(left: str, sign: str, right: str) -> str:
    if sign == "/" and (int(right) == 0 or int(left) % int(right)):
        return "?"
    return str(OPERATIONS[sign](int(left), int(right)))
