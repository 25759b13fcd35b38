"""Mixes fresh and replayed questions: plans a step, assembles its groups, picks what is worth keeping."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ..records import CompletedGroup, MixedBatch, Question, RolloutGroup, Row, Trajectory
from ..rounding import less_rounding
from ..settings import Count, Share, ShareBelowOne, check, require
from .buffer import ReplayBuffer
from .difficulty import DifficultyBuckets, as_fraction
from .sampling import QuestionSampler

Floats = npt.NDArray[np.float32]
# (rewards (G, K), gradable (G, K)) → advantages (G, K), an array or a tensor
Advantages = Callable[[npt.NDArray[np.float64], npt.NDArray[np.bool_]], Any]


class FreshSource(Protocol):
    """Where fresh questions come from, and every question by its id."""

    def draw(self, n: int, exclude: Collection[str], retired: Collection[str], step: int) -> list[Question]: ...

    def question(self, question_id: str) -> Question: ...


@dataclass(frozen=True)
class Plan:
    """The questions of one step.

    stored: the trajectories of each replayed question
    round: of rollouts in this step, from 0; questions that take the place of others are sampled in later ones
    rollouts_per_replayed: fresh rollouts of a replayed question; None: K−1
    """

    step: int
    fresh: list[Question]
    replayed: list[Question]
    stored: dict[Question, list[Trajectory]]
    round: int = 0
    rollouts_per_replayed: int | None = None

    @property
    def questions(self) -> int:
        return len(self.fresh) + len(self.replayed)

    def rollout_counts(self, group_size: int) -> list[int]:
        """Rollouts of each question, fresh ones first."""
        per_replayed = group_size - 1 if self.rollouts_per_replayed is None else self.rollouts_per_replayed
        return [group_size] * len(self.fresh) + [per_replayed] * len(self.replayed)

    def metrics(self) -> dict[str, float]:
        """What was mixed."""
        return {
            "replay/actual_share": len(self.replayed) / self.questions if self.questions else 0.0,
            "train/questions": float(self.questions),
        }

    def in_order(self, groups: Iterable[RolloutGroup]) -> list[RolloutGroup]:
        """The groups of its questions, of which none is in it twice: fresh ones first, whatever order they come in."""
        place = {question.id: i for i, question in enumerate((*self.fresh, *self.replayed))}
        return sorted(groups, key=lambda group: place[group.question.id])


class ReplayMixer:
    """ρ, its schedule and the delayed start.

    rho: share of a batch's questions that come from the buffer, in [0, 1]; 0 is on-policy training. The number of
        replayed questions is ⌊ρ·B⌋, or all candidates if there are fewer (Algorithm 1, line 7).
    rho_end, rho_steps: ρ moves linearly from `rho`, in the first step that may replay, to `rho_end`, `rho_steps` later,
        and stays there; both None: ρ is constant
    start_at_accuracy: replay starts in the step after the first batch whose Pass@1 (mean accuracy over its graded
        fresh rollouts) exceeds this; None: from the first step
    collect_before_start: whether accuracies, trajectories and retirements are recorded before that. The paper starts
        collecting and replaying together (False). The batch that triggers the start is collected.
    fresh_beside: fresh rollouts beside a stored trajectory, from 1 to K−1; None: K−1, a whole group (the paper). A
        known success needs fewer fresh rollouts around it for a signal than a question of which nothing is known, and
        what is not generated is saved. The question's accuracy is then that of fewer rollouts. 'all': all K are
        generated, and after grading the stored success takes the place of the one with the lowest reward
        (`RolloutGroup.with_stored`); the accuracy is that of the K. 'unless_solved' (planned revisits): all K are
        generated, and only where none of them is a success does the stored one take a place
    late_injection: after grading, a group of fresh rollouts without a success (its accuracy is 0) gets a stored
        trajectory of its question, where the buffer has one, instead of a rollout (`RolloutGroup.with_stored`).
        Nothing more is generated, and no question gives way to a replayed one: ρ must be 0, or planned questions be
        'unless_solved' too. 'newest': the one whose log-probs are the newest; 'selected': the one that
        `TrajectorySelector` chooses, which may have to be scored. None: no late injection. The delayed start holds for
        it too.
    store_up_to: store successes only of groups whose accuracy, over their graded fresh rollouts, is at most this, in
        (0, 1]; 'one_success': only of groups with exactly one success, whatever K is (SU-01, arXiv 2605.13301); None:
        of every group (the paper). What is stored stays when its question is solved more often later.
    stores: 'successes'; where rewards lie between 0 and 1, fresh rollouts whose reward is 'above_mean', the mean of
        their group's fresh rollouts; or 'all' that finished, failures too (RePO, arXiv 2506.09340)
    collects: False: the run records nothing of its own, no accuracy, trajectory or retirement; what it started with
        (`Work.experience`) is replayed as it is
    """

    def __init__(
        self,
        sampler: QuestionSampler,
        buckets: DifficultyBuckets,
        *,
        group_size: int,
        questions_per_step: int,
        rng: np.random.Generator,
        rho: Share = 0.5,
        rho_end: Share | None = None,
        rho_steps: Count | None = None,
        start_at_accuracy: ShareBelowOne | None = 0.35,
        collect_before_start: bool = False,
        fresh_beside: int | Literal["all", "unless_solved"] | None = None,
        late_injection: Literal["newest", "selected"] | None = None,
        store_up_to: float | Literal["one_success"] | None = None,
        stores: Literal["successes", "above_mean", "all"] = "successes",
        collects: bool = True,
    ) -> None:
        """Raises ValueError for a share outside its range, rho_end without rho_steps or the reverse, a ρ above 0 that
        replays no question, fresh_beside outside [1, K−1], late_injection with a ρ above 0, store_up_to outside (0, 1],
        or μ above K success counts."""
        check(ReplayMixer, locals())
        require(
            (rho_end is None) == (rho_steps is None),
            "ReplayMixer.rho_end and ReplayMixer.rho_steps are both numbers, or both None (constant ρ); got "
            f"{rho_end!r} and {rho_steps!r}",
        )
        largest = as_fraction(max(rho, rho_end or 0))
        require(
            largest == 0 or largest * questions_per_step >= 1,
            f"ReplayMixer.rho · train.questions_per_step = {float(largest * questions_per_step):g} is rounded down to "
            "0: no question would ever be replayed; raise one of them, or bind 0",
        )
        require(
            fresh_beside in (None, "all", "unless_solved")
            or (type(fresh_beside) is int and 1 <= fresh_beside < group_size),
            f"ReplayMixer.fresh_beside must be a whole number in [1, train.group_size − 1] = [1, {group_size - 1}], "
            f"'all', 'unless_solved' or None; got {fresh_beside!r}",
        )
        require(
            late_injection is None or max(rho, rho_end or 0) == 0 or fresh_beside == "unless_solved",
            f"ReplayMixer.late_injection = {late_injection!r} plans no question for replay: ReplayMixer.rho must be 0 "
            f"and ReplayMixer.rho_end 0 or None, or ReplayMixer.fresh_beside 'unless_solved'; got {rho!r}, {rho_end!r} "
            f"and {fresh_beside!r}",
        )
        require(
            store_up_to in (None, "one_success") or (not isinstance(store_up_to, str) and 0 < store_up_to <= 1),
            "ReplayMixer.store_up_to must be an accuracy in (0, 1], 'one_success' (groups with exactly one success) or "
            f"None; got {store_up_to!r}",
        )
        require(
            sampler.unit == "accuracy" or sampler.mu <= group_size,
            f"QuestionSampler.mu must lie in [0, K] = [0, {group_size}] successes, got {sampler.mu!r}",
        )
        require(
            stores != "all" or (late_injection is None and not isinstance(fresh_beside, str)),
            "ReplayMixer.stores = 'all' stores failures, which ReplayMixer.late_injection and .fresh_beside = 'all' or "
            f"'unless_solved' would put where a success belongs; got {late_injection!r} and {fresh_beside!r}",
        )
        self.sampler, self.buckets = sampler, buckets
        self.group_size, self.questions_per_step = group_size, questions_per_step
        self.rollouts_per_replayed = group_size if isinstance(fresh_beside, str) else fresh_beside or group_size - 1
        self.late_injection, self.unless_solved = late_injection, fresh_beside == "unless_solved"
        self.rng = rng
        self.store_up_to = store_up_to if isinstance(store_up_to, str | None) else as_fraction(store_up_to)
        self.rho, self.rho_end = as_fraction(rho), as_fraction(rho if rho_end is None else rho_end)
        self.rho_steps = 1 if rho_steps is None else rho_steps
        self.start_at_accuracy = None if start_at_accuracy is None else as_fraction(start_at_accuracy)
        self.collect_before_start, self.collects = collect_before_start, collects
        self.stores = stores
        self.started_at: int | None = 0 if start_at_accuracy is None else None

    @property
    def started(self) -> bool:
        return self.started_at is not None

    @property
    def plans_replay(self) -> bool:
        """Whether questions are ever planned for replay; late injection plans none."""
        return max(self.rho, self.rho_end) > 0

    @property
    def replays(self) -> bool:
        """Whether anything is ever replayed."""
        return self.plans_replay or self.late_injection is not None

    @property
    def collecting(self) -> bool:
        """Whether this step's experience is recorded; never where nothing is ever replayed."""
        return self.collects and self.replays and (self.started or self.collect_before_start)

    def rho_at(self, step: int) -> Fraction:
        """The step's ρ, exact; 0 before the delayed start is over. Replay may begin in the step after the start."""
        if self.started_at is None:
            return Fraction(0)
        steps = min(max(step - self.started_at - 1, 0), self.rho_steps)
        return self.rho + (self.rho_end - self.rho) * steps / self.rho_steps

    def plan(self, fresh: FreshSource, buffer: ReplayBuffer, step: int, fills_batch: bool = False) -> Plan:
        """The step's questions, none twice: replayed ones first, then only as many fresh ones as are still needed.

        Drawing a full fresh batch and throwing part of it away would lose those questions for the epoch.
        fills_batch: where retired questions leave too few, they return; otherwise the batch is a smaller one
        """
        replayed: list[Question] = []
        if (rho := self.rho_at(step)) > 0:
            n = min(int(rho * self.questions_per_step), buffer.n_candidates)  # min(⌊ρB⌋, |E|)
            buckets = self.buckets.adapted(buffer.candidates)
            ids = self.sampler.sample(buffer.candidates, n, self.group_size, buckets, self.rng, buffer.newest_step)
            replayed = [fresh.question(question_id) for question_id in ids]
        fresh_count = self.questions_per_step - len(replayed)
        revisited = [fresh.question(question_id) for question_id in buffer.revisit(step, fresh_count, self.rng)]
        batch_ids = {question.id for question in (*replayed, *revisited)}
        retired = buffer.retired if buffer.retirement.leaves_fresh else ()
        fresh_questions = revisited + fresh.draw(fresh_count - len(revisited), batch_ids, retired, step)
        if fills_batch and (missing := fresh_count - len(fresh_questions)):
            fresh_questions += fresh.draw(missing, batch_ids | {each.id for each in fresh_questions}, (), step)
        stored = {question: buffer.trajectories(question.id) for question in replayed}
        return Plan(step, fresh_questions, replayed, stored, rollouts_per_replayed=self.rollouts_per_replayed)

    def late_stored(self, groups: Iterable[RolloutGroup], buffer: ReplayBuffer) -> dict[Question, list[Trajectory]]:
        """For late injection: what is stored of each question whose fresh rollouts have all failed.

        groups: graded; those of planned questions are left out. A group too few of whose rollouts could be graded has
            not failed.
        By spread, a group has failed whose rewards are all equal and below the stored one's.
        """
        if self.late_injection is None or not self.started:
            return {}
        late = {}
        for group in groups:
            if group.question.id in buffer.records and not group.planned_replay and buffer.has_failed(group):
                stored = buffer.trajectories(group.question.id)
                if better := [
                    one for one in stored if not buffer.by_spread or less_rounding(one.reward) > group.mean_reward
                ]:
                    late[group.question] = better
        return late

    def observe(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Start replay once a batch's Pass@1 exceeds `start_at_accuracy`; it never stops again. step: the last one that
        is planned already"""
        graded = sum(group.graded for group in groups)
        if self.started or not graded or self.start_at_accuracy is None:
            return
        if as_fraction(sum(group.correct for group in groups)) / graded > self.start_at_accuracy:
            self.started_at = step

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
            completed.append(group.with_stored(self._stored_for(group, chosen), self.group_size))
        return completed

    def _stored_for(self, group: RolloutGroup, chosen: Mapping[str, Trajectory]) -> Trajectory | None:
        """The stored trajectory that enters a group. Raises KeyError if a replayed group has none."""
        if not group.planned_replay:
            return chosen.get(group.question.id)
        return None if self.unless_solved and group.accuracy != 0 else chosen[group.question.id]

    def assemble(
        self,
        groups: Sequence[CompletedGroup],
        advantages: Advantages,
        penalty: Callable[[int], float] = lambda _: 0.0,
        weights: Mapping[str, float] = {},
    ) -> MixedBatch:
        """Compute advantages over the rows that are trained on. A stored success keeps its stored reward: it is never
        graded again. penalty: of a response's length in tokens, added to its reward here alone, of a fresh row and of a
        stored one. weights: by name, of several rewards of which each has its own advantages. Raises ValueError if a
        group is not graded."""
        rewards = np.zeros((len(groups), self.group_size))
        gradable = np.zeros((len(groups), self.group_size), dtype=bool)
        parts = np.full((len(weights), *rewards.shape), np.nan)
        for g, (_, members) in enumerate(groups):
            for i, one in enumerate(members):
                if one.reward is not None:
                    rewards[g, i], gradable[g, i] = one.reward + penalty(one.length), True
                    parts[:, g, i] = [dict(one.parts).get(name, np.nan) for name in weights]
        of_several: Any = getattr(advantages, "of_several", None)
        values = of_several(parts, [*weights.values()]) if weights else advantages(rewards, gradable)
        rows = [
            [Row(group.question, one, float(values[g, i]), bool(gradable[g, i])) for i, one in enumerate(members)]
            for g, (group, members) in enumerate(groups)
        ]
        return MixedBatch([group for group, _ in groups], rows, self.group_size)

    def collect(self, batch: MixedBatch, logprobs: Sequence[Floats], step: int) -> list[tuple[str, Trajectory]]:
        """The step's new experience: correct (or as `stores` says), finished fresh rollouts with the log-probs measured
        in this step, of groups that `store_up_to` admits.

        logprobs: of the policies that sampled them, per row of the flattened batch, float32 (A,)
        Raises ValueError for another number of log-probs than rows.
        """
        if not self.collecting:
            return []
        admitted = {group.question.id: group for group in batch.groups if self._admits(group)}
        experience = []
        for row, behaviour in zip(batch.flat_rows(), logprobs, strict=True):
            rollout = row.response
            if isinstance(rollout, Trajectory) or row.question.id not in admitted:
                continue
            grade = rollout.grade
            if grade is None or grade.reward is None:
                continue
            if self.stores == "above_mean" and less_rounding(grade.reward) <= admitted[row.question.id].mean_reward:
                continue
            if self.stores == "successes" and not grade.correct:
                continue
            if rollout.finish == "stop":
                version = step if rollout.policy_step is None else rollout.policy_step
                ids, sound = rollout.token_ids, grade.sound if grade.correct or self.stores != "all" else None
                episode = rollout.actions, rollout.seed
                trajectory = Trajectory(ids, behaviour, grade.reward, version, "stop", sound, *episode, grade.parts)
                experience.append((row.question.id, trajectory))
        return experience

    def _admits(self, group: RolloutGroup) -> bool:
        """Whether a group's successes are stored; never where too few of its rollouts could be graded."""
        if group.accuracy is None or self.store_up_to is None:
            return group.accuracy is not None
        if isinstance(self.store_up_to, str):
            return group.correct == 1
        return group.accuracy <= self.store_up_to

    def metrics(self, groups: Iterable[RolloutGroup], chosen: Mapping[str, Trajectory]) -> dict[str, float]:
        """Of the parts that are switched on. groups: of the batch; chosen: as in `complete`"""
        metrics = {} if self.start_at_accuracy is None else {"replay/started": float(self.started)}
        if self.late_injection is not None or self.unless_solved:
            stored = [self._stored_for(one, chosen) for one in groups if self.unless_solved or not one.planned_replay]
            metrics["replay/injected"] = float(sum(one is not None for one in stored))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"started_at": self.started_at, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError for a missing or unknown entry."""
        if set(state) != {"started_at", "rng"}:
            raise KeyError(f"a mixer's state has the entries started_at and rng, got {sorted(state)}")
        self.started_at = state["started_at"]
        self.rng.bit_generator.state = state["rng"]
