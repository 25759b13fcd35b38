"""docs/study/pays.py: rates, the two arms that are compared, and the tables, from the runs that are there."""

from __future__ import annotations

import json
import math
import sys

import pytest
from run_builders import ROOT, train_small

from exgrpo_orlhf import config
from exgrpo_orlhf.show.tables import csv_text


@pytest.fixture
def pays(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "docs" / "study")
    module = __import__("pays")
    monkeypatch.setattr(module, "FILE", tmp_path / "pays_runs.csv")
    yield module
    sys.modules.pop("pays")


def rows(pays, bed: str, arm: str, rate: str, seed: int, end: float, generated: float = 100.0) -> list[dict]:
    """Four evaluations on a line from 0 to `end`; as many tokens are trained as generated."""
    own = {"bed": bed, "arm": arm, "rate": rate, "seed": seed}
    sums = dict.fromkeys(pays.SUMS, 4.0) | {"generated": generated, "trained": generated}
    return [
        {**own, "step": i, "accuracy": end * i / 3, **{name: value * i / 3 for name, value in sums.items()}}
        for i in range(4)
    ]


def test_a_bed_is_compared_when_its_runs_are_there_by_the_arms_that_its_tuning_seeds_chose(pays, tmp_path):
    from document import Document

    arms, described = list(config.load_suite("docs/study/suites/pays.gin").variants), len(pays.DESCRIBED["rare"])
    best = {"on_policy_k4": 0.6, "exgrpo_k8": 0.5}
    made = [
        row
        for arm in arms
        for rate, gain in (("1e-4", -0.1), ("2e-4", 0.0), ("4e-4", -0.2))
        for seed in (100, 101)
        for row in rows(pays, "rare", arm, rate, seed, best.get(arm, 0.3) + gain)
    ]
    pays.FILE.write_text(csv_text(pays.HEAD, made[:-4]))
    assert "13 of 14 arms are tuned" in "\n".join(pays.tables("rare"))
    pays.FILE.write_text(csv_text(pays.HEAD, made))
    assert [*pays.tables("rare")][1:] == [
        f"by the tuning seeds: exgrpo_k8 against on_policy_k4; 0 of {12 * described + 2 * 8} runs are there"
    ]
    with pytest.raises(ValueError, match="no bed has all its runs"):
        pays.picture()
    assert "28 tuning runs are missing: exgrpo_k4 seed 100, exgrpo_k4 seed 101" in "\n".join(pays.tables("once"))
    # ExGRPO generates twice the tokens: at 100, which all have reached, it is half way.
    for arm in arms:
        for seed in range(10, 18 if arm in best else 15):
            end, tokens = best.get(arm, 0.3) + (seed - 10) / 1000, 200.0 if arm == "exgrpo_k8" else 100.0
            made += rows(pays, "rare", arm, "2e-4", seed, end, tokens)
    pays.FILE.write_text(csv_text(pays.HEAD, made))
    text = "\n".join(pays.tables("rare"))
    # The mean of (0.5 + s)/2 − (0.6 + s), s from 0 to 0.007; one of 256 sign patterns is as far, and its reverse.
    assert "at 100 tokens, 8 seeds: -0.352 [" in text
    assert "exact p 0.0078" in text
    table = {line.split(" | ")[0][2:]: line.split(" | ") for line in text.splitlines() if line.startswith("| ")}
    assert table["exgrpo_k8"][1:3] == ["2e-4", "0.251"]
    assert table["on_policy_k4"][2:4] == [f"{0.6 + (described - 1) / 2000:.3f}", "–"]
    assert pays.picture().startswith(b"\x89PNG")
    assert "by Holm's method over the 3 beds: –" in text
    # RePO is tuned at one rate only and not shown; ReMix is described, and what it generated decides nothing.
    for arm, rates in (("repo_all_k4", ("2e-4",)), ("remix_k4", ("1e-4", "2e-4", "4e-4"))):
        for rate in rates:
            for seed in (100, 101, *(range(10, 15) if rate == "2e-4" else ())):
                made += rows(pays, "rare", arm, rate, seed, 0.9 if rate == "2e-4" else 0.8, 50.0)
    pays.FILE.write_text(csv_text(pays.HEAD, made))
    *_, last = beside = [*pays.tables("rare")][1:]
    assert [line for line in beside if line not in text.splitlines()] == [last]
    assert last.startswith("| remix_k4 | 2e-4 | 0.900 | +0.298 [")
    pays.FILE.write_text(csv_text(pays.HEAD, [row | {"bed": bed} for bed in pays.BEDS for row in made]))
    assert Document(tmp_path).fill("{{pays once p}}") == "0.0234"  # three times 2/256


def test_a_runs_rows_are_sums_of_its_own_files_and_an_unfinished_one_has_none(pays, raw_model, tmp_path, monkeypatch):
    run = tmp_path / "pays_rare" / "exgrpo_k4" / "seed0"
    train_small(raw_model, run, "Optimizer.learning_rate = 2e-4", "train.steps = 4")
    (run / "metrics.jsonl").rename(tmp_path / "kept.jsonl")
    lines = (tmp_path / "kept.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    pays.add(run.parents[1])
    assert pays.runs_of("rare") == []
    (run / "metrics.jsonl").write_text("".join(lines))
    pays.add(run.parents[1])
    pays.add(run.parents[1])
    (found,) = pays.runs_of("rare")
    assert (found.arm, found.rate, found.seed) == ("exgrpo_k4", "2e-4", 0)
    metrics = [json.loads(line) for line in lines]
    steps = [json.loads(line) for line in (run / "decisions.jsonl").read_text().splitlines()]
    assert [*found.accuracy] == [row["eval/greedy_accuracy"] for row in metrics if "eval/greedy_accuracy" in row]
    last = {name: values[-1] for name, values in found.sums.items()}
    assert last["generated"] == metrics[-1]["cost/generated_tokens"]
    replayed = sum(role == "replayed" for step in steps for role in step["questions"]["as"])
    assert (last["questions"], last["updates"], last["replayed"]) == (32, 4, replayed)
    assert last["rows"] == sum(sum(step["questions"]["rollouts"]) for step in steps) + replayed
    replayed_tokens = sum(sum(step["replays"].get("tokens", [])) for step in steps)
    assert last["trained"] == pytest.approx(last["generated"] + replayed_tokens)
    with pytest.raises(ValueError, match="pays_ and one of rare, rarer, once"):
        pays.add(tmp_path)


def test_added_rows_are_counted_and_updates_up_to_a_reincarnation(pays, raw_model, tmp_path):
    run = tmp_path / "pays_rare" / "remix_k4" / "seed0"
    bindings = ["Reincarnation.after_step = 3", "StoredRows.rows = 3", "Optimizer.learning_rate = 2e-4"]
    train_small(raw_model, run, *bindings, "train.steps = 5", files=("baselines/remix.gin",))
    pays.add(run.parents[1])
    (found,) = pays.runs_of("rare")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    added = sum(row.get("replay/added_rows", 0) for row in metrics)
    last = {name: values[-1] for name, values in found.sums.items()}
    assert added > 0
    assert last["rows"] == 5 * 8 * 4 + added
    assert last["updates"] == 2 * 3 + 2
    assert math.isnan(last["pull"])


def test_a_replayed_rows_pull_is_that_of_its_shaped_weight(pays):
    experiment = config.load(["toy.gin"], ["train.group_size = 4", "MixedPolicyLoss.beta = 0.1"])
    questions = {"id": ["a", "b", "c"], "rollouts": [3, 4, 4], "correct": [1, 1, 4]}
    replays = {"id": ["a"], "tokens": [10], "log_weight": [0.0]}
    sums = pays.rows_and_pulls(experiment, questions, replays, 6.0)
    # a: two of four are right, A = ±1/2, and f' = 0.1 / 1.1² at w = 1; b: one of four, A = 3/4 and three times −1/4.
    stored = 10 * 0.5 * 0.1 / 1.1**2
    fresh = 6 * 3 * 0.5 + 6 * (0.75 + 3 * 0.25)
    assert sums == {"rows": 12, "pull": pytest.approx(fresh + stored), "pull_replayed": pytest.approx(stored)}
    unshaped = ["train.group_size = 4", "MixedPolicyLoss.shaping = False"]
    replays["log_weight"] = [0.7]
    for more, slope in (
        ([], math.exp(0.7)),
        (["MixedPolicyLoss.max_weight = 1.5"], 1.5),
        (["MixedPolicyLoss.importance_weights = False"], 1.0),
    ):
        sums = pays.rows_and_pulls(config.load(["toy.gin"], unshaped + more), questions, replays, 6.0)
        assert sums["pull_replayed"] == pytest.approx(5 * slope)


def test_the_recipe_for_very_rare_successes_is_the_arm_that_was_run():
    files, bed = ["recipes/paper.gin", "testbed/rare.gin"], ["train.eval_every = 8", "train.keep = 1"]
    own = config.load_suite("docs/study/suites/pays.gin").variants["one_rollout_beside_k4"]
    arm = config.load([*files, *(name for name in own if " = " not in name)], [n for n in own if " = " in n] + bed)
    lengths = [binding for binding in own if binding.startswith(("train.steps", "Optimizer"))]
    assert config.load(["recipes/very_rare.gin", "testbed/rare.gin"], lengths + bed).config_hash == arm.config_hash
