"""Pages for users: every command of ours, and every binding, file and option they name, is one that the program takes.

Names of OpenRLHF on docs/from_other_tools.md are compared with its parser in test_openrlhf_contract.py.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from run_builders import ROOT

from exgrpo_orlhf import config
from exgrpo_orlhf.config import gin_files
from exgrpo_orlhf.engines.openrlhf import flags

PAGES = [ROOT / "docs" / name for name in ("from_other_tools.md", "choosing.md")]
BINDING = re.compile(r"`((?:[a-z]+/)?(?:[A-Za-z]\w*\.[a-z]\w*|[A-Z_]{4,}) = [^`]+)`")
COMMAND = re.compile(r"^python scripts/train\.py ((?:.*\\\n)*.*)", re.MULTILINE)
LAYOUT = "engines/openrlhf_8gpu.gin"
# What a binding needs beside it.
BESIDE = {
    "ReplayMixer.rho_end": ["ReplayMixer.rho_steps = 100"],
    "ReplayMixer.rho_steps": ["ReplayMixer.rho_end = 0.5"],
    "QuestionSampler.mu": ["QuestionSampler.unit = 'successes'"],
    "Verifier.function": ["Verifier.kind = 'function'"],
    "Evaluation.samples": ["Evaluation.temperature = 0.6"],
    "Work.validation": ["validation/QuestionFile.path = 'validation.parquet'"],
}


def options(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "), comments=True)


COMMANDS = [pytest.param(each, id=f"{page.stem}-{i}") for page in PAGES
            for i, each in enumerate(COMMAND.findall(page.read_text(encoding="utf-8")))]  # fmt: skip
BINDINGS = sorted({each for page in PAGES for each in BINDING.findall(page.read_text(encoding="utf-8"))})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_describes_a_run(command: str) -> None:
    words = options(command)
    given = {name: [words[i + 1] for i, word in enumerate(words) if word == name] for name in ("--gin", "--set")}
    x = config.load(given["--gin"], given["--set"])
    if x.openrlhf is not None:
        flags.check(x.openrlhf.all_flags())
    program = (ROOT / "scripts" / "train.py").read_text(encoding="utf-8")
    assert all(f'"{word}"' in program for word in words if word.startswith("--"))


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_binding_is_taken(binding: str) -> None:
    name = binding.partition(" = ")[0]
    layout = [LAYOUT] if name.startswith("OpenRLHF.") else []
    x = config.load(["base.gin", *layout], [*BESIDE.get(name, []), binding])
    if layout:
        flags.check(x.openrlhf.all_flags())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_metrics_and_options_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`gin/([\w/]+\.gin)`", text):
        assert gin_files.find(name, None).is_file()
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:reward|rollout|replay|policy|train|cost|eval|time)/\w+)`", text):
        listed = re.sub(r"^(replay/bucket)_\w+", r"\1_<level>", name).removeprefix("time")  # as that page lists them
        assert f"{listed}`" in metrics, name


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "study" / "appendix.md"],
    ids=lambda page: page.stem,
)
def test_links_of_a_page_lead_to_a_file_and_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([\w/.-]*)(?:#([\w-]+))?\)", page.read_text(encoding="utf-8"))
    for target, anchor in links:
        aim = page.parent / target if target else page
        assert aim.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", aim.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, (target, anchor)
