"""The records that every part passes around: questions, rollouts, grades, trajectories, groups, rows of a batch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .grader.grade import Grade, Message

Finish = Literal["stop", "length"]
Actions = npt.NDArray[np.bool_]
EXTRA_INFO = "_extra_info"  # in a question's meta: verl's column of this name, where no binding asks for it


@dataclass(frozen=True, slots=True)
class Question:
    """One question with a verifiable answer.

    id: stable hash of source, prompt and answer, 32 hexadecimal digits (`make`; where it is taken, of the meta too)
    prompt: plain text, or chat messages as (role, content) pairs
    answer: the gold answer as its set has it: text, a number, or a tuple of these, any of which is right
    source: the data set it comes from
    meta: anything else a verifier or a report wants (its task's own fields)
    """

    id: str
    prompt: str | tuple[Message, ...]
    answer: Any
    source: str
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def answer_text(self) -> str:
        """The gold answer as text; several as JSON."""
        return json.dumps(self.answer) if isinstance(self.answer, tuple) else str(self.answer)

    @classmethod
    def make(
        cls, source: str, prompt: str | tuple[Message, ...], answer: Any, meta: Mapping[str, Any] | None = None
    ) -> Question:
        """A question whose id is derived from what it asks: the same in every process and on every machine."""
        identity = [source, prompt, json.dumps(answer) if isinstance(answer, tuple) else answer]
        digest = hashlib.blake2b(json.dumps(identity, separators=(",", ":")).encode(), digest_size=16).hexdigest()
        return cls(digest, prompt, answer, source, dict(meta or {}))


@dataclass(frozen=True, slots=True)
class Rollout:
    """A response sampled from the current policy.

    token_ids: int32 (T,), all that follows the prompt: a response with its end token, or an episode, the turns of the
        policy and what the environment returned between them
    sampler_logprobs: float32 (A,), as the engine that sampled it has them, where it is asked for them; the trainer's
        own differ from them by rounding
    behaviour_logprobs: float32 (A,), under the policy that sampled it, where they are known before the update
        (train.generate_ahead; on OpenRLHF the sampler's); None: the update measures them
    policy_step: the policy version that sampled it: t is the policy before the update of step t; None: the step that
        trains on it
    actions: bool (T,), which of an episode's tokens are the policy's. The others are context in a forward pass and
        nothing else. None: all
    seed: of an episode
    given: how many of its first tokens are those of a stored response (`replay.prefix`): context too
    """

    token_ids: npt.NDArray[np.int32]
    finish: Finish
    grade: Grade | None = None
    sampler_logprobs: npt.NDArray[np.float32] | None = None
    behaviour_logprobs: npt.NDArray[np.float32] | None = None
    policy_step: int | None = None
    actions: Actions | None = None
    seed: int | None = None
    given: int = 0

    @property
    def learned(self) -> Actions | None:
        """bool (T,), which A of its tokens the policy sampled; None: all"""
        if not self.given:
            return self.actions
        sampled = np.arange(len(self.token_ids)) >= self.given
        return sampled if self.actions is None else sampled & self.actions

    @property
    def length(self) -> int:
        """A, the number of tokens that the policy sampled"""
        return action_count(self.token_ids, self.learned)

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """As its `Grade` has them."""
        return self.grade.parts if self.grade else ()

    @property
    def turns(self) -> int:
        """of the policy. Two with nothing between them are one."""
        return 1 if self.actions is None else int(np.count_nonzero(np.diff(self.actions, prepend=False) & self.actions))

    @property
    def reward(self) -> float | None:
        """None where it could not be graded. Raises ValueError before grading."""
        if self.grade is None:
            raise ValueError("this rollout has not been graded yet")
        return self.grade.reward


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A correct response as the replay buffer keeps it.

    token_ids: int32 (T,), as a `Rollout` has them; never decoded and encoded again
    behaviour_logprobs: float32 (A,), of the actions under the policy that made them, at sampling temperature, from
        the trainer's own forward pass (of batches that OpenRLHF generates ahead, the sampler's)
    step: the policy version of behaviour_logprobs: t is the policy before the update of step t
    actions, seed: of an episode, as a `Rollout` has them; None: all tokens, A = T
    parts: as its `Grade` had them; correct: whether it is a success
    advantage: that it had in its own group, where it is kept (`replay.stored_rows`)
    """

    token_ids: npt.NDArray[np.int32]
    behaviour_logprobs: npt.NDArray[np.float32]
    reward: float
    step: int
    finish: Finish = "stop"
    sound: bool | None = None
    actions: Actions | None = None
    seed: int | None = None
    parts: tuple[tuple[str, float], ...] = ()
    correct: bool = True
    advantage: float | None = None

    def __post_init__(self) -> None:
        if self.token_ids.dtype != np.int32 or self.behaviour_logprobs.dtype != np.float32:
            raise TypeError(
                f"a trajectory holds int32 token ids and float32 log-probs, got {self.token_ids.dtype} and "
                f"{self.behaviour_logprobs.dtype}"
            )
        if self.token_ids.ndim != 1 or self.behaviour_logprobs.shape != (self.length,) or not self.length:
            raise ValueError(
                f"a trajectory needs as many behaviour log-probs as tokens of the policy, at least one; got shapes "
                f"{self.token_ids.shape} and {self.behaviour_logprobs.shape}"
            )
        if (mask := self.actions) is not None and (mask.dtype != np.bool_ or mask.shape != self.token_ids.shape):
            raise ValueError("a trajectory's actions are a bool for each of its tokens")
        # The sum of squares is finite only if every log-prob is; a third of the time of looking at each.
        if not math.isfinite(self.behaviour_logprobs @ self.behaviour_logprobs):
            raise ValueError("a trajectory's behaviour log-probs must be finite")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def learned(self) -> Actions | None:  # as of a `Rollout`
        return self.actions

    @property
    def length(self) -> int:
        """A, the number of tokens that the policy sampled"""
        return action_count(self.token_ids, self.actions)

    @property
    def n_bytes(self) -> int:
        """of its arrays"""
        mask = 0 if self.actions is None else self.actions.nbytes
        return self.token_ids.nbytes + self.behaviour_logprobs.nbytes + mask

    @property
    def key(self) -> bytes:
        """Identity: the hash of the token ids and, of an episode, of which of them are actions; 16 bytes."""
        identity = hashlib.blake2b(self.token_ids.tobytes(), digest_size=16)
        if self.actions is not None:
            identity.update(self.actions.tobytes())
        return identity.digest()


class Measured(NamedTuple):
    """A response under the current policy.

    logprobs: float32 (A,), of its actions at the sampling temperature; entropy: mean over them, nats, at temperature 1
    """

    logprobs: npt.NDArray[np.float32]
    entropy: float


@dataclass(frozen=True)
class RolloutGroup:
    """The fresh rollouts of one question in one step: K, or fewer (K−1 in the paper) beside a stored trajectory.

    planned_replay: whether its question was drawn to be replayed, also where in the end no stored trajectory enters
    """

    question: Question
    rollouts: tuple[Rollout, ...]
    planned_replay: bool

    @cached_property
    def given(self) -> int:
        """Tokens of a stored response that all its rollouts begin with; 0: it is no continued group."""
        return max((rollout.given for rollout in self.rollouts), default=0)  # 0 of an episode that did not go on

    @cached_property
    def graded(self) -> int:
        """Number of gradable fresh rollouts, n. Raises ValueError before grading."""
        return sum(rollout.reward is not None for rollout in self.rollouts)

    @cached_property
    def correct(self) -> int:
        """Number of correct fresh rollouts, k."""
        return sum(rollout.grade is not None and rollout.grade.correct for rollout in self.rollouts)

    @property
    def length(self) -> int:
        """Tokens that the policy sampled"""
        return sum(rollout.length for rollout in self.rollouts)

    @property
    def accuracy(self) -> Fraction | None:
        """k/n over the gradable fresh rollouts, exact; None where fewer than two (of one: none) could be graded.

        The stored row of a replayed group does not count: with it, a replayed question could never fall below 1/K and
        every replay would lift its accuracy.
        """
        graded = self.graded
        if not graded or graded < min(2, len(self.rollouts)):
            return None
        return _fraction(self.correct, graded)

    @property
    def rewards(self) -> list[float]:
        """Of its gradable rollouts. Raises ValueError before grading."""
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]

    def with_stored(self, stored: Trajectory | None, group_size: int) -> CompletedGroup:
        """The group with the rows that are trained on, `group_size` = K of them in a whole group.

        A stored success joins fewer than K rollouts as the last row. Of K rollouts it takes the place of the one with
        the lowest reward: of one that could not be graded before any other, and of equal ones of the last. None: the
        rollouts as they are. Raises ValueError before grading.
        """
        rows: list[Rollout | Trajectory] = list(self.rollouts)
        if stored is not None and len(rows) < group_size:
            rows.append(stored)
        elif stored is not None:
            rewards = [-math.inf if rollout.reward is None else rollout.reward for rollout in self.rollouts]
            rows[min(range(len(rows)), key=lambda i: (rewards[i], -i))] = stored
        return CompletedGroup(self, rows)


class CompletedGroup(NamedTuple):
    """A graded group with the rows that are trained on: its rollouts, and the stored trajectory if it gets one."""

    group: RolloutGroup
    rows: list[Rollout | Trajectory]

    @property
    def rewards(self) -> list[float]:
        """Of the rows that could be graded. Raises ValueError before grading."""
        return [row.reward for row in self.rows if row.reward is not None]


@dataclass(frozen=True)
class Row:
    """One row of the batch: a fresh rollout, or the stored trajectory of its group.

    advantage: 0 where the row could not be graded, or its group has no signal
    in_loss: False for a row that could not be graded: no token of it enters the loss, but it counts as a row
    prompt: its token ids (P,), as an engine encodes it; empty in a batch that no engine has trained on
    weight: of its loss, beside 1 of another row (`objective.divisors`)
    trajectory: the stored trajectory, or None for a fresh rollout
    length: A, the number of tokens that the policy sampled: what the loss and its normaliser count
    """

    question: Question
    response: Rollout | Trajectory
    advantage: float
    in_loss: bool
    prompt: Sequence[int] = field(default=(), repr=False, compare=False)
    weight: float = field(default=1.0, repr=False, compare=False)
    trajectory: Trajectory | None = field(init=False, repr=False, compare=False)
    length: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_stored = isinstance(self.response, Trajectory)
        object.__setattr__(self, "trajectory", self.response if is_stored else None)
        object.__setattr__(self, "length", self.response.length)

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """int32 (T,), of the response"""
        return self.response.token_ids

    @property
    def actions(self) -> Actions | None:
        """bool (T,), those that are trained on; None: all"""
        return self.response.learned

    @property
    def targets(self) -> npt.NDArray[np.int32]:
        """int32 (A,), the tokens that are measured and trained on"""
        return self.token_ids if self.actions is None else self.token_ids[self.actions]

    def __len__(self) -> int:
        """P + T"""
        return len(self.prompt) + len(self.token_ids)


@dataclass(frozen=True)
class MixedBatch:
    """Groups of K rows or, around a stored trajectory, fewer (`RolloutGroup.with_stored`).

    group_size: K, what a group counts in the loss's normaliser, whatever it holds
    added_size: stored rows that may follow the K of each group (`replay.stored_group`)
    base_share: λ (`objective.ConvexKL`); reincarnated: whether it is gone through once (`replay.share`)
    """

    groups: list[RolloutGroup]
    rows: list[list[Row]]
    group_size: int
    added_size: int = 0
    base_share: float = 1.0
    reincarnated: bool = False

    @classmethod
    def of(
        cls, groups: Sequence[CompletedGroup], advantages: Any, group_size: int, prompts: Sequence[Sequence[int]]
    ) -> MixedBatch:
        """advantages: (G, K), of each row; prompts: of each group. Raises ValueError if a group is not graded."""
        rows = [
            [
                Row(group.question, response, float(advantages[g, i]), response.reward is not None, prompts[g])
                for i, response in enumerate(responses)
            ]
            for g, (group, responses) in enumerate(groups)
        ]
        return cls([group for group, _ in groups], rows, group_size)

    def flat_rows(self) -> list[Row]:
        return [row for rows in self.rows for row in rows]


def action_count(token_ids: npt.NDArray[np.int32], actions: Actions | None) -> int:
    return len(token_ids) if actions is None else int(np.count_nonzero(actions))


def mean(values: Sequence[float]) -> float:
    """The mean, or of booleans the share; of nothing it is 0, never NaN."""
    return float(np.mean(values)) if values else 0.0


_fraction = lru_cache(maxsize=4096)(Fraction)  # there are few accuracies and many groups, and making one is slow
