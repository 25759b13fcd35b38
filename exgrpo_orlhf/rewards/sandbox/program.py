"""The program as the judge sees it: references to what is in the program's process. Standard library alone.

A call of one of the program's functions goes to its process (`answering.py`) with the arguments. The result comes back
as plain data (`plain.py`) or, if it is anything else, as another reference. Arguments that the function changed are
changed here too.

A reference is not compared, ordered or calculated with plain data: that is wrong at once, however the program's class
defines it, and no test can catch it. Between two references the program's own operators decide.
"""

from __future__ import annotations

import builtins
import copy
import importlib
import math
import operator
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .plain import Packer, dumps, loads

_LONGEST = 32 * 2**20  # bytes of an answer


class Theirs:
    """An object of the program's: a reference to it. What is done with it happens in the program's process."""

    __slots__ = ("_place_", "_program_")

    def __init__(self, program: Program, place: int) -> None:
        object.__setattr__(self, "_program_", program)
        object.__setattr__(self, "_place_", place)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._program_.call(self, arguments, options)

    def __getattr__(self, name: str) -> Any:
        return _do(getattr, self, name)

    def __enter__(self) -> Any:
        return _do(getattr, self, "__enter__")()

    def __exit__(self, *error: Any) -> Any:
        return _do(getattr, self, "__exit__")(None, None, None)

    def __deepcopy__(self, _: Any) -> Any:
        return _do(copy.deepcopy, self)

    def __contains__(self, item: Any) -> bool:
        return any(each is item or each == item for each in self)  # type: ignore[attr-defined]

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Theirs and bool(_do(isinstance, value, self))

    def __subclasscheck__(self, kind: Any) -> bool:
        return type(kind) is Theirs and bool(_do(issubclass, kind, self))


def _do(function: Callable[..., Any], theirs: Theirs, *arguments: Any) -> Any:
    return theirs._program_.call(function, (theirs, *arguments), {})


def _between(function: Callable[..., Any], swapped: bool = False) -> Callable[[Theirs, Any], Any]:
    def method(theirs: Theirs, other: Any) -> Any:
        if type(other) is not Theirs:
            theirs._program_.end(False, f"{function.__name__} of an object of the program's and {type(other).__name__}")
        return _do(function, other, theirs) if swapped else _do(function, theirs, other)

    return method


for _function in (
    len, iter, next, bool, str, repr, hash, int, float, complex, operator.index, reversed, abs, round, dir, copy.copy,
    operator.getitem, operator.setitem, operator.delitem, setattr, delattr, operator.neg, operator.pos,
    operator.invert, math.floor, math.ceil, math.trunc, format, bytes,
):  # fmt: skip
    setattr(Theirs, f"__{_function.__name__}__", lambda self, *given, _f=_function: _do(_f, self, *given))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Theirs, f"__{_name}__", _between(getattr(operator, _name)))
for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "lshift",
    "rshift",
    "and_",
    "or_",
    "xor",
):
    setattr(Theirs, f"__{_name.strip('_')}__", _between(getattr(operator, _name)))
    setattr(Theirs, f"__r{_name.strip('_')}__", _between(getattr(operator, _name), swapped=True))


class Program:
    """The program in its process, at the other end of two pipes.

    verdict: the descriptor on which `end` tells how the tests ended; the program's process does not have it
    """

    def __init__(self, requests: int, answers: int, verdict: int) -> None:
        self.requests = os.fdopen(requests, "wb")
        self.answers = os.fdopen(answers, "rb")
        self.verdict = verdict
        self.references: dict[int, Any] = {}  # place there: the reference to it here
        self.exceptions: dict[type, Theirs] = {}  # a class of exceptions here: the program's own class
        self.callbacks: list[Any] = []
        self.run, self.look_up = Theirs(self, 0), Theirs(self, 1)

    def end(self, passed: bool, why: str) -> NoReturn:
        os.write(self.verdict, dumps([passed, why[:200]]).encode())
        os._exit(0)

    def call(self, function: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        """The result of a function, called in the program's process. Raises what it raises."""
        packer = Packer(self)
        self.send("call", packer, (function, tuple(arguments), tuple(options.items())))
        while True:
            verb, changed, packed, printed = self.receive()
            try:
                answer = Packer(self, packer.containers) if verb != "call" else Packer(self)
                for place, content in changed:
                    answer.fill(packer.containers[place], content)
                result = answer.unpack(packed)
                if verb == "raise":
                    error = self.error(*result)
                elif verb == "call":
                    place, values, named = result
                    function = dict(enumerate(self.callbacks))[place]
            except Exception as complaint:  # whatever the program sent
                self.end(False, f"the answer is no answer: {complaint!r:.200}")
            sys.stdout.write(printed)
            if verb == "value":
                return result
            if verb == "raise":
                raise error
            self.call_back(function, values, named)

    def call_back(self, function: Any, arguments: Any, options: Any) -> None:
        """Call a function of the test's for the program."""
        try:
            verb, result = "value", function(*arguments, **dict(options))
        except Exception as error:
            verb, result = "raise", (type(error), error.args)
        self.send(verb, Packer(self), result)

    def send(self, verb: str, packer: Packer, message: Any) -> None:
        text = dumps([verb, packer.pack(message)])
        try:
            self.requests.write(text.encode() + b"\n")
            self.requests.flush()
        except OSError:
            self.end(False, "the program's process has ended")

    def receive(self) -> tuple[str, Any, Any, str]:
        line = self.answers.readline(_LONGEST)
        if not line.endswith(b"\n"):
            self.end(False, "the answer is too long" if len(line) == _LONGEST else "the program's process has ended")
        try:
            verb, changed, packed, printed = loads(line.decode())
        except Exception as error:  # whatever the program sent
            self.end(False, f"the answer is no answer: {error!r:.200}")
        if verb not in ("value", "raise", "call") or type(printed) is not str:
            self.end(False, "the answer is no answer")
        return verb, changed, packed, printed

    def pack_other(self, value: Any) -> list[Any]:
        if type(value) is Theirs:
            return ["held", value._place_]
        if isinstance(value, type) and value in self.exceptions:
            return ["held", self.exceptions[value]._place_]
        if type(value) in self.exceptions and value.theirs is not None:
            return ["held", value.theirs._place_]
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if isinstance(module, str) and isinstance(name, str) and module.split(".")[0] in sys.stdlib_module_names:
            found: Any = sys.modules.get(module)
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is value:
                return ["python", f"{module}:{name}"]
        if callable(value):
            self.callbacks.append(value)
            return ["callback", len(self.callbacks) - 1]
        self.end(False, f"the test hands the program a {type(value).__name__}")

    def unpack_other(self, tag: str, content: Any) -> Any:
        if tag == "held" and type(content) is int:
            return self.references.setdefault(content, Theirs(self, content))
        if tag == "python":
            module, name = content.split(":")
            found = getattr(module_named(module), name)
            if isinstance(found, type) and (module == "builtins" or issubclass(found, BaseException)):
                return found
        if tag == "module":
            return module_named(content)
        if tag == "exception":
            place, name, base = content
            if place not in self.references:
                kind = type(name, (_Raised, getattr(builtins, base)), {})
                self.references[place], self.exceptions[kind] = kind, Theirs(self, place)
            return self.references[place]
        raise ValueError(f"unknown: {tag!r:.80}")

    def error(self, kind: Any, values: Sequence[Any], theirs: Theirs) -> BaseException:
        """What the program has raised, as an exception of this process."""
        if not issubclass(kind, BaseException):
            raise TypeError("only exceptions are raised")
        try:
            error = kind(*values)
        except Exception:  # its class takes other arguments than `args`
            error = kind.__new__(kind, *values)
        if kind in self.exceptions:
            error.theirs = theirs
        return error  # type: ignore[no-any-return]


class _Raised:
    """What the classes of exceptions have that stand for the program's own."""

    theirs: Any = None

    def __getattr__(self, field: str) -> Any:
        return getattr(self.theirs, field)

    def __str__(self) -> str:
        return str(self.theirs)


def module_named(name: str) -> Any:
    """A module of Python's, or numpy. Raises ImportError."""
    if name.split(".")[0] not in {*sys.stdlib_module_names, "numpy"}:
        raise ImportError(f"{name} is no module of Python's")
    return importlib.import_module(name)
