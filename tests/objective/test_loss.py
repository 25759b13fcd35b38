"""The mixed-policy loss against the paper's equations, written out token by token in plain Python."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from plain_loss import NORMALIZERS, PlainRow, evaluated, plain_loss, random_rows, token_term

from exgrpo_orlhf.objective import ConvexKL, MixedPolicyLoss


def each(clip=({},), **choices) -> list[dict]:
    """Settings with every combination of these values."""
    combined = itertools.product(clip, *choices.values())
    return [{**bounds, **dict(zip(choices, values, strict=True))} for bounds, *values in combined]


def clips(*pairs) -> list[dict]:
    return [{"clip_low": low, "clip_high": high} for low, high in pairs]


NONE = (None, None)
SETTINGS = [
    *each(
        shaping=[True, False],
        importance_weights=[True, False],
        clip=clips(NONE, (0.2, 0.2), (0.1, 0.4)),
        normalizer=NORMALIZERS,
    ),
    *each(ratio=["sequence"], clip=clips(NONE, (0.2, 0.2), (0.05, 0.1)), normalizer=NORMALIZERS),
    *each(max_weight=[0.05, 0.7, 1.0, 2.0, 50.0], shaping=[True, False]),
    *each(max_fresh_weight=[0.05, 0.7, 1.1, 2.0, 50.0], clip=clips(NONE, (0.2, 0.2))),
    *each(dual_clip=[1.2, 1.5, 3.0], max_fresh_weight=[None, 1.3, 5.0]),
    *each(
        clips_replayed=[True],
        shaping=[False],
        dual_clip=[None, 1.5],
        max_weight=[None, 1.1],
        ratio=["token", "sequence"],
        normalizer=NORMALIZERS,
    ),
]


def assert_equals_the_equations(loss, rows) -> None:
    value, grad_logprobs, grad_entropies = evaluated(loss, rows)
    plain_value, plain_logprobs, plain_entropies = plain_loss(loss, rows)
    assert value == pytest.approx(plain_value, rel=1e-12, abs=1e-14)
    assert np.allclose(grad_logprobs, plain_logprobs, rtol=1e-10, atol=1e-14)
    assert np.allclose(grad_entropies, plain_entropies, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_loss_and_gradient_equal_the_equations_written_plainly(settings):
    for seed, (entropy_coef, kl_coef) in enumerate([(0.0, 0.0), (0.01, 0.0), (0.0, 0.05), (0.01, 0.05)]):
        more = {"beta": 0.1 + 0.1 * seed, "entropy_coef": entropy_coef, "kl_coef": kl_coef}
        assert_equals_the_equations(MixedPolicyLoss(response_length=20, **more, **settings), random_rows(seed))


def test_a_mixed_batch_is_unclipped_in_its_parts_without_replayed_rows_too_and_another_is_clipped():
    """With `clips_mixed` = False: what is mixed is the batch, not a micro-batch of it."""
    loss = MixedPolicyLoss(clips_mixed=False, dual_clip=1.3, response_length=20)
    rows = random_rows()
    assert_equals_the_equations(loss, rows)
    fresh = [i for i, row in enumerate(rows) if not row.replayed]
    unclipped = replace(loss, clip_low=None, clip_high=None, dual_clip=None)
    for one, other in zip(evaluated(loss, rows, fresh), evaluated(unclipped, rows, fresh), strict=True):
        assert np.array_equal(one, other)
    on_policy = [rows[i] for i in fresh]
    assert_equals_the_equations(loss, on_policy)
    assert plain_loss(loss, on_policy) == plain_loss(replace(loss, clips_mixed=True), on_policy)
    assert plain_loss(loss, on_policy) != plain_loss(unclipped, on_policy)


def test_the_rows_of_these_tests_meet_every_case():
    """Clipped above and below, beyond the dual clip, unclipped on the harmless side, replayed with both signs."""
    cases = set()
    for row in (row for seed in range(4) for row in random_rows(seed)):
        for logprob, behaviour in zip(row.logprobs, row.behaviour, strict=True):
            w = math.exp(logprob - behaviour)
            zone = "far above" if w > 3 else "above" if w > 1.4 else "below" if w < 0.8 else "inside"
            cases.add((row.replayed, zone, np.sign(row.advantage)))
    assert {(False, zone, sign) for zone in ("above", "inside", "below") for sign in (1, -1)} <= cases
    assert {(True, zone, sign) for zone in ("above", "below") for sign in (1, -1)} | {(False, "far above", -1)} <= cases


# -- bounded weights --------------------------------------------------------------------------------------------------


def test_dual_clipped_tokens_are_counted_however_extreme_their_ratio():
    policy, behaviour = np.array([-1.0, -1.0, -9.0], np.float32), np.array([-101.0, -1.0, -1.0], np.float32)
    losses = MixedPolicyLoss(dual_clip=3.0), MixedPolicyLoss()
    counts = [one.fresh_sums([(-0.5, policy, behaviour)], False)["clipped"] for one in losses]
    assert counts == [2, 1], "and one token below the lower clip"


def test_with_the_ratio_of_the_sequence_the_share_of_clipped_tokens_is_that_of_whole_responses():
    loss = MixedPolicyLoss(ratio="sequence", clip_low=0.2, clip_high=0.2)
    above = (0.5, np.full(3, -1.0, np.float32), np.array([-2.0, -1.0, -1.0], np.float32))  # s = e^(1/3), one token of 3
    inside = (0.5, np.full(2, -1.0, np.float32), np.array([-2.0, 0.0], np.float32))  # s = 1
    sequences, tokens = (one.fresh_metrics(one.fresh_sums([above, inside], False)) for one in (loss, MixedPolicyLoss()))
    assert (sequences["policy/clip_share"], tokens["policy/clip_share"]) == (3 / 5, 2 / 5)
    assert sequences["policy/approx_kl"] == tokens["policy/approx_kl"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"shaping": False}, {"importance_weights": False}, {"max_weight": 2.0}),
        *({"max_weight": 2.0, "shaping": False}, {"dual_clip": 3.0}, {"max_fresh_weight": 2.0}),
        *({"ratio": "sequence"}, *each(clip=clips(NONE), max_fresh_weight=[None, 2.0])),
    ],
    ids=str,
)
def test_a_token_with_an_extreme_ratio_is_as_in_the_equations_and_no_other_row_is_touched(settings, dtype):
    """T18: in float32 a ratio beyond e^88 is infinite. Where the equations have a bound, as f(w*) is one, nothing
    overflows or becomes 0/0 or 0·∞."""
    loss = MixedPolicyLoss(normalizer="tokens", entropy_coef=0.01, **settings)
    rows, exact, bounded = random_rows(), 1e-10 if dtype == torch.float64 else 1e-5, 0
    for log_w, advantage, replayed in itertools.product((1e4, 100.0, -100.0, -1e4), (0.5, 0.0, -0.5), (False, True)):
        extreme = PlainRow([-1.0, -2.0], [-1.0 - log_w, -2.0], [-1.0] * 2, [1.0] * 2, advantage, replayed)
        expected, *slopes = plain_loss(loss, [*rows, extreme])
        if abs(expected) > 1e30:
            continue
        value, *gradients = evaluated(loss, [*rows, extreme], dtype=dtype)
        assert value == pytest.approx(expected, rel=exact)
        for gradient, slope in zip(gradients, slopes, strict=True):
            assert np.allclose(gradient, slope, rtol=exact, atol=1e-9)
        _, calm, _ = evaluated(loss, [*rows, replace(extreme, behaviour=extreme.logprobs)], dtype=dtype)
        assert torch.equal(gradients[0][:-2], calm[:-2])
        bounded += 1
    assert bounded >= 16


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


def test_the_weight_of_the_kl_term_to_the_reference_takes_its_course():
    """λ(t) = max(1 − 0.1·⌈max(t − 50, 0)/10⌉, 0.5), as ReMix has it."""
    for step in range(1, 200):
        expected = max(1 - 0.1 * math.ceil(max(step - 50, 0) / 10), 0.5)
        assert ConvexKL().at(step) == pytest.approx(expected, abs=1e-12)
    assert [ConvexKL().at(step) for step in (1, 50)] == [1.0, 1.0], "exactly: the preceding policy is not measured"
