"""What is forgotten and what comes back, from the decisions of each step (decisions.jsonl).

    python docs/study/forgetting.py runs/GROUP > forgetting.csv

Groups of fresh rollouts alone are compared, not those of replayed questions, so that all methods have the same: a
question and the next time it is drawn. It was solved if any of its graded rollouts was correct.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from exgrpo_orlhf.show.tables import csv_text

HEAD = ("variant", "seed", "forgotten", "recovered", "never_solved", "first_signal")


def rows(runs: Path) -> Iterator[dict[str, object]]:
    """Rows of HEAD for a part's runs (<variant>/seed<n>).

    forgotten: of the questions solved at one time, the share that is not solved the next time
    recovered: of those solved at an earlier time and not at the last one, the share that is solved the next time
    never_solved: share of the questions that were drawn and never solved
    first_signal: of the questions not solved so far, the share that is solved the next time
    """
    for run in sorted(runs.glob("*/seed*")):
        before: dict[str, bool] = {}  # question -> whether it was solved the last time
        ever: set[str] = set()
        counts = {name: [0, 0] for name in ("forgotten", "recovered", "first_signal")}
        with (run / "decisions.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                table = json.loads(line)["questions"]
                columns = (table["id"], table["as"], table["graded"], table["correct"])
                for question, role, graded, correct in zip(*columns, strict=True):
                    if role in ("replayed", "continued") or not graded:
                        continue
                    solved = correct > 0
                    if question in before:
                        name = "forgotten" if before[question] else "recovered" if question in ever else "first_signal"
                        counts[name][0] += solved != before[question]
                        counts[name][1] += 1
                    before[question] = solved
                    ever |= {question} if solved else set()
        shares = {name: count / of for name, (count, of) in counts.items() if of}
        never = 1 - len(ever) / len(before) if before else 0.0
        yield {"variant": run.parent.name, "seed": run.name.removeprefix("seed"), **shares, "never_solved": never}


if __name__ == "__main__":
    sys.stdout.write(csv_text(HEAD, rows(Path(sys.argv[1]))))
