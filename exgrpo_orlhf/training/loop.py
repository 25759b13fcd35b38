"""The training loop, top to bottom, whichever engine does the work.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from .. import checkpoints
from ..engines.engine import Engine, NonFiniteUpdate
from ..evaluation.validation import Validation
from ..experiment import Experiment, Outcome
from ..explore.run_page import RunPage
from ..files import Files, write
from ..paths import run_name
from ..progress import Clock, Progress
from ..questions.fresh import FreshQuestions
from ..records import CompletedGroup, Question, RolloutGroup, Trajectory
from ..replay import Plan, ReplayBuffer, TrajectorySelector, snapshot
from ..replay.selection import NEWEST
from ..stopping import Stop
from ..study import comparison_charts
from ..tracking.decisions import DecisionLog, ScoredTrajectories, StepRecord
from ..tracking.metrics_log import MetricsLog
from ..tracking.tracker import MlflowTracker
from . import ahead, batch_metrics
from .ahead import BatchAhead
from .health import Health

log = logging.getLogger(__name__)


@dataclass(eq=False)
class TrainingRun:
    """A run that is ready to make steps; `preparation.prepare` makes it.

    experiment: whose mixer and generators change with every step; folder: of the run
    fingerprint: of the prompts; prompt: what a checkpoint records of them
    steps: that are done; saved_step: of the newest checkpoint
    best: value of train.best_metric, in step best_step
    batch_ahead: the next step's batch, where it is generated ahead
    batch_size: questions of the last batch
    """

    experiment: Experiment
    folder: Path
    engine: Engine
    fresh: FreshQuestions
    buffer: ReplayBuffer
    validation: Validation
    metrics: MetricsLog
    decisions: DecisionLog
    tracker: MlflowTracker
    page: RunPage
    fingerprint: str
    prompt: Mapping[str, Any]
    steps: int = 0
    saved_step: int | None = None
    generated_tokens: int = 0
    best: float | None = None
    best_step: int | None = None
    batch_ahead: BatchAhead | None = None
    batch_size: int = 0

    def run(self, stop: Stop) -> Outcome:
        """Make all steps that are left, until `stop`; evaluate, log and save on the way.

        Raises NonFiniteUpdate, CheckpointError, ValueError, and what the engine and the verifier raise.
        """
        status: Literal["FINISHED", "KILLED", "FAILED"] = "FAILED"
        try:
            settings, mixer = self.experiment.settings, self.experiment.mixer
            self.tracker.catch_up()
            if self.metrics.last_step < 0 and self.steps == 0:  # the policy as it came, before the first update
                metrics = self._evaluate()
                self._best_metric(metrics)  # a vote is not measured where no answers can be compared
                self.metrics.append(0, {**metrics, "cost/generated_tokens": 0})
                self.tracker.send()
            rows = list(self.metrics.rows())
            health = Health(rows, settings.steps, mixer.share.start_at_accuracy if mixer.replays else None)
            evaluation = max((row.get("time/evaluation", 0.0) for row in rows), default=0.0)
            progress = Progress(run_name(self.folder), self.steps, settings.steps, settings.eval_every, evaluation)
            while self.steps < settings.steps and not stop.signal:
                metrics = self.step()
                every, is_last = settings.eval_every, self.steps == settings.steps
                if every and (is_last or self.steps % every == 0):
                    metrics |= self._evaluate()
                self.metrics.append(self.steps, metrics)
                self.tracker.send()
                progress.show(self.steps, metrics)
                health.look(self.steps, metrics, float(mixer.share.at(self.steps)))
                value = self._best_metric(metrics)
                # The rates are of responses that went wrong (validation.metric_names), and tokens are a cost.
                sign = -1 if str(settings.best_metric).endswith(("_rate", "/response_tokens")) else 1
                is_best = value is not None and (self.best is None or sign * value > sign * self.best)
                if is_best:
                    self.best, self.best_step = value, self.steps
                if is_best or self.steps % settings.save_every == 0:
                    self.save()
                if is_best:
                    checkpoints.mark_best(self.folder, self.steps)
            if self.saved_step != self.steps:
                self.save()
            status = "KILLED" if stop.signal and self.steps < settings.steps else "FINISHED"
            self._draw()
            self.page.refresh(self.buffer, self.steps, last=True)
            for path in filter(Path.exists, (self.metrics.path, self.decisions.rollouts.path)):
                self.tracker.artifact(path)
        finally:
            self.tracker.close(status)
        return Outcome(self.steps, settings.steps, stop.signal if self.steps < settings.steps else None)

    def step(self) -> dict[str, float]:
        """One step of ExGRPO, in the order of docs/algorithm.md. Returns its metrics. Raises as `run`."""
        experiment, buffer, engine, clock = self.experiment, self.buffer, self.engine, Clock()
        mixer, dynamic_sampling, step = experiment.mixer, experiment.dynamic_sampling, self.steps + 1
        buffer.advance(step)
        outdated = self._evict_outdated(step, clock)

        # The step's questions and their fresh rollouts, unless they were generated ahead.
        plan, new = self.batch_ahead or self._begin(step, clock).result()

        # o* = argmin over the question's stored trajectories of their mean token entropy under the current policy (or
        # of another score).
        chosen, scored = self._choose(experiment.selector, plan.stored)
        clock.lap("score")

        # Late injection: a group without a success gets a stored one. Then groups without a signal are replaced, if
        # bound, by the rows that would be trained on.
        late_selector = NEWEST if mixer.injection.late == "newest" else experiment.selector
        groups: list[RolloutGroup] = []
        completed: list[CompletedGroup] = []
        rounds = 0
        while new:
            late, late_scored = self._choose(late_selector, mixer.late_stored(new, buffer))
            clock.lap("inject")
            chosen, scored = chosen | late, scored | late_scored
            groups, completed = [*groups, *new], [*completed, *mixer.injection.complete(new, chosen)]
            rounds += 1
            replacements = dynamic_sampling.replacements(plan, completed, rounds, self.fresh, buffer)
            new = self._rollout(replacements, groups, clock) if replacements else []
        selected = dynamic_sampling.select(plan, completed, rounds)

        # One step ahead: the next batch is planned before this one is observed, and generated by the weights that this
        # update is about to change; after the last step too, so that an extended run equals a longer one.
        next_batch, thread_clock = None, Clock() if engine.overlaps_update else None
        if experiment.settings.generate_ahead:
            next_batch = self._begin(step + 1, clock, thread_clock)

        # The latest accuracy counts fresh rollouts only, also of replaced groups; mastered questions retire.
        mixer.share.observe(groups, step + experiment.settings.generate_ahead)
        self.fresh.observe(groups, step)
        if mixer.collecting:
            buffer.observe(groups, step)

        # A = r − mean(r) over the whole group, the stored success included; one loss over fresh and replayed rows.
        penalty = lambda tokens: experiment.verifier.overlong_penalty(tokens, experiment.sampling.max_response_tokens)
        weights = experiment.verifier.weights if experiment.advantages.of_each_reward else {}
        batch = dynamic_sampling.masked(mixer.assemble(selected.groups, experiment.advantages, penalty, weights))
        clock.lap("assemble")
        try:
            stats = engine.update(batch, experiment.loss)
        except NonFiniteUpdate as error:
            path = self.folder / f"failed-step-{step}.jsonl"
            write(path, "".join(json.dumps(row) + "\n" for row in error.dump))
            raise NonFiniteUpdate(f"step {step}: {error}; its rows are in {path}", error.dump) from error
        except Exception:
            # One of the two is often the cause of the other.
            if next_batch and next_batch.done() and (failure := next_batch.exception()):
                log.error("the batch that was generated beside this update failed too: %s", failure)
            raise
        clock.lap("update")

        # Correct fresh rollouts become experience, with the log-probs of the policy that sampled them.
        experience = mixer.collect(batch, stats.behaviour_logprobs, step)
        stored = buffer.store(experience)
        clock.lap("store")

        record = StepRecord(
            step=step,
            sampled=groups,
            batch=batch,
            scored=scored,
            entropies=stats.entropies,
            policy=stats.policy_logprobs,
            behaviour=stats.behaviour_logprobs,
            stored=experience,
            retired=buffer.retired,
            changes=buffer.changes,
            buckets=buffer.bucket_sizes(mixer.buckets),
        )
        self.decisions.append(record, engine.decode)
        clock.lap("log")

        if next_batch:
            self.batch_ahead = next_batch.result()
            clock.lap("wait")
            engine.sync()
            clock.lap("sync")
            if thread_clock:
                clock.add(thread_clock)

        self.generated_tokens += sum(row.length for group in groups for row in group.rollouts)
        self.steps = step
        metrics = {
            **selected.metrics(),
            **selected.plan.metrics(),
            **mixer.metrics(batch.groups, chosen),
            **buffer.metrics(mixer.buckets),
            **batch_metrics.of_batch(batch, step, stats.entropies),
            **experiment.loss.replayed_metrics(batch.flat_rows(), stats.policy_logprobs, stats.behaviour_logprobs),
            **stats.metrics,
            **self.fresh.metrics(),
            **outdated,
            **experiment.verifier.metrics(groups, experiment.sampling.max_response_tokens),
            "replay/candidates_scored": float(sum(len(candidates.measured) for candidates in scored.values())),
            "replay/stored": float(stored),
            "cost/generated_tokens": self.generated_tokens,
            **clock.times(),
        }
        return {name: value for name, value in metrics.items() if mixer.replays or not name.startswith("replay/")}

    def _evict_outdated(self, step: int, clock: Clock) -> dict[str, float]:
        """Where Environment.recheck_every is due: stored episodes that the environment would answer otherwise go."""
        every, buffer = self.experiment.environment.recheck_every, self.buffer
        if every is None or step % every:
            return {}
        stored = [(id_, entry) for id_, record in buffer.records.items() for entry in record.stored]
        differ = self.engine.outdated([(self.fresh.question(id_), entry.trajectory) for id_, entry in stored])
        for (id_, candidate), differs in zip(stored, differ, strict=True):
            if differs:
                buffer.evict(id_, candidate.key)
        clock.lap("recheck")
        return {"replay/outdated": float(sum(differ))}

    def _begin(self, step: int, clock: Clock, thread_clock: Clock | None = None) -> Future[BatchAhead]:
        """A step's questions: (1−ρ)·B fresh ones, ρ·B replayed ones with p ∝ N(accuracy; μ, σ), no question twice. And
        K fresh rollouts of each, or as many as are asked for around a stored one.

        thread_clock: clock of the rollouts where they are made in a thread, beside the update
        """
        plan = self.experiment.mixer.plan(self.fresh, self.buffer, step, self.engine.whole_batches)
        planned = self.experiment.mixer.questions_per_step
        if plan.questions < planned and plan.questions != self.batch_size:
            log.warning(
                "step %d: a batch of %d questions instead of %d: no more are left to draw without repeating one",
                *(step, plan.questions, planned),
            )
        self.batch_size = plan.questions
        clock.lap("plan")
        sample = lambda: BatchAhead(plan, self._rollout(plan, [], thread_clock or clock))
        return ahead.start(sample, in_thread=thread_clock is not None)

    def _choose(
        self, selector: TrajectorySelector, stored: Mapping[Question, Sequence[Trajectory]]
    ) -> tuple[dict[str, Trajectory], dict[str, ScoredTrajectories]]:
        """One stored trajectory of each question, and what it was chosen from, by question id."""
        scores = self.engine.score(selector.to_score(stored))
        records = {question.id: self.buffer.records.get(question.id) for question in stored}
        accuracies = {id_: float(record.accuracy) for id_, record in records.items() if record}
        chosen = selector.choose(stored, scores, self.experiment.mixer.rng, accuracies, self.steps + 1)
        return chosen, {
            question.id: ScoredTrajectories(trajectories, scores.get(question, ()))
            for question, trajectories in stored.items()
        }

    def _rollout(self, plan: Plan, graded: list[RolloutGroup], clock: Clock) -> list[RolloutGroup]:
        """Sample and grade a plan's questions; OpenRLHF's groups while it is still generating others. With
        train.generate_ahead they get the log-probs of the policy that sampled them. graded: the step's groups so far"""
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

    def _evaluate(self) -> dict[str, float]:
        if not self.validation.questions or self.experiment.settings.eval_every is None:
            return {}
        clock = Clock()
        metrics = self.validation.evaluate((self.steps, self.experiment.settings.steps), self.engine)
        clock.lap("evaluation")
        return {**metrics, "time/evaluation": clock.laps["evaluation"]}

    def _best_metric(self, metrics: Mapping[str, float]) -> float | None:
        """train.best_metric, where there was an evaluation. Raises ValueError if that did not measure it."""
        name = self.experiment.settings.best_metric
        measured = sorted(metric for metric in metrics if metric.startswith("eval/"))
        if name is None or not measured:
            return None
        if name not in metrics:
            raise ValueError(f"train.best_metric = {name!r} was not measured; measured were {', '.join(measured)}")
        return metrics[name]

    def save(self) -> None:
        """Make checkpoint-<steps>. Raises CheckpointError."""
        state = {
            "step": self.steps,
            "identity": dict(self.experiment.identity),
            "own_code": self.experiment.own_code,
            "base": self.experiment.base,
            "mixer": self.experiment.mixer.state_dict(),
            "fresh": self.fresh.state_dict(),
            "validation": self.validation.fingerprint,
            "generated_tokens": self.generated_tokens,
            "best": self.best,
            "best_step": self.best_step,
            "best_of": self.experiment.settings.best_metric,
            "mlflow_run_id": self.tracker.run_id,
            "torch": torch.__version__,
            **({"prompt": self.prompt} if self.prompt else {}),
        }
        self.decisions.sync()
        self.metrics.sync()  # rows of steps that a checkpoint has passed would never be written again

        def fill(folder: Path) -> Files:
            written = self.engine.save(folder)
            tables = snapshot.save(self.buffer, folder / "replay", self.fingerprint)
            if self.batch_ahead:
                ahead.save(self.batch_ahead, folder / ahead.FOLDER)
            checkpoints.write_state(folder, state)
            return {**written, **{f"replay/{name}": entry for name, entry in tables.items()}}

        checkpoints.save(self.folder, self.steps, self.metrics.identity, fill, self.experiment.settings.keep)
        self.saved_step = self.steps
        self.page.refresh(self.buffer, self.steps)
        self.tracker.catch_up()

    def _draw(self) -> None:
        path = self.folder / "curves.png"
        try:
            write(path, comparison_charts.training_picture({run_name(self.folder): list(self.metrics.rows())}))
        except (OSError, ValueError, RuntimeError) as error:  # the run is done and saved: a picture must not fail it
            log.warning("%s could not be drawn: %s", path, error)
            return
        self.tracker.artifact(path)
