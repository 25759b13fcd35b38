"""Calls a program's functions. Runs in the sandbox (`code.py` passes this file as text); standard library alone.

Reads [program, calls] as JSON from standard input and writes the results as one line of JSON. Whatever the program does
to this process, it can only change what its own functions return: what they should return is never in the sandbox.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False  # typing is not imported: it would take longer than the rest
if TYPE_CHECKING:
    from typing import Any

# What LeetCode's starting code needs, the class Solution with one method, and does not import: APPS' graders have it.
_IMPORTS = """
import bisect, collections, functools, heapq, itertools, math, random, re, string, sys
from bisect import *; from collections import *; from functools import *; from heapq import *; from itertools import *
from math import ceil, comb, floor, gcd, inf, log, log2, sqrt; from typing import *
"""


def pack(value: Any) -> Any:
    """Plain data as JSON: None, bool, int, float and str as they are, others as [kind, *items]. Raises TypeError."""
    if type(value).__module__ == "numpy":
        value = value.item()  # of one number; an array of several raises ValueError
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return ["dict", *[pack(part) for pair in value.items() for part in pair]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, *map(pack, value)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    raise TypeError(f"{type(value)} is no plain data")


def main() -> None:
    program, calls = json.load(sys.stdin)
    results = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what the program prints
    module = sys.modules["solution"] = type(sys)("solution")  # where dataclasses and pickle look for it
    names = vars(module)
    if "class Solution" in program:
        exec(_IMPORTS, names)
    imported = dict(names)
    exec(compile(program, "solution", "exec", dont_inherit=True), names)
    packed = []
    for name, call in calls:
        # Methods are called merge or compress too, which the imports have.
        is_method = names.get(name) is imported.get(name) and hasattr(names.get("Solution"), name)
        function = getattr(names["Solution"](), name) if is_method else names[name]
        packed.append(pack(eval(call, {name: function})))
    with os.fdopen(results, "w") as file:
        file.write(json.dumps(packed) + "\n")
    os._exit(0)  # threads of the program may still run


if __name__ == "__main__":
    main()
