"""Large matrix products by oneDNN: the same up to rounding, only during generation, and only where they fit."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from engine_builders import SMALL
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from exgrpo_orlhf.engines.local import products
from exgrpo_orlhf.engines.local.batch import Batch
from exgrpo_orlhf.engines.local.generation import generate
from exgrpo_orlhf.engines.local.products import large_products


@pytest.fixture
def computed(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of the weights whose products oneDNN computed."""
    shapes, linear = [], products._linear

    def count(layer, rows):
        shapes.append(tuple(layer.weight.shape))
        return linear(layer, rows)

    monkeypatch.setattr(products, "_linear", count)
    return shapes


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1, 1), (7, 1), (3, 20)], ids=str)
@torch.no_grad()
def test_a_product_is_that_of_the_layer(rows, bias, computed):
    torch.manual_seed(0)
    layer = nn.Linear(512, 1024, bias=bias)
    hidden = torch.randn(*rows, 512)
    with large_products(layer):
        ours = layer(hidden)
    assert computed == [(1024, 512)]
    torch.testing.assert_close(ours, layer(hidden), atol=1e-5, rtol=1e-5)
    assert len(computed) == 1, "the layer is as it was"


@torch.no_grad()
def test_layers_are_as_they_were_after_an_error(computed):
    layer = nn.Linear(512, 1024)
    with pytest.raises(RuntimeError), large_products(layer):
        layer(torch.randn(2, 3))
    assert computed
    assert "forward" not in vars(layer)


@torch.no_grad()
def test_small_weights_other_dtypes_and_autocast_keep_torchs_products(computed):
    small, double = nn.Linear(512, 1023), nn.Linear(512, 1024).double()
    with large_products(nn.ModuleList([small, double])):
        small(torch.randn(2, 512))
        double(torch.randn(2, 512).double())
    layer = nn.Linear(512, 1024)
    with torch.autocast("cpu", torch.bfloat16), large_products(layer):
        assert layer(torch.randn(2, 512)).dtype == torch.bfloat16
    assert not computed


def test_generation_uses_them(computed, monkeypatch):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    monkeypatch.setattr(products, "LARGE", 18 * 32)
    generate(model, [[2, 3]] * 2, end=[], pad=0, max_new_tokens=3, temperature=1.0)
    assert computed.count((18, 32)) == 3, "the output layer, at each token"


@torch.no_grad()
def test_logits_of_generation_are_those_of_torchs_products(computed, monkeypatch):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, initializer_range=0.3)).eval()
    monkeypatch.setattr(products, "LARGE", 1)

    def logits(context) -> torch.Tensor:
        with context:
            rows = Batch(model, [[2, 3], [4, 5, 6]], [0, 0, 1], 0, 2)
            outputs = [rows.logits]
            for token in ([7, 8, 9], [3, 2, 4]):
                rows.append(torch.tensor(token))
                outputs.append(rows.logits)
        return torch.stack(outputs)

    ours = logits(large_products(model))
    calls = len(computed)
    assert calls == 3 * (7 * model.config.num_hidden_layers + 1)
    theirs = logits(nullcontext())
    assert len(computed) == calls
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
