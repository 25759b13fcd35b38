"""The simulation of a step: closed forms, conservation, bounds; docs/ahead.md has the figures of its CSV files."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from run_builders import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import ahead
import engine_sim as sim

H100 = sim.GPUS["H100"]
FILES = {name: ahead.read(ROOT / "docs" / "ahead" / f"{name}.csv") for name in ("cases", "parts", "assumptions")}


def prefill(tokens: int) -> float:
    return tokens * 2 * sim.PARAMETERS / (H100.flops * sim.GENERATE_SHARE)


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_constant_lengths_take_the_closed_form(rows):
    length, prompt = 500, 100
    made = sim.run_engine(H100, [[length]] * rows, 10**6, prompt)
    read = rows * sum(prompt + i for i in range(length)) * sim.KV  # bytes of cache, step by step
    weights = max(sim.WEIGHTS / (3.35e12 * 0.8), rows * 2 * sim.PARAMETERS / (989e12 * 0.5))
    expected = prefill(rows * prompt) + length * (weights + sim.DECODE_OVERHEAD) + read / (3.35e12 * 0.8)
    assert made.seconds == pytest.approx(expected, rel=1e-12)
    assert (made.tokens, made.prefilled, made.preemptions) == (rows * length, rows * prompt, 0)


def test_a_step_of_many_tokens_equals_its_steps_one_by_one():
    one_by_one = sum(sim.decode_seconds(H100, 7, 7 * (100 + i), 1) for i in range(50))
    assert sim.decode_seconds(H100, 7, 700, 50) == pytest.approx(one_by_one, rel=1e-12)


@pytest.mark.parametrize("cache", [1500, 3000, 10**6])
def test_tokens_are_conserved_whatever_the_cache(cache):
    rng = np.random.default_rng(3)
    groups = [sim.Lengths(150, 8, 1000).draw(rng, 8) for _ in range(20)]
    made = sim.run_engine(H100, groups, cache, prompt=50)
    assert made.tokens == sum(map(sum, groups))
    assert (made.preemptions > 0) == (cache < 10**6)
    assert made.prefilled >= 20 * 50


def test_a_prompt_is_computed_once_for_a_question():
    assert sim.run_engine(H100, [[5] * 8] * 3, 10**6, prompt=100).prefilled == 300


def test_an_engine_runs_no_more_rows_than_it_may():
    made = sim.run_engine(H100, [[10]] * 600, 10**6, prompt=1)
    assert made.most_running == sim.MAX_SEQUENCES
    assert made.tokens == 6000


def test_a_smaller_cache_is_never_faster():
    groups = [sim.Lengths(150, 5, 1000).draw(np.random.default_rng(4), 8) for _ in range(10)]
    seconds = [sim.run_engine(H100, groups, cache, prompt=50).seconds for cache in (1500, 4000, 10**6)]
    assert seconds == sorted(seconds, reverse=True)


def test_a_response_longer_than_the_cache_is_refused():
    with pytest.raises(ValueError, match="does not fit in a cache of 1000"):
        sim.run_engine(H100, [[990]], 1000, prompt=50)


def test_lengths_have_the_median_and_the_99th_percentile_they_are_given():
    drawn = sim.Lengths(1600, 5, 10**9).draw(np.random.default_rng(0), 200_000)
    assert np.quantile(drawn, [0.5, 0.99]) == pytest.approx([1600, 8000], rel=0.02)
    assert max(sim.Lengths(1600, 5, 8192).draw(np.random.default_rng(0), 20_000)) == 8192


def test_a_batch_has_the_rows_of_the_recipe():
    batch = sim.draw_batch(ahead.BASE, 0.5, np.random.default_rng(0))
    assert sum(map(len, batch.generated)) == 960
    assert (len(batch.stored), len(batch.candidates)) == (64, 256)
    assert sum(map(len, sim.draw_batch(ahead.BASE, 0, np.random.default_rng(0)).generated)) == 1024


@pytest.mark.parametrize(("generating", "training"), [(4, 4), (1, 7), (6, 2)])
def test_one_ahead_takes_the_longer_half_and_a_sync(generating, training):
    batches = ahead.batches_of(sim.Lengths(1000, 1, 8192), 0.5, seed=0, count=4)  # all the same
    generated = max(one.seconds for one in sim.generate(H100, batches[0], generating, sim.ALONE))
    trained = sim.train(H100, batches[0], training).total + sim.OTHER
    steps = sim.one_ahead(H100, batches, generating, training)
    assert [step.seconds for step in steps] == [max(generated, trained) + sim.sync_seconds()] * 3


def test_a_synchronous_step_is_the_sum_of_its_parts():
    batch = sim.draw_batch(ahead.BASE, 0.5, np.random.default_rng(0))
    step = sim.synchronous(H100, batch, 8)
    assert step.seconds == pytest.approx(step.generate + step.train + step.overhead)
    assert step.overhead == sim.sync_seconds() + sim.sleep_seconds(8) + sim.OTHER


@pytest.mark.parametrize("rho", [0.0, 0.5])
@pytest.mark.parametrize("lengths", [ahead.LENGTHS[0], ahead.LENGTHS[4], ahead.LENGTHS[8]], ids=str)
def test_no_step_is_faster_than_its_longest_response_or_its_training(lengths, rho):
    batches = ahead.batches_of(lengths, rho, seed=1, count=3)
    steps = sim.one_ahead(H100, batches, 4, 4)
    for now, following, step in zip(batches, batches[1:], steps, strict=False):
        alone = sim.decode_seconds(H100, 1, sim.PROMPT, max(map(max, following.generated)))
        assert step.seconds > max(alone, sim.train(H100, now, 4).total)
        assert sim.synchronous(H100, following, 8).seconds > alone + sim.train(H100, following, 8).total
        assert 0 <= step.idle < 1


def test_one_ahead_is_never_twice_as_fast_as_generation_and_training_in_turn():
    """Fewer GPUs do neither faster, and the longer of two times is at least half of their sum."""
    for row in FILES["cases"]:
        sync = float(row["sync_generate"]) + float(row["sync_train"])
        assert float(row["ahead_seconds"]) > max(float(row["ahead_generate"]), float(row["ahead_train"]))
        assert float(row["any_seconds"]) <= float(row["ahead_seconds"])
        assert float(row["ahead_train"]) > float(row["sync_train"])
        assert float(row["ahead_seconds"]) > sync / 2


def test_the_sum_of_cluster_md_is_reproduced():
    parts = {name: sim.layout_parts(gpu, 8, 0.5) for name, gpu in sim.GPUS.items()}
    hours = {name: {part: 700 * 8 * value / 3600 for part, value in of.items()} for name, of in parts.items()}
    guide = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    table = guide[guide.index("| | estimate |") :].split("\n\n")[0].splitlines()[2:7]
    names = ("generate", "update", "measure", "score", "overhead")
    for line, name in zip(table, names, strict=True):
        a100, h100 = (float(cell) for cell in line.rstrip(" |").split(" | ")[-2:])
        assert hours["A100"][name] == pytest.approx(a100, abs=0.6), line
        assert hours["H100"][name] == pytest.approx(h100, abs=0.6), line
    assert f"about {ahead.STATED['A100']}** | **about {ahead.STATED['H100']}**" in guide


def test_training_on_two_gpus_of_a_node_does_not_fit():
    assert [split for split in ahead.splits(H100, 8, 8192) if sim.OPTIMIZER_ROWS % split[1] == 0] == [(4, 4)]


@pytest.mark.parametrize("cut", [None, 4000])
def test_a_files_lengths_are_fitted(cut, tmp_path):
    drawn = sim.Lengths(1600, 5, cut or 10**9).draw(np.random.default_rng(0), 20_000)
    rows = [{"kind": "fresh", "tokens": n, "finish": "length" if n == cut else "stop"} for n in drawn]
    stored = {"kind": "stored", "tokens": 10**6, "finish": "stop"}
    samples = [{"response_tokens": row["tokens"], "finish": row["finish"]} for row in rows]
    (tmp_path / "rollouts.jsonl").write_text(json.dumps({"questions": [{"responses": [*rows, stored]}]}) + "\n")
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    for name in ("rollouts.jsonl", "samples.jsonl"):
        assert sim.fit(tmp_path / name) == pytest.approx((1600, 5), rel=0.05)


def test_a_file_whose_responses_are_mostly_cut_off_is_refused(tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"response_tokens": 9, "finish": "length"}\n' * 4)
    with pytest.raises(ValueError, match="4 of 4 responses are cut off"):
        sim.fit(tmp_path / "samples.jsonl")


@pytest.mark.parametrize("chosen", [1, 20])
def test_the_csv_file_is_what_the_simulation_gives(chosen):
    row = FILES["cases"][chosen]
    lengths = sim.Lengths(int(row["median"]), int(row["tail"]), int(row["limit"]))
    again = ahead.case(row["gpu"], int(row["gpus"]), lengths, float(row["rho"]), seed=0)
    assert {name: str(value) for name, value in again.items()} == row
    other = ahead.case(row["gpu"], int(row["gpus"]), lengths, float(row["rho"]), seed=1)
    assert other["ahead_seconds"] != again["ahead_seconds"]


def test_the_page_has_the_figures_of_the_csv_files():
    page = (ROOT / "docs" / "ahead.md").read_text(encoding="utf-8")
    assert ahead.filled(page, ahead.tables(*FILES.values())) == page


def test_a_page_without_a_place_for_a_table_is_named():
    with pytest.raises(ValueError, match="no place for the table 'parts'"):
        ahead.filled("text", {"parts": "| a |"})
