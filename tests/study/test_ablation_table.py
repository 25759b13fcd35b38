"""The study's pages have the figures of its files, and docs/choosing.md a verdict on every ablation."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from run_builders import ROOT
from study_builders import made

from exgrpo_orlhf.config import gin_files
from exgrpo_orlhf.study.comparison import compare
from exgrpo_orlhf.study.comparison_tables import values_csv

FIGURES = ROOT / "docs" / "study"
sys.path.insert(0, str(FIGURES))  # the document's own modules lie beside it
import ablations  # noqa: E402
import build  # noqa: E402
from document import Document, DocumentError  # noqa: E402

FILES = sorted([*(ROOT / "gin").glob("ablation_*.gin"), *(ROOT / "gin").glob("ablations/*.gin")])
REAL = Document(FIGURES)  # reads each file once for all tests


@pytest.mark.parametrize(("text", "page"), build.PAGES.items())
def test_every_page_is_what_its_text_and_the_files_say(text: str, page: str) -> None:
    """Write the pages again with python docs/study/build.py --document."""
    filled = REAL.fill((FIGURES / text).read_text(encoding="utf-8"))
    assert filled == (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_every_ablation_states_a_hypothesis_and_has_a_row() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert len(FILES) > 30
    for file in FILES:
        assert len(gin_files.hypothesis(file)) > 20, f"{file.name} must begin with # Hypothesis: …"
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{file.stem}` |")]
        assert "](study/appendix.md#" in row


def test_every_part_and_every_picture_is_on_a_page() -> None:
    texts = "".join((FIGURES / text).read_text(encoding="utf-8") for text in build.PAGES)
    assert len(REAL.parts()) > 20
    for part in REAL.parts():
        assert re.search(rf"{{{{(rows|difference|gain_at) [^}}]*{part}\b", texts), part
    pages = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in build.PAGES.values())
    for picture in [*FIGURES.glob("*.png"), build.PAIRED_SEEDS]:
        assert f"({picture.relative_to(ROOT / 'docs')})" in pages


SUITE = """include 'base.gin'
Suite.variants = {
    'on_policy': ('baselines/on_policy.gin',),
    'start': ('Optimizer.learning_rate = 3e-4', 'train.steps = 20'),
    'tuned': ('ablations/late_injection.gin', 'Optimizer.learning_rate = 3e-4', 'train.steps = 30'),
    'alone': ('gin/ablations/in_place.gin',),
    'waits': ('ablations/one_success.gin',),
}
Suite.baseline = '%s'
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two parts of the same runs, compared with on-policy training and with start; one variant has not run."""
    rates = {"tokens": 1e5, "seconds": 6.0}
    last = {"on_policy": (0.4, 0.001), "start": (0.4, 0.001), "tuned": (0.6, 0.01), "alone": (0.3, 0.003)}
    curves = [
        made(name, seed, [0.2, 0.3, value + seed * slope], **rates)
        for name, (value, slope) in last.items()
        for seed in range(3)
    ]
    (tmp_path / "suites").mkdir()
    for part, baseline in (("study_new", "on_policy"), ("study_old", "start"), ("later", "start")):
        (tmp_path / "suites" / f"{part}.gin").write_text(SUITE % baseline, encoding="utf-8")
        if part != "later":
            (tmp_path / f"{part}.csv").write_text(values_csv([compare("eval/x", curves, baseline)]), encoding="utf-8")
    text = "# Title\n\n## What's new?\n\n{{rows study_new}}\n\n## Old\n\n{{rows study_old on_policy}}\n"
    (tmp_path / "appendix.md.in").write_text(text, encoding="utf-8")
    return tmp_path


def test_a_verdict_compares_with_what_differs_in_the_ablation_alone(folder: Path) -> None:
    """Of study_new, whose baseline is training without replay; of study_old with its baseline, after correction."""
    verdict = Document(folder).fill("{{verdict late_injection.gin}}")
    new, old = verdict.split("; ")
    assert new == f"above before correction: [new/tuned +0.209]({folder.name}/appendix.md#whats-new)"
    assert old == f"**above**: [old/tuned +0.209]({folder.name}/appendix.md#old)"
    assert Document(folder).fill("{{verdict in_place.gin}}").startswith("**below**: [old/alone -0.098](")


def test_an_ablation_without_figures_is_not_run_yet(folder: Path) -> None:
    assert Document(folder).fill("{{verdict one_success.gin}}") == ablations.NOT_RUN


def test_a_verdict_on_a_part_without_rows_in_the_appendix_is_an_error(folder: Path) -> None:
    (folder / "appendix.md.in").write_text("## Old\n\n{{rows study_old}}\n", encoding="utf-8")
    with pytest.raises(DocumentError, match=r"appendix\.md\.in has no rows of study_new"):
        Document(folder).fill("{{verdict late_injection.gin}}")
