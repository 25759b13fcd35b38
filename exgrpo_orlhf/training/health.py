"""Warnings about a run that trains but learns little, or not what it should: each is logged once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

log = logging.getLogger(__name__)
STEPS = 10  # that a warning looks back on: its condition is on the mean over them
FILLING = 20  # steps after the start of replay in which the buffer may still be filling


class _Sign(NamedTuple):
    """metric: its mean over the last STEPS is compared; below: whether low values are bad; bound; text: what it means,
    with its value as {}, and what to look at; with_replay: counts steps with replayed questions only"""

    metric: str
    below: bool
    bound: float
    text: str
    with_replay: bool = False


_SIGNS = (
    _Sign(
        "reward/groups_with_signal", True, 1e-9,
        "no group had both right and wrong rollouts, so nothing is learned: the questions are too hard or too easy for "
        "this model, or the verifier does not read its answers (rollouts.jsonl has examples)",
    ),
    _Sign(
        "rollout/truncated_share", False, 0.5,
        "{:.0%} of the rollouts were cut off: raise MAX_RESPONSE_TOKENS, which binds "
        "Sampling.max_response_tokens and the loss's divisor, or see whether the model knows its end token "
        "(rollouts.jsonl)",
    ),
    _Sign(
        "reward/no_answer_share", False, 0.5,
        "{:.0%} of the rollouts had no answer that the verifier could find: compare the prompt (Prompts.template) with "
        "what Verifier.kind looks for (rollouts.jsonl)",
    ),
    _Sign("reward/timeout_share", False, 0.02, "{:.1%} of the rollouts took too long to grade (Verifier.timeout)"),
    _Sign("reward/error_share", False, 0.02, "the grading of {:.1%} of the rollouts failed"),
    _Sign(
        "replay/ess", True, 0.1,
        "the effective sample size of the replayed tokens' importance weights was {:.0%}: a few tokens decide the "
        "update; the stored trajectories are too old (ReplayBuffer.max_age), or Optimizer.learning_rate is high",
        with_replay=True,
    ),
)  # fmt: skip
_STARVED = (
    "{:.0%} of the questions were replayed instead of {:.0%} (ReplayMixer.rho): too few are candidates. "
    "replay/bucket_… say where the others are: retired early (RetirementPolicy.at_accuracy), or never solved; with "
    "@Prefix() also: at an accuracy that Prefix.target does not take, or without a stored failure (Prefix.of)"
)
_NOT_STARTED = (
    "step %d of %d: replay has not started: no batch's Pass@1 has exceeded ReplayMixer.start_at_accuracy = %.3g, the "
    "best was %.3g; lower it (None: replay from the first step), or take easier questions"
)


class Health:
    """Looks at each step's metrics. A warning is logged once in a process."""

    def __init__(
        self, rows: Iterable[Mapping[str, float]], planned: int = 0, start_at_accuracy: float | Fraction | None = None
    ) -> None:
        """rows: of the steps so far, from the log of a resumed run
        planned: steps of the run; start_at_accuracy: the threshold of a start that has to come, else None"""
        self.planned, self.start_at_accuracy = planned, start_at_accuracy
        self.best = 0.0  # Pass@1 of a batch
        self.seen: dict[str, deque[float]] = {}
        self.logged: set[str] = set()
        self.replaying = 0  # steps since replay began
        for row in rows:
            self._take(row)

    def look(self, step: int, metrics: Mapping[str, float], rho: float) -> None:
        """Log what is wrong. rho: the share of questions that may be replayed in this step, 0 before a delayed start"""
        self._take({**metrics, "step": step})
        for sign in _SIGNS:
            mean = self._mean(sign.metric)
            if mean is not None and (mean < sign.bound if sign.below else mean > sign.bound):
                self._warn(sign.metric, step, sign.text.format(mean))
        waiting = self.start_at_accuracy is not None and not metrics.get("replay/started")
        if waiting and 3 * step >= self.planned and "start" not in self.logged:
            self.logged.add("start")
            log.warning(_NOT_STARTED, step, self.planned, self.start_at_accuracy, self.best)
        share = self._mean("replay/actual_share")
        if rho and share is not None and share < rho / 2:
            self._warn("replay/actual_share", step, _STARVED.format(share, rho))

    def _take(self, row: Mapping[str, float]) -> None:
        if not row["step"]:
            return
        self.best = max(self.best, row.get("reward/pass_at_1", 0.0))
        # A continued group has no stored row, and no importance weights.
        replayed = row.get("replay/actual_share", 0) if "replay/continued_share" not in row else 0
        replayed = row.get("replay/added_rows", row.get("replay/injected", replayed))
        self.replaying += row.get("replay/started", 1) == 1  # it is absent where replay is not delayed
        names = [sign.metric for sign in _SIGNS if replayed or not sign.with_replay]
        # Where dynamic sampling left groups out, the share does not say how many candidates there were.
        if self.replaying > FILLING and not row.get("rollout/filtered_groups"):
            names.append("replay/actual_share")
        for name in names:
            if name in row:
                self.seen.setdefault(name, deque(maxlen=STEPS)).append(row[name])

    def _mean(self, metric: str) -> float | None:
        values = self.seen.get(metric, ())
        return sum(values) / STEPS if len(values) == STEPS else None

    def _warn(self, metric: str, step: int, text: str) -> None:
        if metric not in self.logged:
            self.logged.add(metric)
            log.warning("step %d: in the last %d steps %s", step, STEPS, text)
