"""A tiny language model that knows the procedure of modular chains and has false beliefs about single steps.

0.34 M parameters, warmed up (`warm_up.WarmedUpModel`) on flawed reasoning (`modular_chains.write_reasoning`). Only
reward can correct it; how hard a question is depends on how many false facts its steps need.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from transformers import Qwen2Tokenizer

from ..settings import require
from .made_questions import OPERATORS, check_operands, check_shares
from .modular_chains import PRESETS, Beliefs, draw_question, write_reasoning
from .warm_up import END, MAX_POSITIONS, PAD, WarmedUpModel, character_tokenizer

VOCABULARY = (PAD, END, *"0123456789", *OPERATORS, *"=;#")


def chain_tokenizer() -> Qwen2Tokenizer:
    """One token per character; characters outside the vocabulary are dropped."""
    return character_tokenizer(VOCABULARY)


@dataclass(frozen=True, kw_only=True)
class ChainModel(WarmedUpModel):
    """A warmed-up model, made once and then found in the cache; the other fields are those of `WarmedUpModel`.

    preset: beliefs by name, a key of `modular_chains.PRESETS`
    false_share, strength, slip: each takes the place of the preset's value (see `Beliefs`)
    operands: the numbers of operands in the warm-up's questions, all of them from the training split
    seed: also decides which facts are false
    """

    preset: str = "normal"
    false_share: float | None = None
    strength: float | None = None
    slip: float | None = None
    operands: tuple[int, ...] = (3, 4, 5, 6, 7)

    task: ClassVar[str] = "chain"
    vocabulary: ClassVar[tuple[str, ...]] = VOCABULARY

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.preset in PRESETS, f"ChainModel.preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        check_operands("ChainModel", self.operands)
        most = MAX_POSITIONS // 8  # an operand takes 8 tokens of prompt and response
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
        return {name: value for name, value in settings.items() if name != "preset"}

    def _texts(self, rng: np.random.Generator) -> list[tuple[str, str]]:
        operands, beliefs = self.operands[rng.integers(len(self.operands))], self.beliefs
        questions = (draw_question(rng, operands, "train") for _ in range(self.batch_size))
        return [(str(question.prompt), write_reasoning(rng, question, beliefs)) for question in questions]
