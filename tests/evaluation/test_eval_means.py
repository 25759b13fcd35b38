"""A benchmark of a user's own changes no mean of the project's benchmarks, and says where it differs from one."""

from __future__ import annotations

from pathlib import Path

import pytest
from eval_builders import HERE, definition, results
from results_builder import make_results

from exgrpo_orlhf.evaluation import benchmarks
from exgrpo_orlhf.evaluation.benchmarks import DEFINITIONS, BenchmarkError, Definitions, override
from exgrpo_orlhf.evaluation.compare import compare
from exgrpo_orlhf.evaluation.results import metrics, summarise
from exgrpo_orlhf.evaluation.results_table import means
from exgrpo_orlhf.evaluation.samples import SampleFile
from exgrpo_orlhf.files import write_json

ASKED = {"math500": (12, 12, 12, 1), "arc_c": (8, 8, 8, 1)}


def written(folder: Path, text: str) -> Path:
    path = folder / "own.toml"
    path.write_text(text)
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
    said = {name: over for name, _, over in means(more)}
    assert "over 2 of 2: MATH-500, ARC-c; not in it: GPQA-Diamond" in said["macro mean"]
    assert "20 questions" in said["micro mean"]
    assert said["own mean"].startswith("macro; over 1 of 1: GPQA-Diamond")


def test_benchmarks_of_ones_own_alone_have_a_mean(tmp_path):
    results = make_results(tmp_path, ASKED)
    facts = {name: {**known, "in_mean": False} for name, known in results["benchmarks"].items()}
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
    macro = lambda found: next(line for line in found.table().split("\n") if line.startswith("macro")).split()
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
        found = results(tmp_path / name)["means"]
        assert (found["macro"], found["micro"]) == (expected["macro"], expected["micro"])
        assert found["groups"]["chains"] == expected["groups"]["chains"]
        assert found["groups"]["own"]["of"] == ["mine"]
    own_suite = tmp_path / "suite.toml"
    own_suite.write_text('[suites]\nours = ["chains", "mine"]\n')
    bench(*words, "--suite", "ours", *mine[2:], "--definitions", own_suite, "--out", tmp_path / "ours")
    assert results(tmp_path / "ours")["means"]["macro"]["benchmarks"] == ["chains", "mine"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[suites]\npaper = ["gsm8k"]\n', "suite 'paper' is defined already; give yours another name"),
        (
            '[mine]\ntitle = "Mine"\nverifier = "math"\ngroup = "math"\nfiles = [{ name = "x.jsonl" }]\n',
            "group 'math' is the project's, and its mean would change; give a group of your own",
        ),
        (
            '[math500]\ntitle = "Mine"\nverifier = "math"\ngroup = "own"\nfiles = [{ name = "x.jsonl" }]\n',
            "math500 is of group 'math', not 'own'",
        ),
    ],
)
def test_a_file_of_ones_own_that_would_change_a_mean_is_refused(tmp_path, text, said):
    with pytest.raises(BenchmarkError, match=said):
        Definitions((DEFINITIONS, written(tmp_path, text)))


def test_a_block_added_to_the_projects_own_file_does_not_join_the_mean_of_a_suite_unlisted(tmp_path, monkeypatch):
    block = '\n[mine]\ntitle = "Mine"\nverifier = "math"\ngroup = "math"\nfiles = [{ name = "x.jsonl" }]\n'
    text = DEFINITIONS.read_text(encoding="utf-8") + block
    monkeypatch.setattr(benchmarks, "DEFINITIONS", written(tmp_path, text))
    with pytest.raises(BenchmarkError, match="group 'math' is the mean of suite 'math', which does not list mine"):
        Definitions((tmp_path / "own.toml",))
    listed = text.replace('math = ["aime24"', 'math = ["mine", "aime24"')
    assert "mine" in Definitions((written(tmp_path, listed),)).group("math")


def test_a_block_that_replaces_one_stays_in_its_group_and_says_what_it_changes(tmp_path):
    block = '[math500]\ntitle = "Mine"\nverifier = "math"\nsamples = 4\nfiles = [{ name = "x.jsonl" }]\n'
    definitions = Definitions((DEFINITIONS, written(tmp_path, block)))
    found = override(definitions.benchmark("math500"), max_tokens=64)
    assert definitions.group("math") == Definitions().group("math")
    assert not found.own
    assert found.departures == (
        "samples 4, not 1",
        "rows None, not 500",
        "questions as own.toml says",
        "max_tokens 64, not 8192",
    )
    assert Definitions().benchmark("math500").departures == ()
