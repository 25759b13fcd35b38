"""Compares the local engine on the pretended device with itself on the CPU, and prints the differences as JSON for
test_pretended_cuda.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen as varlen
from device import Pretended, install, messages_of, waits
from engine_builders import K, make_engine, mixed_batch, questions, stored_responses, weights
from generated import generated
from plain_varlen import flash_alone

from exgrpo_orlhf.engines.local import TorchEngine, forward, update
from exgrpo_orlhf.objective import MixedPolicyLoss, token_stats
from exgrpo_orlhf.records import MixedBatch
from exgrpo_orlhf.replay import Plan
from exgrpo_orlhf.sampling import torch_loop
from exgrpo_orlhf.sampling.batch import Batch
from exgrpo_orlhf.settings import LocalEngine, Optimizer, Sampling

LOSS = MixedPolicyLoss(response_length=24, kl_coef=0.01, entropy_coef=0.001)
TOKENS = 130  # of responses that do not end, where waits are counted


class Work:
    """The work of one engine on one device."""

    def __init__(self, model: Path, device: str, dtype: str = "float32", steps: int = 2) -> None:
        """steps: of the optimiser in an update"""
        self.model, self.steps = model, steps
        self.here = Pretended if device == "cuda" else nullcontext
        self.settings = LocalEngine(
            device=device,
            dtype=dtype,
            sampler="loop",
            micro_batch_tokens=300,
            generation_rows=16,
            gradient_checkpointing=True,
        )
        self.engine = self.make()

    def make(self, **more: Any) -> TorchEngine:
        optimizer = Optimizer(learning_rate=1e-3, steps_per_batch=self.steps)
        sampling = Sampling(max_response_tokens=24, temperature=0.9)
        settings: dict[str, Any] = {"settings": self.settings, "optimizer": optimizer, "sampling": sampling}
        with self.here():
            engine = make_engine(self.model, **settings, reference=True, **more)
        engine.forward.one_call = True  # no limit on padding, on a CPU too
        return engine

    def score(self) -> list[float]:
        rng, chains = np.random.default_rng(1), questions(6)
        stored = stored_responses(chains, rng, 3)
        with self.here():
            scores = self.engine.score(stored)
        measured = [one for question in chains for one in scores[question]]
        return [value for one in measured for value in (one.entropy, float(one.logprobs.mean()))]

    def responses(self) -> list[list[int]]:
        """Rollouts, answers with a seed each, greedy ones, and two turns of episodes."""
        chains = questions(6)
        with self.here():
            plan = Plan(1, chains, [], {})
            groups = plan.in_order(self.engine.rollout(plan, K))
            answers = self.engine.generate_for(chains, [[1, 2]] * 6, 0.7, 0.9)
            answers += self.engine.generate_for(chains, [[1]] * 6, 0.0, 1.0)
        rollouts = [rollout for group in groups for rollout in group.rollouts] + [r for own in answers for r in own]
        texts, kept = [[2, 3, 4], [5, 6]] * 2, {}  # type: list[list[int]], dict[int, torch.Tensor]
        settings: dict[str, Any] = {"end": [-1], "pad": 0, "max_new_tokens": 5, "temperature": None}
        for _ in range(2):
            with self.here(), self.engine.forward.autocast():
                new = generated(self.engine.model, texts, sessions=range(4), kept=kept, **settings)
            texts = [[*text, *turn.token_ids.tolist(), 3] for text, turn in zip(texts, new, strict=True)]
        return [*(rollout.token_ids.tolist() for rollout in rollouts), *texts]

    def update(self, batch: MixedBatch, engine: TorchEngine | None = None) -> dict[str, np.ndarray]:
        engine = engine or self.engine
        gradient: list[torch.Tensor] = []
        hook = engine._update.optimizer.register_step_pre_hook(
            lambda *_: gradient.extend(parameter.grad.flatten().cpu() for parameter in engine.model.parameters())
        )
        with self.here():
            stats = engine.update(batch, LOSS)
        hook.remove()
        return {
            "policy": np.concatenate(stats.policy_logprobs),
            "loss": np.array([stats.metrics["policy/loss"], stats.metrics["policy/grad_norm"]]),
            "gradient": torch.cat(gradient).numpy(),
            "weights": weights(engine).cpu().numpy(),
        }

    def resume(self, folder: Path) -> TorchEngine:
        engine = self.make(weights_path=folder)
        with self.here():
            engine.load(folder)
        return engine


def off(a: Any, b: Any) -> float:
    return float(np.abs(np.subtract(a, b, dtype=np.float64)).max())


def share_off(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def weights_off(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Largest difference of the weights. Adam makes a full step even of a rounding error, so weights with a very small
    gradient are left out."""
    clear = np.abs(a["gradient"]) > 1e-5
    return off(a["weights"][clear], b["weights"][clear])


def counted(work: Callable[[], Any]) -> dict[str, int]:
    waits.clear()
    work()
    return dict(waits)


def in_float32(cpu: Work, cuda: Work, batch: MixedBatch, folder: Path) -> dict[str, Any]:
    """Differences of the pretended device from the CPU; and for a run that is saved after one update and continued on
    either device, the difference of the second update."""
    figures: dict[str, Any] = {
        "scores": off(cpu.score(), cuda.score()),
        "responses": cpu.responses() == cuda.responses(),
    }
    works, straight = {"cpu": cpu, "cuda": cuda}, {}
    first = {name: work.update(batch) for name, work in works.items()}
    figures |= {what: off(first["cpu"][what], first["cuda"][what]) for what in ("policy", "loss")}
    figures["gradient"] = share_off(first["cpu"]["gradient"], first["cuda"]["gradient"])
    figures["weights"] = weights_off(first["cpu"], first["cuda"])
    for name, work in works.items():
        work.engine.save(folder / name)
        straight[name] = work.update(batch)
    for saved in works:
        for name, work in works.items():
            engine = work.resume(folder / saved)
            optimizer, again = engine._update.optimizer, work.update(batch, engine)
            figures[f"{saved} to {name}"] = {
                "weights": weights_off(straight[saved], again),
                "fused": optimizer.param_groups[0]["fused"],
                "steps": sorted({state["step"].device.type for state in optimizer.state.values()}),
            }
    return figures


def in_bfloat16(cpu: Work, cuda: Work, batch: MixedBatch) -> dict[str, Any]:
    """cpu: in float32"""
    with cuda.here(), cuda.engine.forward.autocast(), torch.no_grad():
        rows = Batch(cuda.engine.model, [[2, 3, 4], [5, 6]], [0, 1], 0, 8)
        rows.append(torch.tensor([3, 4], device="cuda"))
    responses = zip(cpu.responses(), cuda.responses(), strict=True)
    begin = weights(cpu.engine).numpy()
    right, ours = cpu.update(batch), cuda.update(batch)
    a, b = right["weights"] - begin, ours["weights"] - begin
    return {
        "cache": sorted(
            {f"{type(layer).__name__} {layer.keys.dtype} {layer.values.dtype}" for layer in rows.cache.layers}
        ),
        "same responses": float(np.mean([a == b for a, b in responses])),
        "log-probs": float(np.abs(right["policy"] - ours["policy"]).mean()),
        "cosine": float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)),
    }


def waiting(cuda: Work, batch: MixedBatch) -> dict[str, Any]:
    """How often the host waited for the device, and for what."""

    def generate(prompts: list[list[int]]) -> None:
        model = cuda.engine.model
        with cuda.here(), cuda.engine.forward.autocast():
            generated(model, prompts, end=[-1], pad=0, max_new_tokens=TOKENS, temperature=1.0)

    passes = dict.fromkeys((cuda.engine.forward, cuda.engine._update.reference), 0)
    call = forward.PolicyForward.__call__

    def count(self: forward.PolicyForward, *arguments: Any) -> Any:
        passes[self] += 1
        return call(self, *arguments)

    with cuda.here(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward.PolicyForward, "__call__", count)
        update = counted(lambda: cuda.engine.update(batch, LOSS))
    return {
        "one prompt length": counted(lambda: generate([[2, 3, 4]] * 4)),
        "two prompt lengths": counted(lambda: generate([[2, 3, 4], [5, 6]] * 2)),
        "update": update,
        "passes": list(passes.values()),
    }


def flash(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention without the kernel, which waits where that does not."""
    before = waits.copy()
    result = flash_alone(*args, **kwargs)
    waits.clear()
    waits.update(before)
    return result


def fuse() -> None:
    """From now on statistics are computed as on a GPU, but not compiled, in blocks of 7 columns."""
    token_stats.compiled = lambda device: (
        None if device == "cpu" else (token_stats.block_sums, token_stats.block_gradient)
    )
    token_stats.COLUMNS = 7
    token_stats.token_stats = partial(token_stats.token_stats, chunk_elements=1)


def planted(cuda: Work, batch: MixedBatch) -> dict[str, str]:
    """The error messages if a tensor was left on the CPU."""
    stats, sample, tokens = token_stats.token_stats, torch_loop.sample, update.TokenBatch
    return messages_of(
        {
            "score": (token_stats, "token_stats", lambda h, w, ids, **more: stats(h, w, ids.cpu(), **more), cuda.score),
            "rollout": (torch_loop, "sample", lambda logits, t, u, p: sample(logits, t, u.cpu(), p), cuda.responses),
            "update": (
                update,
                "TokenBatch",
                lambda **x: tokens(**{**x, "advantages": x["advantages"].cpu()}),
                lambda: cuda.update(batch),
            ),
        }
    )


def main(model: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    cpu = Work(model, "cpu", steps=1)
    batch = mixed_batch(cpu.engine)
    install()
    varlen.varlen_attn = flash
    float32 = Work(model, "cuda", steps=1)
    figures: dict[str, Any] = {"float32": in_float32(cpu, float32, batch, folder)}
    fuse()
    bfloat16 = Work(model, "cuda", "bfloat16")
    figures["packs"] = {work.settings.dtype: work.engine.forward.packs for work in (float32, bfloat16)}
    figures["bfloat16"] = in_bfloat16(Work(model, "cpu"), bfloat16, batch)
    figures["waits"] = waiting(bfloat16, batch)
    figures["planted"] = planted(bfloat16, batch)
    print(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
