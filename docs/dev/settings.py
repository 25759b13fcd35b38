"""Write docs/settings.md: every class that gin binds, with its parameters, defaults and docstrings.

    python docs/dev/settings.py

tests/config/test_settings_page.py fails while the page differs from the classes.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from exgrpo_orlhf.config import build
from exgrpo_orlhf.engines.openrlhf import flags

PAGE = Path(__file__).parents[1] / "settings.md"
HEAD = """# Settings

<!-- made by docs/dev/settings.py from the docstrings -->

Every class that a gin file binds, by `Class.parameter = value` in a file or after `--set`. The defaults of the
algorithm are the paper's; `gin/base.gin` binds the rest of its recipe.

{uses}
"""
FLAGS = """## OpenRLHF's flags

`OpenRLHF.flags` and `.more_flags` take OpenRLHF's own flags, without dashes. A gin binding decides these instead:

{bound}

These are refused:

{refused}

All others are [passed on](dev/flags.md).
"""
USES = {  # the page's sections, in the order in which a run needs them; a class in none of them stops the page
    "Training": ("train", "Work", "Optimizer", "LoRA"),
    "Model": ("PretrainedModel", "SupervisedModel", "SupervisedFile"),
    "Questions and prompts": ("QuestionFile", "QuestionHub", "QuestionMix", "LengthFilter", "FreshSampler", "Prompts"),
    "Rewards": ("Verifier", "Environment"),
    "Replay": (
        *("ReplayMixer", "Beside", "InPlace", "UnlessSolved", "LateInjection"),
        *(
            "Prefix",
            "AdaptiveShare",
            "UniformShare",
            "FixedShare",
            "StoredGroup",
            "StoredRows",
            "Successes",
            "OneSuccess",
        ),
        *(
            "AboveMean",
            "AllFinished",
            "WithSignal",
            "Reincarnation",
            "ReplayBuffer",
            "QuestionSampler",
            "DifficultyBuckets",
            "TrajectorySelector",
        ),
        "RetirementPolicy",
    ),
    "Objective": ("MixedPolicyLoss", "ConvexKL", "GroupAdvantages"),
    "Sampling": ("Sampling", "DynamicSampling"),
    "Engines": ("LocalEngine", "OpenRLHF"),
    "Evaluation": ("Evaluation",),
    "Tracking": ("Tracking",),
    "Studies": ("Suite",),
    "Test bed": ("ModularChains", "ChainModel", "WordProblems", "ReasoningGym", "GymModel"),
}
ENTRY = re.compile(r"(?:^|(?<=; ))(\w+(?:, \w+)*): ", re.MULTILINE)


def words(target: type) -> tuple[str, dict[str, str]]:
    """The first paragraph of a class's docstring with the formulas below it, and the words for each parameter, those of
    its bases included."""
    parameters, described = inspect.signature(target).parameters, {}
    for owner in reversed(target.__mro__):
        text = inspect.cleandoc(owner.__dict__.get("__doc__") or "")
        text = re.sub(r"[;\s]+[Tt]he other\s+fields are those of `\w+`", "", text)
        entries = [match for match in ENTRY.finditer(text) if set(match[1].split(", ")) <= parameters.keys()]
        ends = [entry.start() for entry in entries[1:]] + [len(text)]
        for entry, end in zip(entries, ends, strict=False):  # there may be none
            block = re.sub(r"(?<!with)(:?)\n +(?='\w+'(?:,|  ))", r"\1; ", text[entry.end() : end].split("\n\n")[0])
            described |= dict.fromkeys(entry[1].split(", "), " ".join(block.replace(":;", ":").split()).strip("; "))
    first, formulas, *_ = [*text[: entries[0].start() if entries else None].split("\n\n"), ""]
    block = f"\n\n```\n{textwrap.dedent(formulas)}\n```" if first.endswith(":") else ""
    return " ".join(first.split()) + block, described


def cell(text: object) -> str:
    return re.sub(r"([|<>])", r"\\\1", str(text))


def table(head: str, rows: Mapping[str, str]) -> str:
    return "\n".join([f"| {head} |", "| --- | --- |", *(f"| `{name}` | {cell(rows[name])} |" for name in rows)])


def section(name: str) -> str:
    """A class's words and the table of its parameters."""
    text, described = words(build._TARGETS[name])
    rows = ["| parameter | default | |", "| --- | --- | --- |"]
    for parameter, declared in inspect.signature(build._TARGETS[name]).parameters.items():
        if parameter not in build._SUPPLIED.get(name, ()):
            value = "*required*" if declared.default is inspect.Parameter.empty else f"`{declared.default!r}`"
            value = "`{}`" if "factory" in value else value
            rows.append(f"| `{parameter}` | {value} | {cell(described.get(parameter, ''))} |")
    return "\n\n".join([f"### {name}", *([text] if text else []), "\n".join(rows)]) + "\n"


def page() -> str:
    """Raises ValueError if USES lacks a class or has one that gin does not bind."""
    placed = [name for names in USES.values() for name in names]
    if sorted(placed) != sorted(build._TARGETS):
        raise ValueError(f"USES and the classes that gin binds differ in {sorted({*placed} ^ {*build._TARGETS})}")
    links = [f"- {use}: " + ", ".join(f"[{name}](#{name.lower()})" for name in names) for use, names in USES.items()]
    parts = [HEAD.format(uses="\n".join(links))]
    for use, names in USES.items():
        parts += [f"## {use}\n", *map(section, names)]
    tables = {"bound": table("flag | by", flags.BOUND), "refused": table("flag | why", flags.REFUSED)}
    return "\n".join([*parts, FLAGS.format(**tables)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
