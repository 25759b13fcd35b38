"""The source of a user's function as a file of its own, from which another process loads it."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_FUTURE = "from __future__ import annotations"
_REMEDY = "; make it inside the function, or put the function into a file and bind Verifier.function = 'file.py:name'"


def source_of(function: Any) -> str:
    """A module's text: the function, and what it uses of its script or notebook (imports, functions, classes, constants
    and patterns). Raises ValueError for what has no such text: a lambda, a method, what uses variables around it."""
    if not isinstance(function, FunctionType) or not function.__name__.isidentifier():
        raise ValueError(
            f"the reward must be a function made with def, got {function!r:.80}: a lambda, a method or an object has "
            "no source of its own, from which the grading process loads it and a resumed run knows it again"
        )
    parts: dict[str, str] = {}
    _add(function.__name__, function, function.__globals__, parts)
    return "\n\n".join([_FUTURE, *_script_folder("\n".join(parts.values())), *parts.values()]) + "\n"


def _script_folder(text: str) -> list[str]:
    """Where a text imports what is beside the script (of a notebook: in the current folder), the lines with which
    another process finds it."""
    folder = str(Path(sys.path[0]).absolute())
    nodes = [*ast.walk(ast.parse(text))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    is_beside = any(PathFinder.find_spec(name.partition(".")[0], [folder]) for name in names)
    return [f"import sys\n\nsys.path.insert(0, {folder!r})"] if is_beside else []


def _add(name: str, value: Any, namespace: Mapping[str, Any], parts: dict[str, str]) -> None:
    """Put what makes a name of this namespace into `parts`, behind what it uses itself."""
    module, inner = str(getattr(value, "__module__", None)), str(getattr(value, "__name__", None))
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}"
    elif isinstance(value, FunctionType | type) and module == namespace.get("__name__") and inner.isidentifier():
        parts[name] = ""  # it may use itself
        source = _source(value)
        for used in sorted(_globals(symtable.symtable(f"{_FUTURE}\n{source}", name, "exec"))):
            if used in namespace and used not in parts:
                _add(used, namespace[used], namespace, parts)
            elif used not in namespace and used != inner and not hasattr(builtins, used):
                raise ValueError(f"{name} uses {used}, which is not defined{_REMEDY}")
            if isinstance(package := namespace.get(used), ModuleType):
                parts |= {path: f"import {path}" for path in _submodules(used, package, source)}
        del parts[name]
        parts[name] = source if name == inner else f"{source}\n\n{name} = {inner}"
    elif isinstance(value, re.Pattern):
        parts[name] = f"import re\n\n{name} = re.compile({value.pattern!r}, {value.flags})"
    elif module != namespace.get("__name__") and getattr(sys.modules.get(module), inner, None) is value:
        parts[name] = f"from {module} import {inner} as {name}"
    elif _is_literal(value):
        parts[name] = f"{name} = {value!r}"
    else:
        raise ValueError(f"the reward uses {name}, a {type(value).__name__}, which has no source{_REMEDY}")


def _submodules(name: str, package: ModuleType, source: str) -> Iterator[str]:
    """The modules that a source has as attributes of a package: xml.etree of `xml.etree.ElementTree`, and that one."""
    for node in ast.walk(ast.parse(source)):
        first, *attributes = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else [""]
        module: Any = package if first == name else None
        for attribute in attributes:
            path = f"{module.__name__}.{attribute}" if hasattr(module, "__path__") else ""
            module = getattr(module, attribute, None)
            if not isinstance(module, ModuleType) or sys.modules.get(path) is not module:
                break
            yield path


def _source(value: FunctionType | type) -> str:
    if isinstance(value, FunctionType) and value.__closure__:
        names = ", ".join(value.__code__.co_freevars)
        raise ValueError(f"{value.__name__} uses {names} of the function around it, which has no source{_REMEDY}")
    try:
        return textwrap.dedent(inspect.getsource(value)).rstrip()
    except (OSError, TypeError):
        raise ValueError(f"{value.__name__} is in no file and no cell: its source cannot be read{_REMEDY}") from None


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    """The names that a source takes from outside of it, or from its top."""
    at_top = table.get_type() == "module"
    symbols = [one for one in table.get_symbols() if not one.is_imported()]
    yield from (one.get_name() for one in symbols if one.is_global() or (at_top and one.is_referenced()))
    for child in table.get_children():
        yield from _globals(child)


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError):
        return False
