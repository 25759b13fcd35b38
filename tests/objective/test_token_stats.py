"""Log-probs and entropies in chunks against the plain computation over the whole logits."""

import os
import shutil

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from exgrpo_orlhf.attention import products
from exgrpo_orlhf.objective import token_stats as token_stats_module
from exgrpo_orlhf.objective.token_stats import block_gradient, block_sums, compiled, token_stats

N, H, V = 23, 8, 37


@pytest.fixture(params=["in place", "fused"])
def arithmetic(request, monkeypatch):
    """That of a CPU, and that of a GPU, not compiled, in blocks of 5 columns."""
    if request.param == "fused":
        monkeypatch.setattr(token_stats_module, "compiled", lambda device: (block_sums, block_gradient))
        monkeypatch.setattr(token_stats_module, "COLUMNS", 5)


def inputs(dtype=torch.float32, bias=True, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = scale * torch.randn(N, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64)
    offsets = torch.randn(V, generator=generator, dtype=torch.float64)
    targets = torch.randint(V, (N,), generator=generator)
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, offsets)]
    return leaves[0], leaves[1], (leaves[2] if bias else None), targets


def plain(hidden, weight, bias, targets, temperature=1.0):
    """The whole logits at once; entropies at temperature 1."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = (logits / temperature).log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    log_p = logits.log_softmax(1)
    return logprobs, -(log_p.exp() * log_p).sum(1)


def chunked(hidden, weight, bias, targets, temperature=1.0, chunk=5):
    return token_stats(
        hidden, weight, targets, bias=bias, temperature=temperature, chunk_elements=chunk * weight.shape[0]
    )


def gradients(outputs, leaves, use=(True, True)):
    """Of a sum in which every token has a weight of its own."""
    generator = torch.Generator().manual_seed(9)
    total = torch.zeros((), dtype=outputs[0].dtype)
    for output, used in zip(outputs, use, strict=True):
        weights = torch.randn(len(output), generator=generator, dtype=torch.float64).to(output.dtype)
        if used:
            total = total + (output * weights).sum()
    return torch.autograd.grad(total, leaves)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("chunk", [1, 5, 23, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("least", [1, products.LARGE], ids=["oneDNN", "torch"])
def test_values_and_gradients_equal_the_plain_computation(chunk, temperature, bias, least, monkeypatch):
    monkeypatch.setattr(products, "LARGE", least)
    hidden, weight, offsets, targets = inputs(bias=bias)
    leaves = [hidden, weight, offsets] if bias else [hidden, weight]
    outputs = chunked(hidden, weight, offsets, targets, temperature, chunk)
    expected = plain(hidden, weight, offsets, targets, temperature)
    for a, b in zip(outputs, expected, strict=True):
        assert a.dtype == torch.float32
        assert a.shape == (N,)
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients(outputs, leaves), gradients(expected, leaves), strict=True):
        assert a.dtype == torch.float32
        # two logits of up to 18.5, sums of H products, over the lowest temperature: 2 · 8 · 2^-24 · 18.5 / 0.6
        assert torch.allclose(a, b, rtol=1e-5, atol=3e-5)


BOTH, ALL = (True, True), (0, 1, 2)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize(
    ("use", "wanted"),
    [((True, False), ALL), ((False, True), ALL), (BOTH, (0,)), (BOTH, (1,)), (BOTH, (2,)), (BOTH, (0, 2))],
)
def test_an_output_used_alone_and_inputs_that_alone_need_a_gradient_have_the_plain_one(use, wanted):
    *leaves, targets = inputs(torch.float64)
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i in wanted)
    needed = [leaves[i] for i in wanted]
    slopes = gradients(chunked(*leaves, targets, 0.7), needed, use)
    for a, b in zip(slopes, gradients(plain(*leaves, targets, 0.7), needed, use), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("chunk", [1, 5, 23])
def test_bfloat16_inputs_give_float32_values_and_close_bfloat16_gradients(chunk):
    """Against float32 from the same rounded inputs: one rounding of the logits and one of the gradient, no more."""
    low = inputs(torch.bfloat16)
    high = [tensor.detach().float().requires_grad_() for tensor in low[:3]]
    outputs, expected = chunked(*low, chunk=chunk), plain(*high, low[3])
    for a, b in zip(outputs, expected, strict=True):
        assert a.dtype == torch.float32
        # two logits of up to 18.5, each rounded by 2^-8 of it at most
        torch.testing.assert_close(a, b, rtol=0, atol=2 * 2**-8 * 18.5)
    for a, b in zip(gradients(outputs, list(low[:3])), gradients(expected, high), strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.float() - b).norm() < 0.02 * b.norm()


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("scale", [5.0, 30.0])
def test_sharp_distributions_stay_exact(scale):
    """Logits of tens to hundreds, as a confident model has them: entropies near 0, log-probs far below."""
    arguments = inputs(scale=scale)
    hidden, weight, offsets = (tensor.detach().double() for tensor in arguments[:3])
    exact = plain(hidden, weight, offsets, arguments[3])
    largest = torch.nn.functional.linear(hidden, weight, offsets).abs().max()
    for a, b in zip(chunked(*arguments), exact, strict=True):
        assert torch.isfinite(a).all()
        # two logits, each a sum of H products in float32
        assert (a - b).abs().max() <= 2 * H * 2**-24 * largest


@pytest.mark.usefixtures("arithmetic")
def test_an_offset_common_to_all_logits_changes_nothing():
    """Softmax does not see it; e^(z + 100) would overflow, and a difference of two sums of its size would be coarse.

    In eighths every logit is exact, with the offset and without, and so are the results: they are bit-identical.
    """
    hidden, weight, offsets, targets = inputs()
    coarse = [(tensor.detach() * 8).round() / 8 for tensor in (hidden, weight, offsets)]
    for temperature in (1.0, 0.7):
        shifted = chunked(*coarse[:2], coarse[2] + 100, targets, temperature)
        for a, b in zip(shifted, chunked(*coarse, targets, temperature), strict=True):
            assert torch.equal(a, b)


class Recorder(TorchDispatchMode):
    """The sizes of all tensors that any operation returns, in the forward and in the backward pass."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, (tuple, list)) else (out,)
        self.sizes += [tensor.numel() for tensor in results if isinstance(tensor, torch.Tensor)]
        return out


def sizes_of(function) -> tuple[int, int]:
    """Elements of the largest tensor made in a forward and backward pass, and of the largest kept between the two."""
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with Recorder() as recorder, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, entropies = function()
        (logprobs + entropies).sum().backward()
    return max(recorder.sizes), max(kept)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_logits_never_exist(temperature, dtype, monkeypatch):
    """No tensor, forward or backward, is larger than a chunk's logits; the plain computation shows the recorder works.

    What the forward pass keeps for the backward pass is smaller still.
    """
    n, h, v, chunk = 64, 3, 500, 4
    monkeypatch.setattr(token_stats_module, "COLUMNS", 25)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, h, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(v, h, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(v, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(v, (n,), generator=generator)
    arguments = (hidden, weight, bias, targets, temperature)
    largest, largest_kept = sizes_of(lambda: plain(*arguments))
    assert min(largest, largest_kept) >= n * v
    largest, largest_kept = sizes_of(lambda: chunked(*arguments, chunk))
    assert largest <= chunk * v
    assert largest_kept <= v * h


def test_a_block_is_never_narrower_than_the_hidden_states():
    """However many the tokens: no block of a column or two, and nothing larger than the hidden states themselves."""
    hidden, weight, offsets, targets = inputs()
    many = hidden.detach().repeat(4, 1).requires_grad_()
    largest, _ = sizes_of(lambda: token_stats(many, weight, targets.repeat(4), bias=offsets, chunk_elements=1))
    assert largest == 4 * N * H > V * H


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_thousand_blocks_are_as_exact_as_one(temperature):
    """Rounding does not pile up over the blocks: values and gradients stay within a few units in the last place."""
    n, h, v = 16, 4, 4000
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*shape, generator=generator).requires_grad_() for shape in ((n, h), (v, h), (v,))]
    targets = torch.randint(v, (n,), generator=generator)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = plain(*exact, targets, temperature)
    outputs = token_stats(*leaves[:2], targets, bias=leaves[2], temperature=temperature, chunk_elements=1)
    # A logit less a log-sum of about 12: four roundings of up to 12 · 2^-24, also in the probabilities of the gradient.
    # Three times that for another CPU's order of sums.
    bound = 3 * 4 * 12 * 2**-24
    for a, b in zip(outputs, expected, strict=True):
        assert (a - b).abs().max() < bound
    for a, b in zip(gradients(outputs, leaves), gradients(expected, exact), strict=True):
        assert (a - b).norm() < bound * b.norm()


@pytest.mark.usefixtures("arithmetic")
def test_bfloat16_hidden_gradient_does_not_lose_the_later_blocks():
    """500 blocks of two columns, each with the same share of the gradient."""
    v = 1000
    hidden = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(v, 2, dtype=torch.bfloat16)
    weight[0] = 0
    logprobs, _ = token_stats(hidden, weight, torch.zeros(1, dtype=torch.int64), chunk_elements=1)
    logprobs.sum().backward()
    assert torch.allclose(hidden.grad.float(), torch.full((1, 2), 1 / v - 1), rtol=0.01)


def test_no_tokens_give_no_values_and_zero_gradients():
    hidden, weight, offsets, _ = inputs()
    none = hidden[:0].detach().requires_grad_()
    logprobs, entropies = chunked(none, weight, offsets, torch.zeros(0, dtype=torch.int64))
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    assert none.grad.shape == (0, H)
    assert not weight.grad.any()
    assert not offsets.grad.any()


def test_shapes_without_a_meaning_are_refused():
    hidden, weight, _, targets = inputs()
    for arguments in (
        (hidden[None], weight, targets),
        (hidden[:, 1:], weight, targets),
        (hidden, weight, targets[1:]),
        (hidden, weight, targets[:, None]),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            token_stats(*arguments)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
def test_compiled_the_arithmetic_of_a_gpu_gives_what_it_gives_uncompiled(monkeypatch):
    """Compiled for this CPU, in blocks of 5 columns and a last one of 2."""
    functions = block_sums, block_gradient
    made = functions, [torch.compile(function, dynamic=True) for function in functions]
    monkeypatch.setattr(token_stats_module, "COLUMNS", 5)
    for dtype, temperature, use in (
        (torch.float32, 1.0, (True, False)),
        (torch.float32, 0.7, BOTH),
        (torch.bfloat16, 0.7, BOTH),
    ):
        results = []
        for functions in made:
            monkeypatch.setattr(token_stats_module, "compiled", lambda device, functions=functions: functions)
            *leaves, targets = inputs(dtype)
            outputs = chunked(*leaves, targets, temperature)
            results.append([*outputs, *gradients(outputs, leaves, use)])
        bound = 1e-5 if dtype == torch.float32 else 2**-7  # a rounding of bfloat16 may go the other way
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound * float(theirs.detach().abs().max()))


def test_where_nothing_can_be_compiled_a_gpu_gets_the_arithmetic_of_a_cpu_which_is_said_once(caplog):
    compiled.cache_clear()
    with torch._dynamo.config.patch(disable=True):
        assert compiled("cuda") is compiled("cuda") is compiled("cpu") is None
    compiled.cache_clear()
    [record] = caplog.records
    assert record.message.endswith("torch.compile failed (it is switched off)")
