"""results.json against numbers computed by hand from ten lines of samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from results_builder import line

from exgrpo_orlhf.evaluation.results import metrics, summarise
from exgrpo_orlhf.evaluation.samples import SampleFile

LINES = [  # row, sample, verdict, plain, extracted, finish, tokens, sound, group
    (0, 0, "correct", "correct", "4", "stop", 10, True, "a"),
    (0, 1, "correct", "wrong", "4", "stop", 20, False, "a"),
    (0, 2, "wrong", "wrong", "5", "length", 64, None, "a"),
    (0, 3, "wrong", "wrong", "6", "stop", 30, None, "a"),
    (3, 0, "wrong", "correct", "7", "stop", 10, None, "b"),
    (3, 1, "no_answer", "no_answer", None, "length", 64, None, "b"),
    (3, 2, "timeout", "timeout", None, "stop", 12, None, "b"),
    (3, 3, "correct", "correct", "8", "length", 64, False, "b"),
    (7, 0, "error", "wrong", None, "stop", 1, None, "a"),
    (7, 1, "wrong", "wrong", "1", "stop", 1, None, "a"),
    (7, 2, "wrong", "wrong", "1", "stop", 2, None, "a"),
    (7, 3, "wrong", "wrong", "2", "stop", 2, None, "a"),
]


def made(folder: Path, lines=LINES) -> SampleFile:
    names = ("plain", "extracted", "finish", "response_tokens", "sound", "group")
    file = SampleFile(folder / "samples.jsonl")
    file.write(line(*each[:3], **dict(zip(names, each[3:], strict=True))) for each in lines)
    return file


def entry(group: str, of: list[str], whole: bool = True) -> dict:
    counts = {"samples": 4, "questions": 3}
    return {"title": group, "group": group, "of_group": of, "in_mean": True, "whole": whole, **counts}


def test_every_number_is_what_the_lines_say(tmp_path):
    results = summarise("x", {}, {"one": entry("g", ["one"])}, {}, {"one": made(tmp_path)}, {"one": 3.21})
    one = results["benchmarks"]["one"]
    assert one["avg"]["k"] == 4
    assert one["avg"]["value"] == pytest.approx((2 / 4 + 1 / 4 + 0) / 3)
    assert one["avg"]["low"] < one["avg"]["value"] < one["avg"]["high"]
    passed = {k: each["value"] for k, each in one["pass"].items()}
    assert passed == pytest.approx({"1": 0.25, "2": ((1 - 1 / 6) + 1 / 2 + 0) / 3, "4": 2 / 3})
    # Row 0: 4 leads with two votes and is right; row 3: 7 and 8 have one each, of which 8 is right; row 7: 1 leads.
    assert {k: each["value"] for k, each in one["maj"].items()} == pytest.approx({"4": (1 + 1 / 2 + 0) / 3})
    assert one["rates"] == pytest.approx(
        {"truncated": 3 / 12, "correct_truncated": 1 / 12, "no_answer": 1 / 12, "timeout": 1 / 12, "error": 1 / 12}
    )
    assert one["lucky_guess_rate"] == pytest.approx(2 / 3)
    assert one["plain"]["value"] == pytest.approx((1 / 4 + 2 / 4 + 0) / 3)
    assert one["plain"]["disagreements"] == 2
    assert {name: each["value"] for name, each in one["by_group"].items()} == pytest.approx({"a": 0.25, "b": 0.25})
    assert {name: each["questions"] for name, each in one["by_group"].items()} == {"a": 2, "b": 1}
    assert (one["tokens"]["prompt"], one["tokens"]["response"]) == (60, 280)
    assert one["tokens"]["response_mean"] == pytest.approx(280 / 12)
    assert one["seconds"] == 3.2
    assert results["complete"]


def test_macro_and_micro_means_and_those_that_are_named_for_more_than_was_run(tmp_path):
    easy = [(row, sample, "correct", None, "1", "stop", 1, None, None) for row in range(9) for sample in range(4)]
    files = {"one": made(tmp_path / "one"), "two": made(tmp_path / "two", easy)}
    facts = {"one": entry("g", ["one", "two"]), "two": entry("g", ["one", "two"])}
    results = summarise("x", {}, facts, {}, files, {})
    assert results["means"]["macro"]["value"] == pytest.approx((0.25 + 1) / 2)
    assert results["means"]["micro"]["value"] == pytest.approx((3 * 0.25 + 9 * 1) / 12)
    assert results["means"]["micro"]["questions"] == 12
    logged = metrics(results)
    assert logged["eval/avg"] == logged["eval/avg_g"] == pytest.approx(0.625)
    assert logged["eval/one/avg_at_4"] == pytest.approx(0.25)
    assert logged["eval/one/pass_at_4"] == pytest.approx(2 / 3)
    assert logged["eval/one/timeout_rate"] == pytest.approx(1 / 12)
    assert results["benchmarks"]["two"]["plain"] is None
    assert results["benchmarks"]["two"]["by_group"] == {}

    absent = {"three": {"title": "Three", "group": "h", "reason": "no network"}}
    for part in (
        summarise("x", {}, facts, absent, files, {}),
        summarise("x", {}, {**facts, "two": entry("g", ["one", "two"], whole=False)}, {}, files, {}),
    ):
        assert not part["complete"]
        assert "eval/avg" not in metrics(part)
    assert "eval/avg_g" in metrics(summarise("x", {}, facts, absent, files, {})), "that group was run whole"
    alone = summarise("x", {}, {"one": facts["one"]}, {}, {"one": files["one"]}, {})
    assert alone["means"]["groups"]["g"]["of"] == ["one", "two"]
    assert "eval/avg_g" not in metrics(alone)


def test_intervals_do_not_depend_on_what_stands_beside_a_benchmark(tmp_path):
    file, one = made(tmp_path), entry("g", ["one"])
    alone = summarise("x", {}, {"one": one}, {}, {"one": file}, {})["benchmarks"]
    both = summarise("y", {}, {"two": one, "one": one}, {}, {"two": file, "one": file}, {})["benchmarks"]
    assert alone["one"] == both["one"] == both["two"]
