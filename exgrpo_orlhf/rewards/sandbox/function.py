"""A user's own reward function, in OpenRLHF's form: `reward_func(queries, prompts, labels)`.

It is called in the pool with lists of one, so that a response on which it hangs affects no other response.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

from ..answer import Answer, Graded, Grader

NAME = "reward_func"  # where the binding names no function


def grader(where: str) -> Grader:
    """The reward of the function at "file.py" or "file.py:name"; a reward above 0 means correct. Its `queries` hold
    prompt and response in one text. Raises ValueError, or whatever the file raises."""
    path, _, name = where.rpartition(":")
    if not path.endswith(".py"):
        path, name = where, NAME
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"Verifier.function = {where!r}: there is no file {str(file.absolute())!r}")
    spec = importlib.util.spec_from_file_location(f"reward_function_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"Verifier.function = {where!r}: the file must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"Verifier.function = {where!r}: the file defines no function {name!r}")

    def grade(answer: Answer) -> Graded:
        result = function([answer.prompt + answer.response], [answer.prompt], [answer.gold])
        if isinstance(result, dict):
            result = result["rewards"]
        if hasattr(result, "tolist"):  # a tensor or an array
            result = result.tolist()
        while isinstance(result, list | tuple):
            if len(result) != 1:
                raise ValueError(f"it must return one reward for each query, got {len(result)} for one")
            result = result[0]
        reward = float(result)
        if not math.isfinite(reward):
            raise ValueError(f"it must return finite rewards, got {reward}")
        return Graded("correct" if reward > 0 else "wrong", reward)

    return grade
