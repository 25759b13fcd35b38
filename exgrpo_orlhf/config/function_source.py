"""The source of a user's function as a file of its own, from which another process loads it."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_FUTURE = "from __future__ import annotations"
_REMEDY = "; put it into a file, and bind Verifier.function = 'file.py:name'"


def source_of(function: Any) -> str:
    """The text of a module with the function and what it uses of its script or notebook: imports, other functions,
    classes, constants and patterns. Equal functions have equal texts.

    Raises ValueError for what cannot be written: a lambda, a method, a function that uses variables of one around it.
    """
    if not isinstance(function, FunctionType) or not function.__name__.isidentifier():
        raise ValueError(
            f"the reward must be a function made with def, got {function!r:.80}: a lambda, a method or an object has "
            "no source of its own, from which the grading process loads it and a resumed run knows it again"
        )
    parts: dict[str, str] = {}
    _add(function.__name__, function, function.__globals__, parts)
    return "\n\n".join([_FUTURE, *parts.values()]) + "\n"


def _add(name: str, value: Any, namespace: Mapping[str, Any], parts: dict[str, str]) -> None:
    """Put what makes a name of this namespace into `parts`, behind what it uses itself."""
    if name in parts:
        return
    module, inner = str(getattr(value, "__module__", None)), str(getattr(value, "__name__", None))
    if isinstance(value, ModuleType):
        parts[name] = _path_of(value) + f"import {value.__name__} as {name}"
    elif isinstance(value, FunctionType | type) and module == namespace.get("__name__"):
        parts[name] = ""  # it may use itself
        source = _source(value)
        for used in sorted(_globals(symtable.symtable(f"{_FUTURE}\n{source}", name, "exec"))):
            if used in namespace:
                _add(used, namespace[used], namespace, parts)
            elif used != inner and not hasattr(builtins, used):
                raise ValueError(f"{name} uses {used}, which is not defined{_REMEDY}")
        del parts[name]
        parts[name] = source if name == inner else f"{source}\n\n{name} = {inner}"
    elif isinstance(value, re.Pattern):
        parts[name] = f"import re\n\n{name} = re.compile({value.pattern!r}, {value.flags})"
    elif module in sys.modules and getattr(sys.modules[module], inner, None) is value:
        parts[name] = _path_of(sys.modules[module]) + f"from {module} import {inner} as {name}"
    elif _is_literal(value):
        parts[name] = f"{name} = {value!r}"
    else:
        raise ValueError(
            f"the reward uses {name}, a {type(value).__name__} that cannot be written into the run's folder: make it "
            f"inside the function{_REMEDY}"
        )


def _source(value: FunctionType | type) -> str:
    """Of a function or class. Raises ValueError."""
    if isinstance(value, FunctionType) and value.__closure__:
        raise ValueError(
            f"{value.__name__} uses {', '.join(value.__code__.co_freevars)} of the function around it, which another "
            f"process does not have: give it as a default argument, or define it outside{_REMEDY}"
        )
    try:
        return textwrap.dedent(inspect.getsource(value)).rstrip()
    except (OSError, TypeError):
        raise ValueError(
            f"the source of {value.__name__} cannot be read: it is in no file and no cell{_REMEDY}"
        ) from None


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    """The names that a source takes from outside of it, or from its top."""
    at_top = table.get_type() == "module"
    symbols = [one for one in table.get_symbols() if not one.is_imported()]
    yield from (one.get_name() for one in symbols if one.is_global() or (at_top and one.is_referenced()))
    for child in table.get_children():
        yield from _globals(child)


def _path_of(module: ModuleType) -> str:
    """A line that lets a module be found that is not installed: one beside a script, say."""
    top = import_module(module.__name__.partition(".")[0])
    file = Path(top.__file__ or "").absolute() if getattr(top, "__file__", None) else None
    if file is None or any(file.is_relative_to(path) for path in sysconfig.get_paths().values()):
        return ""
    folder = file.parent.parent if file.name == "__init__.py" else file.parent
    return f"import sys\n\nsys.path.append({str(folder)!r})\n"


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
