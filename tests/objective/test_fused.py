"""The arithmetic for GPUs where it is compiled, and where it cannot be. What it computes: test_token_stats.py."""

import os
import shutil

import pytest
import torch

from exgrpo_orlhf.objective import fused
from exgrpo_orlhf.objective import token_stats as token_stats_module
from exgrpo_orlhf.objective.token_stats import token_stats

N, H, V = 19, 8, 150


def statistics(dtype: torch.dtype, temperature: float, entropies: bool) -> list[torch.Tensor]:
    """Values, and gradients of a sum in which every token has a weight of its own."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in ((N, H), (V, H), (V,))]
    targets, slopes = torch.randint(V, (N,), generator=generator), torch.randn(2, N, generator=generator)
    values = token_stats(*leaves[:2], targets, bias=leaves[2], temperature=temperature, chunk_elements=1)
    sum((value * slope).sum() for value, slope in zip(values, slopes[: 1 + entropies], strict=False)).backward()
    return [*(value.detach() for value in values), *(leaf.grad for leaf in leaves)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
def test_compiled_the_arithmetic_gives_what_it_gives_uncompiled(monkeypatch):
    """For this CPU, in blocks of 64 columns and one of 22: nothing is compiled anew for another size."""
    made = {
        "as it is": fused.Arithmetic(fused.sums, fused.gradient),
        "compiled": fused.Arithmetic(*(torch.compile(f, dynamic=True) for f in (fused.sums, fused.gradient))),
    }
    monkeypatch.setattr(token_stats_module, "COLUMNS", 64)
    for case in ((torch.float32, 1.0, False), (torch.float32, 0.7, True), (torch.bfloat16, 0.7, True)):
        results = []
        for arithmetic in made.values():
            monkeypatch.setattr(token_stats_module, "compiled", lambda device, arithmetic=arithmetic: arithmetic)
            results.append(statistics(*case))
        bound = 1e-5 if case[0] == torch.float32 else 2**-7  # a rounding of bfloat16 may fall to the other side
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound * float(theirs.abs().max()))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 5, "sums for two dtypes; gradients for two dtypes, and without entropies"


def test_where_nothing_can_be_compiled_a_gpu_gets_the_arithmetic_of_a_cpu_which_is_said_once(caplog):
    fused.compiled.cache_clear()
    with torch._dynamo.config.patch(disable=True):
        assert fused.compiled(torch.device("cuda")) is None
        assert fused.compiled(torch.device("cuda")) is None
    fused.compiled.cache_clear()
    [record] = caplog.records
    assert "without fused kernels" in record.message
    assert record.message.endswith("torch.compile is switched off")
