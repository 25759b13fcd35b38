"""Tiny language models warmed up on flawed texts of a task, each made once and then found in a cache.

A Qwen2 of 0.34 M parameters with one token per character, trained by next-token prediction on the responses alone. The
result is an ordinary Hugging Face model directory. Only reward can correct what a model was taught wrongly:

- `ChainModel` knows the procedure of modular chains and has false beliefs about single steps; how hard a question is
  depends on how many false facts its steps need.
- `GymModel` has seen tasks of reasoning-gym for a short time.
"""

# No postponed annotations: those of inherited fields would be looked up in the module of the class that inherits them.
import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from ..checkpoints import cache
from ..checks import Constraint, Count, Natural, Share, check_settings, require
from ..engines.rows import ForwardRow, padded
from ..io import paths, weights
from ..io.lazy import torch, transformers
from ..training.optimiser_steps import optimiser_steps
from . import modular_chains, reasoning_gym
from .made_questions import Operands
from .modular_chains import OPERATORS, PRESETS, Beliefs
from .reasoning_gym import ReasoningGym

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

PAD, END = "<pad>", "<end>"  # the first one has the id 0, with which rows are padded
_IGNORED = -100  # label of a token that is not learnt
_WIDTH = Constraint("must be a positive multiple of 32", lambda value: value > 0 == value % 32)
_RATE = Constraint("must be between 0 and 1", lambda value: 0 < value < 1)


@dataclass(frozen=True, kw_only=True)
class WarmedUpModel(ABC):
    """Base of the tiny models. A task's class adds the texts that are taught (`_texts`), all of the training split.

    steps, batch_size, learning_rate: the warm-up's optimiser steps, sequences in each, and peak rate (AdamW)
    seed: the first weights and the warm-up's data
    width, layers: size of the network; width is a multiple of 32 (one attention head for each 32)
    cache: directory that holds the models; None means $EXGRPO_CACHE, or ~/.cache/exgrpo_orlhf where that is not set
    """

    MAY_CHANGE = ("cache",)

    steps: Count = 1600
    batch_size: Count = 32
    learning_rate: Annotated[float, _RATE] = 2e-3
    seed: Natural = 0
    width: Annotated[int, _WIDTH] = 96
    layers: Count = 3
    cache: str | Path | None = None

    task: ClassVar[str]  # of the directory's name and the progress line
    vocabulary: ClassVar[tuple[str, ...]]  # PAD, END, then the task's characters
    format: ClassVar[int] = 1  # raise it when the same settings would give another model
    positions: ClassVar[int] = 256  # tokens of prompt and response together

    def __post_init__(self) -> None:
        check_settings(type(self), vars(self))

    def _shaping(self) -> dict[str, Any]:
        """Every setting that shapes the model."""
        settings = dataclasses.asdict(self) | {"format": self.format}
        return {name: value for name, value in settings.items() if name != "cache"}

    @classmethod
    def tokenizer(cls) -> "Qwen2Tokenizer":
        """One token per character, no special tokens added; characters outside the vocabulary are dropped.

        It is Qwen2's own class, because AutoTokenizer loads the tokenizer of any Qwen2 model as that class. Its
        byte-pair encoding without merges gives one token per character.
        """
        return transformers.Qwen2Tokenizer(
            vocab={token: i for i, token in enumerate(cls.vocabulary)},
            merges=[],
            unk_token=PAD,  # without one the class would add a token; nothing is ever encoded as it
            pad_token=PAD,
            eos_token=END,
            padding_side="left",
            clean_up_tokenization_spaces=False,
            model_max_length=cls.positions,
        )

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
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # their number can change the result, and is no part of the cache's key
        try:
            model = self._warmed_up()
        finally:
            torch.set_num_threads(threads)
        with cache.making(directory) as unfinished:
            weights.save(model, unfinished)
            self.tokenizer().save_pretrained(unfinished)
        return directory

    def _warmed_up(self) -> "Qwen2ForCausalLM":
        model = self._fresh_network()
        rng = np.random.default_rng(self.seed)
        optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        rise = 0.1 if self.steps != 10 else 0.11  # OneCycleLR divides by rise · steps − 1
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, self.learning_rate, self.steps, pct_start=rise, cycle_momentum=False
        )

        def gradient(step: int) -> float:
            ids, labels, prompt_length = self._batch(rng)
            states = model.model(ids, use_cache=False).last_hidden_state[:, prompt_length - 1 : -1]
            logits = model.lm_head(states).flatten(0, 1)  # (B · longest response, V)
            loss = torch.nn.functional.cross_entropy(logits, labels[:, prompt_length:].flatten(), ignore_index=_IGNORED)
            loss.backward()
            return loss.item()

        label = f"warming up the {self.task} model"
        deque(optimiser_steps(gradient, optimiser, schedule, last=self.steps, max_grad_norm=1.0, what=label), maxlen=0)
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
            max_position_embeddings=self.positions,
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
        encode, end = self.tokenizer().encode, self.vocabulary.index(END)
        texts = [(encode(prompt), [*encode(response), end]) for prompt, response in self._texts(rng)]
        ids, taught = padded([ForwardRow(prompt, np.array(response, np.int32)) for prompt, response in texts])
        labels = np.where(taught, ids, _IGNORED)
        return torch.from_numpy(ids), torch.from_numpy(labels), min(len(prompt) for prompt, _ in texts)


@dataclass(frozen=True, kw_only=True)
class ChainModel(WarmedUpModel):
    """Taught flawed reasoning (`modular_chains.write_reasoning`); the other fields are those of `WarmedUpModel`.

    preset: beliefs by name, a key of `modular_chains.PRESETS`; strength: instead of the preset's (see `Beliefs`)
    operands: the numbers of operands in the warm-up's questions
    together: chains in each of these questions
    calls: share of the steps that it is taught to write as calls of a calculator (testbed/chain_calculator.py)
    seed: also decides which facts are false
    """

    preset: str = "normal"
    strength: Share | None = None
    operands: Operands = (3, 4, 5, 6, 7)
    together: Count = 1
    calls: Share = 0.0

    task: ClassVar[str] = "chain"
    vocabulary: ClassVar[tuple[str, ...]] = (PAD, END, *"0123456789", *OPERATORS, *"=;#")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.preset in PRESETS, f"ChainModel.preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        most = self.positions // (8 * self.together)  # an operand takes 8 tokens of prompt and response
        require(
            max(self.operands) <= most,
            f"ChainModel.operands must be at most {most} where ChainModel.together is {self.together}, got "
            f"{self.operands!r}",
        )

    @property
    def beliefs(self) -> Beliefs:
        """What the model is taught."""
        beliefs = dataclasses.replace(PRESETS[self.preset], seed=self.seed)
        return beliefs if self.strength is None else dataclasses.replace(beliefs, strength=self.strength)

    def _shaping(self) -> dict[str, Any]:
        settings = super()._shaping() | dataclasses.asdict(self.beliefs)
        del settings["preset"]  # a preset and its values spelled out are the same model
        if not self.calls:  # the name of a model without them stays
            del settings["calls"]
        return settings

    def _texts(self, rng: np.random.Generator) -> list[tuple[str, str]]:
        operands, beliefs = self.operands[rng.integers(len(self.operands))], self.beliefs
        texts = []
        for _ in range(self.batch_size):
            question = modular_chains.draw_question(rng, operands, "train", self.together)
            texts.append((str(question.prompt), modular_chains.write_reasoning(rng, question, beliefs, self.calls)))
        return texts


@dataclass(frozen=True, kw_only=True)
class GymModel(WarmedUpModel):
    """Taught answers of reasoning-gym for a short time; the other fields are those of `WarmedUpModel`.

    tasks, settings: as of `ReasoningGym`
    count: number of questions, in ASCII, of the training split: the first of a `ReasoningGym` with the same seed
    """

    tasks: str | Mapping[str, float] = field(hash=False)
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    count: Count = 2000
    steps: Count = 200

    task: ClassVar[str] = "gym"
    # Space and line break, as byte-level encoding writes them, and the printable characters of ASCII.
    vocabulary: ClassVar[tuple[str, ...]] = (PAD, END, "\u0120", "\u010a", *map(chr, range(ord("!"), ord("~") + 1)))
    positions: ClassVar[int] = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self._questions()
        except ValueError as error:
            raise ValueError(str(error).replace("ReasoningGym.", "GymModel.")) from None

    def _questions(self) -> ReasoningGym:
        return ReasoningGym(self.tasks, self.settings, self.count, self.seed)

    def _shaping(self) -> dict[str, Any]:
        return {**super()._shaping(), "library": reasoning_gym.version()}

    @cached_property
    def _examples(self) -> list[tuple[str, str]]:
        examples = [(str(question.prompt), answer) for question, answer in self._questions().examples()]
        for text in (prompt + answer for prompt, answer in examples):
            require(text.isascii(), f"GymModel.tasks: a text is not in ASCII: {text!r:.200}")
            length = len(text) + 1
            require(
                length <= self.positions, f"GymModel.tasks: a text has {length} characters, at most {self.positions}"
            )
        return examples

    def _texts(self, rng: np.random.Generator) -> list[tuple[str, str]]:
        return [self._examples[i] for i in rng.integers(self.count, size=self.batch_size)]
