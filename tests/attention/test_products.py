"""Large matrix products by oneDNN: values and gradients are the same up to rounding, and only where they fit."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_builders import SMALL
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from exgrpo_orlhf.attention import products
from exgrpo_orlhf.attention.products import _Linear, use_onednn
from exgrpo_orlhf.engines.local.placement import load


@pytest.fixture
def computed(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of the weights whose products oneDNN computed, in a forward pass."""
    shapes, forward = [], _Linear.forward

    def count(ctx, rows, weight, bias):
        shapes.append(tuple(weight.shape))
        return forward(ctx, rows, weight, bias)

    monkeypatch.setattr(_Linear, "forward", staticmethod(count))
    return shapes


@pytest.mark.parametrize("frozen", [(), ("weight",), ("rows",), ("bias",)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (3, 20), (20,), (0, 4)], ids=str)
def test_a_product_and_its_gradients_are_those_of_the_layer(shape, bias, frozen, computed):
    torch.manual_seed(0)
    layer = nn.Linear(512, 1024, bias=bias)
    ours = copy.deepcopy(layer)
    use_onednn(ours)
    ours = copy.deepcopy(ours)  # a copy computes with its own weight
    hidden, direction = torch.randn(*shape, 512), torch.randn(*shape, 1024)
    results = []
    for each in (ours, layer):
        rows = hidden.clone().requires_grad_("rows" not in frozen)
        each.requires_grad_().weight.requires_grad_("weight" not in frozen)
        if bias:
            each.bias.requires_grad_("bias" not in frozen)
        value = each(rows)
        value.backward(direction)
        results.append([value, rows.grad, each.weight.grad, None if each.bias is None else each.bias.grad])
    assert computed == ([(1024, 512)] if 0 not in shape else [])
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_small_weights_other_dtypes_and_autocast_keep_torchs_products(computed):
    small, double = nn.Linear(256, 256), nn.Linear(512, 1024).double()
    use_onednn(nn.ModuleList([small, double]))
    small(torch.randn(2, 256))
    double(torch.randn(2, 512).double())
    layer = nn.Linear(512, 1024)
    use_onednn(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 512)).dtype == torch.bfloat16
    assert not computed
    layer(torch.randn(2, 512))
    assert computed


def test_a_loaded_model_computes_so_and_its_gradients_are_those_of_torchs_products(computed, monkeypatch, tmp_path):
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**SMALL, initializer_range=0.3)).eval()
    theirs.save_pretrained(tmp_path)
    monkeypatch.setattr(products, "LARGE", 1)
    ours = load(tmp_path, torch.device("cpu"))
    ids = torch.tensor([[2, 3, 4, 5], [6, 7, 8, 9]])
    logits = []
    for model in (ours, theirs):
        logits.append(model(input_ids=ids).logits)
        logits[-1].log_softmax(2)[:, :, 3].sum().backward()
    assert len(computed) == 7 * ours.config.num_hidden_layers + 1
    assert logits[1].std() > 0.5
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-3)
