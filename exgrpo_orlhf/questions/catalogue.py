"""The public sets that scripts/prepare_data.py prepares: where each is, how many rows it has, under which licence.

The facts are from stored copies of the sets' cards and of public revision locks, read in 2025 and 2026; a comment says
where one is from another place. Facts that were not seen there are marked; they are recorded from the hub when the set
is prepared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import conversions
from .conversions import Conversion


@dataclass(frozen=True)
class PublicSet:
    """One file of datasets/.

    name: of the file
    id, split, subset: as in QuestionHub
    rows: how many rows the split has, from and to
    convert: makes question and answer of a row
    role: 'train' or 'test'
    ability: 'math' or 'choice', what kind of answer it is
    revision: the commit the facts belong to; None: not known, so the newest is taken and then kept (manifest.json)
    """

    name: str
    id: str
    rows: tuple[int, int]
    licence: str
    convert: Conversion
    split: str = "test"
    subset: str | None = None
    role: str = "test"
    ability: str = "math"
    revision: str | None = None

    @property
    def rows_text(self) -> str:
        low, high = self.rows
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"


_APACHE_MAA, _NO_MAA = "Apache-2.0; questions © MAA", "not stated; questions © MAA"
_APACHE_SOURCE = "not stated; source Apache-2.0"  # open-r1/OpenR1-Math-220k, BytedTsinghua-SIA/DAPO-Math-17k
_COURSES = "not stated; course texts CC BY-NC-SA"  # not seen; MIT OpenCourseWare
_GATED = "CC BY 4.0; gated: not to be shown in the open"
_PLAIN, _BOXED = conversions.columns("problem", "answer"), conversions.boxed("problem", "solution")
_MATH = "DigitalLearningGmbH/MATH-lighteval"  # its listing: 25k rows over all configurations

_SETS = (
    # The name ("46k", the exact number was not seen); ElliottYan/LUFFY and ExGRPO `data/prepare_train.py`.
    PublicSet(
        "openr1", "Elliott/Openr1-Math-46k-8192", (45_000, 47_000), _APACHE_SOURCE, conversions.verl_messages, "train",
        role="train",
    ),
    PublicSet("gsm8k_train", "openai/gsm8k", (7473, 7473), "MIT", conversions.after_hashes, "train", "main", "train"),
    PublicSet("gsm8k_test", "openai/gsm8k", (1319, 1319), "MIT", conversions.after_hashes, subset="main"),
    PublicSet("math_train", _MATH, (7500, 7500), "MIT", _BOXED, "train", "default", "train"),
    PublicSet("math_test", _MATH, (5000, 5000), "MIT", _BOXED, subset="default"),
    # All 17,398, en 14,116, cn 3,282; create_dataset.py.
    PublicSet(
        "dapo", "open-r1/DAPO-Math-17k-Processed", (17_398, 17_398), _APACHE_SOURCE, conversions.dapo, "train", "all",
        role="train",
    ),
    PublicSet("aime24", "HuggingFaceH4/aime_2024", (30, 30), _NO_MAA, _PLAIN, "train"),
    PublicSet("aime25", "math-ai/aime25", (30, 30), _APACHE_MAA, _PLAIN),
    # 2022 and 2023; the 83 of the paper's validation file.
    PublicSet("amc", "AI-MO/aimo-validation-amc", (83, 83), _APACHE_MAA, _PLAIN, "train"),
    PublicSet("math500", "HuggingFaceH4/MATH-500", (500, 500), "MIT", _PLAIN),  # openai/prm800k
    # Its use in public evaluation code.
    PublicSet("minerva", "math-ai/minervamath", (272, 272), _COURSES, conversions.columns("question", "answer")),
    # The text-only English competition questions.
    PublicSet(
        "olympiad", "Hothan/OlympiadBench", (674, 674), "Apache-2.0", conversions.olympiad, "train",
        "OE_TO_maths_en_COMP",
    ),
    # arkilpatel/SVAMP, whose 1,000 questions are the two splits together.
    PublicSet(
        "svamp", "ChilleD/SVAMP", (1000, 1000), "MIT", conversions.columns("question_concat", "Answer"), "train+test"
    ),
    PublicSet(
        "arc_c", "allenai/ai2_arc", (1172, 1172), "CC BY-SA 4.0", conversions.arc, subset="ARC-Challenge",
        ability="choice",
    ),
    PublicSet(
        "gpqa", "Idavidrein/gpqa", (198, 198), _GATED, conversions.gpqa, "train", "gpqa_diamond", ability="choice"
    ),
    PublicSet(
        "mmlu_pro", "TIGER-Lab/MMLU-Pro", (12_032, 12_032), "MIT", conversions.mmlu_pro, subset="default",
        ability="choice",
    ),
)  # fmt: skip

_REVISIONS = {
    **dict.fromkeys(("gsm8k_train", "gsm8k_test"), "740312add88f781978c0658806c59bc2815b9866"),
    **dict.fromkeys(("math_train", "math_test"), "0530c78699ea5e8eb5530600900e1f328b48acad"),
    "aime24": "2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
    "aime25": "563bb8404243c5f09de6ec262f2db674fe5bce9b",
    "amc": "8ef249608d65c2de7763ca7525f438e540ba285e",
    "math500": "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
    "olympiad": "91184b52131e7fc9455fef848035173aea8cc01a",
    "svamp": "5e0bf1e5e7c0e9c4bc39180d224f41f3f801b7ef",
    "arc_c": "210d026faf9955653af8916fad021475a3f00453",
    "gpqa": "633f5ee89ab8ad4522a9f850766b73f62147ffdd",
    "mmlu_pro": "b189ec765aa7ed75c8acfea42df31fdae71f97be",
}

PUBLIC_SETS: dict[str, PublicSet] = {
    public.name: replace(public, revision=_REVISIONS.get(public.name)) for public in _SETS
}
