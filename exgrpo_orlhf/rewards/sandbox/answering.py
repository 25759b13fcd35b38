"""The program's process, with assertions: runs the program and then answers the judge's calls. Standard library alone.

Whatever the program does to this process, it can only change what its own functions answer: the tests, what they
expect and the verdict are in the judge's process. Messages are lines of JSON:

    in   ["call", (function, arguments, keyword arguments)], ["value", result], ["raise", (class, arguments)]
    out  ["value", changed, result, printed], ["raise", changed, (class, arguments, error), printed],
         ["call", [], (function, arguments, keyword arguments), printed]

changed: [place, contents] for each argument that the call has changed. Calls of a test's own functions, handed to the
program as arguments, go the other way, between a call and its answer.
"""

from __future__ import annotations

import io
import operator
import os
import sys
from importlib import import_module
from types import ModuleType

from .plain import Packer, contents, dumps, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class _Recorded(io.FileIO):
    """Standard output. What is printed during a call is told to the judge too: a test may look at it."""

    def __init__(self) -> None:
        super().__init__(1, "w", closefd=False)
        self.text = bytearray()

    def write(self, data: Any) -> int:
        written = super().write(data) or 0
        self.text += bytes(data[:written])
        return written


class _Answering:
    def __init__(self, requests: int, answers: int) -> None:
        self.requests = os.fdopen(requests, "rb")
        self.answers = os.fdopen(answers, "wb")
        self.names: dict[str, Any] = {"__name__": "solution"}
        self.held: list[Any] = [self.run, self.look_up]  # what the judge has a reference to
        self.places: dict[int, int] = {}
        self.recorded = _Recorded()
        errors = sys.stdout.errors
        self.printed = sys.stdout = io.TextIOWrapper(io.BufferedWriter(self.recorded), "utf-8", errors)

    def run(self, program: str) -> None:
        exec(compile(program, "solution", "exec"), self.names)

    def look_up(self, names: list[str]) -> dict[str, Any]:
        return {name: self.names[name] for name in names if name in self.names}

    def converse(self) -> Any:
        """Answer calls until there is a result to return, or the judge ends."""
        for line in self.requests:
            verb, message = loads(line.decode())
            packer = Packer(self)
            if verb == "call":
                self.answer(packer, message)
            elif verb == "raise":
                kind, values = packer.unpack(message)
                raise kind(*values)
            else:
                return packer.unpack(message)
        os._exit(0)

    def answer(self, packer: Packer, message: Any) -> None:
        function, arguments, options = packer.unpack(message)
        before = [contents(each) for each in packer.containers]
        try:
            verb, result = "value", function(*arguments, **dict(options))
        except BaseException as error:
            verb, result = "raise", (type(error), tuple(error.args), error.with_traceback(None))
        changed = [
            [place, packer.pack_contents(each)]
            for place, (each, old) in enumerate(zip([*packer.containers], before, strict=True))
            if len(each) != len(old) or not all(map(operator.is_, contents(each), old))
        ]
        self.send([verb, changed, packer.pack(result), self.take_printed()])

    def send(self, message: list[Any]) -> None:
        self.answers.write(dumps(message).encode() + b"\n")
        self.answers.flush()

    def take_printed(self) -> str:
        if not self.printed.closed:
            self.printed.flush()
        text = self.recorded.text.decode(errors="replace")
        self.recorded.text.clear()
        return text

    def pack_other(self, value: Any) -> list[Any]:
        if type(value) is ModuleType:
            return ["module", value.__name__]
        if isinstance(value, type):
            module, name, exception = value.__module__, value.__qualname__, issubclass(value, BaseException)
            known = module.split(".")[0] in sys.stdlib_module_names if exception else module == "builtins"
            if known and getattr(sys.modules.get(module), name, None) is value:
                return ["python", f"{module}:{name}"]
            if exception:
                base = next(each for each in value.__mro__ if each.__module__ == "builtins")
                return ["exception", [self.hold(value), value.__name__, base.__name__]]
        return ["held", self.hold(value)]

    def hold(self, value: Any) -> int:
        place = self.places.setdefault(id(value), len(self.held))
        if place == len(self.held):
            self.held.append(value)
        return place

    def unpack_other(self, tag: str, content: Any) -> Any:
        if tag == "held":
            return self.held[content]
        if tag == "python":
            module, _, name = content.partition(":")
            return operator.attrgetter(name)(import_module(module))
        if tag == "callback":

            def call_back(*arguments: Any, **options: Any) -> Any:
                called = (content, arguments, tuple(options.items()))
                self.send(["call", [], Packer(self).pack(called), self.take_printed()])
                return self.converse()

            return call_back
        raise ValueError(f"unknown: {tag}")


def main() -> None:
    _Answering(3, 4).converse()
