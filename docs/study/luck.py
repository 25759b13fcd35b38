"""Measure how well entropy and likelihood separate valid reasoning from lucky guesses, when sampled and when stored.

This needs a task whose checker says whether the reasoning of a correct response holds (`Grade.sound`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.stats import mannwhitneyu

from exgrpo_orlhf.engines.local import LocalParts, TorchEngine
from exgrpo_orlhf.experiment import Experiment
from exgrpo_orlhf.records import Question, RolloutGroup, Trajectory
from exgrpo_orlhf.replay import Plan, snapshot

# Scores of a correct response under a policy. Each detector assumes that a lower score means sounder reasoning.
DETECTORS = ("entropy", "surprise", "length")
HEAD = ("regime", "what", "seed", "responses", "sound", *(f"auc_{name}" for name in DETECTORS))


@dataclass(frozen=True)
class Responses:
    """N correct responses. sound: (N,) bool; scores: detector -> (N,)"""

    sound: npt.NDArray[np.bool_]
    scores: Mapping[str, npt.NDArray[np.float64]]

    def row(self) -> dict[str, object]:
        """Count, share of sound ones, and for each detector the probability that a sound response scores lower."""
        aucs = {f"auc_{name}": auc(-values, self.sound) for name, values in self.scores.items()}
        return {"responses": len(self.sound), "sound": float(self.sound.mean()) if len(self.sound) else None, **aucs}


def auc(scores: npt.NDArray[np.float64], positive: npt.NDArray[np.bool_]) -> float | None:
    """The probability that a positive scores higher than a negative; ties count half. None if one kind is missing."""
    high, low = scores[positive], scores[~positive]
    if not len(high) or not len(low):
        return None
    return float(mannwhitneyu(high, low).statistic / (len(high) * len(low)))


def engine(experiment: Experiment, weights: Path | None = None) -> TorchEngine:
    """The engine with the weights of a checkpoint of the experiment's run, or with the initial weights for None."""
    if experiment.local is None:
        raise ValueError("lucky guesses are measured on the local engine: train.engine must be 'local'")
    return TorchEngine(
        LocalParts.of(experiment),
        model_path=experiment.model.prepare(),
        weights_path=weights,
        seed=experiment.settings.seed,
    )


def sampled(experiment: Experiment) -> tuple[Responses, Responses]:
    """Sample K responses to every training question from the initial policy and keep the correct ones.

    Returns (all of them, those to questions that are not solved every time: only these stay in a replay buffer).
    """
    policy = engine(experiment)
    questions = experiment.questions.load()
    groups = policy.rollout(Plan(1, questions, [], {}), experiment.settings.group_size)
    groups = experiment.verifier.grade_groups(groups, policy.written)
    unmastered = [group for group in groups if group.accuracy != Fraction(1)]
    return _scored(policy, _correct(groups)), _scored(policy, _correct(unmastered))


def stored(experiment: Experiment, checkpoint: Path) -> Responses:
    """The trajectories in a checkpoint's replay buffer, scored by its policy."""
    policy = engine(experiment, checkpoint)
    buffer = snapshot.load(checkpoint / "replay", copy.deepcopy(experiment.buffer), policy.prompts.fingerprint())
    questions = {question.id: question for question in experiment.questions.load()}
    return _scored(policy, {questions[question_id]: buffer.trajectories(question_id) for question_id in buffer.records})


def _correct(groups: Sequence[RolloutGroup]) -> dict[Question, list[Trajectory]]:
    successes: dict[Question, list[Trajectory]] = {}
    for group in groups:
        for rollout in group.rollouts:
            if rollout.grade is not None and rollout.grade.correct and rollout.finish == "stop":
                logprobs = np.zeros(len(rollout.token_ids), np.float32)  # behaviour log-probs, which are not used here
                success = Trajectory(rollout.token_ids, logprobs, 1.0, 1, sound=rollout.grade.sound)
                successes.setdefault(group.question, []).append(success)
    return successes


def _scored(policy: TorchEngine, responses: Mapping[Question, Sequence[Trajectory]]) -> Responses:
    measured = policy.score({question: trajectories for question, trajectories in responses.items() if trajectories})
    each = [one for ones in measured.values() for one in ones]
    seen = [(one.entropy, -float(one.logprobs.sum(dtype=np.float64)), len(one.logprobs)) for one in each]
    sound = np.array([bool(one.sound) for trajectories in responses.values() for one in trajectories], bool)
    columns = np.array(seen, np.float64).reshape(-1, len(DETECTORS)).T
    return Responses(sound, dict(zip(DETECTORS, columns, strict=True)))
