"""Suites of graders: responses by their verdict in files of JSON lines, one for each gold answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from run_builders import rows

from exgrpo_orlhf.grader.answer import Answer
from exgrpo_orlhf.grader.grade import Grade


class Suite:
    def __init__(self, path: Path) -> None:
        self.golds = rows(path)
        self.categories = sorted({row["category"] for row in self.golds})

    def misjudged(self, category: str, grade: Callable[[Answer], Grade]) -> list[tuple[object, str, str, str]]:
        """(gold, response, verdict, verdict expected) of those that differ."""
        cases = []
        for row in (row for row in self.golds if row["category"] == category):
            meta = {"options": row["options"]} if "options" in row else {}
            for expected in ("correct", "wrong", "no_answer", "error"):
                for response in row.get(expected, ()):
                    verdict = grade(Answer(row["gold"], response, meta=meta)).verdict
                    cases.append((row["gold"], response, verdict, expected))
        return [case for case in cases if case[2] != case[3]]
