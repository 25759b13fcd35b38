"""The replacements that let OpenRLHF run without CUDA, tested without starting Ray."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec

import pytest
import torch

if find_spec("ray") is None:  # which comes with OpenRLHF
    pytest.skip("OpenRLHF is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("the CPU test layout does nothing where there is CUDA", allow_module_level=True)

from exgrpo_orlhf.engines.openrlhf import cpu


@pytest.fixture
def in_new_process(monkeypatch):
    """Calls a function in a process of its own: install() changes torch, and how this process imports."""
    for name, value in cpu.environment().items():
        monkeypatch.setenv(name, value)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=900)


def install_twice() -> dict:
    cpu.install()
    first = list(sys.meta_path), torch.cuda.current_device, torch.cuda.synchronize
    cpu.install()
    return {
        "same": first == (sys.meta_path, torch.cuda.current_device, torch.cuda.synchronize),
        "heavy": sorted({"deepspeed", "openrlhf.utils", "ray", "transformers", "vllm"} & sys.modules.keys()),
        "device": str(torch.zeros(1).to(torch.cuda.current_device()).device),
        "index": str(torch.device(f"cuda:{torch.cuda.current_device()}")),
    }


@pytest.mark.slow
def test_install_is_idempotent_and_imports_nothing_heavy(in_new_process):
    assert in_new_process(install_twice) == {"same": True, "heavy": [], "device": "cpu", "index": "cuda:0"}
