"""Which groups get a stored trajectory, and how many rollouts are generated beside one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ..checks import require
from ..records import CompletedGroup, Question, RolloutGroup, Trajectory
from .buffer import ReplayBuffer


class Injection:
    """The stored trajectory of a planned question, and late injection. Settings as in `ReplayMixer`.

    rollouts_per_replayed: fresh rollouts of a planned question
    puts_successes: whether a stored trajectory takes a rollout's place, as the better one
    """

    def __init__(
        self,
        fresh_beside: int | Literal["all", "unless_solved"] | None,
        late: Literal["newest", "selected"] | None,
        group_size: int,
    ) -> None:
        """Raises ValueError for fresh_beside outside [1, K−1]."""
        require(
            fresh_beside in (None, "all", "unless_solved")
            or (type(fresh_beside) is int and 1 <= fresh_beside < group_size),
            f"ReplayMixer.fresh_beside must be a whole number in [1, train.group_size − 1] = [1, {group_size - 1}], "
            f"'all', 'unless_solved' or None; got {fresh_beside!r}",
        )
        self.rollouts_per_replayed = group_size if isinstance(fresh_beside, str) else fresh_beside or group_size - 1
        self.late, self.unless_solved = late, fresh_beside == "unless_solved"
        self.puts_successes = late is not None or isinstance(fresh_beside, str)
        self.group_size = group_size

    def late_stored(self, groups: Iterable[RolloutGroup], buffer: ReplayBuffer) -> dict[Question, list[Trajectory]]:
        """For late injection: what is stored of each question whose fresh rollouts have all failed.

        groups: graded; those of planned questions are left out
        """
        if self.late is None:
            return {}
        others = [group for group in groups if not group.planned_replay]
        return {group.question: stored for group in others if (stored := buffer.for_injection(group))}

    def complete(self, groups: Sequence[RolloutGroup], chosen: Mapping[str, Trajectory]) -> list[CompletedGroup]:
        """The groups with the rows that are trained on (`RolloutGroup.with_stored`).

        chosen: the stored trajectory of each replayed question, and of each that gets one by late injection
        Raises ValueError if a group has another size than planned or is not graded, KeyError if a replayed group has
        no stored trajectory.
        """
        completed = []
        for group in groups:
            if len(group.rollouts) != (self.rollouts_per_replayed if group.planned_replay else self.group_size):
                raise ValueError(
                    f"question {group.question.id}: {len(group.rollouts)} rollouts"
                    f"{' and a stored one' * group.planned_replay} do not make a group of K = {self.group_size} with "
                    f"{self.rollouts_per_replayed} beside a stored one"
                )
            completed.append(group.with_stored(self.stored_for(group, chosen), self.group_size))
        return completed

    def stored_for(self, group: RolloutGroup, chosen: Mapping[str, Trajectory]) -> Trajectory | None:
        """The stored trajectory that enters a group. Raises KeyError if a replayed group has none."""
        if not group.planned_replay:
            return chosen.get(group.question.id)
        return None if self.unless_solved and group.accuracy != 0 else chosen[group.question.id]

    def metrics(self, groups: Iterable[RolloutGroup], chosen: Mapping[str, Trajectory]) -> dict[str, float]:
        """Of a batch's groups, where it is left to their rollouts which of them get a stored trajectory."""
        if self.late is None and not self.unless_solved:
            return {}
        stored = [self.stored_for(group, chosen) for group in groups if self.unless_solved or not group.planned_replay]
        return {"replay/injected": float(sum(trajectory is not None for trajectory in stored))}
