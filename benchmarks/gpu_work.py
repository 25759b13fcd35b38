"""What the sections of gpu.py work on, and how they measure."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from exgrpo_orlhf.engines.local import LocalParts, TorchEngine
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.grader.grade import Grade
from exgrpo_orlhf.objective import MixedPolicyLoss
from exgrpo_orlhf.questions.prompts import Prompts
from exgrpo_orlhf.records import MixedBatch, Question, Rollout, RolloutGroup, Row, Trajectory
from exgrpo_orlhf.settings import LocalEngine, Optimizer, Sampling
from exgrpo_orlhf.testbed.tiny_models import ChainModel

Figures = dict[str, float]
PROMPT = 32  # tokens at most, of a prompt
LOOP = {"sampler": "loop"} if "sampler" in LocalEngine.__dataclass_fields__ else {}  # not vLLM


class Size(NamedTuple):
    """How much a section does. FULL is the default: a Qwen2 of the sizes of Qwen2.5-0.5B."""

    tokens: int = 8192  # padded, of a micro-batch
    row: int = 512  # tokens at most, of a prompt and its response
    model: tuple[int, int, int, int] = (896, 24, 14, 4864)  # hidden size, layers, heads, inner size
    vocabulary: int = 151_936
    statistics: Mapping[str, tuple[int, int]] = {"3,584": (8192, 3584), "896": (8192, 896)}  # tokens and hidden size
    chain: Mapping[str, Any] = {"operands": (3, 4, 5, 6, 7, 8), "steps": 200}  # settings of section 2's model
    questions: int = 16
    group: int = 8
    run: tuple[int, int] = (64, 8)  # questions of a step and steps, sections 6 and 8
    repeats: int = 3  # timed calls, of which the fastest counts


FULL = Size()
SMALL = Size(
    tokens=256, row=56, model=(64, 2, 2, 128), vocabulary=2048, statistics={"3,584": (64, 32), "896": (64, 16)},
    chain={"steps": 1, "width": 32}, questions=4, group=4, run=(4, 3), repeats=1,
)  # fmt: skip


class Work(NamedTuple):
    """What a section works on. folder: for models and runs; progress: where `timed` says what it has timed"""

    cuda: bool
    size: Size
    folder: Path
    progress: TextIO | None = None

    @property
    def device(self) -> str:
        return "cuda" if self.cuda else "cpu"

    @property
    def loss(self) -> MixedPolicyLoss:
        return MixedPolicyLoss(response_length=self.size.row - PROMPT)

    def engine(self, dtype: Any, model: Path | None = None, device: str | None = None, **more: Any) -> TorchEngine:
        """With the torch loop. more: `prompt` and `response`, tokens at most; the rest is TorchEngine's"""
        prompt, response = more.pop("prompt", PROMPT), more.pop("response", self.size.row - PROMPT)
        tokens, device = self.size.tokens, device or self.device
        settings = LocalEngine(device=device, dtype=dtype, micro_batch_tokens=tokens, **LOOP)  # type: ignore[arg-type]
        sampling, prompts = Sampling(max_response_tokens=response), Prompts(max_tokens=prompt)
        parts = LocalParts(settings, Optimizer(), sampling, prompts)
        return TorchEngine(parts, model_path=model or self.folder, **more)

    def make_model(self) -> None:
        """A random Qwen2 whose weights bfloat16 holds exactly: what differs later is the arithmetic."""
        hidden, layers, heads, inner = self.size.model
        shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
        shape |= {"num_attention_heads": heads, "num_key_value_heads": 2, "vocab_size": self.size.vocabulary}
        special = {"tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
        torch.manual_seed(0)
        with torch.device(self.device):
            Qwen2ForCausalLM(Qwen2Config(**shape, **special)).bfloat16().save_pretrained(self.folder)
        ChainModel.tokenizer().save_pretrained(self.folder)

    def batch(self, prompt: int = 24, longest: int | None = None) -> tuple[MixedBatch, list[ForwardRow]]:
        """Random tokens and advantages; the second half of the groups ends with a stored trajectory."""
        rng, k, most = np.random.default_rng(0), self.size.group, longest or self.size.row - PROMPT
        texts = ("".join(map(str, rng.integers(10, size=prompt))) for _ in range(self.size.questions))
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
        batch, encode = MixedBatch(groups, rows, len(rows[0])), ChainModel.tokenizer().encode
        return batch, [ForwardRow(encode(row.question.prompt), row.token_ids) for row in batch.flat_rows()]


class Timed(NamedTuple):
    first: Any  # what the first call, which is not timed, returned
    seconds: float  # the least of the others
    gigabytes: float  # allocated at most in all of them; 0 on a CPU


def timed(work: Work, function: Callable[[], Any], repeats: int | None = None) -> Timed:
    gc.collect()
    began = time.perf_counter()
    synchronize = torch.cuda.synchronize if work.cuda else lambda: None
    if work.cuda:
        torch.cuda.reset_peak_memory_stats()
    first, seconds = function(), []
    for _ in range(repeats or work.size.repeats):
        synchronize()
        begin = time.perf_counter()
        function()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    line = f"   … {min(seconds) * 1e3:,.4g} ms ({time.perf_counter() - began:.0f} s for all)"
    print(line, file=work.progress, flush=True)
    return Timed(first, min(seconds), torch.cuda.max_memory_allocated() / 1e9 if work.cuda else 0.0)


def against(what: str, ours: Timed, plain: Timed) -> Figures:
    """Times and, on a GPU, memory of ours and of the plain computation, and ours as a share of its."""
    figures = {f"{what}: ms": ours.seconds * 1e3, f"{what}: plain, ms": plain.seconds * 1e3}
    figures[f"{what}: time, of plain"] = ours.seconds / plain.seconds
    if plain.gigabytes:
        figures |= {f"{what}: GB": ours.gigabytes, f"{what}: plain, GB": plain.gigabytes}
        figures[f"{what}: memory, of plain"] = ours.gigabytes / plain.gigabytes
    return figures
