"""torch and transformers, imported when they are first used.

Both take seconds of processor time. The modules with the classes that gin binds import them from here, so that a
configuration with a mistake is refused before they are loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    import transformers as transformers
else:

    class _Lazy:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            value = getattr(importlib.import_module(self._name), attribute)
            setattr(self, attribute, value)  # found at once from now on: an update reads torch's names a thousand times
            return value

    torch, transformers = _Lazy("torch"), _Lazy("transformers")
