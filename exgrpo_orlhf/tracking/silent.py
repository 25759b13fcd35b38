"""Which metrics of a run say nothing: of parts that are switched off, and those that another metric says already.

`metrics.jsonl` has them all, so that every run's file has the same columns. MLflow does not get them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..experiment import Experiment


def silent_metrics(x: Experiment) -> Iterator[str]:
    """Names of metrics, and beginnings of names ending in '/'."""
    yield "reward/ungradable"  # timeout_share + error_share
    yield from ("time/rollout_from", "time/rollout_to", "time/update_from", "time/update_to")  # clock times
    if not x.settings.generate_ahead:
        yield "rollout/age_mean"
    if x.verifier.kind != "function":
        yield "reward/pass_at_1"  # reward/mean, where rewards are 0 or 1
    if x.evaluation.samples == 1:
        yield from ("eval/validation/pass_at_1", "eval/validation/maj_at_1")  # avg_at_1
    if not x.verifier.checks_reasoning:
        yield from ("reward/lucky_guess_rate", "replay/lucky_guess_rate", "eval/lucky_guess_rate")
    if x.dynamic_sampling.max_rounds == 0:
        yield from ("rollout/rounds", "rollout/filtered_groups")
    if x.optimizer.steps_per_batch * x.optimizer.passes_per_batch == 1 and not x.settings.generate_ahead:
        yield from ("policy/approx_kl", "policy/clip_share")
    if x.optimizer.skip_above_grad_norm is None:
        yield "policy/skipped_updates"
    if x.optimizer.schedule == "constant" and x.optimizer.warmup_steps == 0:
        yield "policy/learning_rate"
    if not x.mixer.replays:
        yield from ("replay/", "time/score", "time/inject", "time/store")
        return
    if x.mixer.late_injection is None:
        yield from ("replay/injected", "time/inject")
    else:
        yield "replay/actual_share"
    if x.mixer.late_injection == "newest" or x.selector.by not in ("entropy", "perplexity"):
        yield from ("replay/candidates_scored", "time/score")
    if x.mixer.start_at_accuracy is None:
        yield "replay/started"
    buffer = x.buffer
    if buffer.max_bytes is None:
        yield "replay/stored_bytes"  # replay/stored_tokens
    if buffer.per_question is None and buffer.max_age is None and buffer.max_bytes is None:
        yield "replay/evicted"
    if buffer.retirement.at_accuracy is None:
        yield "replay/retired"
