"""The folder of an evaluation: what is damaged or gone is named, and nothing is generated on top of it."""

from __future__ import annotations

import pytest
from eval_builders import results, samples


@pytest.mark.parametrize(
    ("name", "whole", "said"),
    [
        ("results.json", False, "is damaged, it is not JSON"),
        ("sessions.json", False, "is damaged, it is not JSON"),
        ("config.json", False, "is damaged, it is not JSON"),
        ("config.json", True, "does not exist; without it nothing says how the responses were made"),
        ("sessions.json", True, "does not exist; without it nothing says what generated the responses"),
    ],
)
def test_a_file_of_the_folder_that_is_damaged_or_gone_is_named(name, whole, said, tmp_path, chains):
    """Whole: deleted, else cut in half. Nothing is generated on what nobody can compare."""
    chains("--limit", 4)
    path = tmp_path / name
    half = b"" if whole else path.read_bytes()[: path.stat().st_size // 2]
    path.unlink()
    if not whole:
        path.write_bytes(half)
    error = chains("--limit", 4, status=2)
    assert f"{path} {said}" in error
    assert "Traceback" not in error
    assert len(samples(tmp_path)) == 4
    if name == "results.json":
        path.unlink()
        chains("--limit", 4)
        assert results(tmp_path)["benchmarks"]["chains"]["questions"] == 4


def test_an_evaluation_that_is_not_complete_says_how_many_of_its_responses_there_are(tmp_path, chains, bench):
    chains("--limit", 10, "--samples", 2)
    path = tmp_path / "chains" / "samples.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:6]))
    assert "was extended and did not come to its end; continue that first (chains 6/20 responses)" in bench(
        "regrade", tmp_path, status=2
    )
    (tmp_path / "results.json").unlink()
    said = f"{tmp_path}: not complete: chains 6/20 responses; the command that began it continues it"
    for words in (("regrade", tmp_path), ("compare", tmp_path, tmp_path), ("report", tmp_path, "--html", "x.html")):
        assert said in bench(*words, status=2)
    path.unlink()
    assert "not complete: chains 0/20 responses" in bench("regrade", tmp_path, status=2)
