"""A model's large matrix products by oneDNN."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...objective import products
from ...objective.products import is_large, product


def use_onednn(model: nn.Module) -> None:
    """From now on, products with large float32 weights and their gradients are computed by oneDNN (`products.product`).
    Under autocast, in other dtypes and on other devices nothing changes."""
    for layer in large_layers(model):
        if "forward" not in vars(layer):
            layer.forward = partial(_linear, layer)  # type: ignore[method-assign]


def large_layers(model: nn.Module) -> list[nn.Linear]:
    return [each for each in model.modules() if type(each) is nn.Linear and each.weight.numel() >= products.LARGE]


def _linear(layer: nn.Linear, rows: Tensor) -> Tensor:
    if not is_large(rows, layer.weight):
        return nn.functional.linear(rows, layer.weight, layer.bias)
    result: Tensor = _Linear.apply(rows, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    """y = x·Wᵀ + b,  ∂x = ∂y·W,  ∂W = ∂yᵀ·x,  ∂b = Σ ∂y."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        flat = gradient.flatten(0, -2)
        return (
            product(gradient, weight.t()) if of_rows else None,
            product(flat.t(), rows.flatten(0, -2).t()) if of_weight else None,
            flat.sum(0) if of_bias else None,
        )
