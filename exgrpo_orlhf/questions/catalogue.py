"""The public sets that scripts/prepare_data.py prepares: where each is, how many rows, under which licence.

Where the facts are from (read 2025–26 in stored copies of the pages; this machine has no network, so what could not be
seen is marked as such and recorded from the hub when a set is prepared):

| set | rows | seen in |
|---|---|---|
| Elliott/Openr1-Math-46k-8192 | "46k", exact number not seen | its name; ElliottYan/LUFFY and ExGRPO `data/prepare_train.py`; licence of the source, open-r1/OpenR1-Math-220k |
| openai/gsm8k | 7,473 + 1,319 | its card; openai/grade-school-math |
| DigitalLearningGmbH/MATH-lighteval | 7,500 + 5,000 | its listing (25k rows over all configurations), public revision locks; MATH is MIT |
| open-r1/DAPO-Math-17k-Processed, all | 17,398 | its card (all 17,398, en 14,116, cn 3,282), create_dataset.py; licence of the source, BytedTsinghua-SIA/DAPO-Math-17k |
| HuggingFaceH4/aime_2024 | 30 | public revision locks |
| math-ai/aime25 | 30 | public revision locks, with fields and licence |
| AI-MO/aimo-validation-amc | 83 | its card; 2022 and 2023; the 83 of the paper's validation file |
| HuggingFaceH4/MATH-500 | 500 | its card; openai/prm800k |
| math-ai/minervamath | 272 | its use in public evaluation code; licence not seen (course texts of MIT OpenCourseWare) |
| Hothan/OlympiadBench, OE_TO_maths_en_COMP | 674 | its card; the text-only English competition questions |
| allenai/ai2_arc, ARC-Challenge | 1,172 | its card |
| Idavidrein/gpqa, gpqa_diamond | 198 | its card; gated |
| TIGER-Lab/MMLU-Pro | 12,032 | its card |
"""  # noqa: E501 a table

from __future__ import annotations

from dataclasses import dataclass

from . import conversions
from .conversions import Conversion


@dataclass(frozen=True)
class PublicSet:
    """One file of datasets/.

    role: 'train' or 'test'
    id, subset, split: as in QuestionHub
    rows: how many rows the split has, from and to
    columns: the columns that the conversion reads
    ability: 'math' or 'choice', what kind of answer it is
    revision: the commit the facts belong to; None: not known, so the newest is taken and then kept (manifest.json)
    """

    name: str
    role: str
    id: str
    subset: str | None
    split: str
    rows: tuple[int, int]
    licence: str
    columns: tuple[str, ...]
    convert: Conversion
    ability: str = "math"
    revision: str | None = None

    @property
    def rows_text(self) -> str:
        low, high = self.rows
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _exactly(rows: int) -> tuple[int, int]:
    return rows, rows


_GSM8K = {
    "id": "openai/gsm8k",
    "subset": "main",
    "licence": "MIT",
    "columns": ("question", "answer"),
    "convert": conversions.after_hashes,
    "revision": "740312add88f781978c0658806c59bc2815b9866",
}
_MATH = {
    "id": "DigitalLearningGmbH/MATH-lighteval",
    "subset": "default",
    "licence": "MIT",
    "columns": ("problem", "solution"),
    "convert": conversions.boxed("problem", "solution"),
    "revision": "0530c78699ea5e8eb5530600900e1f328b48acad",
}

_SETS = (
    PublicSet(
        "openr1",
        role="train",
        id="Elliott/Openr1-Math-46k-8192",
        subset=None,
        split="train",
        rows=(45_000, 47_000),
        licence="not stated; source Apache-2.0",
        columns=("prompt", "reward_model"),
        convert=conversions.verl_messages,
    ),
    PublicSet("gsm8k_train", "train", split="train", rows=_exactly(7473), **_GSM8K),
    PublicSet("gsm8k_test", "test", split="test", rows=_exactly(1319), **_GSM8K),
    PublicSet("math_train", "train", split="train", rows=_exactly(7500), **_MATH),
    PublicSet("math_test", "test", split="test", rows=_exactly(5000), **_MATH),
    PublicSet(
        "dapo",
        role="train",
        id="open-r1/DAPO-Math-17k-Processed",
        subset="all",
        split="train",
        rows=_exactly(17_398),
        licence="not stated; source Apache-2.0",
        columns=("prompt", "solution"),
        convert=conversions.dapo,
    ),
    PublicSet(
        "aime24",
        role="test",
        id="HuggingFaceH4/aime_2024",
        subset=None,
        split="train",
        rows=_exactly(30),
        licence="not stated; questions © MAA",
        columns=("problem", "answer"),
        convert=conversions.columns("problem", "answer"),
        revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
    ),
    PublicSet(
        "aime25",
        role="test",
        id="math-ai/aime25",
        subset=None,
        split="test",
        rows=_exactly(30),
        licence="Apache-2.0; questions © MAA",
        columns=("problem", "answer"),
        convert=conversions.columns("problem", "answer"),
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
    ),
    PublicSet(
        "amc",
        role="test",
        id="AI-MO/aimo-validation-amc",
        subset=None,
        split="train",
        rows=_exactly(83),
        licence="Apache-2.0; questions © MAA",
        columns=("problem", "answer"),
        convert=conversions.columns("problem", "answer"),
        revision="8ef249608d65c2de7763ca7525f438e540ba285e",
    ),
    PublicSet(
        "math500",
        role="test",
        id="HuggingFaceH4/MATH-500",
        subset=None,
        split="test",
        rows=_exactly(500),
        licence="MIT",
        columns=("problem", "answer"),
        convert=conversions.columns("problem", "answer"),
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
    ),
    PublicSet(
        "minerva",
        role="test",
        id="math-ai/minervamath",
        subset=None,
        split="test",
        rows=_exactly(272),
        licence="not stated; course texts CC BY-NC-SA",
        columns=("question", "answer"),
        convert=conversions.columns("question", "answer"),
    ),
    PublicSet(
        "olympiad",
        role="test",
        id="Hothan/OlympiadBench",
        subset="OE_TO_maths_en_COMP",
        split="train",
        rows=_exactly(674),
        licence="Apache-2.0",
        columns=("context", "question", "final_answer"),
        convert=conversions.olympiad,
        revision="91184b52131e7fc9455fef848035173aea8cc01a",
    ),
    PublicSet(
        "arc_c",
        role="test",
        id="allenai/ai2_arc",
        subset="ARC-Challenge",
        split="test",
        rows=_exactly(1172),
        licence="CC BY-SA 4.0",
        columns=("question", "choices", "answerKey"),
        convert=conversions.arc,
        ability="choice",
        revision="210d026faf9955653af8916fad021475a3f00453",
    ),
    PublicSet(
        "gpqa",
        role="test",
        id="Idavidrein/gpqa",
        subset="gpqa_diamond",
        split="train",
        rows=_exactly(198),
        licence="CC BY 4.0; gated: not to be shown in the open",
        columns=("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
        convert=conversions.gpqa,
        ability="choice",
        revision="633f5ee89ab8ad4522a9f850766b73f62147ffdd",
    ),
    PublicSet(
        "mmlu_pro",
        role="test",
        id="TIGER-Lab/MMLU-Pro",
        subset="default",
        split="test",
        rows=_exactly(12_032),
        licence="MIT",
        columns=("question", "options", "answer"),
        convert=conversions.mmlu_pro,
        ability="choice",
        revision="b189ec765aa7ed75c8acfea42df31fdae71f97be",
    ),
)

PUBLIC_SETS: dict[str, PublicSet] = {public.name: public for public in _SETS}
