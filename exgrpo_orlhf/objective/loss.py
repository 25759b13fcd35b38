"""The mixed-policy loss: clipped fresh tokens, shaped replayed tokens, one normaliser."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..checks import Constraint, Count, NotNegative, Positive, Share, check_settings, reference, require
from ..io.lazy import torch
from ..records import Row
from .convex_kl import kl_of
from .token_batch import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

# A replayed token is saturated when the slope of its shaped weight, f(1−f), is below this: more than about 99 times
# above or below β, where it no longer learns. (The slope is 0.25 at w = β and 0.083 at w = 1 for β = 0.1.)
SATURATED_SLOPE = 0.01
LARGEST_LOG_RATIO = 80.0  # a metric has to stay a finite number
Floats = npt.NDArray[np.float32]


class LossTerms(NamedTuple):
    """Of each token, (T,).

    log_w: log of π_θ over the policy that made the token
    policy: its loss, not yet weighted
    truncated: whether w is above the largest weight
    flat: whether it no longer learns: a fresh token because of the clip, a replayed one because its shaped weight is
        saturated or it is clipped
    """

    log_w: Tensor
    policy: Tensor
    truncated: Tensor
    flat: Tensor


@dataclass(frozen=True)
class MixedPolicyLoss:
    """Equation 4 of the paper (arXiv 2510.02245), token by token. With A the advantage of the token's row:

        fresh      w  = π_θ/π_old     −min(w·A, clip(w, 1−ε_low, 1+ε_high)·A)
        replayed   w* = π_θ/π_past    −f(w*)·A,   f(w*) = w*/(w*+β)

    (1−ρ)·J_on + ρ·J_exp is one sum over all rows: ρ is the share of the rows' groups that are replayed ones (with
    `Beside.rollouts` a replayed group has fewer rows, and its share of the sum is smaller).
    With a largest weight c (`max_weight`), w* is truncated first and shaped then, −f(w̄)·A or, unshaped, −w̄·A:

        w̄ = stop_gradient(min(w*, c)/w*)·w*,   so that w̄ = min(w*, c) and ∇w̄ = min(w*, c)·∇log π_θ

    The gradient of a truncated token is capped, not removed.

    A fresh row that was generated ahead (train.generate_ahead) has π_old of the weights that sampled it, one update
    earlier, so that w is not 1 even where a batch has one optimiser step. The clip leaves w of a token with A < 0
    without an upper bound; with a largest fresh weight (`max_fresh_weight`) it is truncated as above, before the clip.
    With `dual_clip` = c (arXiv 1912.09729) its term is −max(min(w·A, clip(w)·A), c·A): no gradient where w > c.

    With `ratio` = 'sequence' (GSPO, arXiv 2507.18071, equations 5 and 7), w of a fresh token is the length-normalised
    ratio of its response, the same for all of its |y| tokens, and so is the clip:

        w = s = exp(1/|y| · Σ_t log(π_θ/π_old)),   so that ∇s = s/|y| · Σ_t ∇log π_θ

    With 'sequences' as the normaliser each row then counts −min(s·A, clip(s)·A) once, as in GSPO. Replayed rows keep
    w* of each token, and with it truncation and shaping: π_past is further away, and its ratio is what f weighs down
    token by token. Where w = 1 (one optimiser step per batch), both ratios have the same gradient.

    beta: β > 0 of the shaping
    shaping: False uses w* itself
    importance_weights: False sets w* = π_θ/stop_gradient(π_θ): value 1, gradient ∇log π_θ
    max_weight: c > 0, in units of w*; None: not truncated
    max_fresh_weight: c > 0, in units of w, of a token or with `ratio` = 'sequence' of a response; None: not truncated
    ratio: of fresh rows, of each token or of the whole response
    clip_low, clip_high: ε of the fresh rows' ratio; both None: no clipping
    clips_mixed: False leaves batches with a replayed row unclipped (appendix D.1); others are clipped as bound
    dual_clip: c > 1 of fresh tokens with A < 0, in units of w; needs the clip; None: no bound
    normalizer: what the sum over tokens is divided by, one global value per optimiser step:
        'constant'   rows × response_length, K rows for every group, also for those that could not be graded or, with
                     `Beside.rollouts`, were not sampled (Dr. GRPO)
        'tokens'     all response tokens
        'sequences'  each row by its own length, then by the same rows (GRPO)
    clips_replayed: True clips w* of a replayed token as w of a fresh one, with its dual clip, instead of shaping it
    clip_around: of these tokens: 'sampler', around 1, as of fresh ones; 'policy', around c = π_k/π_past of the policy
        before the batch's update, −min(w*·A, clip(w*, c−ε_low, c+ε_high)·A) (Mix-PPG, arXiv 2507.06892)
    divisors: of rows that are added to groups (`AddedRows`): 'apart', they and the fresh rows have one each, of K_off
        and K rows a group or of their tokens, and the loss is the sum (RePO's paper); 'together', one of all there are
    response_length: L of 'constant', in tokens; as Sampling.max_response_tokens (MAX_RESPONSE_TOKENS of base.gin)
    entropy_coef: weight of the mean entropy over all response tokens of the step, subtracted; per nat
    kl_coef: weight of the mean KL to the reference policy, added; nats per token, the estimator exp(x)−x−1 with
        x = log π_ref − log π_θ, at most KL_BOUND nats a token. The mean is over all response tokens; with
        'sequences', as in GRPO, over each row's own, then over rows
    kl_convex: `@ConvexKL()`: a convex sum of that KL and the one to the preceding policy; None: that KL alone
    """

    beta: Positive = 0.1
    shaping: bool = True
    importance_weights: bool = True
    max_weight: Positive | None = None
    max_fresh_weight: Positive | None = None
    ratio: Literal["token", "sequence"] = "token"
    clip_low: Share | None = 0.2
    clip_high: NotNegative | None = 0.2
    clips_mixed: bool = True
    dual_clip: Annotated[float, Constraint("must be above 1 and finite", lambda value: 1 < value < math.inf)] | None = (
        None
    )
    normalizer: Literal["constant", "tokens", "sequences"] = "constant"
    clips_replayed: bool = False
    clip_around: Literal["sampler", "policy"] = "sampler"
    divisors: Literal["apart", "together"] = "apart"
    response_length: Count = 8192
    entropy_coef: NotNegative = 0.0
    kl_coef: NotNegative = 0.0
    kl_convex: Annotated[Any, reference("at", "@ConvexKL()")] | None = None

    def __post_init__(self) -> None:
        check_settings(MixedPolicyLoss, vars(self))
        require(
            self.max_weight is None or self.importance_weights,
            "MixedPolicyLoss.max_weight must be None where MixedPolicyLoss.importance_weights = False: there is no "
            f"weight to truncate; got {self.max_weight!r}",
        )
        require(
            (self.clip_low is None) == (self.clip_high is None),
            "MixedPolicyLoss.clip_low and MixedPolicyLoss.clip_high are both numbers, or both None (no clipping); "
            f"got {self.clip_low!r} and {self.clip_high!r}",
        )
        require(
            self.dual_clip is None or (self.clip_high is not None and self.dual_clip >= 1 + self.clip_high),
            "MixedPolicyLoss.dual_clip must be at least 1 + MixedPolicyLoss.clip_high, which must be a number; got "
            f"{self.dual_clip!r} and {self.clip_high!r}",
        )
        require(
            not self.clips_replayed
            or (self.clip_low is not None and self.clips_mixed and self.importance_weights and not self.shaping),
            "MixedPolicyLoss.clips_replayed needs MixedPolicyLoss.clip_low and clip_high, clips_mixed = True, "
            f"importance_weights = True and shaping = False; got {self.clip_low!r}, {self.clips_mixed}, "
            f"{self.importance_weights} and {self.shaping}",
        )
        require(
            self.clip_around == "sampler" or (self.clips_replayed and self.dual_clip is None),
            "MixedPolicyLoss.clip_around = 'policy' needs MixedPolicyLoss.clips_replayed = True and dual_clip = None; "
            f"got {self.clips_replayed} and {self.dual_clip!r}",
        )
        require(
            self.kl_convex is None or self.kl_coef > 0,
            f"MixedPolicyLoss.kl_convex needs MixedPolicyLoss.kl_coef above 0, got {self.kl_coef!r}",
        )

    def row_weights(self, lengths: Tensor, rows: float | None = None, tokens: float | None = None) -> Tensor:
        """(R,) response lengths of rows of an optimiser step → (R,) weight of each token of that row.

        rows, tokens: of the *whole* step, however it is split into micro-batches and over ranks, so that the loss does
            not depend on that; None: these are all its rows
        """
        lengths = lengths.to(torch.float64)
        rows = len(lengths) if rows is None else rows
        if self.normalizer == "constant":
            return torch.full_like(lengths, 1 / (rows * self.response_length))
        if self.normalizer == "tokens":
            return torch.full_like(lengths, 1.0) / (lengths.sum() if tokens is None else tokens)
        return 1 / (rows * lengths)

    def needs_gradient(self, advantages: Tensor) -> Tensor:
        """(R,) advantages → which rows have a gradient: with no entropy or KL term, an advantage of 0 has none."""
        if self.entropy_coef or self.kl_coef:
            return torch.ones_like(advantages, dtype=torch.bool)
        return advantages != 0

    def clip(self, mixed: bool) -> tuple[float, float] | None:
        """ε_low and ε_high in a batch of rollouts with a replayed row (`mixed`) or without; None: no clipping."""
        if self.clip_low is None or self.clip_high is None or (mixed and not self.clips_mixed):
            return None
        return self.clip_low, self.clip_high

    def __call__(self, batch: TokenBatch) -> Tensor:
        """This batch's share of the loss, a scalar: summed over the micro-batches of a step it is the loss."""
        # An ungradable row's tokens are taken out with `where`, here and before every exp: multiplying by 0 would keep
        # a NaN, in the value or, where only the result is masked, in the gradient.
        policy = torch.where(batch.in_loss, self.terms(batch).policy * batch.row_weights, 0).sum()
        entropy = torch.where(batch.in_loss, batch.entropies, 0).sum() * batch.token_weight
        loss = policy - self.entropy_coef * entropy if self.entropy_coef else policy
        if self.kl_coef:
            kl_weights = batch.row_weights if self.normalizer == "sequences" else batch.token_weight
            loss = loss + self.kl_coef * (kl_of(batch) * kl_weights).sum()
        return loss

    def terms(self, batch: TokenBatch) -> LossTerms:
        """What the loss is made of, token by token: for the gradient, and for the metrics."""
        log_w = torch.where(batch.in_loss, batch.logprobs - batch.behaviour_logprobs, 0)  # (T,)
        # torch.where evaluates both sides, and an infinite unused side would still make the gradient NaN: each side
        # sees a harmless 0 where it is not used.
        fresh = self._fresh(torch.where(batch.replayed, 0, log_w), batch)
        replayed = self._replayed(torch.where(batch.replayed, log_w, 0), batch)
        sides = zip(replayed, fresh, strict=True)
        return LossTerms(
            log_w, *(torch.where(batch.replayed, of_replayed, of_fresh) for of_replayed, of_fresh in sides)
        )

    def _fresh(self, log_w: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """`LossTerms.policy`, `.truncated` and `.flat` of fresh tokens."""
        advantages = batch.advantages
        if self.ratio == "sequence":  # the ratio of a token is its row's
            lengths = torch.bincount(batch.row_of)
            sums = log_w.new_zeros(len(lengths)).index_add(0, batch.row_of, log_w)
            log_w = (sums / lengths.clamp(min=1))[batch.row_of]
        log_w, truncated = _bounded(log_w, self.max_fresh_weight)
        clip = self.clip(batch.mixed)
        if clip is None:
            log_w = torch.where(advantages == 0, 0, log_w)  # w·A is 0 then, and not inf · 0
            return -torch.exp(log_w) * advantages, truncated, torch.zeros_like(truncated)
        policy, flat = self._clipped(log_w, advantages, clip)
        return policy, truncated, flat

    def _clipped(
        self, log_w: Tensor, advantages: Tensor, clip: tuple[float, float], centre: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`LossTerms.policy` and `.flat` of PPO's clip. centre: c of `clip_around`, (T,); None: 1"""
        low, high = clip
        log_w = torch.where(advantages == 0, 0, log_w)
        # Above the clip (of A < 0: the dual clip) a token is a constant. It is made one before exp: the branch that
        # `minimum` leaves would overflow and turn the gradient's 0 into 0 · inf.
        c: Any = 1 if centre is None else centre
        # A number, where it can be one: no copy from the host to the device.
        upper = math.log1p(high) if centre is None else torch.log(centre + high)
        flat = (advantages > 0) & (log_w > upper)
        log_w = torch.where(flat, upper, log_w)
        if self.dual_clip is not None:
            dual = math.log(self.dual_clip)
            above = (advantages < 0) & (log_w > dual)
            flat, log_w = flat | above, torch.where(above, dual, log_w)
        w = torch.exp(log_w)
        clipped = torch.clamp(w, c - low, c + high)
        flat = flat | ((advantages < 0) & (w < c - low))
        return -torch.minimum(w * advantages, clipped * advantages), flat

    def _replayed(self, log_w: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """The same of replayed tokens."""
        if not self.importance_weights:
            logprobs = torch.where(batch.in_loss, batch.logprobs, 0)
            log_w = logprobs - logprobs.detach()
        log_w, truncated = _bounded(log_w, self.max_weight)
        clip = self.clip(mixed=True) if self.clips_replayed else None
        if clip is not None:
            centre = None
            if self.clip_around == "policy":
                old = batch.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
                log_c = torch.where(batch.in_loss & batch.replayed, old - batch.behaviour_logprobs, 0)
                centre = torch.exp(log_c.clamp(max=LARGEST_LOG_RATIO))
            policy, flat = self._clipped(log_w, batch.advantages, clip, centre)
            return policy, truncated, flat
        if not self.shaping:
            weight = torch.exp(torch.where(batch.advantages == 0, 0, log_w))
            return -weight * batch.advantages, truncated, torch.zeros_like(truncated)
        # w/(w+β) = sigmoid(log w − log β): a very old trajectory's ratio can neither overflow nor become 0/0.
        weight = torch.sigmoid(log_w - math.log(self.beta))
        flat = weight * (1 - weight) < SATURATED_SLOPE
        return -weight * batch.advantages, truncated, flat if self.importance_weights else torch.zeros_like(flat)

    def _terms_of(self, rows: Sequence[tuple[float, Floats, Floats]], mixed: bool, replayed: bool) -> LossTerms:
        """Terms of rows as they were measured, in float64. rows: advantage, log π_θ (T,), log of the behaviour (T,)"""
        lengths = torch.tensor([len(policy) for _, policy, _ in rows])
        advantages, row_of = torch.tensor([row[0] for row in rows], dtype=torch.float64), torch.arange(len(rows))
        policy, behaviour = (torch.from_numpy(np.concatenate([row[i] for row in rows])).double() for i in (1, 2))
        return self.terms(
            TokenBatch(
                logprobs=policy,
                entropies=torch.zeros_like(policy),
                behaviour_logprobs=behaviour,
                advantages=advantages.repeat_interleave(lengths),
                replayed=torch.full_like(policy, replayed, dtype=torch.bool),
                in_loss=torch.ones_like(policy, dtype=torch.bool),
                row_weights=torch.zeros_like(policy),
                token_weight=0.0,
                row_of=row_of.repeat_interleave(lengths),
                mixed=mixed,
            )
        )

    def fresh_sums(self, rows: Iterable[tuple[float, Floats, Floats]], mixed: bool) -> dict[str, float]:
        """Sums over fresh rows, to be added up over whatever parts of an update they are taken of.

        rows: advantage, log π_θ (T,), log π_old (T,)
        mixed: as in TokenBatch
        Returns the number of tokens, of those whose gradient the clip takes away (`clipped`), of those whose weight is
        above the largest one (`truncated`), and the sum of w − 1 − log w, w = π_θ/π_old of a token (`kl`).
        """
        if not (rows := list(rows)):
            return dict.fromkeys(("tokens", "clipped", "truncated", "kl"), 0.0)
        terms = self._terms_of(rows, mixed, replayed=False)
        log_w = terms.log_w.numpy()
        kl = np.exp(np.minimum(log_w, LARGEST_LOG_RATIO)) - 1 - log_w
        by_row = np.split(kl, np.cumsum([len(policy) for _, policy, _ in rows])[:-1])
        counts = {"clipped": terms.flat, "truncated": terms.truncated}
        return {
            "tokens": float(len(log_w)),
            **{name: float(where.sum()) for name, where in counts.items()},
            "kl": sum(float(row.sum()) for row in by_row),
        }

    def fresh_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Of the fresh tokens of an update. sums: `fresh_sums`, over all its steps, passes and ranks"""
        names = {"kl": "policy/approx_kl", "clipped": "policy/clip_share"}
        if self.max_fresh_weight is not None:
            names["truncated"] = "policy/truncated_share"
        return {metric: sums[name] / max(sums["tokens"], 1) for name, metric in names.items()}

    def replayed_metrics(
        self, rows: Sequence[Row], policy: Sequence[Floats], behaviour: Sequence[Floats]
    ) -> dict[str, float]:
        """Of all replayed tokens, in log space, w* = π_θ/π_past. ess: effective sample size (Σw)²/Σw² as a share of the
        tokens, 1 when all weigh the same. truncated_share: tokens whose weight is above the largest one.

        policy, behaviour: log-probs of each row, (T,)
        """
        metrics = {"replay/log_weight_max": 0.0, "replay/ess": 0.0}
        if self.clip_around == "sampler":  # around π_k, whose log-probs are not here
            metrics["replay/saturated_share"] = 0.0
        if self.max_weight is not None:
            metrics["replay/truncated_share"] = 0.0
        triples = zip(rows, policy, behaviour, strict=True)
        stored = [(row.advantage, now, past) for row, now, past in triples if row.trajectory is not None]
        if not stored:
            return metrics
        terms = self._terms_of(stored, mixed=True, replayed=True)
        log_w = terms.log_w.numpy()
        w = np.exp(log_w - log_w.max())  # the common factor cancels in the effective sample size
        shares = {"replay/saturated_share": terms.flat, "replay/truncated_share": terms.truncated}
        return {
            "replay/log_weight_max": float(log_w.max()),
            "replay/ess": float(w.sum() ** 2 / (w**2).sum() / len(w)),
            **{name: float(where.double().mean()) for name, where in shares.items() if name in metrics},
        }


def _bounded(log_w: Tensor, largest: float | None) -> tuple[Tensor, Tensor]:
    """log w̄ of w̄ = stop_gradient(min(w, c)/w)·w, and where w > c: there log w̄ is log c with the gradient of log w."""
    ceiling = math.inf if largest is None else math.log(largest)
    truncated = log_w > ceiling
    if largest is None:
        return log_w, truncated
    return torch.where(truncated, ceiling + (log_w - log_w.detach()), log_w), truncated  # exactly 0, nothing overflows
