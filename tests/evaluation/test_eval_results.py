"""results.json against numbers by hand, and the means, which a benchmark of a user's own does not change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eval_builders import HERE, definition
from eval_builders import results as results_of
from results_builder import line, make_results

from exgrpo_orlhf.evaluation import benchmarks
from exgrpo_orlhf.evaluation.benchmarks import DEFINITIONS, BenchmarkError, Definitions
from exgrpo_orlhf.evaluation.results_table import means
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.tracking.samples import SampleFile
from exgrpo_orlhf.tracking.scores import metrics, summarise, votes
from exgrpo_orlhf.workers.fork_server import close_workers

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


def entry(group: str, of: list[str], is_complete: bool = True) -> dict:
    counts = {"samples": 4, "questions": 3}
    return {"title": group, "group": group, "of_group": of, "in_mean": True, "whole": is_complete, **counts}


@pytest.mark.slow
def test_the_grader_s_equal_answers_are_one_vote(tmp_path):
    answers = ["1/2", "0.5", "5", "x=5", None, "70,000", "70000", "70000", "\\frac12"]
    [keys] = votes([answers], Verifier("math", workers=1))
    try:
        assert [keys.index(key) for key in keys] == [0, 0, 2, 2, 4, 5, 5, 5, 0]
        lines = [(0, i, "wrong", None, text, "stop", 1, None, None) for i, text in enumerate(("5", "x=5", "5.0"))]
        lines += [(0, i, "correct", None, "0.5", "stop", 1, None, None) for i in (3, 4)]
        facts = {"one": {**entry("g", ["one"]), "verifier": "math"}}
        for grader, expected in ((Verifier("math", workers=1, format="think_answer"), 0.0), (None, 1.0)):
            results = summarise("x", {}, facts, {}, {"one": made(tmp_path, lines)}, {}, grader)
            assert results["benchmarks"]["one"]["maj"]["5"]["value"] == expected
    finally:
        close_workers()


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


@pytest.mark.parametrize(("verdict", "expected"), [("no_answer", {"4": 0}), ("wrong", {})])
def test_votes_are_0_where_there_is_no_answer_and_not_measured_where_none_is_extracted(verdict, expected, tmp_path):
    """A run that keeps its best checkpoint by votes would end at an evaluation that does not measure them."""
    lines = [(0, i, verdict, None, None, "stop", 1, None, None) for i in range(4)]
    results = summarise("x", {}, {"one": entry("g", ["one"])}, {}, {"one": made(tmp_path, lines)}, {})
    assert {k: each["value"] for k, each in results["benchmarks"]["one"]["maj"].items()} == expected


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
        summarise("x", {}, {**facts, "two": entry("g", ["one", "two"], is_complete=False)}, {}, files, {}),
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


# -- benchmarks of a user's own ----------------------------------------------------------------------------------------


SIZES = {"math500": (12, 12, 12, 1), "arc_c": (8, 8, 8, 1)}


def block(folder: Path, name: str, **more: str) -> Path:
    """A file with one block, or with suites."""
    keys = {"title": '"Mine"', "verifier": '"math"', "files": '[{ name = "x.jsonl" }]', **more}
    path = folder / "own.toml"
    path.write_text(f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items()))
    return path


def beside(folder: Path, **own: object) -> dict:
    """Results with GPQA as if it were a user's own benchmark."""
    results = make_results(folder, {**SIZES, "gpqa": (5, 5, 5, 1)})
    facts = results["benchmarks"]
    facts["gpqa"] |= {"in_mean": False, "group": "own", "of_group": ["gpqa"], **own}
    facts["arc_c"]["of_group"] = ["arc_c"]
    files = {name: SampleFile(folder / name / "samples.jsonl") for name in facts}
    return summarise(results["name"], results["record"], facts, {}, files, {})


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_benchmark_beside_the_suite_leaves_every_mean_of_it_as_it_was(tmp_path, is_complete):
    alone, more = make_results(tmp_path / "a", SIZES), beside(tmp_path / "b", whole=is_complete)
    for name in ("macro", "micro"):
        assert more["means"][name] == alone["means"][name]
    logged = metrics(more)
    assert all(logged[name] == value for name, value in metrics(alone).items())
    assert ("eval/avg_own" in logged) == is_complete
    covered = {name: over for name, _, over in means(more)}
    assert "over 2 of 2: MATH-500, ARC-c; not in it: GPQA-Diamond" in covered["macro mean"]
    assert "20 questions" in covered["micro mean"]
    assert covered["own mean"].startswith("macro; over 1 of 1: GPQA-Diamond")


def test_benchmarks_of_ones_own_alone_have_a_mean(tmp_path):
    results = make_results(tmp_path, SIZES)
    facts = {name: {**entry, "in_mean": False} for name, entry in results["benchmarks"].items()}
    files = {name: SampleFile(tmp_path / name / "samples.jsonl") for name in facts}
    assert summarise("x", {}, facts, {}, files, {})["means"] == results["means"]


def test_an_evaluation_of_a_suite_and_a_block_of_ones_own_has_the_mean_of_the_suite(warm_model, tmp_path, bench):
    words = ("--model", warm_model, *HERE, "--limit", 4, "--max-tokens", 24, "--template", "plain")
    mine = ("--benchmarks", "mine", "--definitions", definition(tmp_path))
    bench(*words, "--suite", "chains", "--out", tmp_path / "suite")
    expected = results_of(tmp_path / "suite")["means"]
    bench(*words, *mine, "--out", tmp_path / "suite")  # added later, to the same folder
    averages = results_of(tmp_path / "suite")["means"]
    assert (averages["macro"], averages["micro"]) == (expected["macro"], expected["micro"])
    assert averages["groups"]["own"]["of"] == ["mine"]
    path = tmp_path / "suite" / "config.json"
    written = json.loads(path.read_text())
    assert written["suite"] == ["chains", "chains_beyond"]
    del written["suite"]  # as a version that noted no suite left it
    path.write_text(json.dumps(written))
    own_suite = tmp_path / "suite.toml"
    own_suite.write_text('[suites]\nours = ["chains", "mine"]\nalone = ["mine"]\n')
    bench(*words, "--suite", "alone", *mine[2:], "--definitions", own_suite, "--out", tmp_path / "suite")
    assert {*results_of(tmp_path / "suite")["means"]["macro"]["benchmarks"]} == {"chains", "chains_beyond", "mine"}
    bench(*words, "--suite", "ours", *mine[2:], "--definitions", own_suite, "--out", tmp_path / "ours")
    assert results_of(tmp_path / "ours")["means"]["macro"]["benchmarks"] == ["chains", "mine"]


def test_a_file_of_ones_own_that_would_change_a_mean_or_a_benchmark_is_refused(tmp_path):
    suite = tmp_path / "suite.toml"
    suite.write_text('[suites]\npaper = ["gsm8k"]\n')
    for file, message in (
        (suite, "suite 'paper' is defined already; give yours another name"),
        (block(tmp_path, "mine", group='"math"'), "group 'math' is the project's, and its mean would change"),
    ):
        with pytest.raises(BenchmarkError, match=message):
            Definitions((DEFINITIONS, file))
    with pytest.raises(BenchmarkError, match="math500 is defined already; give yours another name"):
        Definitions((DEFINITIONS, block(tmp_path, "math500")))


def test_a_block_added_to_the_projects_own_file_does_not_join_the_mean_of_a_suite_unlisted(tmp_path, monkeypatch):
    text = DEFINITIONS.read_text(encoding="utf-8") + block(tmp_path, "mine", group='"math"').read_text()
    file = tmp_path / "project.toml"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(benchmarks, "DEFINITIONS", file)
    with pytest.raises(BenchmarkError, match="group 'math' is the mean of suite 'math', which does not list mine"):
        Definitions((file,))
    file.write_text(text.replace('math = ["aime24"', 'math = ["mine", "aime24"'), encoding="utf-8")
    assert "mine" in Definitions((file,)).group("math")
