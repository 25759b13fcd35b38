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
from exgrpo_orlhf.records import Grade, MixedBatch, Question, Rollout, RolloutGroup, Row, Trajectory
from exgrpo_orlhf.settings import LocalEngine, Optimizer, Sampling
from exgrpo_orlhf.tasks.modular_chains import ModularChains

Figures = dict[str, float]
PROMPT = 32  # tokens at most, of a prompt
LOOP = {"sampler": "loop"} if "sampler" in LocalEngine.__dataclass_fields__ else {}  # not vLLM


class Size(NamedTuple):
    """How much a section does.

    tokens: padded, of a micro-batch; row: tokens at most, of a prompt and its response
    model: hidden size, layers, heads and inner size of a random Qwen2; vocabulary: its tokens
    statistics: tokens and hidden size of section 1, by the hidden size at full size
    chain: settings of the ChainModel of section 2
    questions, group: rows are their product; run: questions of a step of sections 6 and 8, and their steps
    repeats: timed calls, of which the fastest counts; counts: whether goals of time and memory do
    """

    tokens: int
    row: int
    model: tuple[int, int, int, int]
    vocabulary: int
    statistics: dict[str, tuple[int, int]]
    chain: dict[str, Any]
    questions: int
    group: int
    run: tuple[int, int]
    repeats: int
    counts: bool


QWEN_05B = (896, 24, 14, 4864)
STATISTICS = {"3,584": (8192, 3584), "896": (8192, 896)}
CHAINS = {"operands": (3, 4, 5, 6, 7, 8)}
FULL = Size(8192, 512, QWEN_05B, 151_936, STATISTICS, CHAINS, 16, 8, (64, 8), 3, True)
TINY_CHAIN = {"steps": 1, "width": 32}
SMALL = Size(256, 56, (64, 2, 2, 128), 2048, {"3,584": (64, 32), "896": (64, 16)}, TINY_CHAIN, 4, 4, (4, 3), 1, False)


class Work(NamedTuple):
    """What a section works on. folder: for models and runs"""

    device: str
    cuda: bool
    size: Size
    folder: Path

    @property
    def loss(self) -> MixedPolicyLoss:
        return MixedPolicyLoss(response_length=self.size.row - PROMPT)

    def engine(self, dtype: Any, model: Path | None = None, device: str | None = None, **more: Any) -> TorchEngine:
        """With the torch loop. more: `prompt` and `response`, tokens at most; the rest is TorchEngine's"""
        prompt, response = more.pop("prompt", PROMPT), more.pop("response", self.size.row - PROMPT)
        tokens, device = self.size.tokens, device or self.device
        settings = LocalEngine(device=device, dtype=dtype, micro_batch_tokens=tokens, **LOOP)  # type: ignore[arg-type]
        sampling, prompts = Sampling(max_response_tokens=response), Prompts(max_tokens=prompt)
        return TorchEngine(settings, Optimizer(), sampling, prompts, model_path=model or self.folder, **more)

    def make_model(self) -> None:
        """A random Qwen2 whose weights bfloat16 holds exactly: what differs later is the arithmetic."""
        hidden, layers, heads, inner = self.size.model
        shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
        shape |= {"num_attention_heads": heads, "num_key_value_heads": 2, "vocab_size": self.size.vocabulary}
        special = {"tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
        torch.manual_seed(0)
        with torch.device(self.device):
            Qwen2ForCausalLM(Qwen2Config(**shape, **special)).bfloat16().save_pretrained(self.folder)
        chain_tokenizer().save_pretrained(self.folder)

    def batch(self, prompt: int | None = None, longest: int | None = None) -> tuple[MixedBatch, list[ForwardRow]]:
        """Random tokens and advantages; the second half of the groups ends with a stored trajectory.

        prompt: tokens of each prompt, random digits; None: of modular chains; longest: tokens of a response
        """
        rng, k, most = np.random.default_rng(0), self.size.group, longest or self.size.row - PROMPT
        questions = ModularChains(count=self.size.questions).load()
        if prompt:
            texts = ["".join(map(str, rng.integers(10, size=prompt))) for _ in questions]
            questions = [Question.make("random", text, "1") for text in texts]
        groups, rows = [], []
        for i, question in enumerate(questions):
            lengths, a = rng.integers(most // 2, most + 1, k), rng.normal(size=k)
            responses = [rng.integers(2, self.size.vocabulary, n).astype(np.int32) for n in lengths]
            behaviour = rng.normal(-np.log(self.size.vocabulary), 0.5, lengths[-1]).astype(np.float32)
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


def timed(work: Work, function: Callable[[], Any], repeats: int | None = None) -> Timed:
    gc.collect()
    synchronize = torch.cuda.synchronize if work.cuda else lambda: None
    if work.cuda:
        torch.cuda.reset_peak_memory_stats()
    first, seconds = function(), []
    for _ in range(min(repeats or work.size.repeats, work.size.repeats)):
        synchronize()
        begin = time.perf_counter()
        function()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return Timed(first, min(seconds), torch.cuda.max_memory_allocated() / 1e9 if work.cuda else 0.0)


def against(what: str, ours: Timed, plain: Timed) -> Figures:
    """Times and, on a GPU, memory of ours and of the plain computation, and ours as a share of its."""
    figures = {f"{what}: ms": ours.seconds * 1e3, f"{what}: plain, ms": plain.seconds * 1e3}
    figures[f"{what}: time, of plain"] = ours.seconds / plain.seconds
    if plain.gigabytes:
        figures |= {f"{what}: GB": ours.gigabytes, f"{what}: plain, GB": plain.gigabytes}
        figures[f"{what}: memory, of plain"] = ours.gigabytes / plain.gigabytes
    return figures
