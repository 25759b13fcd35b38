"""docs/ablations.md names every ablation with its own words, and what the study's files say of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from run_builders import ROOT
from study_builders import made

from exgrpo_orlhf import config
from exgrpo_orlhf.study.comparison import compare
from exgrpo_orlhf.study.comparison_tables import values_csv

FIGURES = ROOT / "docs" / "study"
sys.path.insert(0, str(FIGURES))  # the document's own modules lie beside it
import ablations  # noqa: E402
import build  # noqa: E402
from document import Document  # noqa: E402

FILES = sorted([*(ROOT / "gin").glob("ablation_*.gin"), *(ROOT / "gin").glob("ablations/*.gin")])
PAGE = (ROOT / "docs" / "ablations.md").read_text(encoding="utf-8")


def cells(page: str, file: str) -> list[str]:
    """The row of a file: its name, hypothesis, bindings and findings."""
    [row] = [line for line in page.splitlines() if line.startswith(f"| `{file}` |")]
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


@pytest.mark.parametrize(("text", "page"), build.PAGES.items())
def test_every_page_is_what_its_text_and_the_files_say(text: str, page: str) -> None:
    """Write the pages again with python docs/study/build.py --document."""
    filled = Document(FIGURES).fill((FIGURES / text).read_text(encoding="utf-8"))
    assert filled == (ROOT / "docs" / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_the_bindings_of_a_row_make_the_experiment_of_its_file(file: Path) -> None:
    _, hypothesis, bindings, found = cells(PAGE, file.name)
    assert len(hypothesis) > 20
    assert found
    stated = re.findall(r"`([^`]+)`", bindings)
    assert config.load(["toy.gin"], stated).params == config.load([file]).params


def test_every_part_that_ran_an_ablation_is_in_its_row() -> None:
    document = Document(FIGURES)
    parts = document.parts()
    assert len(parts) > 15
    for part in parts:
        for variant, words in ablations._suite(document, part).variants.items():
            for file in FILES:
                if file.name in (Path(word).name for word in words) and document.has(part, variant):
                    assert f"[{part}](study.md" in cells(PAGE, file.name)[3]


SUITE = """include 'base.gin'
Suite.variants = {
    'on_policy': ('baselines/on_policy.gin',),
    'start': ('Optimizer.learning_rate = 3e-4', 'train.steps = 20'),
    'tuned': ('ablations/late_injection.gin', 'Optimizer.learning_rate = 3e-4', 'train.steps = 30'),
    'alone': ('gin/ablations/in_place.gin',),
    'waits': ('ablations/one_success.gin',),
}
Suite.baseline = 'on_policy'
"""


@pytest.fixture
def table(tmp_path: Path) -> str:
    """With a part whose suite and figures are new: one variant of it has not run."""
    rates = {"tokens": 1e5, "seconds": 6.0}
    last = {"on_policy": (0.4, 0.001), "start": (0.4, 0.001), "tuned": (0.6, 0.01), "alone": (0.3, 0.003)}
    curves = [
        made(name, seed, [0.2, 0.3, value + seed * slope], **rates)
        for name, (value, slope) in last.items()
        for seed in range(3)
    ]
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "new.gin").write_text(SUITE, encoding="utf-8")
    (tmp_path / "suites" / "later.gin").write_text(SUITE, encoding="utf-8")
    (tmp_path / "text.md").write_text("# Title\n\n## What's new?\n\n{{table new}}\n", encoding="utf-8")
    (tmp_path / "new.csv").write_text(values_csv([compare("eval/x", curves, "on_policy")]), encoding="utf-8")
    return Document(tmp_path).fill("{{ablations}}")


def test_a_new_part_is_found_and_compared_with_what_differs_in_the_ablation_alone(table: str, tmp_path: Path) -> None:
    found = cells(table, "late_injection.gin")[3]
    place = f"[new]({tmp_path.name}.md#whats-new) with `Optimizer.learning_rate = 3e-4`"
    effect = Document(tmp_path).fill("{{difference new tuned start equal_tokens}}")
    assert found.startswith(f"{place}: uncorrected, above `start` ({effect} at equal tokens, ")
    assert "; **above** `on_policy` (**+" in found
    assert found.endswith("; 3 seeds)")
    assert "**below** `on_policy`" in cells(table, "in_place.gin")[3]


def test_an_ablation_without_figures_is_not_run_yet(table: str) -> None:
    rows = {file.name: cells(table, file.name)[3] for file in FILES}
    ran = {"late_injection.gin", "in_place.gin"}
    assert {name for name, found in rows.items() if found != ablations.NOT_RUN} == ran


def test_a_file_without_a_hypothesis_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gin").write_text("# What if?\ninclude 'base.gin'\nReplayMixer.rho = 0.1\n")
    with pytest.raises(ValueError, match=r"x\.gin must begin with # Hypothesis"):
        ablations.read(tmp_path / "x.gin")
