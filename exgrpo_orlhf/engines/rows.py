"""Rows of prompt and response: how they are padded, cut into forward passes, and what a pass measures of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..records import Actions, Rollout, Row, Trajectory

if TYPE_CHECKING:
    from ..attention.packing import PackedRow

MAX_PADDING = 0.05  # share of a batch's tokens; found on two virtual cores
T = TypeVar("T")


@dataclass(frozen=True)
class ForwardRow:
    """What is measured and is in no batch.

    prompt: token ids (P,), P ≥ 1; token_ids: int32 (T,), of the response, T ≥ 1; actions: bool (T,), those that
    are trained on; None: all
    """

    prompt: Sequence[int]
    token_ids: npt.NDArray[np.int32]
    actions: Actions | None = None

    @classmethod
    def of(cls, prompt: Sequence[int], response: Rollout | Trajectory | PackedRow) -> ForwardRow:
        actions = response.learned if isinstance(response, Rollout | Trajectory) else response.actions
        return cls(prompt, response.token_ids, actions)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.token_ids)

    @property
    def targets(self) -> npt.NDArray[np.int32]:
        """int32 (A,), the tokens that are measured and trained on"""
        return self.token_ids if self.actions is None else self.token_ids[self.actions]


def micro_batches(rows: Sequence[Sized], token_budget: int, padding: float = MAX_PADDING) -> Iterator[list[int]]:
    """Positions of rows, longest first, in batches whose padded size (rows × longest) stays within the budget and of
    which at most the share `padding` is padding. A single row may exceed the budget.

    On chains of 15 to 60 tokens four batches that are 96 % useful took 0.8 of the time of one that is 74 % useful.
    """
    lengths = [len(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (-lengths[i], i))
    while order:
        longest, useful, n = lengths[order[0]], 0, 0
        for i in order:
            useful += lengths[i]
            padded = (n + 1) * longest
            if n and (padded > token_budget or useful < (1 - padding) * padded):
                break
            n += 1
        yield order[:n]
        order = order[n:]


def padded(rows: Sequence[PackedRow]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Token ids (R, W), padded on the right with 0, and which of them are actions (R, W)."""
    shape = len(rows), max(map(len, rows))
    ids, actions = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    for i, row in enumerate(rows):
        prompt, length = len(row.prompt), len(row)
        ids[i, :prompt], ids[i, prompt:length] = row.prompt, row.token_ids
        actions[i, prompt:length] = True if row.actions is None else row.actions
    return ids, actions


def probe_rows(vocabulary: int, lengths: Sequence[tuple[int, int]], step: int = 7) -> list[ForwardRow]:
    """Rows of arbitrary tokens, to test a model with. lengths: of prompts and responses; step: makes other tokens"""
    tokens = (np.arange(1, 1 + max(map(sum, lengths))) * step % vocabulary).astype(np.int32)
    return [ForwardRow(tokens[:p].tolist(), tokens[p : p + t]) for p, t in lengths]


def behaviour_logprobs(row: Row, measured: T) -> npt.NDArray[np.float32] | T:
    """The log-probs that a row came with, bit-identical: a replayed row's are stored, those of a fresh row that was
    generated ahead were taken when it was sampled. Of another fresh row `measured`: its log-probs under the policy that
    sampled it, or None where they are not known yet."""
    logprobs = row.response.behaviour_logprobs
    return measured if logprobs is None else logprobs


def row_dump(row: Row, policy: npt.NDArray[np.float32], behaviour: npt.NDArray[np.float32]) -> dict[str, Any]:
    """One row for `NonFiniteUpdate.dump`, as JSON; with its log-probs under the current and the behaviour policy."""
    return {
        "question_id": row.question.id,
        "token_ids": row.token_ids.tolist(),
        **({} if (learned := row.response.learned) is None else {"actions": learned.tolist()}),
        "advantage": row.advantage,
        "in_loss": row.in_loss,
        "replayed_from_step": None if row.trajectory is None else row.trajectory.step,
        "policy_logprobs": policy.tolist(),
        "behaviour_logprobs": behaviour.tolist(),
    }
