"""What the sections of gpu.py work on, and how they measure."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from exgrpo_orlhf.engines.local import TorchEngine
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.models.tiny_models import chain_tokenizer
from exgrpo_orlhf.objective import MixedPolicyLoss
from exgrpo_orlhf.questions.prompts import Prompts
from exgrpo_orlhf.records import Grade, MixedBatch, Rollout, RolloutGroup, Row, Trajectory
from exgrpo_orlhf.settings import LocalEngine, Optimizer, Sampling
from exgrpo_orlhf.tasks.modular_chains import ModularChains

Figures = dict[str, Any]  # a number, or a number and what it may be at most (None: anything)
PROMPT, ROW = 32, 512  # tokens at most, of a prompt and of a whole row


class Work(NamedTuple):
    """What a section works on. tokens: padded, of a micro-batch; length: of a response, at most; folder: for a model"""

    device: str
    cuda: bool
    small: bool
    tokens: int
    length: int
    vocabulary: int
    loss: MixedPolicyLoss
    folder: Path

    def engine(self, dtype: Any, model: Path | None = None, device: str | None = None, **more: Any) -> TorchEngine:
        settings = LocalEngine(device=device or self.device, dtype=dtype, micro_batch_tokens=self.tokens)
        sampling, prompts = Sampling(max_response_tokens=self.length), Prompts(max_tokens=PROMPT)
        return TorchEngine(settings, Optimizer(), sampling, prompts, model_path=model or self.folder, **more)

    def make_model(self) -> None:
        """A random Qwen2 whose weights bfloat16 holds exactly: what differs later is the arithmetic."""
        hidden, layers, heads, inner = (64, 2, 2, 128) if self.small else (896, 24, 14, 4864)  # of Qwen2.5-0.5B
        shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
        shape |= {"num_attention_heads": heads, "num_key_value_heads": 2, "vocab_size": self.vocabulary}
        special = {"tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
        torch.manual_seed(0)
        with torch.device(self.device):
            Qwen2ForCausalLM(Qwen2Config(**shape, **special)).bfloat16().save_pretrained(self.folder)
        chain_tokenizer().save_pretrained(self.folder)

    def batch(self) -> tuple[MixedBatch, list[ForwardRow]]:
        """Random tokens and advantages; the second half of the groups ends with a stored trajectory."""
        rng, k = np.random.default_rng(0), 4 if self.small else 8
        groups, rows = [], []
        for i, question in enumerate(questions := ModularChains(count=4 if self.small else 16).load()):
            lengths, a = rng.integers(self.length // 2, self.length + 1, k), rng.normal(size=k)
            responses = [rng.integers(2, self.vocabulary, n).astype(np.int32) for n in lengths]
            behaviour = rng.normal(-np.log(self.vocabulary), 0.5, lengths[-1]).astype(np.float32)
            stored = None if i < len(questions) // 2 else Trajectory(responses[-1], behaviour, 1.0, 0)
            fresh = tuple(Rollout(ids, "length", Grade("wrong", 0.0)) for ids in responses[: k - (stored is not None)])
            groups.append(RolloutGroup(question, fresh, stored is not None))
            members = [*fresh, stored] if stored else fresh
            parts = zip(members, (a - a.mean()).tolist(), strict=True)
            rows.append([Row(question, member, advantage, True) for member, advantage in parts])
        batch, encode = MixedBatch(groups, rows, len(rows[0])), chain_tokenizer().encode
        return batch, [ForwardRow(encode(row.question.prompt), row.token_ids) for row in batch.flat_rows()]


class Timed(NamedTuple):
    first: Any  # what the first call, which is not timed, returned
    seconds: float  # the least of the others
    gigabytes: float  # allocated at most in all of them; 0 on a CPU


def timed(work: Work, function: Callable[[], Any], repeats: int = 3) -> Timed:
    gc.collect()
    synchronize = torch.cuda.synchronize if work.cuda else lambda: None
    if work.cuda:
        torch.cuda.reset_peak_memory_stats()
    first, seconds = function(), []
    for _ in range(1 if work.small else repeats):
        synchronize()
        begin = time.perf_counter()
        function()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return Timed(first, min(seconds), torch.cuda.max_memory_allocated() / 1e9 if work.cuda else 0.0)


def against(what: str, ours: Timed, plain: Timed, time_limit: float, memory_limit: Any) -> Figures:
    figures: Figures = {f"{what}: ms": ours.seconds * 1e3, f"{what}: plain, ms": plain.seconds * 1e3}
    figures[f"{what}: time, of plain"] = (ours.seconds / plain.seconds, time_limit)
    if plain.gigabytes:
        figures |= {f"{what}: GB": ours.gigabytes, f"{what}: plain, GB": plain.gigabytes}
        figures[f"{what}: memory, of plain"] = (ours.gigabytes / plain.gigabytes, memory_limit)
    return figures
