"""Whether a value fits an annotation: a type or several, `Literal`, or a bound in `Annotated` (see settings.py)."""

from __future__ import annotations

import inspect
import types
import typing
from functools import cache
from itertools import repeat
from numbers import Integral, Real
from typing import Any, Literal


@cache
def annotations_of(owner: type) -> dict[str, Any]:
    """Of the arguments with which an object of a class is made."""
    return typing.get_type_hints(inspect.getattr_static(owner, "__init__"), include_extras=True)


def refusal(value: Any, hint: Any) -> str | None:
    """What an annotation takes, for a message, if this value does not fit."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    optional, others = types.NoneType in kinds, [kind for kind in kinds if kind is not types.NoneType]
    if optional and value is None:
        return None
    if len(others) == 1 and typing.get_origin(others[0]) is Literal:
        choices = typing.get_args(others[0])
        listed = f"must be one of {', '.join(map(repr, choices))}{', or None' * optional};"
        return None if value in choices else listed
    if not any(_is_of(value, kind) for kind in others):
        names = [getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind for kind in kinds]
        shown = " | ".join(kind.__name__ if type(kind) is type else str(kind) for kind in names)
        return f"takes {shown.replace('NoneType', 'None').replace('typing.', '')},"
    bound = getattr(others[0], "__metadata__", (None,))[0]
    return f"{bound.says}{', or None;' if optional else ','}" if bound and not bound.holds(value) else None


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a type; True for what is no type, such as `Any`, a `Literal` or a mapping."""
    kind = kind.__origin__ if hasattr(kind, "__metadata__") else kind
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)  # map ends with the shorter one: the length is left to the class
        return isinstance(value, tuple) and all(map(_is_of, value, repeat(kinds[0]) if kinds[-1] is ... else kinds))
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)
