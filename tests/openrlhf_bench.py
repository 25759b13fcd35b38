"""What the tests of the OpenRLHF engine share: skip where its stack is absent, and one actor without Ray."""

from __future__ import annotations

import importlib.util
import os

import pytest

if importlib.util.find_spec("openrlhf") is None:
    pytest.skip("the OpenRLHF stack is not installed (make openrlhf-cpu)", allow_module_level=True)

from exgrpo_orlhf.engines.openrlhf import cpu

os.environ.update(cpu.environment())
cpu.install()
