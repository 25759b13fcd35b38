"""One step of ExGRPO, top to bottom, whichever engine does the work: sample, observe, learn, remember, report.

Follows the paper (arXiv 2510.02245) in what is replayed and how it enters the loss; departs from the official code
where that departs from the paper or is wrong: accuracy counts fresh rollouts only, a question that falls to 0 is no
candidate, entropy is the mean over exactly the response tokens, stored token ids are never decoded and encoded again,
only as many fresh questions are drawn as are trained on, replayed groups generate K−1 responses unless asked for all
K, one normaliser for the whole optimiser step. See docs/algorithm.md for each of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ..engines.engine import Clock, Engine, NonFiniteUpdate, UpdateStats
from ..experiment import Experiment
from ..io.files import write
from ..objective.divisors import weighted
from ..questions.fresh import FreshQuestions
from ..records import CompletedGroup, MixedBatch, Question, Rollout, RolloutGroup, Trajectory, mean
from ..replay import Plan, ReplayBuffer, TrajectorySelector
from ..replay.injection import Choice
from ..replay.plan import SelectedBatch
from ..tracking.decisions import DecisionLog, StepRecord, pieces
from . import ahead
from .ahead import BatchAhead

log = logging.getLogger(__name__)


class _Sample(NamedTuple):
    """What a step has sampled: all its graded groups; those that are trained on; by question id the stored trajectory
    that was chosen; of each group of the batch the stored rows that are added."""

    groups: list[RolloutGroup]
    selected: SelectedBatch
    choices: dict[str, Choice]
    stored_rows: list[list[tuple[Question, Trajectory]]]


class _NextBatch(NamedTuple):
    """The next step's batch. clock: of its rollouts, where they are made in a thread beside the update"""

    future: Future[BatchAhead]
    clock: Clock | None


@dataclass(eq=False, kw_only=True)
class Trainer:
    """Makes steps, and logs their decisions.

    experiment: whose mixer and generators change with every step; folder: of the run
    steps: that are done; generated_tokens: in them
    batch_ahead: the next step's batch, where it is generated ahead
    batch_size: questions of the last batch
    """

    experiment: Experiment
    folder: Path
    engine: Engine
    fresh: FreshQuestions
    buffer: ReplayBuffer
    decisions: DecisionLog
    steps: int = 0
    generated_tokens: int = 0
    batch_ahead: BatchAhead | None = None
    batch_size: int = 0

    def step(self) -> dict[str, float]:
        """One step of ExGRPO, in the order of docs/algorithm.md. Returns its metrics. Raises as `run`."""
        clock, step = Clock(), self.steps + 1
        self.buffer.advance(step)
        if self.experiment.mixer.share.begin(step):
            self.engine.reincarnate()
        sample = self._sample(step, clock)
        next_batch = self._begin_next(step + 1, clock)
        batch = self._observe(sample, step, clock)
        stats = self._learn(batch, step, next_batch, clock)
        stored = self._remember(sample, batch, stats, step, clock)
        self._await(next_batch, clock)
        self.generated_tokens += sum(group.length for group in sample.groups)
        self.steps = step
        return self._report(sample, batch, stats, float(stored), clock)

    def _sample(self, step: int, clock: Clock) -> _Sample:
        """The step's questions, their graded fresh rollouts, and the stored trajectories that stand beside them."""
        experiment, buffer = self.experiment, self.buffer
        mixer, dynamic_sampling = experiment.mixer, experiment.dynamic_sampling
        plan, new = self.batch_ahead or self._first_batch(step, clock)

        # o* = argmin over the question's stored trajectories of their mean token entropy under the current policy (or
        # of another score). What a group continues was chosen before it was sampled.
        if mixer.injection.prefix:
            choices = {question.id: Choice(stored, (), 0) for question, stored in plan.stored.items()}
        else:
            choices = self._choose(experiment.selector, plan.stored)
        clock.lap("score")

        # Late injection: a group without a success gets a stored one. Then groups without a signal are replaced, if
        # bound, by the rows that would be trained on.
        late_selector = mixer.injection.late_selector(experiment.selector)
        groups: list[RolloutGroup] = []
        completed: list[CompletedGroup] = []
        rounds = 0
        while new:
            choices |= self._choose(late_selector, mixer.late_stored(new, buffer))
            clock.lap("inject")
            groups, completed = [*groups, *new], [*completed, *mixer.complete(new, choices)]
            rounds += 1
            replacements = dynamic_sampling.replacements(plan, completed, rounds, self.fresh, buffer)
            new = self._rollout(replacements, groups, clock) if replacements else []
        selected = dynamic_sampling.select(plan, completed, rounds)
        return _Sample(groups, selected, choices, mixer.draw(selected.groups, buffer, self.fresh, step))

    def _begin_next(self, step: int, clock: Clock) -> _NextBatch | None:
        """One step ahead: the next batch is planned before this one is observed, and generated by the weights that this
        update is about to change; after the last step too, so that an extended run equals a longer one."""
        if not self.experiment.settings.generate_ahead:
            return None
        thread_clock = Clock() if self.engine.overlaps_update else None
        plan = self._plan(step, clock)
        sample = lambda: BatchAhead(plan, self._rollout(plan, [], thread_clock or clock))
        return _NextBatch(ahead.start(sample, in_thread=thread_clock is not None), thread_clock)

    def _first_batch(self, step: int, clock: Clock) -> tuple[Plan, list[RolloutGroup]]:
        """A step's plan and its first rollouts, where they were not made ahead."""
        plan = self._plan(step, clock)
        return plan, self._rollout(plan, [], clock)

    def _observe(self, sample: _Sample, step: int, clock: Clock) -> MixedBatch:
        """The latest accuracy counts fresh rollouts only, also of replaced groups, and of no continued group; mastered
        questions retire. Then A = r − mean(r) over the whole group, the stored success included."""
        experiment = self.experiment
        mixer, verifier = experiment.mixer, experiment.verifier
        of_policy = [group for group in sample.groups if not group.given]
        mixer.share.observe(of_policy, step + experiment.settings.generate_ahead)
        self.fresh.observe(sample.groups, step)
        mixer.steer(sample.groups, sample.choices)
        if mixer.collecting:
            self.buffer.observe(of_policy, step, mixer.group_size)
        penalty = lambda tokens: verifier.overlong_penalty(tokens, experiment.sampling.max_response_tokens)
        penalised = verifier.overlong_share is not None
        weights = verifier.weights if experiment.advantages.of_each_reward else {}
        encode, bound = self.engine.prompts.encode, penalty if penalised else None
        batch = mixer.assemble(
            sample.selected.groups, experiment.advantages, bound, weights, encode, sample.stored_rows
        )
        batch = experiment.dynamic_sampling.masked(batch)
        if batch.added_size:
            batch = weighted(batch, experiment.loss, experiment.optimizer.steps_per_batch)
        convex = experiment.loss.kl_convex
        batch = replace(batch, base_share=convex.at(step) if convex else 1.0, reincarnated=mixer.share.over)
        clock.lap("assemble")
        return batch

    def _learn(self, batch: MixedBatch, step: int, next_batch: _NextBatch | None, clock: Clock) -> UpdateStats:
        """One loss over fresh and replayed rows."""
        try:
            stats = self.engine.update(batch, self.experiment.loss)
        except NonFiniteUpdate as error:
            path = self.folder / f"failed-step-{step}.jsonl"
            write(path, "".join(json.dumps(row) + "\n" for row in error.dump))
            raise NonFiniteUpdate(f"step {step}: {error}; its rows are in {path}", error.dump) from error
        except Exception:
            # One of the two is often the cause of the other.
            if next_batch and next_batch.future.done() and (failure := next_batch.future.exception()):
                log.error("the batch that was generated beside this update failed too: %s", failure)
            raise
        clock.lap("update")
        return stats

    def _remember(self, sample: _Sample, batch: MixedBatch, stats: UpdateStats, step: int, clock: Clock) -> int:
        """Correct fresh rollouts become experience, with the log-probs of the policy that sampled them; the decisions
        are logged. Returns how many are stored."""
        mixer, buffer = self.experiment.mixer, self.buffer
        experience = mixer.collect(batch, stats.behaviour_logprobs, step)
        stored = buffer.store(experience)
        if buffer.failed:
            buffer.failed.store(mixer.failures(batch, stats.behaviour_logprobs, step))
        clock.lap("store")
        record = StepRecord(
            step=step,
            sampled=sample.groups,
            batch=batch,
            choices=sample.choices,
            entropies=stats.entropies,
            policy=stats.policy_logprobs,
            behaviour=stats.behaviour_logprobs,
            stored=experience,
            retired=buffer.retired,
            changes=buffer.changes,
            buckets=buffer.bucket_sizes(mixer.buckets),
        )
        self.decisions.append(record, self.engine.decode)
        clock.lap("log")
        return stored

    def _await(self, next_batch: _NextBatch | None, clock: Clock) -> None:
        """Wait for the batch that was generated beside the update, and give its sampler the new weights."""
        if next_batch is None:
            return
        self.batch_ahead = next_batch.future.result()
        clock.lap("wait")
        self.engine.sync()
        clock.lap("sync")
        if next_batch.clock:
            clock.add(next_batch.clock)

    def _report(
        self, sample: _Sample, batch: MixedBatch, stats: UpdateStats, stored: float, clock: Clock
    ) -> dict[str, float]:
        """The metrics of the step, from those who own them; without replay's where nothing is ever replayed."""
        experiment = self.experiment
        mixer = experiment.mixer
        scored = sum(len(choice.measured) for choice in sample.choices.values())
        if prefix := mixer.injection.prefix:  # what a group continues was scored when the step was planned
            to_score = prefix.selector(experiment.selector).to_score(sample.selected.plan.stored)
            scored = sum(map(len, to_score.values()))
        metrics = {
            **sample.selected.metrics(),
            **sample.selected.plan.metrics(),
            **mixer.metrics(batch.groups, sample.choices),
            **(added.batch_metrics(batch) if (added := mixer.injection.added_rows) else {}),
            **self.buffer.metrics(mixer.buckets),
            "replay/candidates": float(sum(map(len, mixer.injection.candidates(self.buffer).values()))),
            **batch_metrics(batch, self.steps, stats.entropies),
            **experiment.loss.replayed_metrics(batch.flat_rows(), stats.policy_logprobs, stats.behaviour_logprobs),
            **stats.metrics,
            **({"policy/base_share": batch.base_share} if experiment.loss.kl_convex else {}),
            **self.fresh.metrics(),
            **experiment.verifier.metrics(sample.groups, experiment.sampling.max_response_tokens),
            "replay/candidates_scored": float(scored),
            "replay/stored": stored,
            "cost/generated_tokens": self.generated_tokens,
            **clock.times(),
        }
        return metrics if mixer.replays else {n: x for n, x in metrics.items() if not n.startswith("replay/")}

    def _plan(self, step: int, clock: Clock) -> Plan:
        """A step's questions: (1−ρ)·B fresh ones, ρ·B replayed ones with p ∝ N(accuracy; μ, σ), no question twice."""
        plan = self._with_given(self.experiment.mixer.plan(self.fresh, self.buffer, step, self.engine.whole_batches))
        planned = self.experiment.mixer.questions_per_step
        if plan.questions < planned and plan.questions != self.batch_size:
            log.warning(
                "step %d: a batch of %d questions instead of %d: no more are left to draw without repeating one",
                *(step, plan.questions, planned),
            )
        self.batch_size = plan.questions
        clock.lap("plan")
        return plan

    def _with_given(self, plan: Plan) -> Plan:
        """Where planned groups continue a stored response: what each is given of which. An episode that its environment
        would answer otherwise by now is not continued."""
        mixer, room = self.experiment.mixer, self.experiment.sampling.max_response_tokens
        if (prefix := mixer.injection.prefix) is None:
            return plan
        choices = self._choose(prefix.selector(self.experiment.selector), plan.stored)
        pairs = [(question, choices[question.id].trajectory) for question in plan.replayed]
        outdated = zip(pairs, self.engine.outdated(pairs), strict=True)
        unusable = {question.id for (question, _), differs in outdated if differs}
        if unusable:
            log.warning(
                "step %d: %d stored episodes are not continued: their environment answers otherwise by now",
                *(plan.step, len(unusable)),
            )
        return mixer.with_given(plan, choices, unusable, room, lambda one: pieces(one.token_ids, self.engine.decode))

    def _choose(
        self, selector: TrajectorySelector, stored: Mapping[Question, Sequence[Trajectory]]
    ) -> dict[str, Choice]:
        """One stored trajectory of each question, by question id."""
        scores = self.engine.score(selector.to_score(stored))
        records = {question.id: self.buffer.records.get(question.id) for question in stored}
        accuracies = {id_: float(record.accuracy) for id_, record in records.items() if record}
        return selector.choose(stored, scores, self.experiment.mixer.rng, accuracies, self.steps + 1)

    def _rollout(self, plan: Plan, graded: list[RolloutGroup], clock: Clock) -> list[RolloutGroup]:
        """K graded fresh rollouts of each of a plan's questions, or as many as are asked for around a stored one; of
        OpenRLHF they are graded while others are still generated. With train.generate_ahead they get the log-probs of
        the policy that sampled them. graded: the step's groups so far"""
        engine, verifier = self.engine, self.experiment.verifier
        with closing(clock.timed("rollout", engine.rollout(plan, self.experiment.mixer.group_size))) as rollouts:
            groups = plan.in_order(
                verifier.grade_groups(rollouts, engine.written, graded, (self.steps, self.experiment.settings.steps))
            )
        clock.lap("grade")
        if self.experiment.settings.generate_ahead:
            groups = ahead.sampled_by(groups, engine.behaviour_logprobs(groups), self.steps + 1)
            clock.lap("behaviour")
        return groups


def batch_metrics(batch: MixedBatch, step: int, entropies: Sequence[float]) -> dict[str, float]:
    """What the log says of the rows of a batch, fresh and replayed ones apart. entropies: of each row, flattened

    `policy/entropy_sound` and `…_lucky` are of the correct fresh rollouts whose reasoning was checked: the paper
    replays the lowest entropy because it expects valid reasoning there. They, `replay/lucky_guess_rate` and, of
    rows that were generated ahead, `rollout/age_mean` are left out where there are no such rows.
    """
    pairs = list(zip(batch.flat_rows(), entropies, strict=True))
    checked: dict[str, list[float]] = {}
    for row, entropy in pairs:
        grade = row.response.grade if isinstance(row.response, Rollout) else None
        if grade is not None and grade.correct and grade.sound is not None:
            checked.setdefault("sound" if grade.sound else "lucky", []).append(entropy)
    trajectories = [row.trajectory for row, _ in pairs if row.trajectory is not None]
    ages = [step - trajectory.step for trajectory in trajectories]
    soundness = [trajectory.sound for trajectory in trajectories if trajectory.sound is not None]
    fresh = [row.response.policy_step for row, _ in pairs if isinstance(row.response, Rollout)]
    sampling_ages = [step - sampled for sampled in fresh if sampled is not None]
    return {
        **({"rollout/age_mean": mean(sampling_ages)} if sampling_ages else {}),
        **({"replay/lucky_guess_rate": soundness.count(False) / len(soundness)} if soundness else {}),
        "reward/groups_with_signal": mean(
            [any(row.advantage for row in group[: batch.group_size]) for group in batch.rows]
        ),
        "policy/entropy_fresh": mean([entropy for row, entropy in pairs if row.trajectory is None]),
        "replay/entropy": mean([entropy for row, entropy in pairs if row.trajectory is not None]),
        "replay/age_mean": mean(ages),
        "replay/age_max": float(max(ages, default=0)),
        "replay/response_tokens": mean([trajectory.length for trajectory in trajectories]),
        **{f"policy/entropy_{kind}": mean(values) for kind, values in checked.items()},
    }
