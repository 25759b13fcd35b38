"""A tiny language model that knows the procedure of modular chains and holds false beliefs about single steps.

A Qwen2 of 0.34 M parameters with one token per character, warmed up by next-token prediction on flawed reasoning
(`modular_chains.write_reasoning`). Only reward can correct it: whether a question is hard depends on the false facts
it meets. The result is an ordinary Hugging Face model directory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from exgrpo_orlhf.tasks.modular_chains import (
    OPERATORS,
    PRESETS,
    Beliefs,
    check_operands,
    check_seed,
    draw_question,
    write_reasoning,
)

FORMAT = 1  # raise it when the same settings would give another model
PAD, END = "<pad>", "<end>"
VOCABULARY = (PAD, END, *"0123456789", *OPERATORS, *"=;#")
_IDS = {token: i for i, token in enumerate(VOCABULARY)}
MAX_POSITIONS = 256  # tokens of prompt and response together: up to 32 operands


def chain_tokenizer() -> Qwen2Tokenizer:
    """One token per character, no special tokens added; characters outside the vocabulary are dropped.

    Qwen2's own class, because AutoTokenizer rebuilds the tokenizer of any Qwen2 model as one: a tokenizer of our own
    would come back from the disk as something else. Its byte-pair encoding without merges is one token per character.
    """
    return Qwen2Tokenizer(
        vocab=_IDS,
        merges=[],
        unk_token=PAD,  # the class needs one, and would add a token of its own; nothing is ever encoded as it
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


@dataclass(frozen=True)
class ChainModel:
    """A warmed-up model, made once and then found in the cache.

    preset: beliefs by name, a key of `modular_chains.PRESETS`
    false_share, strength, slip: each takes the place of the preset's value (see `Beliefs`)
    operands: the numbers of operands in the warm-up's questions, all of them from the training split
    steps, batch_size, learning_rate: the warm-up's optimiser steps, sequences in each, and peak rate (AdamW)
    seed: which facts are false, the first weights, and the warm-up's data
    width, layers: size of the network; width is a multiple of 32 (one attention head for each 32)
    cache: directory that holds the models; None means $EXGRPO_CACHE, or ~/.cache/exgrpo_orlhf where that is not set
    """

    preset: str = "normal"
    false_share: float | None = None
    strength: float | None = None
    slip: float | None = None
    operands: tuple[int, ...] = (3, 4, 5, 6, 7)
    steps: int = 1600
    batch_size: int = 32
    learning_rate: float = 2e-3
    seed: int = 0
    width: int = 96
    layers: int = 3
    cache: str | Path | None = None

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"ChainModel.preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        check_operands("ChainModel", self.operands)
        if max(self.operands) > MAX_POSITIONS // 8:
            raise ValueError(f"ChainModel.operands must be at most {MAX_POSITIONS // 8}, got {self.operands!r}")
        check_seed("ChainModel", self.seed)
        for name, step in (("steps", 1), ("batch_size", 1), ("layers", 1), ("width", 32)):
            value = getattr(self, name)
            if type(value) is not int or value < step or value % step:
                raise ValueError(f"ChainModel.{name} must be a positive multiple of {step}, got {value!r}")
        if type(self.learning_rate) is not float or not 0 < self.learning_rate < 1:
            raise ValueError(f"ChainModel.learning_rate must be between 0 and 1, got {self.learning_rate!r}")
        if self.cache is not None and not isinstance(self.cache, str | Path):
            raise ValueError(f"ChainModel.cache must be a path or None, got {self.cache!r}")
        try:
            _ = self.beliefs
        except ValueError as error:
            raise ValueError(f"ChainModel{str(error).removeprefix('Beliefs')}") from None

    @property
    def beliefs(self) -> Beliefs:
        """What the model is taught."""
        given = {name: getattr(self, name) for name in ("false_share", "strength", "slip")}
        overrides = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(PRESETS[self.preset], **overrides, seed=self.seed)

    @property
    def directory(self) -> Path:
        """Where the finished model is or will be: its name is a hash of every setting that shapes the model."""
        settings = dataclasses.asdict(self) | dataclasses.asdict(self.beliefs) | {"format": FORMAT}
        shaping = {name: value for name, value in settings.items() if name not in ("preset", "cache")}
        digest = hashlib.blake2b(json.dumps(shaping, sort_keys=True).encode(), digest_size=8).hexdigest()
        cache = self.cache or os.environ.get("EXGRPO_CACHE") or Path.home() / ".cache" / "exgrpo_orlhf"
        return Path(cache).expanduser() / f"chain-model-{digest}"

    def prepare(self) -> Path:
        """The directory of the warmed-up model, which is trained first unless the cache has it.

        Runs on the CPU, leaves torch's global generator as it was, and reports to stderr every few seconds. The
        directory appears in one rename: an interrupted warm-up leaves no such directory, and of two processes that
        warm up at once the second one's work is thrown away.
        """
        directory = self.directory
        if directory.is_dir():
            return directory
        model = self._warmed_up()
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".unfinished-") as temporary:
            unfinished = Path(temporary) / "model"
            model.save_pretrained(unfinished)
            chain_tokenizer().save_pretrained(unfinished)
            try:
                unfinished.rename(directory)
            except OSError:
                if not directory.is_dir():  # otherwise another process was first
                    raise
        return directory

    def _warmed_up(self) -> Qwen2ForCausalLM:
        """On one thread whatever the caller uses: their number can change the result, and the cache ignores it."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._train()
        finally:
            torch.set_num_threads(threads)

    def _train(self) -> Qwen2ForCausalLM:
        model = self._fresh_network()
        rng, beliefs = np.random.default_rng(self.seed), self.beliefs
        optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, self.learning_rate, self.steps, pct_start=0.1, cycle_momentum=False
        )
        began = reported = time.monotonic()
        for step in range(1, self.steps + 1):
            loss = _response_loss(model, *self._batch(rng, beliefs))
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            now = time.monotonic()
            if now - reported > 5:
                left = (now - began) / step * (self.steps - step)
                progress = f"step {step} of {self.steps}, loss {loss.item():.3f}, {left:.0f} s left"
                print(f"warming up the chain model: {progress}", file=sys.stderr)
                reported = now
        return model.eval()

    def _fresh_network(self) -> Qwen2ForCausalLM:
        config = Qwen2Config(
            vocab_size=len(VOCABULARY),
            hidden_size=self.width,
            intermediate_size=self.width * 8 // 3,
            num_hidden_layers=self.layers,
            num_attention_heads=self.width // 32,  # head size 32: the smallest that vLLM's kernels take
            num_key_value_heads=self.width // 32,
            max_position_embeddings=MAX_POSITIONS,
            # Tokens that matter are a few dozen apart. At the usual base of 10,000 most dimensions hardly turn over
            # such a distance, and finding the next operator takes much longer to learn.
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            initializer_range=0.1,  # about width ** -0.5; the usual 0.02 is for networks ten times as wide
            tie_word_embeddings=True,
            pad_token_id=_IDS[PAD],
            eos_token_id=_IDS[END],
            bos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which seeds every accelerator too.
            torch.default_generator.manual_seed(self.seed)
            return Qwen2ForCausalLM(config).train()

    def _batch(self, rng: np.random.Generator, beliefs: Beliefs) -> tuple[torch.Tensor, int]:
        """Token ids (batch_size, T) of prompt, flawed reasoning and end token, equally long; length of the prompts."""
        operands = self.operands[rng.integers(len(self.operands))]
        rows = []
        for _ in range(self.batch_size):
            question = draw_question(rng, operands, "train")
            rows.append([*question.prompt, *write_reasoning(rng, question, beliefs), END])
        return torch.tensor([[_IDS[token] for token in row] for row in rows]), len(question.prompt)


def _response_loss(model: Qwen2ForCausalLM, ids: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Mean negative log-likelihood of the response tokens. ids: (B, T)."""
    states = model.model(ids, use_cache=False).last_hidden_state[:, prompt_length - 1 : -1]  # (B, response, width)
    return F.cross_entropy(model.lm_head(states).flatten(0, 1), ids[:, prompt_length:].flatten())
