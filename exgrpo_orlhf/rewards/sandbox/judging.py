"""Runs a program under its judge, in process 1 of a sandbox. Standard library alone.

The program's process runs `answering.py`. The judge is a fork of process 1 with the program's limits. It is not
dumpable: the program, though of the same user, reads neither its memory nor its descriptors.
"""

from __future__ import annotations

import json
import marshal
import os
import time
from typing import Any

from . import answering, plain, running
from .judge import judge
from .program import Program
from .system_calls import libc

_DUMPABLE = 4
# The program's process cannot read the files of `answering.py`: the judge sends it the code.
_CODE = marshal.dumps([(each.__name__, each.__loader__.get_code(each.__name__)) for each in (plain, answering)])  # type: ignore[union-attr]
_START = f"""
import marshal, os, sys
_code = b""
while len(_code) < {len(_CODE)}:
    _code += os.read(3, {len(_CODE)} - len(_code))
sys.modules["sandbox"] = type(sys)("sandbox")
for _name, _code in marshal.loads(_code):
    _module = sys.modules[_name] = type(sys)(_name)
    _module.__package__ = "sandbox"
    exec(_code, _module.__dict__)
_module.main()
"""


def result(orders: dict[str, Any], root: bool) -> dict[str, Any]:
    """The program under its judge: 'exit 0' if it passed all tests, else 'exit 1' and the reason as its output."""
    end = time.monotonic() + orders["timeout"]
    silent = os.open("/dev/null", os.O_RDWR)
    taken, requests, answers, verdict = os.pipe(), os.pipe(), os.pipe(), os.pipe()
    running.start(orders, root, [silent, taken[1], requests[0], answers[1]], [*orders["command"], "-c", _START])
    own = os.fork()
    if own == 0:
        try:
            running.keep(silent, silent, silent, requests[1], answers[0], verdict[1])
            running.give_up_rights(orders, root)
            libc.prctl(_DUMPABLE, 0, 0, 0, 0)  # a change of the user may have set it
            judge(orders["program"], orders["tests"], _CODE, Program(3, 4, 5))
        finally:
            os._exit(1)
    for fd in (silent, taken[1], *requests, *answers, verdict[1]):
        os.close(fd)
    how, _ = running.watch(own, None, taken[0], b"", orders, end, orders["most_output"])
    ended = running.end_all(own, how)
    said = os.read(verdict[0], 4096)
    os.close(taken[0])
    os.close(verdict[0])
    if how != "ended" or not said:
        return {"how": ended if ended != "exit 0" else "exit 1", "output": ""}
    passed, why = json.loads(said)
    return {"how": "exit 0" if passed else "exit 1", "output": why}
