"""Plain data as JSON, between the judge and a program's process. Each side packs with it, and unpacks what it is sent.

Plain are None, bool, int, float, str, bytes, complex, list, tuple, dict, set, frozenset, and some of the standard
library's own values and containers, each of exactly that type; also numpy's numbers and arrays. Anything else is left
to `other`: it stays where it is, and a reference to it is sent. No code is sent, and unpacking runs none.
"""

from __future__ import annotations

import builtins
import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque

TYPE_CHECKING = False  # typing is not imported: it would take longer than the rest
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any, Protocol

    class Other(Protocol):
        """What a side does with values that are not plain. Both methods raise what they like for what they do not
        know."""

        def pack_other(self, value: Any) -> list[Any]: ...
        def unpack_other(self, tag: str, content: Any) -> Any: ...


_SCALARS = {type(None), bool, int, float, str}
_FIXED: dict[str, Callable[[Iterable[Any]], Any]] = {"tuple": tuple, "frozenset": frozenset}
# Two sides that change one of these see the same contents again after each call.
_CHANGING: dict[str, type] = {
    kind.__name__: kind for kind in (list, dict, set, bytearray, deque, Counter, OrderedDict, defaultdict)
}
_MADE: Mapping[str, Callable[[Any], Any]] = {  # the arguments from which a value is made again
    "builtins.complex": lambda value: (value.real, value.imag),
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.slice": lambda value: (value.start, value.stop, value.step),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "decimal.Decimal": lambda value: (str(value),),
    "datetime.date": lambda value: value.__reduce__()[1],
    "datetime.time": lambda value: value.__reduce__()[1],
    "datetime.datetime": lambda value: value.__reduce__()[1],
    "datetime.timedelta": lambda value: value.__reduce__()[1],
}
_WIDE = 2**4096  # larger numbers are sent in hexadecimal digits, which are read in linear time
_CONSTANTS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
dumps = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
loads = json.JSONDecoder(parse_constant=_CONSTANTS.__getitem__).decode


class Packer:
    """The values of one message, or of a request and its answer: a container that occurs twice stays one container.

    containers: those that can change, in the order in which they occurred; the other side's Packer has the same
    """

    def __init__(self, other: Other, containers: Iterable[Any] = ()) -> None:
        self.other = other
        self.containers: list[Any] = []
        self._places: dict[int, int] = {}
        for each in containers:
            self._add(each)

    def _add(self, container: Any) -> None:
        self._places[id(container)] = len(self.containers)
        self.containers.append(container)

    def pack(self, value: Any) -> Any:
        """The value as JSON has it: a scalar, or [tag, content]."""
        kind = type(value)
        if kind in _SCALARS:
            return ["int", hex(value)] if kind is int and not -_WIDE < value < _WIDE else value
        name = kind.__name__
        if _CHANGING.get(name) is kind:
            place = self._places.get(id(value))
            if place is not None:
                return ["same", place]
            self._add(value)
            return [name, self.pack_contents(value)]
        if _FIXED.get(name) is kind:
            return [name, self._pack_items([*value])]
        if kind is bytes:
            return ["bytes", value.hex()]
        path = f"{kind.__module__}.{kind.__qualname__}"
        if path in _MADE and _find(path, sys.modules) is kind:
            return ["made", [path, self._pack_items([*_MADE[path](value)])]]
        if kind.__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biufcSU":
            return ["numpy", [value.dtype.str, list(value.shape), self._pack_items(value.ravel().tolist())]]
        return self.other.pack_other(value)

    def pack_contents(self, container: Any) -> list[Any]:
        """What is in a container that can change: its items, or its keys and then its values."""
        return self._pack_items(contents(container))

    def _pack_items(self, items: list[Any]) -> list[Any]:
        kinds = set(map(type, items))
        if kinds <= _SCALARS and (int not in kinds or all(-_WIDE < x < _WIDE for x in items if type(x) is int)):
            return items
        return [*map(self.pack, items)]

    def unpack(self, packed: Any) -> Any:
        """The value of `pack` on the other side. Raises whatever is wrong with it, in any way."""
        if type(packed) is not list:
            if type(packed) in _SCALARS:
                return packed
            raise ValueError("an object of JSON is no value")
        tag, content = packed
        if tag in _CHANGING:
            container = _CHANGING[tag]()
            self._add(container)
            self.fill(container, content)
            return container
        if tag in _FIXED:
            return _FIXED[tag](self._unpack_items(content))
        if tag == "same":
            return self.containers[content]
        if tag == "int":
            return int(content, 16)
        if tag == "bytes":
            return bytes.fromhex(content)
        if tag == "made":
            path, arguments = content
            return _find(path if path in _MADE else "", None)(*self._unpack_items(arguments))
        if tag == "numpy":
            kind, shape, items = content
            return _numpy(kind, shape, self._unpack_items(items))
        return self.other.unpack_other(tag, content)

    def fill(self, container: Any, content: Any) -> None:
        """Replace what is in a container by the content that `pack_contents` made."""
        items = self._unpack_items(content)
        container.clear()
        if isinstance(container, dict):
            half = len(items) // 2
            for key, value in zip(items[:half], items[half:], strict=True):
                container[key] = value
        elif isinstance(container, set):
            container.update(items)
        else:
            container.extend(items)

    def _unpack_items(self, items: Any) -> list[Any]:
        if type(items) is not list:
            raise ValueError("items are a list")
        return items if set(map(type, items)) <= _SCALARS else [*map(self.unpack, items)]


def contents(container: Any) -> list[Any]:
    """The items of a container, or its keys and then its values."""
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


def _find(path: str, loaded: Mapping[str, Any] | None) -> Any:
    """The object "module.name", in a module that is loaded, or (None) in one that may be imported."""
    module, _, name = path.rpartition(".")
    if loaded is None:
        __import__(module)
    return getattr(sys.modules.get(module, builtins), name, None)


def _numpy(kind: str, shape: list[int], items: list[Any]) -> Any:
    import numpy

    dtype = numpy.dtype(kind)
    if dtype.kind not in "biufcSU":
        raise ValueError("an array of objects is not plain")
    return numpy.array(items, dtype=dtype).reshape(shape)[()]
