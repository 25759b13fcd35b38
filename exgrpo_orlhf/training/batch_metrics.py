"""What the log says of the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from ..records import MixedBatch, Rollout, mean


def of_batch(batch: MixedBatch, step: int, entropies: Sequence[float]) -> dict[str, float]:
    """Fresh and replayed rows apart. entropies: of each row of the flattened batch

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
        "reward/groups_with_signal": mean([any(row.advantage for row in group) for group in batch.rows]),
        "policy/entropy_fresh": mean([entropy for row, entropy in pairs if row.trajectory is None]),
        "replay/entropy": mean([entropy for row, entropy in pairs if row.trajectory is not None]),
        "replay/age_mean": mean(ages),
        "replay/age_max": float(max(ages, default=0)),
        "replay/response_tokens": mean([trajectory.length for trajectory in trajectories]),
        **{f"policy/entropy_{kind}": mean(values) for kind, values in checked.items()},
    }
