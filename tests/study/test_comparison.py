"""The arithmetic of a comparison over seeds, by hand and by the textbook, and its page with many variants."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from drawn_charts import charts as drawn_charts
from drawn_charts import clipped, of_class, outline, plot
from study_builders import made

from exgrpo_orlhf.config import all_settings, variant_of
from exgrpo_orlhf.show import seeds, tables
from exgrpo_orlhf.study import comparison_charts, comparison_tables
from exgrpo_orlhf.study.comparison import ComparisonError, compare, differing_settings, named_by_settings
from exgrpo_orlhf.study.curve import band

METRIC = "eval/avg"


def test_values_and_areas_by_hand():
    curve = made("v", 0, [0.0, 1.0, 0.5], steps=[0, 10, 30], tokens=2)
    assert [curve.at("steps", x) for x in (0, 5, 20, 30)] == [0.0, 0.5, 0.75, 0.5]
    assert curve.at("tokens", 40) == 0.75
    assert math.isnan(curve.at("steps", 31))
    assert curve.area("steps", 0, 30) == pytest.approx((10 * 0.5 + 20 * 0.75) / 30)
    assert curve.area("steps", 5, 20) == pytest.approx((5 * 0.75 + 10 * 0.875) / 15)
    assert curve.area("tokens", 10, 40) == pytest.approx((5 * 0.75 + 10 * 0.875) / 15)
    assert math.isnan(curve.area("steps", 0, 31))
    assert math.isnan(curve.area("steps", 10, 10))


def test_areas_equal_tokens_and_equal_steps_are_over_what_all_runs_cover():
    short, long = made("a", 0, [0.0, 1.0], tokens=100), made("b", 0, [0.0, 1.0, 1.0], steps=[0, 10, 40], tokens=50)
    comparison = compare(METRIC, [short, long], "a")
    assert comparison.ranges == {"steps": (0, 10), "tokens": (0, 1000), "seconds": (0, 20)}
    measured = {v.name: {key: values[0] for key, values in v.values.items()} for v in comparison.variants}
    half = {"equal_steps": 1, "area_steps": 0.5, "area_seconds": 0.5}
    assert measured["a"] == {"final": 1, "equal_tokens": 1, "area_tokens": 0.5, **half, "tokens": 1000, "seconds": 20}
    costs = {"tokens": 2000, "seconds": 80}
    assert measured["b"] == {"final": 1, "equal_tokens": 1, "area_tokens": 0.75, **half, **costs}
    assert [(each.measure, each.mean.value) for each in comparison.differences][4] == ("area_tokens", 0.25)
    late = compare(METRIC, [short, made("c", 0, [0.0, 1.0], steps=[5, 15])], None)
    assert late.ranges["steps"] == (5, 10)
    assert [variant.values["area_steps"][0] for variant in late.variants] == pytest.approx([0.75, 0.25])
    never = compare(METRIC, [short, made("c", 0, [0.0, 1.0], steps=[15, 25])], "a")
    assert [each.measure for each in never.differences] == ["final"]
    assert "no range of steps is covered by all runs: nothing is compared along it" in never.notes


@pytest.mark.parametrize(
    ("values", "collapsed"),
    [
        ([0.2, 0.5, 0.6], False),
        ([0.2, 0.9, 0.5], False),
        ([0.2, 0.9, 0.44], True),  # below half of its best
        ([0.5, 0.6, 0.49], True),  # below its start
        ([0.5, 0.5], False),
        ([-2.0, -1.0], False),
        ([0.3], False),
    ],
)
def test_a_collapse_is_an_end_below_the_start_or_half_of_the_best(values, collapsed):
    assert made("v", 0, values).collapsed is collapsed
    for metric in ("reward/mean", "reward/pass_at_1", "reward_part/modular_chain"):
        assert made("v", 0, values, metric=metric).collapsed is collapsed
    for metric in (
        *("eval/lucky_guess_rate", "eval/avg_bench/error_rate", "reward_log/accuracy", "reward/overlong_penalty"),
        *("reward_part/modular_chain_groups_with_signal", "replay/continued_groups_with_signal"),
    ):
        assert not made("v", 0, values, metric=metric).collapsed, "less may be better"


@pytest.mark.parametrize("count", [2, 3, 8])
def test_intervals_and_p_values_are_those_of_the_textbook(count):
    rng = np.random.default_rng(count)
    for _ in range(5):
        d = rng.normal(0.3, 1, count)
        test = seeds.mean(d)
        error, t = d.std(ddof=1) / math.sqrt(count), scipy.stats.t(count - 1)
        low, high = (d.mean() + sign * t.ppf(0.975) * error for sign in (-1, 1))
        assert (*test.bounds, test.p) == pytest.approx((low, high, 2 * t.sf(abs(d.mean()) / error)))
        assert (test.p < 0.05) == (not low < 0 < high)
        flips = scipy.stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=2**count)
        assert seeds.sign_flip(d) == pytest.approx(flips.pvalue)
    assert seeds.sign_flip(np.arange(1.0, count + 1)) == 2 / 2**count


def test_holms_correction_is_over_the_variants_of_a_measure():
    assert seeds.holm([0.01, None, 0.04, 0.03]) == [pytest.approx(0.03), None, *[pytest.approx(0.06)] * 2]
    assert seeds.holm([0.6, 0.7]) == [1, 1]
    finals = [each for each in compare(METRIC, noisy(3), "on_policy").differences if each.measure == "final"]
    assert len(finals) == 2
    assert [each.p_holm for each in finals] == seeds.holm([each.mean.p for each in finals])


def test_no_spread_has_no_interval_and_no_t_test():
    for values in ([0.4], [0.1 + 0.2, 0.3, 0.3], [0.0, 0.0]):
        test = seeds.mean(values)
        assert (test.bounds, test.p) == (None, None)
    assert seeds.sign_flip([0.0, 0.0]) == 1
    assert seeds.sign_flip([0.3]) == 1
    assert seeds.sign_flip(np.arange(17.0)) is None


@pytest.mark.parametrize("count", [3, 8])
def test_the_paired_t_test_does_not_cry_wolf_where_some_seeds_collapse(count):
    """Two variants alike, each seed of which collapses in one of ten cases: far from normal."""
    rng = np.random.default_rng(0)
    runs = rng.normal(0.6, 0.03, (2, 3000, count)) - 0.4 * (rng.random((2, 3000, count)) < 0.1)
    _, _, p = seeds.t_test((runs[1] - runs[0]).T)
    false = np.mean(p < 0.05)
    assert 0 < false < 0.05


def test_differences_are_over_the_seeds_that_both_have():
    curves = [made("a", seed, [0.1, 0.5 + seed / 10]) for seed in (0, 1, 2)]
    curves += [made("b", seed, [0.1, 0.7 + seed / 5]) for seed in (1, 2, 3)]
    curves += [made("c", 9, [0.1, 0.7])]
    comparison = compare(METRIC, curves, "a")
    (difference,) = [each for each in comparison.differences if each.measure == "final"]
    assert (difference.variant, difference.seeds) == ("b", (1, 2))
    assert difference.mean.value == pytest.approx((0.9 - 0.6 + 1.1 - 0.7) / 2)
    assert "b: differences are over seeds 1, 2, which a has too" in comparison.notes
    assert "c: no seed in common with a, so no difference" in comparison.notes
    with pytest.raises(ComparisonError, match=r"'z' is not among the variants that have eval/avg: a, b, c"):
        compare(METRIC, curves, "z")


@pytest.mark.slow
def test_runs_without_tokens_or_time_are_compared_by_what_they_have():
    curves = [
        made("a", 0, [0.1, 0.5]),
        made("b", 0, [0.1, 0.6], tokens=math.nan, seconds=math.nan),
        made("c", 0, [0.4]),
    ]
    comparison = compare(METRIC, curves[:2], "a")
    assert {each.measure for each in comparison.differences} == {"final", "equal_steps", "area_steps"}
    assert "no record of tokens at the steps of eval/avg, so no comparison by tokens: b, seed 0 (b-0, b-0)" in [
        *comparison.notes
    ]
    table = comparison_tables.tables(comparison)[0]
    assert table.rows[0][4] == "–"
    once = compare(METRIC, curves[::2], None)
    assert any("measured once only" in note and "c, seed 0" in note for note in once.notes)
    assert "NaN" not in comparison_tables.values_csv([comparison, once]).replace("nan", "NaN")
    for shown in (comparison, once):
        assert comparison_tables.page("t", "a", [shown], []).startswith("<!doctype html>")
        assert comparison_charts.picture([shown]).startswith(b"\x89PNG")


@pytest.mark.slow
def test_variants_whose_seeds_share_no_step_are_drawn_by_their_last_values(tmp_path):
    """As of `best` checkpoints: each seed was evaluated once, at another step."""
    places = {"a": (100, 120), "b": (80, 140)}
    curves = [
        made(name, seed, [0.5 + seed / 10], steps=[step])
        for name, steps in places.items()
        for seed, step in enumerate(steps)
    ]
    alone = compare(METRIC, curves, "a")
    assert comparison_charts.picture([alone]).startswith(b"\x89PNG")
    text = comparison_tables.page("t", "a", [alone], [])
    assert not drawn_charts(text, "learning")
    [chart] = drawn_charts(text, "finals")
    assert len(of_class(chart, "dot")) == 4
    beside = compare(METRIC, [made(name, seed, [0.1, 0.2 + seed / 10]) for name in "ab" for seed in (0, 1)], "a")
    assert comparison_charts.picture([alone, beside]).startswith(b"\x89PNG")
    assert comparison_tables.page("t", "a", [alone, beside], []).startswith("<!doctype html>")


def test_bands_are_means_with_intervals_where_all_seeds_are():
    x, mean, lows, highs = band([made("a", 0, [0.0, 1.0]), made("a", 1, [0.0, 1.0, 2.0], steps=[0, 5, 10])], "steps")
    assert x.tolist() == [0, 5, 10]
    assert mean.tolist() == [0, 0.75, 1.5]
    low, high = scipy.stats.t.interval(0.95, 1, 0.75, scipy.stats.sem([0.5, 1.0]))
    assert (lows[1], highs[1]) == pytest.approx((low, high))


def test_settings_that_differ_are_those_of_the_variants_and_not_the_seed():
    curves = [made(v, s, [0.1, 0.2], **{"train.seed": str(s), "rho": v, "same": "1"}) for v in "ab" for s in (0, 1)]
    curves += [made("c", 0, [0.1, 0.2], rho="c", same="1", more="x")]
    differing, notes = differing_settings(compare(METRIC, curves, None).variants)
    assert differing == {"rho": ["a", "b", "c"], "more": ["", "", "x"]}
    assert notes == []


def noisy(seeds: int) -> list:
    rng = np.random.default_rng(0)
    means = {"on_policy": 0.2, "a_long_name_of_a_variant_that_binds_rho_to_0.75_and_sigma_to_2.5": 0.5, "weak": 0.02}
    values = lambda mean: np.clip(mean + rng.normal(0, 0.18, 8), 0, 1)
    return [made(name, seed, values(mean)) for name, mean in means.items() for seed in range(seeds)]


def test_bands_intervals_and_dots_lie_wholly_in_the_plot():
    comparison = compare(METRIC, noisy(3), "on_policy")
    text = comparison_tables.page("t", "a", [comparison], [])
    kinds = {"learning": ("band", "curve", "thin"), "finals": ("spread", "mean", "dot")}
    for kind, classes in kinds.items():
        for chart in drawn_charts(text, kind):
            left, top, right, bottom = plot(chart)
            marks = [mark for name in classes for mark in of_class(chart, name)]
            assert len(marks) > 9
            assert all(map(clipped, marks))
            for x, y in (corner for mark in marks for corner in outline(mark, chart)):
                assert left <= x <= right
                assert top <= y <= bottom
    assert "goes on beyond it" not in text
    low = comparison.variants[2].mean("final").bounds[0]
    assert low < 0, "an interval that begins below the least value is whole too"


def test_a_name_in_the_markdown_file_is_text_and_no_html():
    name = '<img src=x onerror="alert(1)"> & <b>|'
    comparison = compare(METRIC, [made(name, 0, [0.1, 0.2]), made("b", 0, [0.1, 0.2])], name)
    text = comparison_tables.markdown(name, [comparison], [name])
    assert "<" not in text.replace("p <", "")
    assert text.count('&lt;img src=x onerror="alert(1)"&gt; &amp; &lt;b&gt;') >= 4, "title, heading, cells, notes"


def variants(*of_runs: dict[str, str], name: str = "quickstart.gin") -> list[str]:
    runs = [made(name, seed, [0.1], **{"train.seed": str(seed), **params}).run for seed, params in enumerate(of_runs)]
    return [run.variant for run in named_by_settings(runs, variant_of, all_settings())]


def test_runs_of_one_name_with_different_settings_are_variants_and_their_names_say_which():
    rho, rate = "ReplayMixer.rho", "Optimizer.learning_rate"
    same = {rho: "0.5", rate: "2e-06"}
    assert variants(same, same) == ["quickstart.gin"] * 2, "but for the seed"
    changeable = {"train.steps": "9", "Tracking.uri": "x"}
    assert variants(same, {**same, **changeable}) == ["quickstart.gin"] * 2, "as when a run is continued"
    sampled = {**same, "Evaluation.temperature": "0.6"}
    assert len({*variants(same, sampled)}) == 2, "their evaluations are two quantities"
    three = variants(same, {**same, rho: "0.25"}, {**same, rate: "1e-5"}, same)
    assert three[0] == three[3] == f"quickstart.gin ({rate} = 2e-06, {rho} = 0.5)"
    assert three[1] == f"quickstart.gin ({rate} = 2e-06, {rho} = 0.25)"
    assert three[2] == f"quickstart.gin ({rate} = 1e-5, {rho} = 0.5)"
    assert (
        variants(same, {**same, "PretrainedModel.path": "x"})[0] == "quickstart.gin (PretrainedModel.path = not bound)"
    )


def test_a_run_from_before_a_setting_is_of_the_variant_that_has_its_default():
    rho, rate, model = "ReplayMixer.rho", "Optimizer.learning_rate", "a/Prompts.template"
    default = all_settings()[rate]
    before, now = {rho: "0.5"}, {rho: "0.5", rate: default, model: "'plain'"}
    assert variants(before, now) == ["quickstart.gin"] * 2
    assert variants(before, {**now, rate: "1e-05"}) == [
        f"quickstart.gin ({rate} = {text})" for text in (default, "1e-05")
    ]
    assert len(set(variants(before, now, {**now, rate: "1e-05"}))) == 2
    curves = [made("v", seed, [0.1], **params) for seed, params in enumerate((before, now, {**now, rate: "1e-05"}))]
    of_one, of_all = (compare(METRIC, curves[:n], None).variants for n in (2, 3))
    assert differing_settings(of_one, all_settings()) == ({}, [])
    assert differing_settings(of_all, all_settings())[1] == [f"v: its runs differ in more than the seed: {rate}"]


def test_flags_of_openrlhf_that_change_what_is_computed_tell_variants_apart():
    stage = {"OpenRLHF.flags": "{'ds.zero_stage': 2, 'vllm.num_engines': 1}", "OpenRLHF.more_flags": "{}"}
    engines = {**stage, "OpenRLHF.more_flags": "{'vllm.num_engines': 8}"}
    other = {**stage, "OpenRLHF.more_flags": "{'ds.zero_stage': 3}"}
    assert variants(stage, engines, name="v") == ["v"] * 2
    assert variants(stage, other, name="v") == ["v (OpenRLHF ds.zero_stage = 2)", "v (OpenRLHF ds.zero_stage = 3)"]
    cut = {"OpenRLHF.flags": "{'ds.zero_stage': 2, … cut here: 7000 characters, blake2b 12"}
    assert len(set(variants(stage, cut))) == 2


def test_a_difference_that_rounds_to_0_has_no_minus():
    assert tables.number(-0.0004, sign="+") == "+0.000"


@pytest.mark.slow
def test_metrics_below_a_hundredth_are_shown_with_three_significant_digits():
    small = {"a": (0.00034, 0.00036), "b": (0.0004, 0.00051)}
    curves = [
        made(name, seed, [0.5, value], metric="policy/approx_kl")
        for name, values in small.items()
        for seed, value in enumerate(values)
    ]
    compared = compare("policy/approx_kl", curves, "a")
    reached, gains = comparison_tables.tables(compared)
    assert [row[3] for row in reached.rows] == ["0.000350 ± 0.000127", "0.000455 ± 0.000699"]
    final = gains.rows[0]
    assert final[3:5] == ("+0.000105", "[-0.000467, +0.000677]")
    by_area = next(row for row in gains.rows if row[0] == "area, steps")
    assert by_area[3] == "+0.000", "of areas of 0.25"
    for text in (
        comparison_tables.terminal([compared], []),
        comparison_tables.markdown("t", [compared], []),
        comparison_tables.page("t", "a", [compared], []),
    ):
        for cell in ("0.000350 ± 0.000127", "+0.000105"):
            assert cell in text
    assert "0.000510 at step 10" in text
    rates = compare("policy/learning_rate", [made("a", 0, [1e-6]), made("b", 0, [0.0])], "a")
    assert [row[3] for row in comparison_tables.tables(rates)[0].rows] == ["1.00e-06", "0.000"]
    assert comparison_tables.tables(rates)[1].rows[0][3] == "-1.00e-06"
    accuracies = compare(METRIC, [made("a", 0, [0.5]), made("b", 0, [0.504])], "a")
    assert comparison_tables.tables(accuracies)[1].rows[0][3] == "+0.004"


def test_names_of_variants_that_are_cut_stay_different():
    names = variants(*({"Prompts.system": "x" * 100 + end} for end in "ab"))
    assert len(set(names)) == 2
    assert max(map(len, names)) < 100
    many = variants(*({f"X.y{i}": each for i in range(9)} | {"X.y9": end} for each, end in ("1a", "2a", "2b")))
    assert len(set(many)) == 3
    assert "and 6 more" in many[0]
