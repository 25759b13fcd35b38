"""A benchmark of a user's own changes no mean of the project's benchmarks, and says where it differs from one."""

from __future__ import annotations

from pathlib import Path

import pytest
from eval_builders import HERE, definition, results
from results_builder import make_results

from exgrpo_orlhf.evaluation import benchmarks
from exgrpo_orlhf.evaluation.benchmarks import DEFINITIONS, BenchmarkError, Definitions
from exgrpo_orlhf.evaluation.compare import compare
from exgrpo_orlhf.evaluation.results import metrics, summarise
from exgrpo_orlhf.evaluation.results_table import means
from exgrpo_orlhf.evaluation.samples import SampleFile
from exgrpo_orlhf.files import write_json

ASKED = {"math500": (12, 12, 12, 1), "arc_c": (8, 8, 8, 1)}


def block(folder: Path, name: str, **more: str) -> Path:
    """A file with one block, or with suites."""
    keys = {"title": '"Mine"', "verifier": '"math"', "files": '[{ name = "x.jsonl" }]', **more}
    path = folder / "own.toml"
    path.write_text(f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items()))
    return path


def beside(folder: Path, **own: object) -> dict:
    """Results with GPQA as if it were a user's own benchmark."""
    results = make_results(folder, {**ASKED, "gpqa": (5, 5, 5, 1)})
    facts = results["benchmarks"]
    facts["gpqa"] |= {"in_mean": False, "group": "own", "of_group": ["gpqa"], **own}
    facts["arc_c"]["of_group"] = ["arc_c"]
    files = {name: SampleFile(folder / name / "samples.jsonl") for name in facts}
    return summarise(results["name"], results["record"], facts, {}, files, {})


@pytest.mark.parametrize("whole", [True, False])
def test_a_benchmark_beside_the_suite_leaves_every_mean_of_it_as_it_was(tmp_path, whole):
    alone, more = make_results(tmp_path / "a", ASKED), beside(tmp_path / "b", whole=whole)
    for name in ("macro", "micro"):
        assert more["means"][name] == alone["means"][name]
    logged = metrics(more)
    assert all(logged[name] == value for name, value in metrics(alone).items())
    assert ("eval/avg_own" in logged) == whole
    covered = {name: over for name, _, over in means(more)}
    assert "over 2 of 2: MATH-500, ARC-c; not in it: GPQA-Diamond" in covered["macro mean"]
    assert "20 questions" in covered["micro mean"]
    assert covered["own mean"].startswith("macro; over 1 of 1: GPQA-Diamond")


def test_benchmarks_of_ones_own_alone_have_a_mean(tmp_path):
    results = make_results(tmp_path, ASKED)
    facts = {name: {**entry, "in_mean": False} for name, entry in results["benchmarks"].items()}
    files = {name: SampleFile(tmp_path / name / "samples.jsonl") for name in facts}
    assert summarise("x", {}, facts, {}, files, {})["means"] == results["means"]


def test_a_comparison_has_the_same_mean_with_a_benchmark_beside_the_suite(tmp_path):
    for name, skill in (("a", 0.3), ("b", 0.6)):
        make_results(tmp_path / name, ASKED, skill=skill)
        more = make_results(tmp_path / f"{name}2", {**ASKED, "gpqa": (5, 5, 5, 1)}, skill=skill)
        more["benchmarks"]["gpqa"]["in_mean"] = False
        write_json(tmp_path / f"{name}2" / "results.json", more)
    before = compare(tmp_path / "a", tmp_path / "b")
    after = compare(tmp_path / "a2", tmp_path / "b2")
    assert after.macro == before.macro
    macro = lambda result: next(line for line in result.table().split("\n") if line.startswith("macro")).split()
    assert macro(after) == macro(before)
    assert "not in the mean: GPQA-Diamond" in after.table()


def test_an_evaluation_of_a_suite_and_a_block_of_ones_own_has_the_mean_of_the_suite(warm_model, tmp_path, bench):
    words = ("--model", warm_model, *HERE, "--limit", 4, "--max-tokens", 24, "--template", "plain")
    mine = ("--benchmarks", "mine", "--definitions", definition(tmp_path))
    bench(*words, "--suite", "chains", "--out", tmp_path / "suite")
    expected = results(tmp_path / "suite")["means"]
    bench(*words, "--suite", "chains", *mine, "--out", tmp_path / "both")
    bench(*words, *mine, "--out", tmp_path / "suite")  # added later, to the same folder
    for name in ("both", "suite"):
        averages = results(tmp_path / name)["means"]
        assert (averages["macro"], averages["micro"]) == (expected["macro"], expected["micro"])
        assert averages["groups"]["chains"] == expected["groups"]["chains"]
        assert averages["groups"]["own"]["of"] == ["mine"]
    own_suite = tmp_path / "suite.toml"
    own_suite.write_text('[suites]\nours = ["chains", "mine"]\n')
    bench(*words, "--suite", "ours", *mine[2:], "--definitions", own_suite, "--out", tmp_path / "ours")
    assert results(tmp_path / "ours")["means"]["macro"]["benchmarks"] == ["chains", "mine"]


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
