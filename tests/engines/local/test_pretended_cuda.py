"""Both engines' code for CUDA without a GPU: on a pretended device (pretended_cuda/device.py), in separate processes.

In float32 forward passes are bit-identical to the CPU's, because the same kernels run in the same order, with the same
random numbers. Gradients differ by rounding, because for a tensor subclass torch uses other formulas in the backward
pass of silu. In bfloat16 rows are packed and statistics fused as on a GPU, with plain Python instead of kernels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_builders import BUILDERS, ROOT, python

from exgrpo_orlhf.sampling.torch_loop import CHECK_EVERY

PROGRAMS = BUILDERS / "pretended_cuda"
RATE = 1e-3  # of learning, in local.py
TWO_DEVICES = r"aten\.\w+\.\w+: tensors on two devices, cuda:0 \(.*\) and cpu \(.*\)"  # operation and shapes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def device(tmp_path_factory) -> Path:
    """guard.cpp, compiled against this torch."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C++ compiler, or no LD_PRELOAD")
    if torch.version.cuda is not None:
        pytest.skip("this torch has a CUDA of its own")
    library, at = tmp_path_factory.mktemp("device") / "guard.so", Path(torch.__file__).parent
    command = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", f"-I{at / 'include'}", str(PROGRAMS / "guard.cpp")]
    command += ["-o", str(library), f"-L{at / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{at / 'lib'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def run(device: Path, program: str, *arguments: Path) -> dict[str, Any]:
    done = python(PROGRAMS / program, *arguments, cwd=ROOT, env={"LD_PRELOAD": str(device)})
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def local(device, warm_model, tmp_path_factory) -> dict[str, Any]:
    return run(device, "local.py", warm_model, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def actor(device, warm_model) -> dict[str, Any]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("the OpenRLHF stack is not installed (make openrlhf-cpu)")
    return run(device, "actor.py", warm_model)


def test_in_float32_the_local_engine_computes_on_cuda_what_it_does_on_a_cpu(local):
    """Scores, rollouts, answers with and without a temperature, an update with a KL term and checkpointed layers."""
    figures = local["float32"]
    assert figures["responses"], "rollouts and answers, token by token"
    assert (figures["scores"], figures["policy"]) == (0, 0)
    assert figures["loss"] < 2e-6, "with the gradient's norm, which is below 1"
    assert figures["gradient"] < 2e-6, "of its norm: a few roundings of float32, 6e-8 each, in two layers"
    # If the gradient is far above that, Adam's step differs only by its kernel: fused, or a loop.
    assert figures["weights"] < RATE / 200


@pytest.mark.parametrize("saved", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_checkpoint_of_either_device_is_continued_on_either(local, saved, name):
    """With the Adam of the device that continues: on CUDA the fused one, whose step counters are on CUDA."""
    figures = local["float32"][f"{saved} to {name}"]
    assert figures["weights"] < (RATE / 200 if saved != name else 1e-12)
    assert figures["fused"] is (True if name == "cuda" else None)
    assert figures["steps"] == [name]


def test_in_bfloat16_the_local_engine_stays_near_float32_and_keeps_its_cache_in_bfloat16(local):
    figures = local["bfloat16"]
    assert figures["cache"] == ["ReservedLayer torch.bfloat16 torch.bfloat16"]
    assert figures["log-probs"] < 0.05
    assert figures["cosine"] > 0.9, "of the updates"
    assert figures["same responses"] > 0.5


def test_rows_are_packed_in_bfloat16_and_padded_in_float32_which_flash_attention_does_not_take(local):
    assert local["packs"] == {"float32": False, "bfloat16": True}


def test_generation_waits_for_the_device_once_a_token_and_once_in_many_for_finite_logits(local):
    """The wait at each token determines which rows have not ended. With prompts of several lengths transformers waits
    once more, to find out whether it can leave out the mask."""
    tokens, looks = 130, 130 // CHECK_EVERY + 1
    assert local["waits"]["one prompt length"] == {"nonzero": tokens, "_local_scalar_dense": looks, "_to_copy": 1}
    padded = local["waits"]["two prompt lengths"]
    assert padded == {"nonzero": tokens, "_local_scalar_dense": looks + tokens + 1, "_to_copy": 1}


def test_an_update_waits_for_the_device_a_few_times_a_micro_batch_and_not_once_a_row(local):
    policy, reference = local["waits"]["passes"]  # a pass of the reference with every micro-batch
    steps = 2
    assert local["waits"]["update"] == {
        "_to_copy": 2 * policy,  # log-probs and entropies
        "_local_scalar_dense": reference + steps,  # the loss, the norm
    }


def test_a_tensor_left_on_the_cpu_stops_the_local_engine_and_the_operation_is_named(local):
    for work in ("score", "rollout", "update"):
        assert re.fullmatch(TWO_DEVICES, local["planted"][work])


@pytest.mark.openrlhf
@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_openrlhfs_actor_computes_on_cuda_what_it_does_on_a_cpu(actor, rows):
    """In bfloat16, as OpenRLHF holds its weights: log-probs, entropies and every metric of an update."""
    figures = actor[rows]
    assert (figures["log_probs"], figures["entropies"], figures["status"]) == (0, 0, 0)
    assert figures["gradient"] < 0.02, "of its norm: a few roundings of bfloat16, 0.004 each, in two layers"


@pytest.mark.openrlhf
def test_a_tensor_left_on_the_cpu_stops_openrlhfs_actor_and_the_operation_is_named(actor):
    for work in ("forward", "loss"):
        assert re.fullmatch(TWO_DEVICES, actor["planted"][work])
