"""The training loop, top to bottom, whichever engine does the work.

Follows the paper (arXiv 2510.02245) in what is replayed and how it enters the loss; departs from the official code
where that departs from the paper or is wrong: accuracy counts fresh rollouts only, a question that falls to 0 is no
candidate, entropy is the mean over exactly the response tokens, stored token ids are never decoded and encoded again,
only as many fresh questions are drawn as are trained on, replayed groups generate K−1 responses unless asked for all
K, one normaliser for the whole optimiser step. See docs/algorithm.md for each of them.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import checkpoints, initial_buffer
from ..checkpoints import manifest
from ..engines.engine import Engine, NonFiniteUpdate
from ..evaluation.session import session
from ..evaluation.validation import Validation
from ..experiment import Experiment, Outcome
from ..explore.run_page import RunPage
from ..files import write
from ..models.supervised_start import CURVE, copy_curve
from ..progress import Clock, Progress
from ..records import Question, RolloutGroup, Trajectory
from ..replay import Plan, TrajectorySelector, snapshot
from ..replay.selection import NEWEST
from ..stopping import Stop
from ..tracking.decisions import Considered, DecisionLog, Step
from ..tracking.metrics_log import MetricsLog
from ..tracking.silent import silent_metrics
from ..tracking.tracker import MlflowTracker
from . import prefetch
from .health import Health
from .load_questions import load_questions

log = logging.getLogger(__name__)


class TrainingRun:
    def __init__(
        self,
        experiment: Experiment,
        engine: Callable[[Path | None], Engine],
        run: Path,
        tracking_uri: str,
        tags: Mapping[str, str],
        loaded: tuple[list[Question], list[Question]] | None = None,
    ) -> None:
        """engine: makes the engine, with the weights of a checkpoint if there is one
        loaded: what `load_questions` returned, if it was called already"""
        # Copies, so that an experiment can be run more than once: the mixer and the generators change with every step.
        x = replace(
            experiment,
            mixer=copy.deepcopy(experiment.mixer),
            buffer=copy.deepcopy(experiment.buffer),
            fresh_rng=copy.deepcopy(experiment.fresh_rng),
        )
        self.x, self.run, self.buffer = x, run, x.buffer
        questions, asked = loaded or load_questions(x)
        self.fresh = x.fresh.over(questions, x.fresh_rng)
        found = checkpoints.find(run)
        self.step = max(found, default=0)
        checkpoint = found.get(self.step)
        state = checkpoints.read_state(checkpoint, dict(x.identity)) if checkpoint else None
        checkpoints.remove_partial(run)
        self.engine = engine(checkpoint)
        self.fingerprint = self.engine.prompts.fingerprint()
        template = {"name": x.prompts.template, "system": x.prompts.system, "fingerprint": self.fingerprint}
        about = {"template": template, "engine": {"name": x.settings.engine, "reproducible": None}, **session()}
        tokens = x.sampling.max_response_tokens
        self.validation = Validation(asked, x.evaluation, x.verifier, run, x.settings.seed, tokens, about)
        self.prompt = self.engine.prompts.introduce(questions, asked)  # what a checkpoint records of it
        self.generated_tokens = 0
        self.begun: prefetch.Begun | None = None  # the next step's batch, where it is generated ahead
        self.best: float | None = None  # of train.best_metric
        self.best_step: int | None = None
        self.batch_size = x.settings.questions_per_step
        if checkpoint and state:
            self.engine.load(checkpoint)
            snapshot.load(checkpoint / "replay", self.buffer, self.fingerprint)
            x.mixer.load_state_dict(state["mixer"])
            self.fresh.load_state_dict(state["fresh"])
            self.generated_tokens = state["generated_tokens"]
            if (begun := checkpoint / prefetch.FOLDER).exists():
                self.begun = prefetch.load(begun, self.fresh.question, self.step + 1, x.mixer.fresh_beside)
            if state["best_of"] == self._measure():  # or the best is one of another measure
                self._restore_best(state["best"], state["best_step"])
        elif x.experience:
            self.buffer = initial_buffer.load(x, questions, self.engine.prompts)
        self.saved_step = self.step if checkpoint else None
        identity = manifest.read(checkpoint).run if checkpoint else checkpoints.set_aside(run, x.config_text)
        self.metrics = MetricsLog(run / "metrics.jsonl", identity)
        self.decisions = DecisionLog(run)
        self.decisions.cut_back(self.step)
        self.metrics.cut_back(self.step)
        self.metrics.warn_if_missing(range(self.step + 1) if checkpoint else ())
        copy_curve(Path(self.engine.model_path), run, resumed=checkpoint is not None)
        self.identity = self.metrics.identity
        write(run / "config.gin", x.config_text)
        self.tracker = MlflowTracker(
            self.metrics,
            x.tracking,
            default_uri=tracking_uri,
            run_name=run.name,
            params=x.params,
            tags={**tags, "config_hash": x.config_hash},
            run_id=state["mlflow_run_id"] if state else None,
            start=MetricsLog(run / CURVE) if (run / CURVE).exists() else None,
            questions={"training": questions, "validation": asked},
            leave_out=[*silent_metrics(x)],
        )
        self.tracker.artifact(run / "config.gin")
        self.page = RunPage(run, self.tracker, questions, self.engine.decode)

    def go(self, stop: Stop) -> Outcome:
        status: Any = "FAILED"
        try:
            if self.metrics.last_step < 0 and self.step == 0:  # the policy as it came, before the first update
                metrics = self._evaluate()
                self._best_metric(metrics)  # a vote is not measured where no answers can be compared
                self.metrics.append(0, {**metrics, "cost/generated_tokens": 0})
            settings, before = self.x.settings, list(self.metrics.rows())
            health = Health(before, settings.steps, self.x.mixer.start_at_accuracy if self.x.mixer.replays else None)
            evaluation = max((row.get("time/evaluation", 0.0) for row in before), default=0.0)
            progress = Progress(self.run.name, self.step, settings.steps, settings.eval_every, evaluation)
            while self.step < self.x.settings.steps and not stop.signal:
                metrics = self._step(self.step + 1)
                self.step += 1
                done = self.step == self.x.settings.steps
                every = self.x.settings.eval_every
                if every and (done or self.step % every == 0):
                    metrics |= self._evaluate()
                self.metrics.append(self.step, metrics)
                progress.show(self.step, metrics)
                health.look(self.step, metrics, float(self.x.mixer.rho_at(self.step)))
                value = self._best_metric(metrics)
                best = value is not None and (self.best is None or value > self.best)
                if best:
                    self.best, self.best_step = value, self.step
                if best or self.step % self.x.settings.save_every == 0:
                    self._save()
                if best:
                    checkpoints.mark_best(self.run, self.step)
            if self.saved_step != self.step:
                self._save()
            status = "KILLED" if stop.signal else "FINISHED"
            self._draw()
            self.page.refresh(self.buffer, self.step, last=True)
            for path in filter(Path.exists, (self.metrics.path, self.decisions.rollouts.path)):
                self.tracker.artifact(path)
        finally:
            self.tracker.close(status)
        return Outcome(self.step, self.x.settings.steps, stop.signal if self.step < self.x.settings.steps else None)

    def _step(self, step: int) -> dict[str, float]:
        """One step of ExGRPO, in the order of docs/algorithm.md."""
        x, buffer, mixer, engine, clock = self.x, self.buffer, self.x.mixer, self.engine, Clock()
        buffer.advance(step)

        # The step's questions and their fresh rollouts, unless they were generated ahead.
        plan, new = self.begun or self._begin(step, clock).result()

        # o* = argmin over the question's stored trajectories of their mean token entropy under the current policy (or
        # of another score).
        chosen, considered = self._choose(x.selector, plan.candidates)
        clock.lap("score")

        # Late injection: a group without a success gets a stored one. Then groups without a signal are replaced, if
        # bound, by the rows that would be trained on.
        late_by = NEWEST if mixer.late_injection == "newest" else x.selector
        groups: list[RolloutGroup] = []
        rounds, K = 0, mixer.group_size
        while new:
            late, considered_late = self._choose(late_by, mixer.late_candidates(new, buffer))
            clock.lap("inject")
            chosen, considered = chosen | late, considered | considered_late
            groups, rounds = [*groups, *new], rounds + 1
            more = x.dynamic_sampling.replacements(plan, groups, chosen, K, rounds, self.fresh, buffer)
            new = self._rollout(more, groups, clock) if more else []
        sampled = x.dynamic_sampling.select(plan, groups, chosen, K, rounds)

        # One step ahead: the next batch is planned before this one is observed, and generated by the weights that this
        # update is about to change; after the last step too, so that an extended run equals a longer one.
        coming = self._begin(step + 1, clock, engine.generates_beside) if x.settings.generate_ahead else None

        # The latest accuracy counts fresh rollouts only, also of replaced groups; mastered questions retire.
        mixer.observe(groups, step)
        self.fresh.observe(groups, step)
        if mixer.collecting:
            buffer.observe(groups, step)

        # A = r − mean(r) over the whole group, the stored success included; one loss over fresh and replayed rows.
        batch = x.dynamic_sampling.masked(mixer.assemble(sampled.groups, chosen, x.advantages))
        clock.lap("assemble")
        try:
            stats = engine.update(batch, x.loss)
        except NonFiniteUpdate as error:
            path = self._dump(step, error)
            raise NonFiniteUpdate(f"step {step}: {error}; its rows are in {path}", error.dump) from error
        except Exception:
            prefetch.log_error(coming)
            raise
        clock.lap("update")

        # Correct fresh rollouts become experience, with the log-probs of the policy that sampled them.
        collected = mixer.collect(batch, stats.behaviour_logprobs, step)
        stored = buffer.store(collected)
        clock.lap("store")

        measured = stats.entropies, stats.policy_logprobs, stats.behaviour_logprobs
        buckets = buffer.bucket_sizes(mixer.buckets)
        done = Step(step, groups, batch, considered, *measured, collected, buffer.retired, buffer.changes, buckets)
        self.decisions.append(done, engine.decode)
        clock.lap("log")

        if coming:
            self.begun = coming.result()
            clock.lap("wait")
            engine.sync()
            clock.lap("sync")
            clock.add(coming.clock)

        self.generated_tokens += sum(len(row.token_ids) for group in groups for row in group.rollouts)
        return {
            **sampled.metrics(),
            **sampled.plan.metrics(),
            **mixer.metrics(),
            **buffer.metrics(mixer.buckets),
            **batch.metrics(step, stats.entropies),
            **x.loss.replayed_metrics(batch.flat_rows(), stats.policy_logprobs, stats.behaviour_logprobs),
            **stats.metrics,
            **self.fresh.metrics(),
            "replay/candidates_scored": float(sum(len(one.measured) for one in considered.values())),
            "replay/injected": float(sum(not group.replayed and group.question.id in chosen for group in batch.groups)),
            "replay/stored": float(stored),
            "cost/generated_tokens": self.generated_tokens,
            **clock.times(),
        }

    def _begin(self, step: int, clock: Clock, in_thread: bool = False) -> prefetch.Beside[prefetch.Begun]:
        """A step's questions: (1−ρ)·B fresh ones, ρ·B replayed ones with p ∝ N(accuracy; μ, σ), no question twice. And
        K fresh rollouts of each, or as many as are asked for around a stored one."""
        plan = self.x.mixer.plan(self.fresh, self.buffer, step, self.engine.whole_batches)
        self._say_if_smaller(step, plan.questions)
        clock.lap("plan")
        of_call = Clock() if in_thread else clock
        return prefetch.Beside(lambda: prefetch.Begun(plan, self._rollout(plan, [], of_call)), of_call, in_thread)

    def _choose(
        self, selector: TrajectorySelector, candidates: Mapping[Question, Sequence[Trajectory]]
    ) -> tuple[dict[str, Trajectory], dict[str, Considered]]:
        """One stored trajectory of each question, and what it was chosen from, by question id."""
        scores = self.engine.score(selector.to_score(candidates))
        chosen = selector.choose(candidates, scores, self.x.mixer.rng)
        return chosen, {one.id: Considered(stored, scores.get(one, ())) for one, stored in candidates.items()}

    def _rollout(self, plan: Plan, before: list[RolloutGroup], clock: Clock) -> list[RolloutGroup]:
        """Sample and grade a plan's questions; OpenRLHF's groups while it is still generating others. With
        train.generate_ahead they get the log-probs of the policy that sampled them. before: groups graded already"""
        engine, K = self.engine, self.x.mixer.group_size
        with closing(clock.lap_after("rollout", engine.rollout(plan, K))) as coming:
            groups = plan.in_order(self.x.verifier.grade_groups(coming, engine.decode, before))
        clock.lap("grade")
        if self.x.settings.generate_ahead:
            groups = prefetch.sampled_by(groups, engine.behaviour(groups), self.step + 1)
            clock.lap("behaviour")
        return groups

    def _say_if_smaller(self, step: int, questions: int) -> None:
        asked = self.x.settings.questions_per_step
        if questions < asked and questions != self.batch_size:
            log.warning(
                "step %d: a batch of %d questions instead of %d: no more are left to draw without repeating one",
                *(step, questions, asked),
            )
        self.batch_size = questions

    def _evaluate(self) -> dict[str, float]:
        if not self.validation.questions or self.x.settings.eval_every is None:
            return {}
        clock, engine = Clock(), self.engine
        metrics = self.validation.evaluate(self.step, engine.generate_for, engine.decode, engine.prompts)
        clock.lap("evaluation")
        return {**metrics, "time/evaluation": clock.laps["evaluation"]}

    def _best_metric(self, metrics: Mapping[str, float]) -> float | None:
        """train.best_metric, where there was an evaluation. Raises ValueError if that did not measure it."""
        name, measured = self.x.settings.best_metric, sorted(metric for metric in metrics if metric.startswith("eval/"))
        if name is None or not measured:
            return None
        if name not in metrics:
            raise ValueError(f"train.best_metric = {name!r} was not measured; measured were {', '.join(measured)}")
        return metrics[name]

    def _restore_best(self, value: float | None, step: int | None) -> None:
        """The link too: a kill may have come before it, or its checkpoint may have been set aside."""
        if step in checkpoints.find(self.run):
            self.best, self.best_step = value, step
            checkpoints.mark_best(self.run, step)
        else:
            (self.run / checkpoints.BEST).unlink(missing_ok=True)

    def _measure(self) -> list[Any]:
        """What the best checkpoint is the best by."""
        evaluation = self.x.evaluation
        return [self.x.settings.best_metric, evaluation.samples, evaluation.temperature, evaluation.top_p]

    def _save(self) -> None:
        state = {
            "step": self.step,
            "identity": dict(self.x.identity),
            "base": self.x.base,
            "mixer": self.x.mixer.state_dict(),
            "fresh": self.fresh.state_dict(),
            "generated_tokens": self.generated_tokens,
            "best": self.best,
            "best_step": self.best_step,
            "best_of": self._measure(),
            "mlflow_run_id": self.tracker.run_id,
            "torch": torch.__version__,
            **({"prompt": self.prompt} if self.prompt else {}),
        }
        self.decisions.sync()
        self.metrics.sync()  # rows of steps that a checkpoint has passed would never be written again

        def fill(folder: Path) -> manifest.Files:
            written = self.engine.save(folder)
            snapshot.save(self.buffer, folder / "replay", self.fingerprint)
            if self.begun:
                prefetch.save(self.begun, folder / prefetch.FOLDER)
            checkpoints.write_state(folder, state)
            return written

        checkpoints.save(self.run, self.step, self.identity, fill, self.x.settings.keep)
        self.saved_step = self.step
        self.page.refresh(self.buffer, self.step)

    def _draw(self) -> None:
        from ..evaluation import curves  # matplotlib, half a second that no other command should wait for

        try:
            curves.plot({self.run.name: curves.read(self.run)}, self.run / "curves.png")
        except (OSError, ValueError, RuntimeError) as error:  # the run is done and saved: a picture must not fail it
            log.warning("%s could not be drawn: %s", self.run / "curves.png", error)
            return
        self.tracker.artifact(self.run / "curves.png")

    def _dump(self, step: int, error: NonFiniteUpdate) -> Path:
        path = self.run / f"failed-step-{step}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in error.dump), encoding="utf-8")
        return path
