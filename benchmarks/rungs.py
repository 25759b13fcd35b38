#!/usr/bin/env python
"""How hard word problems of one to four steps are for the model that a run would start with.

    python benchmarks/rungs.py --gin gin/smollm2.gin

For each number of steps: K = 8 sampled responses (temperature 1) to each of some questions, and of them pass@1, pass@8,
the share of mixed groups (some right, some wrong: the others teach nothing), responses without an answer, correct
responses with wrong reasoning, and tokens. Goal: the numbers of steps that the run trains on have a pass@1 of 10 to
40 % and at least 30 % mixed groups. The model is made first if it is not in the cache.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from command_line import TINY, finish, make_parser

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.local import TorchEngine
from exgrpo_orlhf.records import Grade
from exgrpo_orlhf.tasks.word_problems import WordProblems

K = 8
SMALL = ("Work.questions = @WordProblems()", "Verifier.kind = 'word_problem'", "Prompts.max_tokens = 99")
PASS_AT_1, MIXED = (0.1, 0.4), 0.3


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--gin", action="append", default=[], help="as train.py's")
    parser.add_argument("--set", action="append", default=[], help="as train.py's")
    parser.add_argument("--questions", type=int, default=64, help="for each number of steps (default: 64)")
    parser.add_argument("--split", choices=("train", "validation"), default="train")
    given = parser.parse_args()
    if given.small:
        given.gin, given.set, given.questions = ["toy.gin"], [*SMALL, *TINY], 2
    x = config.load(given.gin or ["smollm2.gin"], given.set)
    if x.local is None:
        parser.error("only the local engine is measured: add --set \"train.engine = 'local'\"")
    if not isinstance(x.questions, WordProblems):
        parser.error(f"the goal is for word problems: Work.questions must be @WordProblems(), not {x.questions!r:.80}")
    engine = TorchEngine(x.local, x.optimizer, x.sampling, x.prompts, model_path=x.model.prepare())
    figures: dict[str, Any] = {}
    print(
        f"{'steps':>5} {'pass@1':>7} {'pass@8':>7} {'mixed':>6} {'no answer':>10} {'lucky':>6} {'tokens':>7} {'fit':>4}"
    )
    for steps in (1, 2, 3, 4):
        questions = WordProblems(count=given.questions, steps=(steps,), seed=7, split=given.split).load()
        began = time.perf_counter()
        seeds = np.arange(len(questions) * K).reshape(-1, K)
        answered = engine.generate_for(questions, seeds.tolist(), 1.0, 1.0)
        pairs = [(q, engine.decode(one.token_ids)) for q, own in zip(questions, answered, strict=True) for one in own]
        known = measured(x.verifier.grade_all(pairs))
        known["tokens"] = float(np.mean([len(one.token_ids) for own in answered for one in own]))
        known["seconds"] = time.perf_counter() - began
        fit = PASS_AT_1[0] <= known["pass_at_1"] <= PASS_AT_1[1] and known["mixed"] >= MIXED
        figures[str(steps)] = {**known, "fit": fit}
        print(
            f"{steps:>5} {known['pass_at_1']:7.1%} {known['pass_at_8']:7.1%} {known['mixed']:6.1%} "
            f"{known['no_answer']:10.1%} {known['lucky']:6.1%} {known['tokens']:7.1f} {'yes' if fit else 'no':>4}"
        )
    trained_on = x.questions.steps
    figures["met"] = given.small or all(figures[str(steps)]["fit"] for steps in trained_on)
    return finish(given, figures, f"the run trains on {' and '.join(map(str, trained_on))} steps")


def measured(grades: list[Grade]) -> dict[str, float]:
    """grades: K for each question, one question after another"""
    right = np.array([grade.correct for grade in grades]).reshape(-1, K)
    sound = [bool(grade.sound) for grade in grades if grade.correct]
    return {
        "pass_at_1": float(right.mean()),
        "pass_at_8": float(right.any(1).mean()),
        "mixed": float((right.any(1) & ~right.all(1)).mean()),
        "no_answer": float(np.mean([grade.verdict == "no_answer" for grade in grades])),
        "lucky": 1 - float(np.mean(sound)) if sound else 0.0,
    }


if __name__ == "__main__":
    sys.exit(main())
