"""Import this first in tests of the OpenRLHF engine: it skips them where the OpenRLHF stack is not installed, and makes
OpenRLHF importable without CUDA."""

from __future__ import annotations

import importlib.util
import os

import pytest

# By Ray, which comes with it: pytest puts tests/engines into the path, and would take the folder openrlhf there for it.
if importlib.util.find_spec("ray") is None:
    pytest.skip("the OpenRLHF stack is not installed (make openrlhf-cpu)", allow_module_level=True)

from exgrpo_orlhf.engines.openrlhf import cpu

os.environ.update(cpu.environment())
cpu.install()
