"""Import this first in tests of the OpenRLHF engine: it skips them where the OpenRLHF stack is not installed, and makes
OpenRLHF importable without CUDA."""

from __future__ import annotations

import importlib.util
import os

import pytest

# Not its name alone: pytest puts tests/engines into the path, and the folder openrlhf there would do.
if importlib.util.find_spec("openrlhf.trainer") is None:
    pytest.skip("the OpenRLHF stack is not installed (make openrlhf-cpu)", allow_module_level=True)

from exgrpo_orlhf.engines.openrlhf import cpu

os.environ.update(cpu.environment())
cpu.install()
