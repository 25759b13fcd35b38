"""The study's figures: they come from its files, and what it measures is measured."""

import csv
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from run_builders import ROOT, small_bindings
from study_builders import made

from exgrpo_orlhf import config
from exgrpo_orlhf.study.comparison import compare
from exgrpo_orlhf.study.comparison_tables import curves_csv, values_csv
from exgrpo_orlhf.tracking.metrics_log import MetricsLog

FIGURES = ROOT / "docs" / "study"
sys.path.insert(0, str(FIGURES))  # the document's own modules lie beside it
import build  # noqa: E402
import combined  # noqa: E402
import forgetting  # noqa: E402
import luck  # noqa: E402
import quarters  # noqa: E402
from document import Document  # noqa: E402


@pytest.fixture
def document(tmp_path: Path) -> Document:
    rates = {"tokens": 1e5, "seconds": 6.0}
    curves = [
        *(made("on_policy", seed, [0.2, 0.3, 0.4 + seed / 100], **rates) for seed in range(3)),
        *(made("ours", seed, [0.2, 0.5, 0.6 + seed / 50], **rates) for seed in range(3)),
        *(made("bad", seed, [0.2, 0.3, 0.1], **rates) for seed in range(3)),
    ]
    (tmp_path / "toy.csv").write_text(values_csv([compare("eval/x", curves, "on_policy")]), encoding="utf-8")
    (tmp_path / "luck.csv").write_text(
        "regime,what,seed,sound\nweak,paper,0,0.25\nweak,paper,1,0.35\n", encoding="utf-8"
    )
    return Document(tmp_path)


def test_places_are_filled_with_the_figures_of_the_files(document: Document) -> None:
    assert document.fill("{{mean toy ours final}}") == "0.620 ± 0.050"  # t(0.975, 2) · 0.02 / √3
    assert document.fill("{{difference toy ours on_policy final}}") == "+0.210 [+0.185, +0.235]"
    assert document.fill("{{p toy ours final p}}, {{p toy ours final p_exact}}") == "0.0008, 0.2500"
    assert document.fill("{{family toy}}") == "2"
    assert document.fill("{{collapsed toy bad}}, {{collapsed toy ours}}") == "3 of 3, 0 of 3"
    assert document.fill("{{column luck sound regime=weak what=paper}}") == "0.300 ± 0.635"
    assert document.fill("{{means luck regime,what sound seed=1}}") == "| luck/weak/paper | 0.350 |"
    assert document.fill("no place {here}") == "no place {here}"


def test_variants_of_two_parts_are_compared_after_as_many_steps_or_tokens(document: Document) -> None:
    for part, name, factor in (("toy", "ours", 1), ("other", "late", 2)):
        lines = [
            f"eval/x,{name},{seed},{step},{step * 1e5},0,{0.01 * step * seed * factor},"
            for seed in (1, 2)
            for step in (0, 10, 20)
        ]
        head = "metric,variant,seed,step,tokens,seconds,value,run"
        (document.folder / f"{part}_curves.csv").write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
    # 0.15 and 0.3 of seeds 1 and 2; t(0.975, 1) = 12.706
    assert document.fill("{{gain_after other late toy ours 15}}") == "+0.225 [-0.728, +1.178]"
    assert document.fill("{{gain_at other late toy ours 1}}") == "+0.150 [-0.485, +0.785]"


def test_runs_of_several_suites_are_compared_together_over_their_common_seeds(tmp_path: Path, monkeypatch) -> None:
    parts = {
        "one": [made("plain", seed, [0.2, 0.3, 0.4 + seed / 100]) for seed in range(4)],
        "two": [made("new", seed, [0.2, 0.5, 0.7 + seed / 50]) for seed in range(1, 4)],
    }
    for name, curves in parts.items():
        (tmp_path / f"{name}_curves.csv").write_text(curves_csv([compare("eval/x", curves, None)]), encoding="utf-8")
    of = {"one": {"base": "plain"}, "two": {"new": "new"}}
    half = {**of, "three": {"more": "more"}}  # not run yet
    both = {"both": combined.Combined("base", of), "half": combined.Combined("base", half)}
    monkeypatch.setattr(combined, "PARTS", both)
    combined.make(tmp_path)
    assert not list(tmp_path.glob("half*"))
    expected = [*parts["one"][1:], *parts["two"]]
    renamed = [replace(c, run=replace(c.run, variant={"plain": "base"}.get(c.run.variant, "new"))) for c in expected]
    together = compare("eval/x", renamed, "base")
    with (tmp_path / "both.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "difference"]
    values = {(row["measure"], row["variant"]): (float(row["value"]), float(row["p_holm"])) for row in rows}
    assert values == {(d.measure, d.variant): (d.mean.value, d.p_holm) for d in together.differences}
    monkeypatch.setattr(combined, "PARTS", {"both": combined.Combined("base", {**of, "one": {"base": "nobody"}})})
    with pytest.raises(KeyError, match=r"one_curves\.csv has no variant nobody"):
        combined.make(tmp_path)


def test_the_committed_files_of_combined_parts_are_made_of_the_committed_curves(tmp_path: Path, monkeypatch) -> None:
    """Write them again with python docs/study/build.py --document."""
    monkeypatch.setattr(combined, "PICTURES", ())  # which take seconds
    for path in FIGURES.glob("*_curves.csv"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    combined.make(tmp_path)
    for part in combined.PARTS:
        ours, theirs = (
            list(csv.DictReader((folder / f"{part}.csv").read_text(encoding="utf-8").splitlines()))
            for folder in (tmp_path, FIGURES)
        )
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            numbers = [name for name, cell in other.items() if cell and name in ("value", "low", "high", "p", "p_holm")]
            assert {**one, **dict.fromkeys(numbers)} == {**other, **dict.fromkeys(numbers)}
            assert [float(one[n]) for n in numbers] == pytest.approx([float(other[n]) for n in numbers], abs=1e-9)


def test_what_survives_a_correction_over_all_parts_is_named(document: Document) -> None:
    """Two parts of the same runs, with p = 0.03 for ours: below 0.05 within its part, 2 × 0.03 over both."""
    text = (document.folder / "toy.csv").read_text(encoding="utf-8")
    p = document.p_of("toy", "ours", "final", "p")
    (document.folder / "suites").mkdir()
    for part in ("toy", "twin"):
        (document.folder / "suites" / f"{part}.gin").touch()
        (document.folder / f"{part}.csv").write_text(text.replace(str(p), "0.03"), encoding="utf-8")
    twins = Document(document.folder)
    assert twins.fill("{{families}}: {{surviving final}}") == "4: `toy/bad`, `twin/bad`"
    assert twins.fill("{{cost}}") == "18 runs, 0.6 hours"


def test_study_reports_no_seed_it_was_tuned_on() -> None:
    paths = list(FIGURES.glob("study_*.csv"))
    assert len(paths) > 4
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            seeds = {row["seed"] for row in csv.DictReader(file)} - {""}
        assert seeds.isdisjoint({"100", "101"}), path  # gin/recipes/one_rollout_beside.gin was chosen on these


def test_auc_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(0)
    scores, positive = rng.integers(6, size=60).astype(float), rng.random(60) < 0.4
    pairs = list(itertools.product(scores[positive], scores[~positive]))
    brute = sum((high > low) + 0.5 * (high == low) for high, low in pairs) / len(pairs)
    assert luck.auc(scores, positive) == pytest.approx(brute, abs=1e-12)
    assert luck.auc(scores, np.ones(60, bool)) is None


def test_lucky_guesses_are_recognised_by_the_checker_and_separated_by_entropy(warm_model: Path) -> None:
    experiment = config.load(
        ["toy.gin"], small_bindings(warm_model, "ModularChains.count = 200", "train.group_size = 8")
    )
    responses, unmastered = luck.sampled(experiment)
    assert len(responses.sound) >= len(unmastered.sound) > 50
    row = responses.row()
    assert 0 < row["sound"] < 1
    assert row["auc_entropy"] > 0.6  # lower entropy, sounder reasoning: what the paper says
    assert {*luck.HEAD} == {"regime", "what", "seed", *row}


def test_forgotten_and_recovered_are_shares_of_the_questions_that_are_drawn_again(tmp_path: Path) -> None:
    """a: unsolved, solved, unsolved, solved; b: solved, then replayed without success, c: solved from a given
    beginning: neither counts."""
    seen = [
        [("a", "fresh", 8, 0), ("b", "fresh", 8, 3), ("c", "injected", 8, 0)],
        [("a", "fresh", 8, 1), ("b", "replayed", 7, 0), ("c", "left_out", 0, 0)],
        [("a", "fresh", 8, 0), ("b", "fresh", 8, 8)],
        [("a", "fresh", 8, 2), ("c", "continued", 8, 4)],
    ]
    run = tmp_path / "late" / "seed3"
    run.mkdir(parents=True)
    columns = [dict(zip(("id", "as", "graded", "correct"), zip(*step, strict=True), strict=True)) for step in seen]
    (run / "decisions.jsonl").write_text("".join(json.dumps({"questions": each}) + "\n" for each in columns))
    [row] = forgetting.rows(tmp_path)
    assert set(row) == {*forgetting.HEAD}
    assert (row["variant"], row["seed"]) == ("late", "3")
    assert row["forgotten"] == 1 / 2  # a, not b
    assert row["recovered"] == 1
    assert row["first_signal"] == 1
    assert row["never_solved"] == pytest.approx(1 / 3)


def test_quarters_are_means_over_the_steps_that_replay(tmp_path: Path) -> None:
    for name, shares in (("paper/seed3", [0, 0.5, 0.5, 0, 0.5, 0, 0, 0]), ("on_policy/seed3", [0] * 8)):
        log = MetricsLog(tmp_path / name / "metrics.jsonl")
        log.append(0, {"eval/greedy_accuracy": 0.2})
        for step, share in enumerate(shares, 1):
            state = {"replay/candidates": 10 * step, "replay/actual_share": share}
            log.append(step, {**state, **({"replay/age_mean": step, "replay/ess": 1 / step} if share else {})})
    rows = list(quarters.rows(tmp_path))
    assert [(row["variant"], row["seed"], row["quarter"]) for row in rows] == [("paper", "3", n) for n in (1, 2, 3, 4)]
    assert [row.get("age") for row in rows] == [2, 3, 5, None]
    assert [row["candidates"] for row in rows] == [15, 35, 55, 75]
    assert {name for row in rows for name in row} <= {*quarters.HEAD}


# -- the pages and the table of ablations ------------------------------------------------------------------------------


REAL = Document(FIGURES)  # reads each file once for all pages


def test_rows_of_variants_that_a_suite_has_no_more_are_kept_when_its_part_is_run_again():
    """All that the pages take from them was measured with settings that are gone."""
    suite = config.load_suite("docs/study/suites/study_ours.gin")
    for name in ("study_ours.csv", "study_ours_curves.csv"):
        lines = build.rows_of_removed(build.FIGURES / name, suite.variants)
        assert lines
        assert all("unbounded_pool" in line for line in lines)
    assert build.rows_of_removed(build.FIGURES / "absent.csv", ()) == []


@pytest.mark.parametrize(("text", "page"), build.PAGES.items())
def test_every_page_is_what_its_text_and_the_files_say(text: str, page: str) -> None:
    """Write the pages again with python docs/study/build.py --document."""
    filled = REAL.fill((FIGURES / text).read_text(encoding="utf-8"))
    assert filled == (ROOT / "docs" / page).read_text(encoding="utf-8")
