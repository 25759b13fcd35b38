"""The mixed-policy loss against the paper's equations, written out token by token in plain Python."""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from exgrpo_orlhf.objective import MixedPolicyLoss, TokenBatch

# -- the equations, plainly -------------------------------------------------------------------------------------------


@dataclass
class PlainRow:
    """One row: per token its log-probs and entropy as Python floats."""

    logprobs: list[float]
    behaviour: list[float]
    reference: list[float]
    entropies: list[float]
    advantage: float
    replayed: bool
    in_loss: bool = True


def token_term(loss: MixedPolicyLoss, row: PlainRow, t: int) -> tuple[float, float]:
    """−(objective of one token), and its derivative in log π_θ."""
    w, advantage = math.exp(row.logprobs[t] - row.behaviour[t]), row.advantage
    if not row.replayed:
        if loss.clip_low is None:
            return -w * advantage, -w * advantage
        clipped = min(max(w, 1 - loss.clip_low), 1 + loss.clip_high)
        if clipped * advantage < w * advantage:
            return -clipped * advantage, 0.0
        return -w * advantage, -w * advantage
    if not loss.importance_weights:
        w = 1.0
    if loss.max_weight is not None:  # a truncated weight keeps its gradient: dw̄/d log π = w̄
        w = min(w, loss.max_weight)
    if loss.shaping:
        f = w / (w + loss.beta)
        slope = w * loss.beta / (w + loss.beta) ** 2  # dw/d log π = w
        return -f * advantage, -slope * advantage
    return -w * advantage, -w * advantage


def plain_loss(loss: MixedPolicyLoss, rows: list[PlainRow]) -> tuple[float, list[float], list[float]]:
    """The loss of one optimiser step, and its gradients in all log-probs and in all entropies."""
    n_tokens = sum(len(row.logprobs) for row in rows)
    value, grad_logprobs, grad_entropies = 0.0, [], []
    for row in rows:
        for t in range(len(row.logprobs)):
            divisor = {
                "constant": len(rows) * loss.response_length,
                "tokens": n_tokens,
                "sequences": len(rows) * len(row.logprobs),
            }[loss.normalizer]
            if not row.in_loss:
                grad_logprobs.append(0.0)
                grad_entropies.append(0.0)
                continue
            term, slope = token_term(loss, row, t)
            x = row.reference[t] - row.logprobs[t]
            value += term / divisor
            value -= loss.entropy_coef * row.entropies[t] / n_tokens
            kl_divisor = divisor if loss.normalizer == "sequences" else n_tokens
            value += loss.kl_coef * (math.exp(x) - x - 1) / kl_divisor
            grad_logprobs.append(slope / divisor + loss.kl_coef * (1 - math.exp(x)) / kl_divisor)
            grad_entropies.append(-loss.entropy_coef / n_tokens)
    return value, grad_logprobs, grad_entropies


# -- the same rows as tensors -----------------------------------------------------------------------------------------


def random_rows(seed=0, n=12, spread=0.6) -> list[PlainRow]:
    """Lengths, signs and ratios of all kinds; every third row is replayed, one could not be graded."""
    draw = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        length = int(draw.integers(1, 9))
        behaviour = -draw.exponential(size=length) - 0.1
        rows.append(
            PlainRow(
                logprobs=(behaviour + spread * draw.normal(size=length)).tolist(),
                behaviour=behaviour.tolist(),
                reference=(behaviour + 0.3 * draw.normal(size=length)).tolist(),
                entropies=draw.uniform(0, 2, length).tolist(),
                advantage=float(draw.choice([0.75, -0.25, 0.5, 0.0])),
                replayed=i % 3 == 0,
            )
        )
    rows[5] = replace(rows[5], advantage=0.0, in_loss=False)
    return rows


def tensors(loss, rows, members=None, dtype=torch.float64):
    """The tokens of `members` (all rows by default) of an optimiser step that consists of `rows`."""
    members = range(len(rows)) if members is None else members
    weights = loss.row_weights(torch.tensor([len(row.logprobs) for row in rows]))
    chosen = [rows[i] for i in members]

    def flat(values, dtype=dtype):
        return torch.tensor([value for part in values for value in part], dtype=dtype)

    def spread(values, dtype=dtype):
        pairs = zip(values, chosen, strict=True)
        return torch.tensor([value for value, row in pairs for _ in row.logprobs], dtype=dtype)

    return TokenBatch(
        logprobs=flat([row.logprobs for row in chosen]).requires_grad_(),
        entropies=flat([row.entropies for row in chosen]).requires_grad_(),
        behaviour_logprobs=flat([row.behaviour for row in chosen]),
        advantages=spread([row.advantage for row in chosen]),
        replayed=spread([row.replayed for row in chosen], torch.bool),
        in_loss=spread([row.in_loss for row in chosen], torch.bool),
        row_weights=spread([float(weights[i]) for i in members]),
        token_weight=1 / sum(len(row.logprobs) for row in rows),
        reference_logprobs=flat([row.reference for row in chosen]),
    )


def evaluated(loss, rows, members=None, dtype=torch.float64):
    batch = tensors(loss, rows, members, dtype)
    value = loss(batch)
    value.backward()
    entropies = batch.entropies.grad
    return value.item(), batch.logprobs.grad, torch.zeros_like(batch.entropies) if entropies is None else entropies


CLIPS = [(None, None), (0.2, 0.2), (0.1, 0.4)]
NORMALIZERS = ("constant", "tokens", "sequences")
COEFS = [(0.0, 0.0), (0.01, 0.0), (0.0, 0.05), (0.01, 0.05)]


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("importance_weights", [True, False])
@pytest.mark.parametrize("shaping", [True, False])
def test_loss_and_gradient_equal_the_equations_written_plainly(shaping, importance_weights, clip, normalizer):
    for (entropy_coef, kl_coef), seed in itertools.product(COEFS, range(2)):
        loss = MixedPolicyLoss(
            beta=0.1 + 0.2 * seed,
            shaping=shaping,
            importance_weights=importance_weights,
            clip_low=clip[0],
            clip_high=clip[1],
            normalizer=normalizer,
            response_length=20,
            entropy_coef=entropy_coef,
            kl_coef=kl_coef,
        )
        rows = random_rows(seed)
        value, grad_logprobs, grad_entropies = evaluated(loss, rows)
        plain_value, plain_logprobs, plain_entropies = plain_loss(loss, rows)
        assert value == pytest.approx(plain_value, rel=1e-12, abs=1e-14)
        assert np.allclose(grad_logprobs, plain_logprobs, rtol=1e-10, atol=1e-14)
        assert np.allclose(grad_entropies, plain_entropies, rtol=1e-12, atol=1e-16)


def test_the_rows_of_these_tests_meet_every_case():
    """Clipped above and below, unclipped beyond the bound on the harmless side, replayed with both signs."""
    cases = set()
    for row in random_rows(0) + random_rows(1):
        for logprob, behaviour in zip(row.logprobs, row.behaviour, strict=True):
            w = math.exp(logprob - behaviour)
            zone = "above" if w > 1.4 else "below" if w < 0.8 else "inside"
            cases.add((row.replayed, zone, np.sign(row.advantage)))
    assert {(False, zone, sign) for zone in ("above", "inside", "below") for sign in (1, -1)} <= cases
    assert {(True, zone, sign) for zone in ("above", "below") for sign in (1, -1)} <= cases


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("shaping", [True, False])
def test_gradient_equals_finite_differences(shaping, clip, normalizer):
    """Importance weights are on: without them the gradient is by design not that of the value."""
    loss = MixedPolicyLoss(
        shaping=shaping,
        clip_low=clip[0],
        clip_high=clip[1],
        normalizer=normalizer,
        response_length=3,
        entropy_coef=0.1,
        kl_coef=0.2,
    )
    batch = tensors(loss, random_rows(2))
    assert torch.autograd.gradcheck(
        lambda logprobs, entropies: loss(replace(batch, logprobs=logprobs, entropies=entropies)),
        (batch.logprobs, batch.entropies),
    )


# -- truncated weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_weight", [0.05, 0.7, 1.0, 2.0, 50.0])
@pytest.mark.parametrize("shaping", [True, False])
def test_truncated_loss_and_gradient_equal_the_equations_written_plainly(shaping, max_weight):
    loss = MixedPolicyLoss(shaping=shaping, max_weight=max_weight, response_length=20, entropy_coef=0.01)
    for seed in range(4):
        rows = random_rows(seed)
        value, grad, _ = evaluated(loss, rows)
        plain_value, plain_grad, _ = plain_loss(loss, rows)
        assert value == pytest.approx(plain_value, rel=1e-12, abs=1e-14)
        assert np.allclose(grad, plain_grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("shaping", [True, False])
def test_the_gradient_of_a_truncated_token_is_that_of_the_weight_with_its_factor_held_fixed(shaping):
    """Finite differences of f(k·w*), k = min(w*, c)/w* at the point: w* on both sides of c and on it."""
    c, beta, h = 2.0, 0.1, 1e-6
    loss = MixedPolicyLoss(shaping=shaping, max_weight=c, beta=beta, normalizer="tokens")
    for log_w, advantage in itertools.product((-3.0, 0.0, 0.69, math.log(c), 0.7, 1.5, 9.0), (0.75, -0.25)):
        k = min(math.exp(log_w), c) / math.exp(log_w)

        def objective(x, k=k, advantage=advantage):
            w = k * math.exp(x)
            return -advantage * (w / (w + beta) if shaping else w)

        value, grad, _ = evaluated(loss, [PlainRow([log_w - 1], [-1.0], [-1.0], [0.0], advantage, True)])
        assert value == pytest.approx(objective(log_w), rel=1e-12)
        slope = (objective(log_w + h) - objective(log_w - h)) / (2 * h)
        assert grad.item() == pytest.approx(slope, rel=1e-6)
        if not shaping:
            assert abs(grad.item()) <= c * abs(advantage) * (1 + 1e-12), "capped"
            assert grad.item() != 0, "and not removed"


def test_a_weight_that_no_token_reaches_changes_nothing_to_the_bit():
    rows = random_rows()
    for settings in ({}, {"shaping": False}):
        expected = evaluated(MixedPolicyLoss(**settings), rows)
        found = evaluated(MixedPolicyLoss(max_weight=1e6, **settings), rows)
        assert found[0] == expected[0]
        assert torch.equal(found[1], expected[1])


def test_truncation_leaves_fresh_rows_alone():
    rows = [replace(row, replayed=False) for row in random_rows()]
    expected, found = (evaluated(MixedPolicyLoss(max_weight=c), rows) for c in (None, 0.01))
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shaping", [True, False])
def test_extreme_truncated_weights_are_exact_and_finite(shaping, dtype):
    """Unshaped and untruncated, e^100 would already be infinite in float32."""
    loss, beta = MixedPolicyLoss(shaping=shaping, max_weight=2.0, normalizer="tokens"), 0.1
    for extreme, advantage in itertools.product((1e4, 100.0, -100.0, -1e4), (0.5, -0.5)):
        row = PlainRow([-1.0, -1.0], [-1.0 - extreme, -1.0], [-1.0] * 2, [0.0] * 2, advantage, True)
        value, grad, _ = evaluated(loss, [row], dtype=dtype)
        weights = [2.0 if extreme > 0 else 0.0, 1.0]
        f = [w / (w + beta) if shaping else w for w in weights]
        slopes = [w * beta / (w + beta) ** 2 if shaping else w for w in weights]
        assert value == pytest.approx(-advantage * sum(f) / 2, rel=1e-6)
        assert grad.tolist() == pytest.approx([-advantage * slope / 2 for slope in slopes], rel=1e-5, abs=1e-12)


# -- the shape of the objective ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shaping", "factor"), [(True, 0.1 / 1.1**2), (False, 1.0)])
def test_without_importance_weights_the_gradient_is_that_of_log_pi_scaled(shaping, factor):
    """w* = π_θ/stop_gradient(π_θ): value f(1), gradient f'(1)·A·∇log π_θ whatever the old log-probs were."""
    loss = MixedPolicyLoss(shaping=shaping, importance_weights=False, normalizer="tokens")
    rows = [replace(row, replayed=True, advantage=0.5, in_loss=True) for row in random_rows()]
    n = sum(len(row.logprobs) for row in rows)
    value, grad, _ = evaluated(loss, rows)
    assert value == pytest.approx(-0.5 * (1 / 1.1 if shaping else 1))
    assert np.allclose(grad, -0.5 * factor / n, rtol=1e-12)
    older = [replace(row, behaviour=[b - 50 for b in row.behaviour]) for row in rows]
    assert torch.equal(evaluated(loss, older)[1], grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("importance_weights", [True, False])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_extreme_weights_of_replayed_rows_stay_finite_beside_fresh_rows(dtype, importance_weights, clip):
    """T18: f(w*) = sigmoid(log w* − log β) neither overflows nor becomes 0/0, and no other row suffers."""
    settings = {"importance_weights": importance_weights, "clip_low": clip, "clip_high": clip}
    loss = MixedPolicyLoss(normalizer="tokens", entropy_coef=0.01, **settings)
    fresh = [row for row in random_rows() if not row.replayed]
    for extreme, advantage in itertools.product((1e4, -1e4, 100.0, -100.0), (0.5, -0.5)):
        old = PlainRow([-1.0, -2.0], [-1.0 - extreme, -2.0], [-1.0] * 2, [1.0] * 2, advantage, True)
        value, grad, _ = evaluated(loss, [*fresh, old], dtype=dtype)
        assert math.isfinite(value)
        assert torch.isfinite(grad).all()
        calm = replace(old, behaviour=[-1.0, -2.0])
        calm_value, calm_grad, _ = evaluated(loss, [*fresh, calm], dtype=dtype)
        assert torch.equal(grad[:-2], calm_grad[:-2])
        if importance_weights:
            assert abs(grad[-2]) < 1e-9
            change = -advantage * ((1 if extreme > 0 else 0) - 1 / 1.1) / len(grad)
            # In float32 the difference of two sums over some 40 tokens, of size 1 at most: 2 · 40 · 2^-24.
            assert value - calm_value == pytest.approx(change, abs=5e-6)


@pytest.mark.parametrize("shaping", [True, False])
def test_a_clipped_fresh_token_takes_no_gradient_however_extreme_its_ratio(shaping):
    """In float32 a ratio beyond e^88 is infinite: neither its clipped side nor a replayed row beside it becomes NaN."""
    loss = MixedPolicyLoss(normalizer="tokens", shaping=shaping)
    for extreme in (1e4, 100.0):
        row = PlainRow([-1.0, -1.0], [-1.0 - extreme, -1.0], [-1.0] * 2, [0.0] * 2, 0.5, False)
        stored = PlainRow([-1.0], [-1.0], [-1.0], [0.0], 0.5, True)
        value, grad, _ = evaluated(loss, [row, stored], dtype=torch.float32)
        f, slope = (1 / 1.1, 0.1 / 1.1**2) if shaping else (1, 1)
        assert value == pytest.approx(-0.5 * (1.2 + 1 + f) / 3)
        # f(1 − f) at f = 1/1.1 loses a factor of 10 of float32's 6e-8.
        assert grad.tolist() == pytest.approx([0, -0.5 / 3, -0.5 * slope / 3], rel=1e-5)


@pytest.mark.parametrize("shaping", [True, False])
def test_replayed_rows_are_never_clipped(shaping):
    rows = [replace(row, replayed=True) for row in random_rows()]
    clipped = evaluated(MixedPolicyLoss(shaping=shaping, clip_low=0.01, clip_high=0.01), rows)
    free = evaluated(MixedPolicyLoss(shaping=shaping, clip_low=None, clip_high=None), rows)
    assert clipped[0] == free[0]
    assert torch.equal(clipped[1], free[1])


def test_one_sum_is_one_minus_rho_times_j_on_plus_rho_times_j_exp():
    """J_on is the mean over the rows of fresh groups, J_exp over those of replayed groups, fresh rollouts included."""
    loss, k, draw = MixedPolicyLoss(response_length=10), 4, random_rows(4, n=24)
    groups = [draw[i : i + k] for i in range(0, 24, k)]
    for g, group in enumerate(groups):
        for i, row in enumerate(group):
            row.replayed, row.in_loss = g < 2 and i == k - 1, True
    exp, on = groups[:2], groups[2:]
    rho = len(exp) / len(groups)

    def objective(part):
        rows = [row for group in part for row in group]
        return sum(-token_term(loss, row, t)[0] for row in rows for t in range(len(row.logprobs))) / (len(rows) * 10)

    single, _, _ = evaluated(loss, [row for group in groups for row in group])
    assert -single == pytest.approx((1 - rho) * objective(on) + rho * objective(exp), rel=1e-12)


# -- invariance -------------------------------------------------------------------------------------------------------

FULL = {"response_length": 20, "entropy_coef": 0.01, "kl_coef": 0.05}


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_micro_batching_does_not_change_loss_or_gradient(normalizer):
    """T11: nothing grows with the number of micro-batches, the entropy bonus included."""
    loss, rows = MixedPolicyLoss(normalizer=normalizer, **FULL), random_rows()
    value, grad, grad_entropies = evaluated(loss, rows)
    for size in (1, 2, 5, 7, 11):
        parts = [evaluated(loss, rows, range(i, min(i + size, 12))) for i in range(0, 12, size)]
        assert sum(part[0] for part in parts) == pytest.approx(value, rel=1e-12)
        assert torch.allclose(torch.cat([part[1] for part in parts]), grad, rtol=1e-12, atol=0)
        assert torch.allclose(torch.cat([part[2] for part in parts]), grad_entropies, rtol=1e-12, atol=0)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_row_order_does_not_change_loss_or_gradient(normalizer):
    loss, rows = MixedPolicyLoss(normalizer=normalizer, **FULL), random_rows()
    value, grad, _ = evaluated(loss, rows)
    starts = np.cumsum([0, *(len(row.logprobs) for row in rows)])
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(12)
        shuffled, shuffled_grad, _ = evaluated(loss, [rows[i] for i in order])
        assert shuffled == pytest.approx(value, rel=1e-12)
        back = torch.cat([grad[starts[i] : starts[i + 1]] for i in order])
        assert torch.allclose(shuffled_grad, back, rtol=1e-12, atol=0)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_the_same_rows_twice_give_the_same_loss(normalizer):
    """T11: divided by rows too, so the batch size does not scale the step."""
    loss, rows = MixedPolicyLoss(normalizer=normalizer, **FULL), random_rows()
    assert evaluated(loss, rows * 2)[0] == pytest.approx(evaluated(loss, rows)[0], rel=1e-12)


def test_token_weights_of_each_normalizer():
    lengths = torch.tensor([2, 3, 5])
    assert MixedPolicyLoss(response_length=7).row_weights(lengths).tolist() == pytest.approx([1 / 21] * 3)
    assert MixedPolicyLoss(normalizer="tokens").row_weights(lengths).tolist() == pytest.approx([1 / 10] * 3)
    by_row = MixedPolicyLoss(normalizer="sequences").row_weights(lengths)
    assert by_row.tolist() == pytest.approx([1 / 6, 1 / 9, 1 / 15])


# -- rows that do not count -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_an_ungradable_row_counts_in_the_normaliser_and_nowhere_else(normalizer):
    loss, rows = MixedPolicyLoss(normalizer=normalizer, **FULL), random_rows()
    other = replace(rows[5], logprobs=[-9.0] * len(rows[5].logprobs), entropies=[7.0] * len(rows[5].logprobs))
    changed = [*rows[:5], other, *rows[6:]]
    assert evaluated(loss, changed)[0] == evaluated(loss, rows)[0]
    without = [*rows[:5], *rows[6:]]
    assert evaluated(loss, without)[0] != pytest.approx(evaluated(loss, rows)[0], rel=1e-3)


@pytest.mark.parametrize("field", ["logprobs", "behaviour", "entropies", "reference"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e4])
@pytest.mark.parametrize("coefs", [(0.0, 0.0), (0.01, 0.05)])
def test_an_ungradable_row_cannot_poison_loss_or_gradient(field, bad, coefs):
    """Its own tokens get a gradient of exactly 0: a NaN there would reach every weight of the model."""
    loss, rows = MixedPolicyLoss(entropy_coef=coefs[0], kl_coef=coefs[1]), random_rows()
    poisoned = [*rows[:5], replace(rows[5], **{field: [bad] * len(rows[5].logprobs)}), *rows[6:]]
    for dtype in (torch.float64, torch.float32):
        expected, found = (evaluated(loss, part, dtype=dtype) for part in (rows, poisoned))
        assert found[0] == expected[0]
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("coefs", [(0.0, 0.0), (0.01, 0.05)])
def test_no_replayed_rows_no_fresh_rows_and_no_rows_at_all_give_no_nan(coefs):
    """T10."""
    loss = MixedPolicyLoss(entropy_coef=coefs[0], kl_coef=coefs[1])
    rows = random_rows()
    for part in ([r for r in rows if not r.replayed], [r for r in rows if r.replayed]):
        value, grad, _ = evaluated(loss, part)
        assert value == pytest.approx(plain_loss(loss, part)[0], rel=1e-12)
        assert torch.isfinite(grad).all()
    value, grad, _ = evaluated(loss, rows, members=[])
    assert value == 0
    assert grad.shape == (0,)


def test_rows_with_no_advantage_need_a_gradient_only_with_entropy_or_kl():
    advantages = torch.tensor([0.5, 0.0, -0.25, 0.0])
    assert MixedPolicyLoss().needs_gradient(advantages).tolist() == [True, False, True, False]
    assert MixedPolicyLoss(entropy_coef=0.01).needs_gradient(advantages).all()
    assert MixedPolicyLoss(kl_coef=0.01).needs_gradient(advantages).all()


@pytest.mark.parametrize("settings", [{}, {"shaping": False}, {"importance_weights": False}, {"clip_low": None}])
def test_rows_said_to_need_no_gradient_have_none(settings):
    if "clip_low" in settings:
        settings = {"clip_low": None, "clip_high": None}
    loss, rows = MixedPolicyLoss(**settings), random_rows()
    _, grad, _ = evaluated(loss, rows)
    batch = tensors(loss, rows)
    needed = loss.needs_gradient(batch.advantages)
    assert 0 < needed.sum() < len(needed)
    assert not grad[~needed].any()


def test_the_kl_term_of_a_token_that_the_policy_all_but_rules_out_is_bounded_and_has_no_gradient():
    """exp(x) of 12 nats would outweigh every other token of the step, of 1,000 it would be infinite."""
    loss, rows = MixedPolicyLoss(kl_coef=0.5, entropy_coef=0.0), random_rows()
    batch = tensors(loss, rows)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages), in_loss=torch.ones_like(batch.in_loss))
    logprobs = batch.logprobs.detach().clone().requires_grad_()
    for x in (12.0, 1000.0):
        value = loss(replace(batch, logprobs=logprobs, reference_logprobs=logprobs.detach() + x))
        [grad] = torch.autograd.grad(value, logprobs)
        assert float(value) == pytest.approx(0.5 * 10.0 * batch.token_weight * len(logprobs))
        assert not grad.any()


def test_kl_without_a_reference_is_refused():
    loss = MixedPolicyLoss(kl_coef=0.1)
    with pytest.raises(ValueError, match=r"MixedPolicyLoss\.kl_coef > 0 needs the reference"):
        loss(replace(tensors(loss, random_rows()), reference_logprobs=None))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0}, r"MixedPolicyLoss\.beta must be positive, got 0"),
        ({"beta": math.inf}, r"MixedPolicyLoss\.beta"),
        ({"beta": math.nan}, r"MixedPolicyLoss\.beta"),
        ({"max_weight": 0.0}, r"MixedPolicyLoss\.max_weight must be positive, or None; got 0\.0"),
        ({"max_weight": math.inf}, r"MixedPolicyLoss\.max_weight"),
        ({"max_weight": math.nan}, r"MixedPolicyLoss\.max_weight"),
        (
            {"max_weight": 2.0, "importance_weights": False},
            r"MixedPolicyLoss\.max_weight must be None where MixedPolicyLoss\.importance_weights = False.* got 2\.0",
        ),
        ({"clip_low": None}, r"MixedPolicyLoss\.clip_low and MixedPolicyLoss\.clip_high are both"),
        ({"clip_high": None}, r"are both numbers, or both None"),
        ({"clip_low": 1.5}, r"MixedPolicyLoss\.clip_low must lie in \[0, 1\]"),
        ({"clip_high": -0.1}, r"MixedPolicyLoss\.clip_high"),
        ({"clip_high": math.nan}, r"MixedPolicyLoss\.clip_high"),
        ({"normalizer": "mean"}, r"MixedPolicyLoss\.normalizer must be .* got 'mean'"),
        ({"response_length": 0}, r"MixedPolicyLoss\.response_length"),
        ({"entropy_coef": -0.1}, r"MixedPolicyLoss\.entropy_coef"),
        ({"kl_coef": math.nan}, r"MixedPolicyLoss\.kl_coef"),
    ],
)
def test_settings_without_a_meaning_are_refused_with_the_binding_named(settings, message):
    with pytest.raises(ValueError, match=message):
        MixedPolicyLoss(**settings)
