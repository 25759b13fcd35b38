"""Whether a value is what a setting takes: a type or several, `Literal`, or a bound in `Annotated`."""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from itertools import repeat
from numbers import Integral, Real
from typing import Annotated, Any, Literal, NamedTuple


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


class ConfigError(ValueError):
    """A gin file or binding that cannot be used: says which, where, and what is allowed."""


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message). The message begins with the gin name of the setting."""
    if not condition:
        raise ValueError(message)


class Constraint(NamedTuple):
    """Which values of its type a setting takes, and how a message says it: `rho: Annotated[float, Constraint(…)]`."""

    says: str
    holds: Callable[[Any], bool]


def at_least(low: int) -> Constraint:
    return Constraint(f"must be at least {low}", lambda value: value >= low)


def reference(method: str, example: str) -> Constraint:
    """Of a setting that takes an object with this method, in a gin file a reference."""
    return Constraint(
        f"must be a reference such as {example} (with its parentheses)",
        lambda value: not isinstance(value, type) and callable(getattr(value, method, None)),
    )


Count = Annotated[int, at_least(1)]
Natural = Annotated[int, at_least(0)]
NotNegative = Annotated[float, Constraint("must be at least 0 and finite", lambda value: 0 <= value < math.inf)]
Finite = Annotated[float, Constraint("must be a finite number", math.isfinite)]
Positive = Annotated[float, Constraint("must be positive and finite", lambda value: 0 < value < math.inf)]
Share = Annotated[float, Constraint("must lie in [0, 1]", lambda value: 0 <= value <= 1)]
ShareBelowOne = Annotated[float, Constraint("must lie in [0, 1)", lambda value: 0 <= value < 1)]
PositiveShare = Annotated[float, Constraint("must lie in (0, 1]", lambda value: 0 < value <= 1)]


def check_settings(owner: type, values: Mapping[str, Any], prefix: str | None = None) -> None:
    """Compare arguments of a class with their annotations: types, `Literal`, and `Constraint` in `Annotated`.

    The length of a tuple and what a mapping holds are left to the class, and so is a `Literal` beside a type.
    values: by parameter; those of no parameter are skipped. prefix: of a parameter in the message, if it is not the
        class's name and a dot
    Raises ValueError that names the setting, what it takes, and its value.
    """
    for parameter, hint in annotations_of(owner).items():
        if parameter in values and (takes := refusal(values[parameter], hint)):
            value = values[parameter]
            one = f"; a tuple of one is written ({value!r},)" if "tuple[" in takes and isinstance(value, str) else ""
            raise ValueError(f"{prefix or f'{owner.__name__}.'}{parameter} {takes} got {value!r:.200}{one}")
