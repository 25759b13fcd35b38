"""A step's metrics of its rollouts and of the rows of its batch. A mean or share of nothing is 0, never NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..records import MixedBatch, RolloutGroup, Row

Floats = npt.NDArray[np.float32]
# A replayed token is saturated when the slope of its shaped weight, f(1−f), is below this: more than about 99 times
# above or below β, where it no longer learns. (The slope is 0.25 at w = β and 0.083 at w = 1 for β = 0.1.)
SATURATED_SLOPE = 0.01
LARGEST_LOG_RATIO = 80.0  # a metric has to stay a finite number


def _mean(values: Sequence[float] | npt.NDArray[np.float64]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def reward_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Of the step's fresh rollouts. `lucky_guess_rate`: correct answers whose reasoning does not hold."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    grades = [rollout.grade for rollout in rollouts if rollout.grade is not None]
    rewards = [grade.reward for grade in grades if grade.reward is not None]
    correct = [grade for grade in grades if grade.correct]
    checked = [grade.sound for grade in correct if grade.sound is not None]
    return {
        "reward/mean": _mean(rewards),
        "reward/pass_at_1": _share(len(correct), len(rewards)),
        "reward/lucky_guess_rate": _share(checked.count(False), len(checked)),
        "reward/no_answer_share": _share(sum(grade.verdict == "no_answer" for grade in grades), len(grades)),
        "reward/timeout_share": _share(sum(grade.verdict == "timeout" for grade in grades), len(grades)),
        "reward/error_share": _share(sum(grade.verdict == "error" for grade in grades), len(grades)),
        "reward/ungradable": float(len(grades) - len(rewards)),
        "rollout/response_tokens": _mean([len(rollout.token_ids) for rollout in rollouts]),
        "rollout/truncated_share": _share(sum(rollout.finish == "length" for rollout in rollouts), len(rollouts)),
    }


def row_metrics(
    batch: MixedBatch,
    policy_logprobs: Sequence[Floats],
    behaviour_logprobs: Sequence[Floats],
    entropies: Sequence[float],
    *,
    step: int,
    beta: float | None,
    clip: tuple[float, float] | None,
    max_weight: float | None = None,
    later_passes: Sequence[Mapping[int, Floats]] = (),
) -> dict[str, float]:
    """Fresh and replayed rows apart: entropies, ages, importance weights. Arrays are per row of the flattened batch.

    beta: of the shaping; None where nothing is shaped, and nothing saturates
    later_passes: where the batch was gone through again, the log-probs of each row that was measured again. They enter
        the ratios of fresh rows; everything else is of the first pass.
    """
    rows = batch.flat_rows()
    fresh = [i for i, row in enumerate(rows) if row.replayed is None]
    replayed = [(i, row.replayed) for i, row in enumerate(rows) if row.replayed is not None]
    ages = [step - trajectory.step for _, trajectory in replayed]
    checked = [trajectory.sound for _, trajectory in replayed if trajectory.sound is not None]
    return {
        "reward/groups_with_signal": _mean([float(any(row.advantage for row in group)) for group in batch.rows]),
        "policy/entropy_fresh": _mean([entropies[i] for i in fresh]),
        **_fresh_ratios(rows, fresh, [dict(enumerate(policy_logprobs)), *later_passes], behaviour_logprobs, clip),
        "replay/entropy": _mean([entropies[i] for i, _ in replayed]),
        "replay/age_mean": _mean(ages),
        "replay/age_max": float(max(ages, default=0)),
        "replay/lucky_guess_rate": _share(checked.count(False), len(checked)),
        "replay/response_tokens": _mean([len(trajectory) for _, trajectory in replayed]),
        **_importance_weights(
            [policy_logprobs[i] for i, _ in replayed], [behaviour_logprobs[i] for i, _ in replayed], beta, max_weight
        ),
    }


def _fresh_ratios(
    rows: Sequence[Row],
    fresh: Sequence[int],
    passes: Sequence[Mapping[int, Floats]],
    behaviour: Sequence[Floats],
    clip: tuple[float, float] | None,
) -> dict[str, float]:
    """approx_kl: mean of w − 1 − log w, w = π_θ/π_old. clip_share: tokens whose gradient the clip takes away."""
    tokens = clipped = 0
    kl = 0.0
    for i, logprobs in [(i, logprobs[i]) for logprobs in passes for i in fresh if i in logprobs]:
        log_w = logprobs.astype(np.float64) - behaviour[i]
        w = np.exp(np.minimum(log_w, LARGEST_LOG_RATIO))
        tokens += len(w)
        kl += float((w - 1 - log_w).sum())
        if clip is not None:
            advantage = rows[i].advantage
            clipped += int(((w > 1 + clip[1]) & (advantage > 0)).sum() + ((w < 1 - clip[0]) & (advantage < 0)).sum())
    return {"policy/approx_kl": _share(kl, tokens), "policy/clip_share": _share(clipped, tokens)}


def _importance_weights(
    policy: Sequence[Floats], behaviour: Sequence[Floats], beta: float | None, max_weight: float | None
) -> dict[str, float]:
    """Of all replayed tokens, in log space, w* = π_θ/π_past.

    ess: effective sample size (Σw)²/Σw² as a share of the tokens, 1 when all weigh the same
    truncated_share: tokens whose weight is above the largest one, where there is one
    """
    truncated = {} if max_weight is None else {"replay/truncated_share": 0.0}
    if not policy:
        return {"replay/log_weight_max": 0.0, "replay/ess": 0.0, "replay/saturated_share": 0.0, **truncated}
    log_w = np.concatenate(list(policy)).astype(np.float64) - np.concatenate(list(behaviour))
    w = np.exp(log_w - log_w.max())  # the common factor cancels in the effective sample size
    if max_weight is not None:
        truncated = {"replay/truncated_share": float(np.mean(log_w > np.log(max_weight)))}
    log_used = log_w if max_weight is None else np.minimum(log_w, np.log(max_weight))
    saturated = 0.0
    if beta is not None:
        shaped = 1 / (1 + np.exp(np.clip(np.log(beta) - log_used, -700, 700)))
        saturated = float(np.mean(shaped * (1 - shaped) < SATURATED_SLOPE))
    return {
        "replay/log_weight_max": float(log_w.max()),
        "replay/ess": float(w.sum() ** 2 / (w**2).sum() / len(w)),
        "replay/saturated_share": saturated,
        **truncated,
    }
