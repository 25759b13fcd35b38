"""With all flags that change how an update is executed, its gradient is the local engine's, parameter by parameter.

Computed by OpenRLHF's own actor and real DeepSpeed in float32 (openrlhf_matrix.py), on one and on two ranks, for all
combinations of flags that change how a gradient is computed, and the flags of every layout in gin/engines/.
"""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import Any

import openrlhf_on_cpu  # noqa: F401
import pytest
from run_builders import BUILDERS, ROOT, python

from exgrpo_orlhf import config

pytestmark = [pytest.mark.openrlhf, pytest.mark.slow]

DYNAMIC = {"train.dynamic_batch_enable": True, "train.max_tokens_per_gpu": 40}  # three micro-batches a step and more
STATIC = {"train.micro_batch_size": 2}
LOSSES = (
    {},
    {"kl_coef": 0.1, "entropy_coef": 0.01, "normalizer": "sequences"},
    {"kl_coef": 0.1, "entropy_coef": 0.01, "normalizer": "tokens", "ratio": "sequence"},
)

# Flags of layouts that this machine cannot use, what replaces them here, and why; None: the flag is left out.
SUBSTITUTES: dict[str, tuple[Any, str]] = {
    "actor.num_nodes": (1, "one machine"),
    "actor.num_gpus_per_node": (None, "as many ranks as the program has, one and two"),
    "ref.num_nodes": (1, "the reference model's log-probs are computed in the same process"),
    "ref.num_gpus_per_node": (None, "as many as actors"),
    "ds.attn_implementation": ("sdpa", "packed rows are kept apart by their position ids, as with flash attention"),
    "ds.param_dtype": ("float32", "bfloat16 hides an error of one part in a hundred (a flag no layout needs to name)"),
    "ds.enable_sleep": (None, "moves states between GPU and CPU; the doctor checks on a GPU that they stay the same"),
    "train.micro_batch_size": (2, "so that a step has several micro-batches"),
    "train.max_tokens_per_gpu": (40, "so that a step has three micro-batches and more"),
    "rollout.max_tokens_per_gpu": (100, "of the reference model's passes"),
    "train.colocate_actor_ref": (None, "where the reference model is; tests/test_openrlhf_run.py trains with it"),
    "train.colocate_all": (None, "where actors and engines are placed; tests/test_openrlhf_run.py trains with it"),
    "vllm.enable_prefix_caching": (None, "generation; tests/test_openrlhf_run.py"),
    "vllm.enable_sleep": (None, "generation; needs a GPU, the doctor checks it there"),
    "vllm.enforce_eager": (None, "generation; tests/test_openrlhf_run.py"),
    "vllm.gpu_memory_utilization": (None, "generation; needs a GPU"),
    "vllm.num_engines": (1, "generation"),
    "vllm.sync_backend": ("gloo", "there is no NCCL without a GPU; the doctor compares weights after a sync"),
    "vllm.tensor_parallel_size": (1, "generation"),
}
AS_THEY_ARE = {
    "actor.gradient_checkpointing_enable",
    "ds.packing_samples",
    "ds.zero_stage",
    "rollout.micro_batch_size",
    "train.dynamic_batch_enable",
}
LAYOUTS = sorted(path.name for path in (ROOT / "gin" / "engines").glob("openrlhf_*.gin"))


def cell(steps: int = 1, loss: dict[str, float] | None = None, **more: Any) -> dict[str, Any]:
    return {"steps": steps, "loss": loss or {}, "flags": {}, **more}


def layout_cell(name: str) -> dict[str, Any]:
    """A layout with the substitutes of the table."""
    layout_flags = config.load(["toy.gin", f"engines/{name}"], []).openrlhf.flags
    flags = {flag: SUBSTITUTES[flag][0] for flag in layout_flags if flag in SUBSTITUTES}
    flags.pop("actor.num_gpus_per_node", None)  # make_actor sets it
    ahead = name.endswith("_ahead.gin")
    loss = {**LOSSES[1], "max_fresh_weight": 1.2} if ahead else LOSSES[1]
    return cell(steps=2, loss=loss, layout=f"engines/{name}", flags=flags, ahead=ahead)


def all_cells() -> dict[str, dict[str, Any]]:
    cells = {}
    for i, (stage, dynamic, packed, steps) in enumerate(
        itertools.product((1, 2, 3), (False, True), (False, True), (1, 2))
    ):
        name = f"zero-{stage} {'dynamic' if dynamic else 'static'} {'packed' if packed else 'padded'} {steps}-step"
        flags = {"ds.zero_stage": stage, "ds.packing_samples": packed, **(DYNAMIC if dynamic else STATIC)}
        cells[name] = cell(steps, LOSSES[(i // 2 + steps) % 3], flags=flags)
    for stage, batches in itertools.product((1, 2, 3), (STATIC, DYNAMIC)):
        more = {"ds.zero_stage": stage, **batches}
        name = f"zero-{stage} {'dynamic' if batches is DYNAMIC else 'static'}"
        cells[f"{name} offloaded"] = cell(2, flags={**more, "ds.adam_offload": True})
        if stage > 1:
            cells[f"{name} overlapping"] = cell(2, LOSSES[1], flags={**more, "ds.overlap_comm": True})
        # Fresh rows are weighed by the log-probs that they come with, in a single step too.
        bound = {"max_fresh_weight" if batches is STATIC else "dual_clip": 1.2}
        cells[f"{name} ahead"] = cell(1, bound, flags=more, ahead=True)
    for stage, (batches, packed) in itertools.product((1, 2, 3), ((STATIC, False), (DYNAMIC, True))):
        flags = {"ds.zero_stage": stage, "ds.packing_samples": packed, **batches}
        flags["actor.gradient_checkpointing_enable"] = packed
        name = f"zero-{stage} {'dynamic packed' if packed else 'static padded'} LoRA"
        cells[name] = cell(2, LOSSES[1], flags=flags, lora=True)
    for i, (stage, (batches, packed)) in enumerate(itertools.product((2, 3), ((STATIC, False), (DYNAMIC, True)))):
        flags = {"ds.zero_stage": stage, "ds.packing_samples": packed, **batches}
        name = f"zero-{stage} {'dynamic packed' if packed else 'static padded'} episodes"
        cells[name] = cell(1 + i // 2, LOSSES[(1, 2, 2, 1)[i]], flags=flags, episodes=True, ahead=i == 3)
    clipped = {"shaping": False, "clips_replayed": True}
    for i, (stage, batches) in enumerate(itertools.product((2, 3), (STATIC, DYNAMIC))):
        loss = clipped | {
            "normalizer": ("sequences", "tokens", "tokens", "constant")[i],
            "dual_clip": (None, 3.0)[i % 2],
        }
        loss["divisors"] = ("apart", "together", "apart", "together")[i]
        flags = {"ds.zero_stage": stage, "ds.packing_samples": i % 2 == 1, **batches}
        name = f"zero-{stage} {'dynamic packed' if i % 2 else 'static padded'} added"
        cells[name] = cell(1 + i // 2, loss, flags=flags, added=True, ahead=i == 3)
    # ReMix: the clip around π_k, and a convex sum of KL terms to policies of which the actors keep copies
    around = {**clipped, "clip_around": "policy", "divisors": "together", "normalizer": "sequences"}
    around |= {"kl_coef": 0.5, "entropy_coef": 0.01}
    for i, (stage, batches) in enumerate(itertools.product((1, 2, 3), (STATIC, DYNAMIC))):
        name = f"zero-{stage} {'dynamic' if batches is DYNAMIC else 'static'} copies"
        more = {"ds.zero_stage": stage, "ds.packing_samples": i % 3 == 1, **batches}
        cells[name] = cell(1 + i % 2, around, flags=more, added=True, copies=True, lora=i in (3, 4))
    cells |= {name: layout_cell(name) for name in LAYOUTS}
    for stage, batches in itertools.product((1, 2, 3), (STATIC, DYNAMIC)):
        name = f"without the fix, zero-{stage} {'dynamic' if batches is DYNAMIC else 'static'}"
        cells[name] = cell(flags={"ds.zero_stage": stage, **batches}, without_fix=True)
    return cells


CELLS = all_cells()


@pytest.fixture(scope="module")
def matrix(warm_model, raw_model, tmp_path_factory):
    """The results of openrlhf_matrix.py, by number of ranks."""

    @cache
    def of(ranks: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(f"matrix-{ranks}")
        (folder / "cells.json").write_text(json.dumps(CELLS))
        arguments = (ranks, warm_model, raw_model, folder / "cells.json", folder / "found.json")
        done = python(BUILDERS / "openrlhf_matrix.py", *arguments, env={"TQDM_DISABLE": "1"}, timeout=1200)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return json.loads((folder / "found.json").read_text())

    return of


def names(*begin: str) -> list[str]:
    return [name for name in CELLS if name.startswith(begin)]


@pytest.mark.parametrize("name", names("zero", *LAYOUTS))
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gradient_of_every_parameter_and_the_step_are_the_local_engines(matrix, ranks, name):
    """Float32 sums of some thousand terms in another order differ by 1e-6, a lost row makes at least 1e-2."""
    result, wanted = matrix(ranks)[name], CELLS[name]
    assert "error" not in result, result["error"]
    assert len(result["steps"]) == wanted["steps"]
    assert result["micro_batches"] >= 3 * wanted["steps"]
    for step in result["steps"]:
        assert all(norm > 1e-4 for norm, _, _ in step.values()), "a parameter without a gradient shows nothing"
        wrong = {p: (error, cosine) for p, (_, error, cosine) in step.items() if error > 1e-3 or cosine < 0.9999}
        assert not wrong, wrong
    norms = [sum(norm**2 for norm, _, _ in step.values()) ** 0.5 for step in result["steps"]]
    assert result["norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-3), "what a run reports"
    # Weights in learning rates. Their own rounding is 1e-7 of a weight of about 1, a thousandth of the rate of 1e-4.
    assert result["weights_compared"] > 0.5
    assert result["frozen"] == 0
    assert result["weights"] < 0.02
    assert result["other_weights"] <= 2.001 * wanted["steps"], "Adam moves no weight by more than the rate a step"


@pytest.mark.parametrize("name", names("without"))
@pytest.mark.parametrize("ranks", [1, 2])
def test_without_the_fix_zero_1_and_2_lose_micro_batches_with_dynamic_batches_and_nowhere_else(matrix, ranks, name):
    """When this fails, DeepSpeed or OpenRLHF has fixed it, and our line in actor.py can go."""
    result = matrix(ranks)[name]
    assert "error" not in result, result["error"]
    [step] = result["steps"]
    lost = name in ("without the fix, zero-1 dynamic", "without the fix, zero-2 dynamic")
    assert (max(error for _, error, _ in step.values()) > 0.1) == lost


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_has_an_untested_flag(name):
    layout_flags = set(config.load(["toy.gin", f"engines/{name}"], []).openrlhf.flags)
    assert layout_flags <= AS_THEY_ARE | SUBSTITUTES.keys(), layout_flags - AS_THEY_ARE - SUBSTITUTES.keys()
