"""Mixes fresh and replayed questions: what a step plans, and how its groups become rows.

How much is replayed is in `ReplayShare`, which groups get a stored trajectory in `injection.py`, what becomes
experience in `store_rule.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from fractions import Fraction
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt

from ..checks import Count, Share, ShareBelowOne, check_settings, reference, require
from ..records import CompletedGroup, MixedBatch, Question, Rollout, RolloutGroup, Trajectory
from .buffer import ReplayBuffer
from .difficulty import DifficultyBuckets
from .injection import Beside, Choice, Injection
from .plan import FreshSource, Plan
from .prefix import Pieces, Prefix
from .sampling import QuestionSampler
from .share import ReplayShare
from .store_rule import Floats, Successes, finished, is_failure

PAPER_INJECTION, PAPER_RULE = Beside(), Successes()


class Advantages(Protocol):
    """As `objective.GroupAdvantages`. Both return (G, K), an array or a tensor."""

    def __call__(self, rewards: npt.NDArray[np.float64], gradable: npt.NDArray[np.bool_]) -> Any: ...

    def of_several(self, rewards: npt.NDArray[np.float64], weights: Sequence[float]) -> Any: ...


@dataclass(frozen=True)
class MixerParts:
    """What the program supplies to a mixer. group_size: K; questions_per_step: B"""

    sampler: QuestionSampler
    buckets: DifficultyBuckets
    group_size: int
    questions_per_step: int
    rng: np.random.Generator


@dataclass(eq=False)
class ReplayMixer:
    """ρ, its schedule and the delayed start.

    rho: share of a batch's questions that come from the buffer, in [0, 1]; 0 is on-policy training. The number of
        replayed questions is ⌊ρ·B⌋, or all candidates if there are fewer (Algorithm 1, line 7).
    rho_end, rho_steps: ρ moves linearly from `rho`, in the first step that may replay, to `rho_end`, `rho_steps` later,
        and stays there; both None: ρ is constant
    start_at_accuracy: replay starts in the step after the first batch whose Pass@1 (mean accuracy over its graded
        fresh rollouts) exceeds this; None: from the first step. The batch that triggers the start is the first whose
        accuracies, trajectories and retirements are recorded (paper)
    injection: how a stored trajectory enters a group: `@Beside()` (the paper), `@InPlace()`, `@UnlessSolved()`,
        `@LateInjection()`, which plans no question for replay: ρ is 0 then; `@Prefix()`: its first tokens are
        continued; `@StoredGroup()`: several are a second group; or `@StoredRows()`: those of any question are added
    store_rule: which fresh rollouts are stored: `@Successes()` (the paper), `@OneSuccess()`, `@AboveMean()`,
        `@AllFinished()` or `@WithSignal()`
    collects: False: the run records nothing of its own, no accuracy, trajectory or retirement; what it started with
        (`Work.experience`) is replayed as it is
    reincarnation: `@Reincarnation()`: replay ends, and the run begins anew from its policy; None: it does not
    """

    parts: InitVar[MixerParts]
    _: KW_ONLY
    rho: Share = 0.5
    rho_end: Share | None = None
    rho_steps: Count | None = None
    start_at_accuracy: ShareBelowOne | None = 0.35
    injection: Annotated[Any, reference("stored_for", "@Beside()")] = PAPER_INJECTION
    store_rule: Annotated[Any, reference("experience", "@Successes()")] = PAPER_RULE
    collects: bool = True
    reincarnation: Annotated[Any, reference("last_step", "@Reincarnation()")] | None = None

    def __post_init__(self, parts: MixerParts) -> None:
        """Raises ValueError for a share outside its range, rho_end without rho_steps or the reverse, a ρ above 0 that
        replays no question or that the injection plans none for, Beside.rollouts outside [1, K−1], or μ above K success
        counts."""
        check_settings(ReplayMixer, vars(self))
        self.sampler, self.buckets, self.rng = parts.sampler, parts.buckets, parts.rng
        self.group_size, self.questions_per_step = parts.group_size, parts.questions_per_step
        self.share = ReplayShare(self.rho, self.rho_end, self.rho_steps, self.start_at_accuracy, self.reincarnation)
        # By whether what is given is a success: the share of each `GivenShare.key`, where it moves (`AdaptiveShare`).
        self.given_shares: dict[bool, dict[str, float]] = {True: {}, False: {}}
        self.rollouts_per_replayed: int = self.injection.fresh_rollouts(self.group_size)
        largest, count = self.share.largest, self.questions_per_step
        require(
            largest == 0 or largest * count >= 1,
            f"ReplayMixer.rho · train.questions_per_step = {float(largest * count):g} is rounded down to "
            "0: no question would ever be replayed; raise one of them, or bind 0",
        )
        require(
            self.injection.plans or largest == 0,
            f"ReplayMixer.injection = {self.injection} plans no question for replay: ReplayMixer.rho must be 0 and "
            f"ReplayMixer.rho_end 0 or None, got {self.rho!r} and {self.rho_end!r}; @UnlessSolved() with "
            "UnlessSolved.late = @LateInjection() does both",
        )
        prefix = self.injection.prefix
        require(
            not (prefix and prefix.share.largest > 0 and self.collects and largest == 1),
            "ReplayMixer.rho = 1 with @Prefix() would continue the same questions for ever: a continued group stores "
            "nothing and measures no accuracy; leave some questions plain (0.75), or bind ReplayMixer.collects = False",
        )
        added = self.injection.added_rows
        self.places: int = self.group_size + (added.rows if added else 0)  # of a group, for rows
        require(
            self.sampler.unit == "accuracy" or self.sampler.mu <= self.group_size,
            f"QuestionSampler.mu must lie in [0, K] = [0, {self.group_size}] successes, got {self.sampler.mu!r}",
        )

    @property
    def replays(self) -> bool:
        """Whether anything is ever replayed; for late injection and added rows no question need be planned."""
        injection = self.injection
        return self.share.largest > 0 or injection.late_injection is not None or injection.added_rows is not None

    @property
    def collecting(self) -> bool:
        """Whether this step's experience is recorded; never where nothing is ever replayed."""
        return self.collects and self.replays and self.share.active

    def check(self, buffer: ReplayBuffer) -> None:
        """Raises ValueError for a buffer that does not go with what is injected and stored."""
        injection, always = self.injection, self.injection.always
        require(
            always or not buffer.counts_stored,
            f"ReplayBuffer.counts_stored counts a stored success that ReplayMixer.injection = {injection} leaves out",
        )
        require(
            not (injection.plans and injection.replaces and buffer.counts_stored),
            f"ReplayBuffer.counts_stored counts a stored success beside its group's fresh rollouts, and ReplayMixer."
            f"injection = {injection} puts it in the place of one, which counts already; it must be False",
        )
        require(
            not buffer.by_spread or (self.rollouts_per_replayed > 1 and always),
            "ReplayBuffer.difficulty = 'reward_spread' needs ReplayMixer.injection = @InPlace(), or @Beside() with 2 "
            f"rollouts and more; got {injection}",
        )
        require(
            not buffer.by_spread or self.sampler.partition == "accuracy",
            "ReplayBuffer.difficulty = 'reward_spread' has levels of its own: QuestionSampler.partition must be "
            f"'accuracy', got {self.sampler.partition!r}",
        )
        require(
            self.collects or buffer.max_age is None,
            f"ReplayBuffer.max_age = {buffer.max_age} would empty the buffer for good where ReplayMixer.collects is "
            "False; it must be None",
        )
        require(
            self.reincarnation is None or self.replays,
            "ReplayMixer.reincarnation ends a replay, and with ReplayMixer.rho = 0 nothing is ever replayed",
        )
        ends, starts = self.reincarnation, self.start_at_accuracy
        require(
            ends is None or ends.at_accuracy is None or starts is None or ends.at_accuracy > starts,
            f"Reincarnation.at_accuracy = {ends and ends.at_accuracy} ends replay before it starts, at "
            f"ReplayMixer.start_at_accuracy = {starts}; it must be above that",
        )
        first = getattr(injection.added_rows, "first_step", 1)
        require(
            ends is None or ends.after_step is None or first <= ends.after_step,
            f"StoredRows.first_step = {first} lies behind Reincarnation.after_step = {ends and ends.after_step}: no "
            "stored row would ever be added",
        )
        self.store_rule.check(buffer, injection)
        if injection.added_rows:
            injection.added_rows.check(buffer, self.store_rule.stores_failures)

    def plan(self, fresh: FreshSource, buffer: ReplayBuffer, step: int, fills_batch: bool = False) -> Plan:
        """The step's questions, none twice: replayed ones first, then only as many fresh ones as are still needed.

        Drawing a full fresh batch and throwing part of it away would lose those questions for the epoch.
        fills_batch: where retired questions leave too few, they return; otherwise the batch is a smaller one
        """
        replayed: list[Question] = []
        if (rho := self.share.at(step)) > 0:
            candidates = self.injection.candidates(buffer)
            n = min(int(rho * self.questions_per_step), sum(map(len, candidates.values())))  # min(⌊ρB⌋, |E|)
            ids = self.sampler.sample(candidates, n, self.group_size, self.buckets, self.rng)
            replayed = [fresh.question(question_id) for question_id in ids]
        fresh_count = self.questions_per_step - len(replayed)
        returned = buffer.revisit(step, fresh_count, self.rng)  # some may be among the replayed: failures do not retire
        revisited = [fresh.question(id_) for id_ in returned if id_ not in {question.id for question in replayed}]
        batch_ids = {question.id for question in (*replayed, *revisited)}
        retired = buffer.retired if buffer.retirement.leaves_fresh else ()
        fresh_questions = revisited + fresh.draw(fresh_count - len(revisited), batch_ids, retired, step)
        if fills_batch and (missing := fresh_count - len(fresh_questions)):
            fresh_questions += fresh.fill(missing, batch_ids | {question.id for question in fresh_questions}, step)
        options = {question: self.injection.stored_of(question.id, buffer) for question in replayed}
        stored = {question: several for question, several in options.items() if several}
        return Plan(step, fresh_questions, replayed, stored, rollouts_per_replayed=self.rollouts_per_replayed)

    def with_given(
        self, plan: Plan, choices: Mapping[str, Choice], unusable: Collection[str], room: int, pieces: Pieces
    ) -> Plan:
        """The plan of a `Prefix`: how much each planned question is given of the chosen response, which is then the
        first of its `stored`.

        choices: one of each planned question; unusable: ids of those that cannot be continued, which then have none;
        room, pieces: as in `Prefix.given`
        """
        prefix: Prefix = self.injection.prefix
        stored: dict[Question, list[Trajectory]] = {}
        given: dict[str, int] = {}
        for question in plan.replayed:
            choice = choices[question.id]
            chosen = choice.trajectory
            own = self.given_shares[chosen.correct].get(prefix.share.key(question.id))
            share = prefix.share.of_group(own, self.rng)
            if question.id in unusable:
                continue
            stored[question] = [chosen, *(one for one in choice.stored if one is not chosen)]
            if tokens := prefix.given(chosen, share, room, pieces):
                given[question.id] = tokens
        return replace(plan, stored=stored, given=given)

    def steer(self, groups: Iterable[RolloutGroup], choices: Mapping[str, Choice]) -> None:
        """The shares of what planned questions are given move by the accuracies of their groups, of which each could
        have been continued and some could be graded."""
        if (prefix := self.injection.prefix) is None:
            return
        accuracies: dict[tuple[bool, str], list[Fraction]] = {}
        for group in groups:
            if group.planned_replay and group.question.id in choices and group.accuracy is not None:
                of = (choices[group.question.id].trajectory.correct, prefix.share.key(group.question.id))
                accuracies.setdefault(of, []).append(group.accuracy)
        for (correct, key), of_groups in accuracies.items():
            own = self.given_shares[correct]
            direction = prefix.direction(sum(of_groups, Fraction(0)) / len(of_groups), correct)
            if (moved := prefix.share.moved(own.get(key), direction)) is not None:
                own[key] = moved

    def complete(self, groups: Iterable[RolloutGroup], choices: Mapping[str, Choice]) -> list[CompletedGroup]:
        """The groups with the rows that are trained on (`RolloutGroup.with_stored`).

        choices: as in `Injection.stored_for`
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
            completed.append(group.with_stored(self.injection.stored_for(group, choices), self.group_size))
        return completed

    def assemble(
        self,
        groups: Sequence[CompletedGroup],
        advantages: Advantages,
        penalty: Callable[[int], float] | None = None,
        weights: Mapping[str, float] = {},
        encode: Callable[[Question], Sequence[int]] = lambda question: (),
        stored_rows: Sequence[Sequence[tuple[Question, Trajectory]]] = (),
    ) -> MixedBatch:
        """Compute advantages over the rows that are trained on. A stored success keeps its stored reward: it is never
        graded again. penalty: of a response's length in tokens, added to its reward here alone, of a fresh row and of a
        stored one. weights: by name, of several rewards of which each has its own advantages. encode: the token ids of
        a question's prompt. stored_rows: of each group, those that are added (`draw`).
        Raises ValueError if a group is not graded."""

        def relative(members: Sequence[Sequence[Rollout | Trajectory]], size: int) -> Any:
            """Of groups of rows, each by itself. size: rows at most"""
            rewards, gradable = np.zeros((len(members), size)), np.zeros((len(members), size), dtype=bool)
            parts = np.full((len(weights), *rewards.shape), np.nan)
            for g, rows in enumerate(members):
                for i, row in enumerate(rows):
                    if row.reward is None:
                        continue
                    rewards[g, i] = row.reward + (penalty(len(row.token_ids)) if penalty else 0.0)
                    gradable[g, i] = True
                    if weights:
                        of_row = dict(row.parts)
                        parts[:, g, i] = [of_row.get(name, np.nan) for name in weights]
            several = [*weights.values()]
            return advantages.of_several(parts, several) if several else advantages(rewards, gradable)

        values = relative([completed.rows for completed in groups], self.group_size)
        prompts = [encode(completed.group.question) for completed in groups]
        batch = MixedBatch.of(groups, values, self.group_size, prompts)
        if (added := self.injection.added_rows) is None:
            return batch
        joined: MixedBatch = added.joined(batch, stored_rows, relative, encode)
        return joined

    def draw(
        self, groups: Sequence[CompletedGroup], buffer: ReplayBuffer, fresh: FreshSource, step: int
    ) -> list[list[tuple[Question, Trajectory]]]:
        """Of each group of a batch, the stored rows that are added to it, once replay has started."""
        if (added := self.injection.added_rows) is None or not self.share.active:
            return [[] for _ in groups]
        drawn = added.draw([completed.group for completed in groups], buffer, step, self.rng)
        return [[(fresh.question(question_id), trajectory) for question_id, trajectory in rows] for rows in drawn]

    def late_stored(self, groups: Iterable[RolloutGroup], buffer: ReplayBuffer) -> dict[Question, list[Trajectory]]:
        """As `Injection.late_stored`, once replay has started."""
        return self.injection.late_stored(groups, buffer) if self.share.active else {}

    def collect(self, batch: MixedBatch, logprobs: Sequence[Floats], step: int) -> list[tuple[str, Trajectory]]:
        """As `StoreRule.experience`, while experience is recorded."""
        keeps = self.injection.added_rows is not None and self.injection.added_rows.keeps_advantages
        return self.store_rule.experience(batch, logprobs, step, keeps) if self.collecting else []

    def failures(self, batch: MixedBatch, logprobs: Sequence[Floats], step: int) -> list[tuple[str, Trajectory]]:
        """What `ReplayBuffer.failed` stores of a step, while experience is recorded."""
        return finished(batch, logprobs, step, is_failure) if self.collecting else []

    def metrics(self, groups: Iterable[RolloutGroup], choices: Mapping[str, Choice]) -> dict[str, float]:
        """Of the parts that are switched on. groups: of the batch; choices: as in `complete`"""
        share = self.share
        metrics = {} if share.start_at_accuracy is None else {"replay/started": float(share.started)}
        metrics |= {"replay/over": float(share.over)} if self.reincarnation else {}
        injection: Injection = self.injection
        return metrics | injection.metrics(groups, choices)

    def state_dict(self) -> dict[str, Any]:
        state = {"started_at": self.share.started_at, "rng": self.rng.bit_generator.state}
        state |= {"last_step": self.share.last_step} if self.reincarnation else {}
        return state | ({"given_shares": [*self.given_shares.values()]} if self.injection.prefix else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError for a missing or unknown entry."""
        entries = {*self.state_dict()}
        if set(state) != entries:
            raise KeyError(f"a mixer's state has the entries {sorted(entries)}, got {sorted(state)}")
        self.given_shares = dict(zip(self.given_shares, state.get("given_shares", ({}, {})), strict=True))
        self.share.started_at, self.share.last_step = state["started_at"], state.get("last_step")
        self.rng.bit_generator.state = state["rng"]
