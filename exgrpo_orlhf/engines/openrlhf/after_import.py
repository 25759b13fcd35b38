"""Changes a module when it is imported, so that a process does not import modules that it does not use."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
from collections.abc import Callable
from types import ModuleType
from typing import Any


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module right after the module's first import."""

    def __init__(self, functions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._pending = functions

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._pending:
            return None
        function = self._pending.pop(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_then_call(module: ModuleType) -> None:
            execute(module)
            function(module)

        spec.loader.exec_module = execute_then_call  # type: ignore[method-assign]
        return spec
