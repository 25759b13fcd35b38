"""What the study found of each file of gin/ablations/: the verdicts in the table of docs/choosing.md.

A finding is a variant of docs/study/suites/<part>.gin that names the file and has figures in <part>.csv; a new part
appears as soon as both exist and the appendix has its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import combined

from exgrpo_orlhf.show.seeds import Mean, mean
from exgrpo_orlhf.show.tables import number

if TYPE_CHECKING:
    from document import Document

NOT_RUN = "not run yet"
WITHOUT_REPLAY = "on_policy"
_MEASURE = "equal_tokens"
_LENGTH = ("train.steps", "train.eval_every", "train.save_every")  # set by the study for a fair cost
_SIGNIFICANT = 0.05


def verdict(document: Document, file: str) -> str:
    """The effects of a file at equal tokens, grouped by verdict, each with a link to the appendix."""
    links: dict[str, list[str]] = {}
    for part, variant, other in comparisons(document, file):
        effect = mean(document.differences(part, variant, other, _MEASURE))
        own = other == settings_of_runs(document)[part][0]
        p = document.p_of(part, variant, _MEASURE) if own else None
        name = part.removeprefix("study_") + ("" if variant in file else f"/{variant}")
        link = f"[{name} {number(effect.value, sign='+')}]({document.section(part)})"
        links.setdefault(_words(effect, p), []).append(link)
    return "; ".join(f"{words}: {', '.join(each)}" for words, each in links.items()) or NOT_RUN


def comparisons(document: Document, file: str) -> Iterator[tuple[str, str, str]]:
    """(part, variant, the variant that it is compared with) where a variant names the file and has run.

    It is compared with the part's baseline. Where that is training without replay, or the variant itself, it is
    compared with the variant that has all its other words.
    """
    for part, (baseline, variants) in settings_of_runs(document).items():
        for variant, settings in variants.items():
            if not (named := [word for word in settings if Path(word).name == file]):
                continue
            rest = [word for word in settings if word not in named]
            others = [name for name, of_other in variants.items() if of_other == rest]
            if baseline not in (None, WITHOUT_REPLAY, variant):
                others = [baseline]
            if others:
                yield part, variant, others[0]


def _words(effect: Mean, p: float | None) -> str:
    """Whether an interval excludes 0, and whether that holds after correction."""
    side = "above" if effect.value > 0 else "below"
    if p is not None and p < _SIGNIFICANT:
        return f"**{side}**"
    if effect.bounds is None:
        return "no interval"
    return "no clear difference" if effect.bounds[0] <= 0 <= effect.bounds[1] else f"{side} before correction"


@cache
def settings_of_runs(document: Document) -> dict[str, tuple[str | None, dict[str, list[str]]]]:
    """part -> (its baseline, the files and bindings of each variant that has run, less those that set the length)"""
    from exgrpo_orlhf import config

    suite = cache(lambda name: config.load_suite(document.folder / "suites" / f"{name}.gin"))
    settings = {}
    for part in document.parts():
        if part in combined.PARTS:
            baseline, names = combined.PARTS[part]
            suites = {of: suite(of).variants for of in names if of not in combined.KEPT}
            words = {name: suites[of][there] for of in suites for name, there in names[of].items()}
        else:
            baseline, words = suite(part).baseline, suite(part).variants
        settings[part] = (
            baseline,
            {
                name: [word for word in each if not word.startswith(_LENGTH)]
                for name, each in words.items()
                if document.has(part, name)
            },
        )
    return settings
