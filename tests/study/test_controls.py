"""docs/study/controls.py: the choice of rates and control, and the test, from the runs that are there."""

from __future__ import annotations

import json
import sys

import pytest
from run_builders import ROOT, train_small

from exgrpo_orlhf.show.tables import csv_text


@pytest.fixture
def controls(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "docs" / "study")
    module = __import__("controls")
    monkeypatch.setattr(module, "HERE", tmp_path)  # of the CSV files
    yield module
    for name in ("controls", "pays"):
        sys.modules.pop(name, None)


def rows(controls, arm: str, rate: str, seed: int, end: float, generated: float = 100.0) -> list[dict]:
    """Four evaluations on a line from 0 to `end`."""
    values = [(arm, rate, seed, i, end * i / 3, generated * i / 3) for i in range(4)]
    return [dict(zip(controls.HEAD, value, strict=True)) for value in values]


def test_the_tuning_seeds_choose_rates_and_the_control_and_the_report_seeds_test_it(controls):
    bed = controls.CONTROLS
    best = {"method": 0.5, "asked_again_k4": 0.4}  # at 1e-4, but for
    at_edge = {"on_policy_k4": {"5e-5": 0.35}}
    gain = dict(zip(bed.rates, (-0.2, 0.0, -0.1, -0.2), strict=True))
    made = [
        row
        for arm in bed.grids
        for rate in bed.rates
        for seed in controls.TUNING
        for row in rows(controls, arm, rate, seed, at_edge.get(arm, {}).get(rate, best.get(arm, 0.3) + gain[rate]))
    ]
    assert controls.answer(bed) == ["none of the 80 tuning runs is there"]
    bed.file.write_text(csv_text(controls.HEAD, made[:-4]))
    assert controls.answer(bed)[-1] == "1 of 80 tuning runs are missing: supervised_k8 4e-4 seed 101"
    bed.file.write_text(csv_text(controls.HEAD, made))
    assert controls.answer(bed)[-1].startswith("2 of 82 tuning runs are missing: on_policy_k4 2.5e-5 seed 100")
    for seed in controls.TUNING:
        made += rows(controls, "on_policy_k4", "2.5e-5", seed, 0.38)
    bed.file.write_text(csv_text(controls.HEAD, made))
    *lines, chosen, missing = controls.answer(bed)
    assert "on_policy_k4: rate 2.5e-5, 0.380 at 100 tokens" in lines
    assert "method: rate 1e-4, 0.500 at 100 tokens" in lines
    assert chosen == "method against asked_again_k4, chosen by the tuning seeds"
    assert missing.startswith("16 of 16 report runs are missing: method 1e-4 seed 10")
    for seed in controls.CONFIRMED:  # the control generates twice the tokens: at 100 it is half way
        made += rows(controls, "method", "1e-4", seed, 0.5)
        made += rows(controls, "asked_again_k4", "1e-4", seed, 0.4 + (seed - 10) / 100, 200.0)
    bed.file.write_text(csv_text(controls.HEAD, made))
    # 0.5 − (0.4 + s)/2, s from 0 to 0.07; all eight are above 0: two of 256 sign patterns are as far
    *_, tested, missing = controls.answer(bed)
    assert tested.startswith("at 100 tokens, 8 seeds: 0.500 and 0.217, +0.282 [")
    assert tested.endswith("exact p 0.0078")
    assert controls.picture().startswith(b"\x89PNG")
    assert missing.startswith("16 of 16 runs of twice the steps are missing: method_twice 1e-4 seed 10")
    for seed in controls.CONFIRMED:  # another arm that has its report runs is described
        made += rows(controls, "on_policy_k8", "1e-4", seed, 0.2 if seed < 17 else 0.1, 50.0)
    bed.file.write_text(csv_text(controls.HEAD, made))
    *_, of_method, of_control, missing = controls.answer(bed)
    assert of_method.startswith("at 50 tokens, 8 seeds: 0.250 and 0.188, +0.062 [")
    assert of_method.endswith("described: method and on_policy_k8")
    assert of_control.startswith("at 50 tokens, 8 seeds: 0.109 and 0.188, -0.079 [")
    assert of_control.endswith("described: asked_again_k4 and on_policy_k8")
    for seed in controls.CONFIRMED:
        made += rows(controls, "method_twice", "1e-4", seed, 0.6, 200.0)
        made += rows(controls, "asked_again_k4_twice", "1e-4", seed, 0.7, 200.0)
    bed.file.write_text(csv_text(controls.HEAD, made))
    said = "at 200 tokens, 8 seeds: 0.600 and 0.700, -0.100, described: twice the steps"
    assert controls.answer(bed)[-1] == said


def test_a_bed_takes_its_controls_from_another_beds_runs(controls):
    bed = controls.BEDS["prefixes_rarer"]
    level = {"prefixes_k8": 0.5, "method": 0.4}
    for of in (bed, bed.others):
        grid = [(arm, rate, seed) for arm, rates in of.grids.items() for rate in rates for seed in controls.TUNING]
        made = [rows(controls, *key, level.get(key[0], 0.3) - 0.1 * (key[1] != "1e-4")) for key in grid]
        of.file.write_text(csv_text(controls.HEAD, [row for own in made for row in own]))
    *_, chosen, missing = controls.answer(bed)
    assert chosen == "prefixes_k8 against method, chosen by the tuning seeds"
    assert missing.startswith("16 of 16 report runs are missing: prefixes_k8 1e-4 seed 10")
    before = bed.file.read_text()
    later = [row for seed in controls.TUNING for row in rows(controls, "prefix_sampling_k4", "2e-4", seed, 0.9, 50.0)]
    bed.file.write_text(before + csv_text(controls.HEAD, later[:4]).partition("\n")[2])
    assert controls.answer(bed)[-2] == chosen, "one of its runs alone"
    bed.file.write_text(before + csv_text(controls.HEAD, later).partition("\n")[2])
    *lines, _, said, _ = controls.answer(bed)  # an arm of a later question is shown, and changes no choice
    assert "prefix_sampling_k4: rate 2e-4, 0.900 at 100 tokens" in lines
    assert said == chosen


def test_a_bed_with_bound_rates_has_others_of_the_study_and_asks_for_no_rate_beyond(controls, monkeypatch, tmp_path):
    pays = sys.modules["pays"]
    monkeypatch.setattr(pays, "FILE", tmp_path / "pays_runs.csv")
    bed = controls.BEDS["prefixes_once"]
    paid = [
        dict.fromkeys(pays.HEAD, 0) | {"bed": of, "arm": arm, "rate": "4e-4", "seed": seed} | row
        for of, arm, end in (("once", "late", 0.5), ("once", "on_policy_k4", 0.4), ("rare", "best_elsewhere", 0.9))
        for seed in controls.TUNING
        for row in [{"step": i, "accuracy": end * i / 3, "generated": 100 * i / 3} for i in range(4)]
    ]
    pays.FILE.write_text(csv_text(pays.HEAD, paid))
    made = []
    for arm, rate in {
        "prefixes_k4": "1e-4", "prefixes_k8": "2e-4", "nothing_given_k4": "2e-4",
        "asked_again_k4": "1e-4", "asked_again_k8": "2e-4",
    }.items():  # fmt: skip
        for seed in controls.TUNING:
            made += rows(controls, arm, rate, seed, 0.3 if arm == "prefixes_k8" else 0.2)
    bed.file.write_text(csv_text(controls.HEAD, made[:-4]))
    assert controls.answer(bed)[-1] == "1 of 14 tuning runs are missing: asked_again_k8 2e-4 seed 101"
    bed.file.write_text(csv_text(controls.HEAD, made))
    *_, chosen, missing = controls.answer(bed)
    assert chosen == "prefixes_k8 against late, chosen by the tuning seeds"
    assert missing.startswith("16 of 16 report runs are missing: prefixes_k8 2e-4 seed 10")
    assert missing.endswith(" more")
    assert controls.corrected() == [""]
    for seed in controls.CONFIRMED:
        made += rows(controls, "prefixes_k8", "2e-4", seed, 0.3 + seed / 1000)
        more = ({"step": i, "accuracy": 0.1 * i, "generated": 100 * i / 3} for i in range(4))
        paid += [
            dict.fromkeys(pays.HEAD, 0) | {"bed": "once", "arm": "late", "rate": "4e-4", "seed": seed} | row
            for row in more
        ]
    pays.FILE.write_text(csv_text(pays.HEAD, paid))
    bed.file.write_text(csv_text(controls.HEAD, made))
    assert controls.answer(bed)[-1].endswith("exact p 0.0078")
    assert controls.corrected() == ["", "prefixes_once: exact p 0.0078, by Holm over 1 beds 0.0078"]


def test_a_finished_run_is_added_once_by_its_folders_name_and_an_unfinished_one_is_not(controls, raw_model, tmp_path):
    run = tmp_path / "controls" / "method-learning_rate=2e-4" / "seed0"
    train_small(raw_model, run, "Optimizer.learning_rate = 2e-4", "train.steps = 4")
    bed = controls.CONTROLS
    controls.add(run.parents[1], bed)
    controls.add(run.parents[1], bed)
    with pytest.raises(ValueError, match=r"controls: the folder of prefixes_once's runs has a name that begins so"):
        controls.add(run.parents[1], controls.BEDS["prefixes_once"])
    (found,) = controls.runs(bed).values()
    assert (found.arm, found.rate, found.seed) == ("method", "2e-4", 0)
    assert found.cost()[-1] > found.cost()[0] == 0
    bed.file.unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    controls.add(run.parents[1], bed)
    assert controls.runs(bed) == {}


def test_the_supervised_control_learns_all_successes_before_each_evaluation(monkeypatch, warm_model, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "docs" / "study")
    supervised = __import__("supervised")
    runs = {"plain": {}, "supervised": {"loop": supervised.supervised}}
    for name, options in runs.items():
        train_small(warm_model, tmp_path / name, "train.steps = 4", files=("baselines/on_policy.gin",), **options)
    plain, own = ([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()] for name in runs)
    correct = [row.get("reward/pass_at_1", 0.0) * 32 for row in own]
    assert [row.get("supervised/rows", 0) > 0 for row in own] == [False, False, True, False, True]  # steps 2 and 4
    assert 1 < own[2]["supervised/rows"] <= sum(correct[:3])
    assert own[2]["supervised/rows"] < own[4]["supervised/rows"] <= sum(correct)
    same = ("reward/mean", "policy/entropy_fresh", "cost/generated_tokens")
    assert [[row[name] for name in same] for row in own[1:3]] == [[row[name] for name in same] for row in plain[1:3]]
    assert own[3]["policy/entropy_fresh"] != plain[3]["policy/entropy_fresh"]
