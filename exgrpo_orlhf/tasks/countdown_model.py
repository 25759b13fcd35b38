"""A tiny language model that can write countdown answers with true values, and rarely finds a right one.

0.34 M parameters, warmed up (`warm_up.WarmedUpModel`) on a searcher's attempts (`countdown.write_attempt`). It looks
ahead as far as three layers can, and where it has a hunch it does not search: only reward can correct that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .countdown import Hunches, check_numbers, draw_question, split_of, write_attempt
from .made_questions import OPERATORS, check_shares
from .warm_up import END, PAD, WarmedUpModel


@dataclass(frozen=True, kw_only=True)
class CountdownModel(WarmedUpModel):
    """A warmed-up model, made once and then found in the cache; the other fields are those of `WarmedUpModel`.

    share, strength: of the teacher's hunches (see `Hunches`); the seed decides which hunches
    operands, largest: of the warm-up's questions (see `Countdown`), all of them from the training split
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
        check_numbers("CountdownModel", self.operands, self.largest)
        check_shares("CountdownModel", share=self.share, strength=self.strength)

    @property
    def hunches(self) -> Hunches:
        """What the model is taught."""
        return Hunches(self.share, self.strength, self.seed)

    def _texts(self, rng: np.random.Generator) -> list[tuple[str, str]]:
        operands, hunches = self.operands[rng.integers(len(self.operands))], self.hunches
        texts: list[tuple[str, str]] = []
        while len(texts) < self.batch_size:
            question, answer = draw_question(rng, operands, self.largest)
            if split_of(str(question.prompt)) == "train":
                texts.append((str(question.prompt), write_attempt(rng, question, answer, hunches)))
        return texts
