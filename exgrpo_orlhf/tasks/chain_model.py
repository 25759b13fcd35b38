"""A tiny language model that knows the procedure of modular chains and holds false beliefs about single steps.

0.34 M parameters, warmed up (`warm_up.WarmedUpModel`) on flawed reasoning (`modular_chains.write_reasoning`). Only
reward can correct it: whether a question is hard depends on the false facts it meets.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from transformers import Qwen2Tokenizer

from exgrpo_orlhf.tasks.modular_chains import (
    OPERATORS,
    PRESETS,
    Beliefs,
    check_operands,
    draw_question,
    write_reasoning,
)
from exgrpo_orlhf.tasks.warm_up import END, MAX_POSITIONS, PAD, WarmedUpModel, character_tokenizer

FORMAT = 1  # raise it when the same settings would give another model
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
    seed: which facts are false, too
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
        if self.preset not in PRESETS:
            raise ValueError(f"ChainModel.preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        check_operands("ChainModel", self.operands)
        if max(self.operands) > MAX_POSITIONS // 8:  # tokens of prompt and response for each operand
            raise ValueError(f"ChainModel.operands must be at most {MAX_POSITIONS // 8}, got {self.operands!r}")
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

    def _shaping(self) -> dict[str, Any]:
        settings = super()._shaping() | dataclasses.asdict(self.beliefs) | {"format": FORMAT}
        return {name: value for name, value in settings.items() if name != "preset"}

    def _tokenizer(self) -> Qwen2Tokenizer:
        return chain_tokenizer()

    def _texts(self, rng: np.random.Generator) -> list[tuple[str, str]]:
        operands, beliefs = self.operands[rng.integers(len(self.operands))], self.beliefs
        questions = (draw_question(rng, operands, "train") for _ in range(self.batch_size))
        return [(question.prompt, write_reasoning(rng, question, beliefs)) for question in questions]
