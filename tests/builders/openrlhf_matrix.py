"""Compares updates of one batch by OpenRLHF's actor with real DeepSpeed, on one or more ranks, with the local engine's.

    python openrlhf_matrix.py RANKS MODEL REFERENCE CELLS OUT

A cell is one configuration of the update, in float32: OpenRLHF's flags (or a layout's flags, overridden by these), the
number of optimiser steps, and the loss. All cells of a program share its process group. MODEL is the policy, REFERENCE
another model for the KL term (with the policy itself the term would have no gradient), CELLS a JSON file of cells by
name, OUT a JSON file with the result of `compare` for each cell, or the error that ended it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from engine_builders import ADDING, as_episodes, make_engine, mixed_batch, move_adapter, with_added
from run_builders import free_port

from exgrpo_orlhf.engines.frozen_copy import FrozenCopy
from exgrpo_orlhf.engines.local import TorchEngine
from exgrpo_orlhf.engines.openrlhf import cpu
from exgrpo_orlhf.grader.grade import Grade
from exgrpo_orlhf.objective import ConvexKL, MixedPolicyLoss
from exgrpo_orlhf.records import MixedBatch
from exgrpo_orlhf.selftest.parity import Difference, generated_ahead, recorded_gradients
from exgrpo_orlhf.settings import LoRA, Optimizer

GROUPS, RATE, RESPONSE = 8, 1e-4, 24  # questions a batch; learning rate; the loss's constant length
ADAM_EPS = 1e-8
# Only where a gradient is that much larger than Adam's ε and than its own error does Adam's step say anything: a tenth
# of a percent of either moves the step by as much.
WELL_ABOVE = 1e3
LORA = LoRA(rank=4)
COPYING = (
    *("MixedPolicyLoss.kl_convex = @ConvexKL()", "ReplayMixer.reincarnation = @Reincarnation()"),
    "Reincarnation.after_step = 9",
)


def batch_of(engine: TorchEngine, ahead: bool = False, episodes: bool = False) -> MixedBatch:
    """Half of the groups replay a trajectory, beside one fresh rollout (so these groups are short); some rows could not
    be graded, and of one group none. ahead: fresh rows have log-probs of another policy"""
    batch = mixed_batch(engine, n=GROUPS, beside=1)
    batch = generated_ahead(engine, batch) if ahead else batch
    batch = as_episodes(batch) if episodes else batch
    groups, rows = list(batch.groups), [list(members) for members in batch.rows]
    for g, k in [(1, 0), (1, 1), (1, 2), (1, 3), (2, 1), (GROUPS - 1, 0)]:
        rollouts = list(groups[g].rollouts)
        rollouts[k] = replace(rollouts[k], grade=Grade("timeout", None))
        groups[g] = replace(groups[g], rollouts=tuple(rollouts))
        rows[g][k] = replace(rows[g][k], advantage=0.0, in_loss=False)
    return replace(batch, groups=groups, rows=rows)


def plain(model: Path, reference: Path, cell: dict[str, Any]) -> dict[str, Any]:
    """The local engine in float32: gradients of each optimiser step and weights after the last, by parameter."""
    steps = cell["steps"]
    optimizer = Optimizer(learning_rate=RATE, max_grad_norm=None, steps_per_batch=steps)
    copies = ("base", "preceding") if cell.get("copies") else ()
    if cell.get("lora"):  # the reference is the model itself, without its adapter
        engine = make_engine(model, reference=True, optimizer=optimizer, lora=LORA, copies=copies)
        move_adapter(engine.model)
        for copy in engine._update.copies.values():
            copy.take()
    else:
        engine = make_engine(reference, weights_path=model, reference=True, optimizer=optimizer, copies=copies)
    batch = batch_of(make_engine(model), cell.get("ahead", False), cell.get("episodes", False))
    loss = loss_of(cell)
    batch = with_added(batch, loss) if cell.get("added") else batch
    if cell.get("copies"):
        batch = replace(batch, base_share=0.7)
        move_copies(engine._update.copies)
    gradients = recorded_gradients(engine)
    engine.update(batch, loss)
    return {"batch": batch, "gradients": gradients, "after": named(engine.model)}


def loss_of(cell: dict[str, Any]) -> MixedPolicyLoss:
    convex = {"kl_convex": ConvexKL()} if cell.get("copies") else {}
    return MixedPolicyLoss(response_length=RESPONSE, **cell["loss"], **convex)


def move_copies(copies: Mapping[str, FrozenCopy]) -> None:
    """So that they are other policies than the present one."""
    for name, factor in (("base", 0.8), ("preceding", 1.1)):
        for kept in copies[name]._kept:
            kept.mul_(factor)


def named(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}


def rank(number: int, ranks: int, port: int, models: tuple[str, str], cells: dict[str, Any], folder: str) -> None:
    os.environ.update(cpu.environment())
    cpu.install()
    torch.set_num_threads(1)
    import openrlhf.utils.utils as theirs

    to_dtype = theirs.convert_to_torch_dtype
    theirs.convert_to_torch_dtype = lambda name: torch.float32 if name == "fp32" else to_dtype(name)
    results = {}
    for name, cell in cells.items():
        expected = torch.load(Path(folder) / f"{cell['plain']}.pt", weights_only=False)
        try:
            result = update(number, ranks, port, models, cell, expected)
        except Exception:
            result = {"error": traceback.format_exc()}
        if number == 0:
            results[name] = result
            print(name, "error" if "error" in result else f"{result['micro_batches']} micro-batches", flush=True)
            (Path(folder) / "found.json").write_text(json.dumps(results))


def update(
    number: int, ranks: int, port: int, models: tuple[str, str], cell: dict[str, Any], expected: dict[str, Any]
) -> dict[str, Any]:
    from openrlhf.models import Actor
    from openrlhf_actor import fill, make_actor

    from exgrpo_orlhf.engines.lora import gathered
    from exgrpo_orlhf.engines.openrlhf.actor import MixedActor
    from exgrpo_orlhf.selftest.actors import record_gradients

    model, reference = models
    make, rank = MixedActor.__init__, LORA.rank if cell.get("lora") else None

    def make_and_move(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        if rank:
            move_adapter(self.model)

    patched = patch.object(MixedActor, "__init__", make_and_move)
    patched.start()
    actor = make_actor(
        Path(model),
        f"LoRA.rank = {rank}",
        f"Optimizer.learning_rate = {RATE}",
        "Optimizer.max_grad_norm = None",
        f"Optimizer.steps_per_batch = {cell['steps']}",
        *(f"MixedPolicyLoss.{name} = {value!r}" for name, value in cell["loss"].items()),
        f"train.generate_ahead = {cell.get('ahead', False)}",
        *(ADDING if cell.get("added") else ()),
        *(COPYING if cell.get("copies") else ()),
        loss=loss_of(cell),
        questions_per_step=GROUPS,
        rank=(number, ranks, port),
        dtype="fp32",
        layout=cell.get("layout"),
        **cell["flags"],
    )
    if cell.get("without_fix"):  # as in OpenRLHF's own trainer
        actor.actor.model.set_gradient_accumulation_boundary = lambda last: None
    patched.stop()
    record_gradients(actor, gradients := [])
    micro_batches = []
    actor.actor.register_forward_pre_hook(lambda *_: micro_batches.append(1) if torch.is_grad_enabled() else None)
    frozen = None
    if cell.get("copies"):
        move_copies(actor.copies)
    elif cell["loss"].get("kl_coef") and not rank:
        packing = actor.strategy.args.ds.packing_samples
        frozen = Actor(reference, attn_implementation="sdpa", param_dtype="fp32", packing_samples=packing).eval()
    fill(actor, expected["batch"], ranks, number, frozen)
    status = actor.fit(cell["loss"].get("kl_coef", 0.0))
    with gathered(list(actor.actor.model.module.parameters())):
        after = named(actor.actor.model.module)
    if number:
        return {}
    compared = compare(expected, gradients, after)
    return {**compared, "micro_batches": len(micro_batches), "norm": status["policy/grad_norm"]}


def compare(
    expected: dict[str, Any], gradients: list[dict[str, torch.Tensor]], after: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Of each optimiser step and parameter the relative error and the cosine of the gradient; of the weights' movement
    the largest error, in learning rates, where the gradient is well above its error and Adam's ε, and elsewhere.
    Weights without a gradient are frozen, and differ by `frozen` at most."""
    frozen = {
        name: after.pop(name) - expected["after"][name] for name in after.keys() - expected["gradients"][0].keys()
    }
    above = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in after.items()}
    for right, ours in zip(expected["gradients"], gradients, strict=True):
        for name, g in right.items():
            bound = torch.maximum((ours[name] - g).abs() * WELL_ABOVE, torch.tensor(ADAM_EPS * WELL_ABOVE))
            above[name] &= g.abs() > bound
    moved = {name: (after[name] - expected["after"][name]).abs() / RATE for name in after}
    where = [(moved[name][above[name]], moved[name][~above[name]]) for name in after]
    inside, outside = (torch.cat(parts) for parts in zip(*where, strict=True))
    return {
        "steps": Difference.between(gradients, expected["gradients"]).steps,
        "weights": largest(inside),
        "weights_compared": len(inside) / (len(inside) + len(outside)),
        "other_weights": largest(outside),
        "frozen": max((largest(moved.abs()) for moved in frozen.values()), default=0.0),
    }


def largest(values: torch.Tensor) -> float:
    return float(values.max()) if len(values) else 0.0


def main() -> None:
    ranks, model, reference, cells_file, out = sys.argv[1:]
    torch.set_num_threads(1)
    cells = json.loads(Path(cells_file).read_text())
    folder = Path(out).with_suffix(".work")
    folder.mkdir()
    for cell in cells.values():
        kind = " ".join(name for name in ("ahead", "lora", "episodes", "added", "copies") if cell.get(name)) or "plain"
        cell["plain"] = f"{kind}-{cell['steps']}-" + "-".join(f"{k}={v}" for k, v in cell["loss"].items())
        path = folder / f"{cell['plain']}.pt"
        if not path.exists():
            torch.save(plain(Path(model), Path(reference), cell), path)
    arguments = (int(ranks), free_port(), (model, reference), cells, str(folder))
    torch.multiprocessing.spawn(rank, arguments, nprocs=int(ranks))
    (folder / "found.json").rename(out)


if __name__ == "__main__":
    main()
