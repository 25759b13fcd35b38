"""Tiny language models warmed up on flawed texts of a task, each made once and then found in a cache.

A Qwen2 of 0.34 M parameters with one token per character, trained by next-token prediction on the responses alone. The
result is an ordinary Hugging Face model directory. Only reward can correct what a model was taught wrongly:

- `ChainModel` knows the procedure of modular chains and has false beliefs about single steps; how hard a question is
  depends on how many false facts its steps need.
- `CountdownModel` writes countdown answers with true values, and rarely finds a right one. It looks ahead as far as
  three layers can, and where it has a hunch it does not search.
"""

# No postponed annotations: those of inherited fields would be looked up in the module of the class that inherits them.
import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .. import cache, paths
from ..lazy import torch, transformers
from ..settings import require
from ..tasks import countdown, modular_chains
from ..tasks.countdown import Hunches
from ..tasks.made_questions import OPERATORS, check_operands, check_seed, check_shares
from ..tasks.modular_chains import PRESETS, Beliefs
from .optimiser_steps import optimiser_steps

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

PAD, END = "<pad>", "<end>"
MAX_POSITIONS = 256  # tokens of prompt and response together
_IGNORED = -100  # label of a token that is not learnt


def character_tokenizer(vocabulary: tuple[str, ...]) -> "Qwen2Tokenizer":
    """One token per character, no special tokens added; characters outside the vocabulary are dropped.

    It is Qwen2's own class, because AutoTokenizer loads the tokenizer of any Qwen2 model as that class. Its byte-pair
    encoding without merges gives one token per character.
    """
    return transformers.Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=[],
        unk_token=PAD,  # without one the class would add a token; nothing is ever encoded as it
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


@dataclass(frozen=True, kw_only=True)
class WarmedUpModel(ABC):
    """Base of the tiny models. A task's class adds the texts that are taught (`_texts`), all of the training split.

    steps, batch_size, learning_rate: the warm-up's optimiser steps, sequences in each, and peak rate (AdamW)
    seed: the first weights and the warm-up's data
    width, layers: size of the network; width is a multiple of 32 (one attention head for each 32)
    cache: directory that holds the models; None means $EXGRPO_CACHE, or ~/.cache/exgrpo_orlhf where that is not set
    """

    MAY_CHANGE: ClassVar[tuple[str, ...]] = ("cache",)

    steps: int = 1600
    batch_size: int = 32
    learning_rate: float = 2e-3
    seed: int = 0
    width: int = 96
    layers: int = 3
    cache: str | Path | None = None

    task: ClassVar[str]  # of the directory's name and the progress line
    vocabulary: ClassVar[tuple[str, ...]]  # PAD, END, then the task's characters
    format: ClassVar[int] = 1  # raise it when the same settings would give another model

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_seed(owner, self.seed)
        for name, step in (("steps", 1), ("batch_size", 1), ("layers", 1), ("width", 32)):
            value = getattr(self, name)
            sound = type(value) is int and value >= step and value % step == 0
            require(sound, f"{owner}.{name} must be a positive multiple of {step}, got {value!r}")
        sound = type(self.learning_rate) is float and 0 < self.learning_rate < 1
        require(sound, f"{owner}.learning_rate must be between 0 and 1, got {self.learning_rate!r}")
        known = self.cache is None or isinstance(self.cache, str | Path)
        require(known, f"{owner}.cache must be a path or None, got {self.cache!r}")

    def _shaping(self) -> dict[str, Any]:
        """Every setting that shapes the model."""
        settings = dataclasses.asdict(self) | {"format": self.format}
        return {name: value for name, value in settings.items() if name != "cache"}

    @abstractmethod
    def _texts(self, rng: np.random.Generator) -> list[tuple[str, str]]:
        """A batch: batch_size pairs of a prompt and a flawed response."""

    @property
    def directory(self) -> Path:
        """Where the finished model is or will be: its name is a hash of every setting that shapes the model."""
        digest = hashlib.blake2b(json.dumps(self._shaping(), sort_keys=True).encode(), digest_size=8).hexdigest()
        return paths.cache(self.cache) / f"{self.task}-model-{digest}"

    def prepare(self) -> Path:
        """The directory of the warmed-up model, which is trained first unless the cache has it.

        Runs on the CPU, leaves torch's global generator as it was, and prints progress to stderr every few seconds. The
        directory appears in one rename: an interrupted warm-up leaves no such directory, and if two processes warm up
        at once, the result of the second one is discarded.
        """
        directory = self.directory
        if cache.has(directory):
            return directory
        model = self._warmed_up()
        with cache.making(directory) as unfinished:
            model.save_pretrained(unfinished)
            character_tokenizer(self.vocabulary).save_pretrained(unfinished)
        return directory

    def _warmed_up(self) -> "Qwen2ForCausalLM":
        """Train on one thread: the number of threads can change the result, and is no part of the cache's key."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._train()
        finally:
            torch.set_num_threads(threads)

    def _train(self) -> "Qwen2ForCausalLM":
        model = self._fresh_network()
        rng = np.random.default_rng(self.seed)
        optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, self.learning_rate, self.steps, pct_start=0.1, cycle_momentum=False
        )

        def gradient(step: int) -> float:
            loss = _response_loss(model, *self._batch(rng))
            loss.backward()
            return loss.item()

        what = f"warming up the {self.task} model"
        for _ in optimiser_steps(gradient, optimiser, schedule, last=self.steps, max_grad_norm=1.0, what=what):
            pass
        model.eval()
        return model

    def _fresh_network(self) -> "Qwen2ForCausalLM":
        config = transformers.Qwen2Config(
            vocab_size=len(self.vocabulary),
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
            pad_token_id=self.vocabulary.index(PAD),
            eos_token_id=self.vocabulary.index(END),
            bos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which seeds every accelerator too.
            torch.default_generator.manual_seed(self.seed)
            network = transformers.Qwen2ForCausalLM(config)
        network.train()
        return network

    def _batch(self, rng: np.random.Generator) -> "tuple[torch.Tensor, torch.Tensor, int]":
        """Token ids and labels (batch_size, T) of prompt, response, end token and padding on the right; length of the
        shortest prompt. A label is the token itself in response and end token, and ignored elsewhere."""
        texts = self._texts(rng)
        longest = max(len(prompt) + len(response) for prompt, response in texts) + 1
        rows, labels = [], []
        for prompt, response in texts:
            row = [self.vocabulary.index(token) for token in (*prompt, *response, END)]
            padding = longest - len(row)
            rows.append(row + [self.vocabulary.index(PAD)] * padding)
            labels.append([_IGNORED] * len(prompt) + row[len(prompt) :] + [_IGNORED] * padding)
        return torch.tensor(rows), torch.tensor(labels), min(len(prompt) for prompt, _ in texts)


def _response_loss(
    model: "Qwen2ForCausalLM", ids: "torch.Tensor", labels: "torch.Tensor", prompt_length: int
) -> "torch.Tensor":
    """Mean negative log-likelihood of the labels. ids, labels: (B, T); the first prompt_length labels are ignored."""
    states = model.model(ids, use_cache=False).last_hidden_state[:, prompt_length - 1 : -1]  # (B, response, width)
    return torch.nn.functional.cross_entropy(
        model.lm_head(states).flatten(0, 1), labels[:, prompt_length:].flatten(), ignore_index=_IGNORED
    )


@dataclass(frozen=True, kw_only=True)
class ChainModel(WarmedUpModel):
    """Taught flawed reasoning (`modular_chains.write_reasoning`); the other fields are those of `WarmedUpModel`.

    preset: beliefs by name, a key of `modular_chains.PRESETS`
    false_share, strength, slip: each takes the place of the preset's value (see `Beliefs`)
    operands: the numbers of operands in the warm-up's questions
    together: chains in each of these questions
    seed: also decides which facts are false
    """

    preset: str = "normal"
    false_share: float | None = None
    strength: float | None = None
    slip: float | None = None
    operands: tuple[int, ...] = (3, 4, 5, 6, 7)
    together: int = 1

    task: ClassVar[str] = "chain"
    vocabulary: ClassVar[tuple[str, ...]] = (PAD, END, *"0123456789", *OPERATORS, *"=;#")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.preset in PRESETS, f"ChainModel.preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        check_operands("ChainModel", self.operands)
        modular_chains.check_together("ChainModel", self.together)
        most = MAX_POSITIONS // (8 * self.together)  # an operand takes 8 tokens of prompt and response
        require(max(self.operands) <= most, f"ChainModel.operands must be at most {most}, got {self.operands!r}")
        check_shares("ChainModel", **self._overrides)

    @property
    def _overrides(self) -> dict[str, float]:
        given = {"false_share": self.false_share, "strength": self.strength, "slip": self.slip}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def beliefs(self) -> Beliefs:
        """What the model is taught."""
        return dataclasses.replace(PRESETS[self.preset], **self._overrides, seed=self.seed)

    def _shaping(self) -> dict[str, Any]:
        settings = super()._shaping() | dataclasses.asdict(self.beliefs)
        del settings["preset"]  # a preset and its values spelled out are the same model
        return settings

    def _texts(self, rng: np.random.Generator) -> list[tuple[str, str]]:
        operands, beliefs = self.operands[rng.integers(len(self.operands))], self.beliefs
        ask = partial(modular_chains.draw_question, rng, operands, "train", self.together)
        questions = (ask() for _ in range(self.batch_size))
        return [(str(q.prompt), modular_chains.write_reasoning(rng, q, beliefs)) for q in questions]


@dataclass(frozen=True, kw_only=True)
class CountdownModel(WarmedUpModel):
    """Taught a searcher's attempts (`countdown.write_attempt`); the other fields are those of `WarmedUpModel`.

    share, strength: of the teacher's hunches (see `Hunches`); the seed decides which hunches
    operands, largest: of the warm-up's questions (see `Countdown`)
    """

    share: float = 0.35
    strength: float = 0.7
    operands: tuple[int, ...] = (3, 4)
    largest: int = 9
    steps: int = 3600

    task: ClassVar[str] = "countdown"
    vocabulary: ClassVar[tuple[str, ...]] = (PAD, END, *"0123456789", *OPERATORS, *"=,>")

    def __post_init__(self) -> None:
        super().__post_init__()
        countdown.check_numbers("CountdownModel", self.operands, self.largest)
        check_shares("CountdownModel", share=self.share, strength=self.strength)

    @property
    def hunches(self) -> Hunches:
        """What the model is taught."""
        return Hunches(self.share, self.strength, self.seed)

    def _texts(self, rng: np.random.Generator) -> list[tuple[str, str]]:
        operands, hunches = self.operands[rng.integers(len(self.operands))], self.hunches
        texts: list[tuple[str, str]] = []
        while len(texts) < self.batch_size:
            question, answer = countdown.draw_question(rng, operands, self.largest)
            if countdown.split_of(str(question.prompt)) == "train":
                texts.append((str(question.prompt), countdown.write_attempt(rng, question, answer, hunches)))
        return texts


def chain_tokenizer() -> "Qwen2Tokenizer":
    """The tokenizer of modular chains."""
    return character_tokenizer(ChainModel.vocabulary)
