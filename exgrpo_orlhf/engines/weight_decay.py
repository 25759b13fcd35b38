"""What AdamW's weight decay takes: the same parameters on both engines and in supervised starts."""

from __future__ import annotations

from typing import Any

from torch.nn import Module, Parameter

# Parts of the names of parameters without it: biases and the weights of norms (OpenRLHF 0.11.2,
# get_optimizer_grouped_parameters, which the actor's strategy calls).
EXEMPT = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")


def decay_groups(model: Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters as the groups of an optimiser with this `weight_decay`: those that it takes, and those
    that it does not. One group if there is no decay, or none of the one kind."""
    decayed: list[Parameter] = []
    exempt: list[Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            free = weight_decay > 0 and any(part in name for part in EXEMPT)
            (exempt if free else decayed).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": exempt, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
