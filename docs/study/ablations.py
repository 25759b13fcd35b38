"""The table of docs/ablations.md: every file of gin/ablations/, its hypothesis, its bindings, and what the study found.

Hypothesis and bindings are read from the gin file. A finding is a variant of docs/study/suites/<part>.gin that names
the file and has figures in <part>.csv; a new part appears here as soon as both exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import combined

from exgrpo_orlhf.config.gin_files import GIN_FOLDER, hypothesis
from exgrpo_orlhf.evaluation.results_table import markdown_table
from exgrpo_orlhf.study.comparison import MEASURES
from exgrpo_orlhf.study.comparison_tables import difference
from exgrpo_orlhf.study.seeds import Mean, mean
from exgrpo_orlhf.study.suite import Suite

if TYPE_CHECKING:
    from document import Document

HEAD = ("file", "hypothesis", "bindings", "what the study found")
NOT_RUN = "not run yet"
_MEASURES = ("equal_tokens", "equal_steps", "area_tokens")  # shown where a part has them; the first one is judged
_LENGTH = ("train.steps", "train.eval_every", "train.save_every")  # set by the study for a fair cost
_SIGNIFICANT = 0.05


def table(document: Document) -> str:
    """Raises ValueError for a file without a hypothesis."""
    suites = {part: _suite(document, part) for part in document.parts()}
    rows = []
    for path in sorted([*GIN_FOLDER.glob("ablation_*.gin"), *GIN_FOLDER.glob("ablations/*.gin")]):
        words, bindings = read(path)
        found = [line for part, suite in suites.items() for line in _findings(document, part, suite, path.name)]
        shown = "<br>".join(f"`{binding}`" for binding in bindings)
        rows.append((f"`{path.name}`", words, shown, "<br>".join(found) or NOT_RUN))
    return "\n".join(markdown_table(HEAD, rows, left=len(HEAD)))


def read(path: Path) -> tuple[str, list[str]]:
    """The hypothesis in a file's first comment, and its bindings without their comments."""
    words, text = hypothesis(path), path.read_text(encoding="utf-8")
    if not words:
        raise ValueError(f"{path.name} must begin with # Hypothesis: …")
    lines = [re.sub(r"\s+#.*", "", line).rstrip() for line in text.splitlines() if not line.startswith("#")]
    bindings = [line for line in lines if line and not line.startswith("include")]
    return words[0].upper() + words[1:] if words[0].isascii() else words, bindings


def _findings(document: Document, part: str, suite: Suite, file: str) -> Iterator[str]:
    """A line for each variant of a part that names the file and was run."""
    for variant, words in suite.variants.items():
        if file not in (Path(word).name for word in words) or not document.has(part, variant):
            continue
        rest = [word for word in words if Path(word).name != file and not word.startswith(_LENGTH)]
        starts = [name for name, of in suite.variants.items() if _same(of, rest) and document.has(part, name)]
        against = [name for name in (*starts[:1], suite.baseline) if name not in (None, variant)]
        effects = [_effect(document, part, variant, name, suite.baseline) for name in dict.fromkeys(against)]
        with_more = f" with {', '.join(f'`{word}`' for word in rest)}" if rest else ""
        if not effects:  # it is the baseline itself
            continue
        yield f"[{part}]({document.section(part)}){with_more}: {'; '.join(effects)}"


def _same(words: tuple[str, ...], rest: list[str]) -> bool:
    return [word for word in words if not word.startswith(_LENGTH)] == rest


def _effect(document: Document, part: str, variant: str, other: str, baseline: str | None) -> str:
    """The difference of a variant from another one. Bold: p (Holm), which only differences from the baseline have."""
    figures, verdict, seeds = [], "", 0
    for measure in _MEASURES:
        if not document.has(part, variant, measure):
            continue
        found = mean(document.differences(part, variant, other, measure))
        seeds = found.count
        p = document.p_holm(part, variant, measure) if other == baseline else None
        holds = p is not None and p < _SIGNIFICANT
        shown = " ".join(difference(found))
        figures.append(f"{f'**{shown}**' if holds else shown} {dict(MEASURES)[measure].replace(',', ' against')}")
        verdict = verdict or _verdict(found, p)
    return f"{verdict} `{other}` ({', '.join(figures)}; {seeds} seeds)"


def _verdict(found: Mean, p: float | None) -> str:
    """Whether an interval excludes 0, and whether that holds after correction."""
    side = "above" if found.value > 0 else "below"
    if p is not None and p < _SIGNIFICANT:
        return f"**{side}**"
    if found.bounds is None:
        return "no interval for the difference from"
    if found.bounds[0] <= 0 <= found.bounds[1]:
        return "no clear difference from"
    return f"before correction {side}" if p is not None else f"uncorrected, {side}"


def _suite(document: Document, part: str) -> Suite:
    from exgrpo_orlhf import config

    def load(name: str) -> Suite:
        return config.load_suite(document.folder / "suites" / f"{name}.gin")

    if part not in combined.PARTS:
        return load(part)
    baseline, of = combined.PARTS[part]
    variants = {name: load(suite).variants[there] for suite, names in of.items() for name, there in names.items()}
    return Suite(variants, baseline)
