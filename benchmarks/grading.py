"""Answers graded per second: our pool on 2 cores against plain math-verify in one process, over the same answers.

Goal: at least 1.8 times as many on ordinary answers, and less than 10 % fewer when 1 % of them are pathological (power
towers, factorials, deep nesting, 100,000 characters, integrals without a solution).

The ordinary answers are mixed: golds of MATH-500, Minerva, GSM8K and AIME from ../shared/data (EXGRPO_TEST_DATA),
boxed or stated, three in five right, one in ten as a sum to be evaluated; each is graded once, so no cache helps.
Plain math-verify parses gold and response and compares them, with its own timeouts off as in any thread.

Why ours is more than twice as fast: most answers are decided as text or as numbers and never reach sympy; an expression
that differs from the gold at one point is not simplified. Most pathological answers are recognised before they are
evaluated; the others are killed at the limit while the other worker continues, and the next fork takes milliseconds.
"""

from __future__ import annotations

import json
import logging
import os
import random
import statistics
import sys
import time

from command_line import DATA, finish, make_parser

from exgrpo_orlhf.grader.math import gold_texts
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.workers.fork_server import close_workers

SPEED_GOAL, HARM_LIMIT = 1.8, 0.10
PATHOLOGICAL = (
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{999999999!}",
    r"\boxed{" + "(" * 5000 + "1" + ")" * 5000 + "}",
    r"\boxed{" + "1" * 100_000 + "}",
    "x" * 100_000,
    r"\boxed{" + r"\frac{1}{" * 400 + "1" + "}" * 401,
    r"\boxed{\prod_{k=1}^{10^{8}} (k+1)}",
    r"\boxed{\binom{10^{9}}{5\cdot 10^{8}}}",
    r"\boxed{(10^{9999})^{9999}}",
    r"\boxed{(x+y+z+w+1)^{199}}",
)

Pair = tuple[str, str]  # gold, response


def ordinary(count: int, seed: int) -> list[Pair]:
    """Golds of four benchmarks with right and wrong responses in several notations, each pair once."""
    rng = random.Random(seed)
    files = {"math500": "answer", "minerva": "solution", "gsm8k": "answer", "aime24": "expected_answer"}
    golds, pairs = [], {}
    for name, field in files.items():
        lines = (DATA / f"{name}_test.jsonl").read_text(encoding="utf-8").split("\n")
        golds += [gold_texts(json.loads(line)[field])[0] for line in lines if line]
    forms = (
        r"So the final answer is $\boxed{{{0}}}$.",
        r"Step {1}: we add. Therefore, $x = {0}$, and the answer is \boxed{{{0}}}.",
        r"After {1} steps, the answer is ${0}$.",
        r"\boxed{{ {0} + {1} }}",
        r"\boxed{{ {0} + {1} - {1} }}",
    )
    while len(pairs) < count:
        gold = rng.choice(golds)
        text = gold if rng.random() < 0.6 else rng.choice(golds)
        form = rng.choice(forms[3:]) if rng.random() < 0.1 else rng.choice(forms[:3])
        pairs[gold, form.format(text, rng.randrange(1, 1000))] = None
    return list(pairs)


def ours(pairs: list[Pair], timeout: float) -> float:
    """Seconds."""
    close_workers()  # a worker's caches of an earlier pass must not help in this one
    starting = [("1", f"\\boxed{{{i}}}") for i in range(16)]
    grader = Verifier("math", workers=2, timeout=timeout, max_failed_share=1.0)
    for each in (starting, pairs):
        answers = [(Question.make("benchmark", "", gold), response) for gold, response in each]
        start = time.perf_counter()
        grader.grade_all(answers)
    return time.perf_counter() - start


def plain(pairs: list[Pair]) -> float:
    """Seconds."""
    from math_verify import parse, verify

    start = time.perf_counter()
    for gold, response in pairs:
        verify(parse(f"${gold}$", parsing_timeout=None), parse(response, parsing_timeout=None), timeout_seconds=None)  # type: ignore[arg-type]
    return time.perf_counter() - start


def spiced(pairs: list[Pair], share: float) -> list[Pair]:
    """With this share of the responses replaced by pathological ones, evenly spread."""
    every = round(1 / share)
    return [
        (gold, PATHOLOGICAL[i // every % len(PATHOLOGICAL)] + f" {i}" if i % every == 0 else response)
        for i, (gold, response) in enumerate(pairs)
    ]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--count", type=int, default=4000, help="answers in a pass (default 4000)")
    parser.add_argument("--repeats", type=int, default=3, help="passes of each (default 3)")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for an answer, as in training")
    arguments = parser.parse_args()
    count, repeats = (500, 1) if arguments.small else (arguments.count, arguments.repeats)
    if len(os.sched_getaffinity(0)) > 2:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    logging.disable(logging.WARNING)

    plain(ordinary(100, seed=-1))
    seconds: dict[str, list[float]] = {"plain": [], "ours": [], "pathological": []}
    for seed in range(repeats):  # in turns: what else the machine does then hits all alike
        pairs = ordinary(count, seed)
        seconds["ours"].append(ours(pairs, arguments.timeout))
        seconds["pathological"].append(ours(spiced(pairs, 0.01), arguments.timeout))
        seconds["plain"].append(plain(pairs))
    close_workers()
    rates = {name: count / statistics.median(each) for name, each in seconds.items()}
    speed, harm = rates["ours"] / rates["plain"], 1 - rates["pathological"] / rates["ours"]
    print(f"{count:,} answers, 2 cores, median of {repeats}, answers per second:")
    print(f"  plain math-verify, one process   {rates['plain']:8.0f}")
    print(f"  ours                             {rates['ours']:8.0f}   {speed:.2f} times (goal {SPEED_GOAL})")
    limit = f"{harm:+.1%} fewer (limit {HARM_LIMIT:.0%})"
    print(f"  ours, 1 % pathological           {rates['pathological']:8.0f}   {limit}")
    met = arguments.small or (speed >= SPEED_GOAL and harm < HARM_LIMIT)
    figures = {"answers_per_second": rates, "speed": speed, "harm": harm, "met": met}
    return finish(arguments, figures, f"{speed:.2f} times as many, {harm:+.1%} fewer with 1 % pathological")


if __name__ == "__main__":
    sys.exit(main())
