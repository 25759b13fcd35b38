"""The mixed-policy loss against the paper's equations, written out token by token in plain Python."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from plain_loss import NORMALIZERS, PlainRow, evaluated, plain_loss, random_rows, tensors, token_term

from exgrpo_orlhf.objective import MixedPolicyLoss

CLIPS = [(None, None), (0.2, 0.2), (0.1, 0.4)]
COEFS = [(0.0, 0.0), (0.01, 0.0), (0.0, 0.05), (0.01, 0.05)]


def assert_equals_the_equations(loss, rows) -> None:
    value, grad_logprobs, grad_entropies = evaluated(loss, rows)
    plain_value, plain_logprobs, plain_entropies = plain_loss(loss, rows)
    assert value == pytest.approx(plain_value, rel=1e-12, abs=1e-14)
    assert np.allclose(grad_logprobs, plain_logprobs, rtol=1e-10, atol=1e-14)
    assert np.allclose(grad_entropies, plain_entropies, rtol=1e-12, atol=1e-16)


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
        assert_equals_the_equations(loss, random_rows(seed))


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


@pytest.mark.parametrize(
    "settings",
    [
        *(
            {"max_weight": c, "shaping": shaping, "entropy_coef": 0.01}
            for c in (0.05, 0.7, 1.0, 2.0, 50.0)
            for shaping in (True, False)
        ),
        *(
            {"max_fresh_weight": c, "clip_low": clip, "clip_high": clip}
            for c in (0.05, 0.7, 1.1, 2.0, 50.0)
            for clip in (0.2, None)
        ),
    ],
    ids=str,
)
def test_truncated_loss_and_gradient_equal_the_equations_written_plainly(settings):
    for seed in range(4):
        assert_equals_the_equations(MixedPolicyLoss(response_length=20, **settings), random_rows(seed))


@pytest.mark.parametrize("max_fresh_weight", [None, 1.3, 5.0])
@pytest.mark.parametrize("c", [1.2, 1.5, 3.0])
def test_a_dual_clip_equals_the_equations_written_plainly(c, max_fresh_weight):
    free, met = MixedPolicyLoss(response_length=20, max_fresh_weight=max_fresh_weight), 0
    for seed in range(4):
        rows = random_rows(seed)
        loss = replace(free, dual_clip=c)
        assert_equals_the_equations(loss, rows)
        met += plain_loss(loss, rows) != plain_loss(free, rows)
    assert (met > 0) == (max_fresh_weight is None or max_fresh_weight > c)


def test_a_dual_clipped_token_is_finite_and_counted_however_extreme_its_ratio():
    loss = MixedPolicyLoss(dual_clip=3.0, normalizer="tokens")
    row = PlainRow([-1.0, -1.0], [-1001.0, -1.0], [-1.0] * 2, [0.0] * 2, -0.5, False)
    value, grad, _ = evaluated(loss, [row], dtype=torch.float32)
    assert value == pytest.approx(0.5 * (3 + 1) / 2)
    assert grad.tolist() == pytest.approx([0, 0.25])
    policy, behaviour = np.array([-1.0, -1.0, -9.0], np.float32), np.array([-101.0, -1.0, -1.0], np.float32)
    counts = [one.fresh_sums([(-0.5, policy, behaviour)])["clipped"] for one in (loss, MixedPolicyLoss())]
    assert counts == [2, 1], "and one token below the lower clip"


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize(
    "clip", [dict(), dict(dual_clip=3.0), dict(clip_low=None, clip_high=None), dict(shaping=False)]
)
def test_a_token_without_an_advantage_is_0_however_extreme_its_ratio(clip, replayed):
    row = PlainRow([-1.0, -1.0], [-1001.0, -1.0], [-1.0] * 2, [0.0] * 2, 0.0, replayed)
    value, grad, _ = evaluated(MixedPolicyLoss(normalizer="tokens", **clip), [row], dtype=torch.float32)
    assert value == 0
    assert grad.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_truncated_fresh_weight_is_finite_where_the_clip_has_no_bound(dtype):
    """A < 0: the clip leaves w = e^100 as it is."""
    loss = MixedPolicyLoss(max_fresh_weight=2.0, normalizer="tokens")
    row = PlainRow([-1.0, -1.0], [-101.0, -1.0], [-1.0] * 2, [0.0] * 2, -0.5, False)
    value, grad, _ = evaluated(loss, [row], dtype=dtype)
    assert value == pytest.approx(0.5 * (2 + 1) / 2, rel=1e-6)
    assert grad.tolist() == pytest.approx([0.5, 0.25], rel=1e-6)


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


@pytest.mark.parametrize("shaping", [True, False])
@pytest.mark.parametrize(
    ("replayed", "one", "other"),
    [
        (None, {"max_weight": None}, {"max_weight": 1e6}),  # a weight that no token reaches
        (False, {"max_weight": None}, {"max_weight": 0.01}),  # fresh rows are not truncated by it
        (True, {"max_fresh_weight": None}, {"max_fresh_weight": 0.01}),  # nor replayed ones by the other
        (
            True,
            {"clip_low": None, "clip_high": None},
            {"clip_low": 0.01, "clip_high": 0.01},
        ),  # replayed ones never clipped
    ],
)
def test_a_bound_leaves_the_result_bit_identical_where_it_does_not_apply(shaping, replayed, one, other):
    """replayed: what all rows are; None: some of each"""
    rows = [row if replayed is None else replace(row, replayed=replayed) for row in random_rows()]
    expected, result = (evaluated(MixedPolicyLoss(shaping=shaping, **settings), rows) for settings in (one, other))
    assert result[0] == expected[0]
    assert torch.equal(result[1], expected[1])


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
