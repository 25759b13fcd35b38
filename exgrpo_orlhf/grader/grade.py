"""The result of a grader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["correct", "wrong", "no_answer", "timeout", "error"]
Message = tuple[str, str]  # (role, content)
SHOWN = 200  # characters of an extracted answer or a reason that a grade keeps


@dataclass(frozen=True, slots=True)
class Grade:
    """What a verifier said of one response.

    reward: None where it could not be graded (timeout, error); never confused with a wrong answer's 0
    sound: whether the reasoning holds, where a checker of reasoning exists (a correct answer with `sound=False` is a
        lucky guess); None where nothing checks it
    extracted: what was taken for the answer (its first 200 characters); None where the verifier does not say
    logs: names and numbers that a function or a server gave besides (OpenRLHF's extra_logs)
    parts: by name, the rewards of which this one is the weighted sum (Verifier.rewards) and that did not abstain
    reason: why it could not be graded, or why some of its logs are left out
    abstains: whether a function gave no reward on purpose
    correct: whether the verdict is 'correct'
    """

    verdict: Verdict
    reward: float | None
    sound: bool | None = None
    extracted: str | None = None
    logs: tuple[tuple[str, float], ...] = ()
    parts: tuple[tuple[str, float], ...] = ()
    reason: str | None = field(default=None, compare=False)
    abstains: bool = field(default=False, compare=False)
    correct: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (self.reward is None) != (self.verdict in ("timeout", "error")):
            raise ValueError(f"a {self.verdict} response {'needs a' if self.reward is None else 'has no'} reward")
        object.__setattr__(self, "correct", self.verdict == "correct")
