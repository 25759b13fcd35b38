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
from exgrpo_orlhf.evaluation.benchmarks import DEFINITIONS, Definitions

PAGES = [ROOT / "docs" / name for name in ("from_other_tools.md", "choosing.md")]
WITH_COMMANDS = [
    *PAGES,
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("training", "reproduce", "baselines")),
]
ALL_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BINDING = re.compile(r"`((?:[a-z]+/)?(?:[A-Za-z]\w*\.[a-z]\w*|[A-Z_]{4,}) = [^`]+)`")
COMMAND = re.compile(r"^python scripts/train\.py ((?:.*\\\n)*.*)", re.MULTILINE)
GIN_FILE = re.compile(r"gin/((?:\w+/)*\w+\.gin)|\b((?:engines|models|recipes|baselines)/\w+\.gin)")
LAYOUT = "engines/openrlhf_8gpu.gin"
# What a binding needs beside it.
BESIDE = {
    "ReplayMixer.rho_end": ["ReplayMixer.rho_steps = 100"],
    "ReplayMixer.rho_steps": ["ReplayMixer.rho_end = 0.5"],
    "QuestionSampler.mu": ["QuestionSampler.unit = 'successes'"],
    "Verifier.function": ["Verifier.kind = 'function'"],
    "Verifier.url": ["Verifier.kind = 'http'"],
    "Evaluation.samples": ["Evaluation.temperature = 0.6"],
    "Work.questions": ["PretrainedModel.path = 'm'", "QuestionHub.id = 'openai/gsm8k'"],
    "Work.validation": [
        *("PretrainedModel.path = 'm'", "QuestionFile.path = 'q.parquet'"),
        "validation/QuestionFile.path = 'validation.parquet'",
    ],
    "PretrainedModel.path": ["QuestionFile.path = 'q.parquet'"],
    "QuestionFile.path": ["PretrainedModel.path = 'm'"],
}


COMMANDS = [pytest.param(each, id=f"{page.stem}-{i}") for page in WITH_COMMANDS
            for i, each in enumerate(COMMAND.findall(page.read_text(encoding="utf-8")))]  # fmt: skip
BINDINGS = sorted({each for page in PAGES for each in BINDING.findall(page.read_text(encoding="utf-8"))})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_describes_a_run(command: str) -> None:
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    values = {name: [words[i + 1] for i, word in enumerate(words) if word == name] for name in ("--gin", "--set")}
    experiment = config.load(values["--gin"], values["--set"])
    if experiment.openrlhf is not None:
        flags.check_flags(experiment.openrlhf.all_flags())
    program = (ROOT / "scripts" / "train.py").read_text(encoding="utf-8")
    assert all(f'"{word}"' in program for word in words if word.startswith("--"))


def test_the_commands_of_the_page_for_a_cpu_take_the_files_that_it_shows(tmp_path, monkeypatch) -> None:
    page = (ROOT / "docs" / "own_model_on_cpu.md").read_text(encoding="utf-8")
    program, recipe, _, benchmark = (block.partition("\n")[2] for block in page.split("```")[1::2])
    for name, text in (("mine.gin", recipe), ("mine.toml", benchmark)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(each, comments=True) for each in COMMAND.findall(page)]
    files = [[words[i + 1] for i, word in enumerate(words) if word == "--gin"] for words in commands]
    experiments = [config.load(each) for each in files]
    assert [one.mixer.replays for one in experiments] == [True, True, True, False]
    assert all(one.local is not None and one.local.device == "cpu" for one in experiments)
    assert Definitions((DEFINITIONS, Path("mine.toml"))).benchmark("mine").files[0].name == "test.jsonl"
    space: dict = {}
    exec(program, space)
    reward = space[experiments[0].verifier.function.rpartition(":")[2]]
    assert reward(["It is 4.", "none", "4, or 5"], ["4"] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_binding_is_taken(binding: str) -> None:
    name = binding.partition(" = ")[0]
    layout = [LAYOUT] if name.startswith("OpenRLHF.") else []
    experiment = config.load(["base.gin", *layout], [*BESIDE.get(name, []), binding])
    if layout:
        flags.check_flags(experiment.openrlhf.all_flags())


def test_gin_files_that_the_pages_name_exist() -> None:
    texts = [page.read_text(encoding="utf-8") for page in ALL_PAGES]
    names = {name for text in texts for found in GIN_FILE.findall(text) for name in found if name}
    assert len(names) > 40
    assert [name for name in sorted(names) if not (gin_files.GIN_FOLDER / name).is_file()] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs" / "cluster.md"], ids=lambda page: page.stem)
def test_metrics_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    names = re.findall(r"`((?:reward|rollout|replay|policy|train|cost|eval|time)/\w+)`", text)
    assert names
    for name in names:
        listed = re.sub(r"^(replay/bucket)_\w+", r"\1_<level>", name).removeprefix("time")  # as that page lists them
        assert f"{listed}`" in metrics, name


def test_the_code_that_the_algorithm_s_page_names_is_where_it_says() -> None:
    page = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")
    tables = page.partition("## One step")[2].partition("## Question sampling")[0]
    places = re.findall(r"((?:`[\w.]+`|[^`|])+)\(`([\w/]+\.py)`\)", tables)
    assert len(places) > 15
    for words, file in places:
        code = (ROOT / "exgrpo_orlhf" / file).read_text(encoding="utf-8")
        owner, _, name = re.findall(r"`(\w[\w.]*)`", words)[-1].rpartition(".")
        assert f" {name}(" in code or f"class {name}" in code, (file, name)
        assert f"class {owner}" in code or not owner, (file, owner)
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "exgrpo_orlhf").rglob("*.py"))
    cells = re.findall(r"^\| .* \| .* \| (.+) \|$", tables, re.MULTILINE)
    for name in re.findall(r"`((?:(?!\.py)[\w.])+)`", " ".join(cells)):
        for part in name.split("."):
            assert f" {part}(" in sources or f"class {part}" in sources, name


@pytest.mark.parametrize("page", ["dev/traps.md", "algorithm.md"])
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    names = re.findall(r"`(?:[\w/]+/)?(test_\w+\.py)`", text)
    assert len(names) > 20
    assert set(names) <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.stem)
def test_links_of_a_page_lead_to_a_file_and_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([\w/.-]*)(?:#([\w-]+))?\)", page.read_text(encoding="utf-8"))
    assert links or page.stem in ("performance", "traps", "samples", "plan", "plan_pays")
    for target, anchor in links:
        aim = page.parent / target if target else page
        assert aim.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", aim.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, (target, anchor)
