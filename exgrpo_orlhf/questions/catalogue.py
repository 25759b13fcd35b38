"""The public sets that scripts/prepare_data.py prepares: where each is, how many rows it has, under which licence.

The comment above an entry says where its facts are from: stored copies of these pages, read in 2025 and 2026. Facts
that were not seen there are marked; they are recorded from the hub when the set is prepared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from . import conversions
from .conversions import Conversion


@dataclass(frozen=True, kw_only=True)
class PublicSet:
    """One file of datasets/.

    role: 'train' or 'test'
    id, subset, split: as in QuestionHub
    rows: how many rows the split has, from and to
    convert: makes question and answer of a row
    ability: 'math' or 'choice', what kind of answer it is
    revision: the commit the facts belong to; None: not known, so the newest is taken and then kept (manifest.json)
    """

    name: str
    id: str
    rows: tuple[int, int]
    licence: str
    convert: Conversion
    role: str = "test"
    subset: str | None = None
    split: str = "test"
    ability: str = "math"
    revision: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the conversion reads."""
        return self.convert.columns

    @property
    def rows_text(self) -> str:
        low, high = self.rows
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"


# The card; openai/grade-school-math.
_gsm8k = partial(
    PublicSet,
    id="openai/gsm8k",
    subset="main",
    licence="MIT",
    convert=conversions.after_hashes,
    revision="740312add88f781978c0658806c59bc2815b9866",
)
# The set's listing (25k rows over all configurations), public revision locks; MATH is MIT.
_math = partial(
    PublicSet,
    id="DigitalLearningGmbH/MATH-lighteval",
    subset="default",
    licence="MIT",
    convert=conversions.boxed("problem", "solution"),
    revision="0530c78699ea5e8eb5530600900e1f328b48acad",
)

_SETS = (
    # The name ("46k", the exact number was not seen); ElliottYan/LUFFY and ExGRPO `data/prepare_train.py`; the licence
    # is that of the source, open-r1/OpenR1-Math-220k.
    PublicSet(
        name="openr1",
        role="train",
        id="Elliott/Openr1-Math-46k-8192",
        split="train",
        rows=(45_000, 47_000),
        licence="not stated; source Apache-2.0",
        convert=conversions.verl_messages,
    ),
    _gsm8k(name="gsm8k_train", role="train", split="train", rows=(7473, 7473)),
    _gsm8k(name="gsm8k_test", rows=(1319, 1319)),
    _math(name="math_train", role="train", split="train", rows=(7500, 7500)),
    _math(name="math_test", rows=(5000, 5000)),
    # The card (all 17,398, en 14,116, cn 3,282), create_dataset.py; the licence is that of the source,
    # BytedTsinghua-SIA/DAPO-Math-17k.
    PublicSet(
        name="dapo",
        role="train",
        id="open-r1/DAPO-Math-17k-Processed",
        subset="all",
        split="train",
        rows=(17_398, 17_398),
        licence="not stated; source Apache-2.0",
        convert=conversions.dapo,
    ),
    # Public revision locks.
    PublicSet(
        name="aime24",
        id="HuggingFaceH4/aime_2024",
        split="train",
        rows=(30, 30),
        licence="not stated; questions © MAA",
        convert=conversions.columns("problem", "answer"),
        revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
    ),
    # Public revision locks, with fields and licence.
    PublicSet(
        name="aime25",
        id="math-ai/aime25",
        rows=(30, 30),
        licence="Apache-2.0; questions © MAA",
        convert=conversions.columns("problem", "answer"),
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
    ),
    # The card; 2022 and 2023; the 83 of the paper's validation file.
    PublicSet(
        name="amc",
        id="AI-MO/aimo-validation-amc",
        split="train",
        rows=(83, 83),
        licence="Apache-2.0; questions © MAA",
        convert=conversions.columns("problem", "answer"),
        revision="8ef249608d65c2de7763ca7525f438e540ba285e",
    ),
    # The card; openai/prm800k.
    PublicSet(
        name="math500",
        id="HuggingFaceH4/MATH-500",
        rows=(500, 500),
        licence="MIT",
        convert=conversions.columns("problem", "answer"),
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
    ),
    # Its use in public evaluation code; the licence was not seen (course texts of MIT OpenCourseWare).
    PublicSet(
        name="minerva",
        id="math-ai/minervamath",
        rows=(272, 272),
        licence="not stated; course texts CC BY-NC-SA",
        convert=conversions.columns("question", "answer"),
    ),
    # The card; the text-only English competition questions.
    PublicSet(
        name="olympiad",
        id="Hothan/OlympiadBench",
        subset="OE_TO_maths_en_COMP",
        split="train",
        rows=(674, 674),
        licence="Apache-2.0",
        convert=conversions.olympiad,
        revision="91184b52131e7fc9455fef848035173aea8cc01a",
    ),
    # Public revision locks; arkilpatel/SVAMP, whose 1,000 questions are the two splits together.
    PublicSet(
        name="svamp",
        id="ChilleD/SVAMP",
        split="train+test",
        rows=(1000, 1000),
        licence="MIT",
        convert=conversions.columns("question_concat", "Answer"),
        revision="5e0bf1e5e7c0e9c4bc39180d224f41f3f801b7ef",
    ),
    # The card.
    PublicSet(
        name="arc_c",
        id="allenai/ai2_arc",
        subset="ARC-Challenge",
        rows=(1172, 1172),
        licence="CC BY-SA 4.0",
        convert=conversions.arc,
        ability="choice",
        revision="210d026faf9955653af8916fad021475a3f00453",
    ),
    # The card; gated.
    PublicSet(
        name="gpqa",
        id="Idavidrein/gpqa",
        subset="gpqa_diamond",
        split="train",
        rows=(198, 198),
        licence="CC BY 4.0; gated: not to be shown in the open",
        convert=conversions.gpqa,
        ability="choice",
        revision="633f5ee89ab8ad4522a9f850766b73f62147ffdd",
    ),
    # The card.
    PublicSet(
        name="mmlu_pro",
        id="TIGER-Lab/MMLU-Pro",
        subset="default",
        rows=(12_032, 12_032),
        licence="MIT",
        convert=conversions.mmlu_pro,
        ability="choice",
        revision="b189ec765aa7ed75c8acfea42df31fdae71f97be",
    ),
)

PUBLIC_SETS: dict[str, PublicSet] = {public.name: public for public in _SETS}
