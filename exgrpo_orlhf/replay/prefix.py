"""Groups that continue a stored response: which one, and how much of it they are given."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from ..checks import Constraint, Count, Positive, ShareBelowOne, check_settings, reference, require
from ..records import RolloutGroup, Trajectory, mean
from ..rounding import are_equal
from .buffer import ReplayBuffer
from .difficulty import as_fraction
from .injection import NEWEST, Choice, Injection, TrajectorySelector
from .sampling import IndexedSet

Pieces = Callable[[Trajectory], Sequence[str]]  # the text of each token of a response
_SENTENCE = re.compile(r"""[.!?]["')\]*]*\s*$""")
_Inner = Annotated[float, Constraint("must lie in (0, 1)", lambda value: 0 < value < 1)]


@dataclass(frozen=True, repr=False)
class GivenShare(ABC):
    """How much of a stored response a group is given: a share of its tokens, in [0, 1)."""

    def __post_init__(self) -> None:
        check_settings(type(self), vars(self))

    def __repr__(self) -> str:
        return f"@{type(self).__name__}()"  # as in a gin file

    @property
    @abstractmethod
    def largest(self) -> float: ...

    @abstractmethod
    def of_group(self, own: float | None, rng: np.random.Generator) -> float:
        """The share of a group. own: that of its `key` from `moved`, None before the first"""

    def key(self, question_id: str) -> str:
        """Of whom the share is that `moved` moves: of the question."""
        return question_id

    def moved(self, own: float | None, direction: int) -> float | None:
        """The next share of a key, after a step with its groups; None where there is none. direction: 1, 0 or −1: more,
        as much or less is to be given"""
        return None


@dataclass(frozen=True, repr=False)
class FixedShare(GivenShare):
    """The same share always.

    value: 0 gives nothing, and the questions are only asked again
    """

    value: ShareBelowOne = 0.5

    @property
    def largest(self) -> float:
        return self.value

    def of_group(self, own: float | None, rng: np.random.Generator) -> float:
        return self.value


@dataclass(frozen=True, repr=False)
class UniformShare(GivenShare):
    """Drawn for each group, uniform between the two.

    lowest, highest: bounds of the share
    """

    lowest: ShareBelowOne = 0.0
    highest: ShareBelowOne = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.lowest, self.highest
        require(low <= high, f"UniformShare.lowest must be at most UniformShare.highest, got {low!r} and {high!r}")

    @property
    def largest(self) -> float:
        return self.highest

    def of_group(self, own: float | None, rng: np.random.Generator) -> float:
        return float(rng.uniform(self.lowest, self.highest))


@dataclass(frozen=True, repr=False)
class AdaptiveShare(GivenShare):
    """Each question has its own, which moves towards `Prefix.target` with the accuracy of each of its planned groups.

    first: of a question's first group; step: by which it moves; lowest, highest: its bounds
    shared: all questions have one, which moves once a step by the mean accuracy of the planned groups; successes and
        failures have one each
    """

    first: ShareBelowOne = 0.5
    step: Positive = 0.125
    lowest: ShareBelowOne = 0.0
    highest: ShareBelowOne = 0.875
    shared: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.lowest <= self.first <= self.highest,
            f"AdaptiveShare.first must lie in [AdaptiveShare.lowest, .highest] = [{self.lowest}, {self.highest}], got "
            f"{self.first!r}",
        )

    @property
    def largest(self) -> float:
        return self.highest

    def of_group(self, own: float | None, rng: np.random.Generator) -> float:
        return self.first if own is None else own

    def key(self, question_id: str) -> str:
        return "" if self.shared else question_id

    def moved(self, own: float | None, direction: int) -> float:
        share = self.first if own is None else own
        return min(max(share + direction * self.step, self.lowest), self.highest)


@dataclass(frozen=True, repr=False)
class Prefix(Injection):
    """All K rollouts of a planned question continue the first tokens of one stored response (prefix sampling, arXiv
    2605.05112; PrefixRL, arXiv 2601.18795; failure-prefix conditioning, arXiv 2601.20829).

    The given tokens are context: in no loss, entropy, length or cost, and without an importance weight. What is trained
    on was sampled by the policy. A continued group counts for no accuracy, retirement, delayed start or Pass@1, and
    nothing of it is stored. A group that is given nothing is as any other.

    of: 'successes': the beginning of a success is given where the question's latest accuracy is below `target` (0 only
        with ReplayBuffer.replays_unsolved); 'failures': that of a failure where it is above; 'both'
    share: how much of it: `@AdaptiveShare()`, `@UniformShare()` or `@FixedShare()`
    target: the accuracy that continued groups are steered to
    choice: of several stored responses the 'newest', or the one 'selected' by `TrajectorySelector`
    cut: where the given part may end: behind any 'token', or behind the last 'line' or 'sentence' before that, if there
        is one, and else nothing is given. In an episode it ends with a turn
    failures: kept of each question for 'failures' and 'both', in a pool of their own with as much max_age and max_bytes
        as the buffer; the oldest goes first
    """

    of: Literal["successes", "failures", "both"] = "successes"
    share: Annotated[Any, reference("of_group", "@AdaptiveShare()")] = AdaptiveShare()
    target: _Inner = 0.5
    choice: Literal["newest", "selected"] = "newest"
    cut: Literal["token", "line", "sentence"] = "token"
    failures: Count = 4

    replaces: ClassVar[bool] = True  # not a row, but it stands where a success belongs
    always: ClassVar[bool] = False

    @property
    def prefix(self) -> Prefix:
        return self

    def candidates(self, buffer: ReplayBuffer) -> Mapping[Fraction, IndexedSet]:
        target = as_fraction(self.target)
        below = {a: members for a, members in buffer.candidates.items() if a < target and self.of != "failures"}
        if self.of == "successes" or buffer.failed is None:
            return below
        return below | {a: members for a, members in buffer.failed.candidates.items() if a > target}

    def stored_of(self, question_id: str, buffer: ReplayBuffer) -> list[Trajectory]:
        """Of a candidate: its successes, or its failures."""
        record = buffer.records.get(question_id)
        succeeds = record is not None and record.stored and record.accuracy < as_fraction(self.target)
        pool = buffer if succeeds and self.of != "failures" else buffer.failed
        assert pool is not None  # or it is no candidate
        return pool.trajectories(question_id)

    def stored_for(self, group: RolloutGroup, choices: Mapping[str, Choice]) -> None:
        """None: the rollouts of a group stay as they are."""

    def check_stored(self, response: Trajectory, room: int, ends: Collection[int], where: str) -> None:
        """Raises ValueError for a response of another run that cannot be continued. room: tokens of a response; ends:
        tokens that end one; where: for the message"""
        given = min(int(self.share.largest * len(response)), len(response) - 1)
        require(
            given < room,
            f"{where}: of a response of {len(response)} tokens {self.share!r} gives up to {given}, and leaves none of "
            f"Sampling.max_response_tokens = {room} to continue it with; raise MAX_RESPONSE_TOKENS, or give less",
        )
        early = [token for token in response.token_ids[:-1].tolist() if token in ends]
        require(
            not early,
            f"{where}: a response has the end token {early and early[0]} before its end; whatever continued it would "
            "follow a response that has ended. Its run had another end token",
        )

    def direction(self, accuracy: Fraction, correct: bool) -> int:
        """1: more should have been given of the response, −1: less. A longer success lifts the accuracy, a longer
        failure lowers it. correct: of the response"""
        lacks = as_fraction(self.target) - accuracy
        return ((lacks > 0) - (lacks < 0)) * (1 if correct else -1)

    def selector(self, bound: TrajectorySelector) -> TrajectorySelector:
        """What chooses the response that is continued. bound: in the run's gin files"""
        return NEWEST if self.choice == "newest" else bound

    def given(self, response: Trajectory, share: float, room: int, pieces: Pieces) -> int:
        """How many of a stored response's first tokens are given: at most this share, and never its last token.

        room: tokens that a response may have
        """
        most = min(int(share * len(response)), len(response) - 1, room - 1)
        if response.actions is not None:  # the ends of the policy's turns
            ends = np.flatnonzero(response.actions[:-1] & ~response.actions[1:]) + 1
            return int(max(ends[ends <= most], default=0))
        if self.cut == "token" or not most:
            return most
        texts = pieces(response)
        return next((n for n in range(most, 0, -1) if self._may_end(texts, n)), 0)

    def _may_end(self, texts: Sequence[str], n: int) -> bool:
        if not texts[n - 1]:  # within a character, whose text comes with the last of its up to four tokens
            return False
        end, goes_on = "".join(texts[max(0, n - 4) : n]), "".join(texts[n : n + 4])
        if self.cut == "line":
            return end.rstrip(" ").endswith("\n")
        return bool(_SENTENCE.search(end)) and (end[-1:].isspace() or goes_on[:1].isspace() or not goes_on)

    def metrics(self, groups: Iterable[RolloutGroup], choices: Mapping[str, Choice]) -> dict[str, float]:
        """Of the batch's groups. Means over the continued ones."""
        groups = list(groups)
        continued = [group for group in groups if group.given]
        lengths = [(group.given, len(choices[group.question.id].trajectory)) for group in continued]
        return {
            "replay/continued_share": len(continued) / len(groups) if groups else 0.0,
            "replay/given_share": mean([given / length for given, length in lengths]),
            "replay/given_tokens": mean([given for given, _ in lengths]),
            "replay/continued_accuracy": mean([float(g.accuracy) for g in continued if g.accuracy is not None]),
            "replay/continued_groups_with_signal": mean([not are_equal(group.rewards) for group in continued]),
        }
