"""What a study consists of: suites, lists of files and grids; nothing starts that cannot be right."""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path

import pytest
from run_builders import ROOT
from study_builders import ablate

from exgrpo_orlhf import config
from exgrpo_orlhf.settings import Tracking
from exgrpo_orlhf.study.runs import plan
from exgrpo_orlhf.study.suite import of_files, of_suite, over_grid, seeds

REFUSED = [  # arguments, and what is said
    ("--gin base.gin bse.gin", "variant bse: there is no gin file 'bse.gin'; did you mean base.gin"),
    ("--gin base.gin --set ReplayMixer.rho=2.0", "ReplayMixer.rho must lie in [0, 1], got 2.0"),
    ("--gin base.gin --set 'train.seed = 5'", "variant base: --set 'train.seed = 5': --seed, or a study's --seeds"),
    ("--gin base.gin --grid ReplayMixer.rho", "--grid 'ReplayMixer.rho' is not a binding with values"),
    ("--gin base.gin --grid ReplayMixer.rho=0.1,,2", "is not a binding with values"),
    ("--gin base.gin gin/base.gin", "two variants have the name base"),
    ("--gin base.gin ablations/rho_25.gin --set ReplayMixer.rho=0.1", "base and rho_25 are the"),
    ("--gin base.gin --grid train.steps=10,20", "apart from train.steps, which does not change the experiment"),
    ("--gin base.gin --group ''", "give --group NAME"),
    ("--gin base.gin --group a/b", "--group must be letters"),
    ("--suite base.gin", "Suite.variants must be bound"),
    ("--suite paper/tabel6.gin", "did you mean paper/table6.gin"),
    ("--suite paper", "paper is a folder, not a gin file; give one of the files in it\n"),
    ("--suite recipes/papr", "error: there is no gin file 'recipes/papr'; did you mean recipes/paper.gin"),
    ("--suite zzzzzzzzz", "there is no gin file 'zzzzzzzzz'; those of the project are in "),
]
SUITES_REFUSED = [  # what the suite's file binds, and what is said
    ("Suite.variants = {}", "Suite.variants must be a dict such as"),
    ("Suite.variants = {'a': ('base.gin')}", "Suite.variants['a'] must be a tuple of gin files and bindings"),
    ("Suite.variants = {'a/b': ()}", "Suite.variants: the name of a variant must be letters"),
    ("Suite.variants = {'a': ()}\nSuite.baseline = 'b'", "Suite.baseline must be one of 'a', or None; got 'b'"),
    ("Suite.variants = {'a': ()}\nSuite.seeds = (1, 1)", "Suite.seeds must be whole numbers, each once"),
    ("Suite.variants = {'a': ()}\nSuite.seds = (1,)", "there is no setting Suite.seds; nearest: Suite.seeds"),
    (
        "Suite.variants = {'a': ()}\ntrain.seed = 5",
        "mine.gin, line 4 binds train.seed, which the study's seeds replace",
    ),
    ("include 'INNER'\nSuite.variants = {'a': ()}", "inner.gin, line 2 binds train.seed, which the study's seeds"),
    ("include 'inner.gin'\nSuite.variants = {'a': ()}", "inner.gin, line 2 binds train.seed, which the study's seeds"),
    ("Suite.variants = {'a': ('INNER',)}", "inner.gin, line 2 binds train.seed, which the study's seeds replace"),
    ("Suite.variants = {'a': ('train.seed = 5',)}", "variant a: --set 'train.seed = 5': --seed, or a study's"),
    ("Suite.variants = {'a': ('bse.gin',)}", "variant a: there is no gin file 'bse.gin'"),
    ("Suite.variants = {'a': ('train.stes = 5',)}", "variant a: --set 'train.stes = 5': there is no setting"),
    ("Suite.variants = {'a': (), 'b': ('base.gin',)}", "the variants a and b are the same configuration"),
]


@pytest.mark.parametrize(
    ("arguments", "binding", "message"),
    [
        *((arguments, None, message) for arguments, message in REFUSED),
        *(("--suite SUITE", binding, message) for binding, message in SUITES_REFUSED),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_starts(arguments, binding, message, tmp_path, capsys):
    file, inner = tmp_path / "mine.gin", tmp_path / "inner.gin"
    inner.write_text("# of another study\ntrain.seed = 7\n")
    file.write_text(f"include 'base.gin'\n\n{binding}\n".replace("INNER", str(inner)))
    more = [] if "--group" in arguments or binding else ["--group", "g"]
    words = shlex.split(arguments.replace("SUITE", str(file)))
    assert ablate("unused", *words, *more, "--out", tmp_path / "out") == 2
    output = capsys.readouterr().err
    assert message in output
    assert not binding or "variant" in output or ".gin, line" in output
    assert not (tmp_path / "out").exists()


def test_the_command_that_compares_a_study_asks_the_store_that_the_runs_were_sent_to(monkeypatch):
    comparison = runpy.run_path(str(ROOT / "scripts" / "ablate.py"))["_comparison"]
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    bound, default = Tracking(uri="http://me:secret@host:5000"), "sqlite:///mlflow.db"
    command = comparison(bound, default, "g", None, "m")
    assert command == "python scripts/compare.py --experiment exgrpo --group g --uri http://host:5000 --metric m"
    assert "--uri" not in comparison(Tracking(), default, "g", "a", "m")
    assert "compare.py" not in comparison(Tracking(enabled=False), default, "g", None, "m")
    for variable, words in (
        ("http://other:5000", ["--uri", "http://other:5000"]),
        (default, []),
        ("http://me:secret@other:5000", []),  # compare.py takes it from there, with its password
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", variable)
        assert shlex.split(comparison(bound, default, "g", None, "m"))[6:] == [*words, "--metric", "m"]


def test_the_folder_of_a_variant_has_no_password_of_an_address():
    [variant] = over_grid(of_files(["base.gin"]), ["Verifier.url='http://me:hidden@host/x?code=hidden'"])
    assert variant.name == "base-url=http_host_x_code"
    assert "hidden@" in variant.bindings[0]


def test_a_grid_is_the_product_of_its_values_over_every_variant():
    grid = ["ReplayMixer.rho=0.25,0.5", "DifficultyBuckets.thresholds = (0.1, 0.9),(0.3, 0.7)"]
    variants = over_grid(of_files(["toy.gin", "ablation_no_entropy.gin+ablations/no_shaping.gin"]), grid)
    built = {run.variant.name: run.experiment for run in plan(variants, [0], Path("unused"), config.load)}
    assert len(built) == 2 * 2 * 2
    experiment = built["ablation_no_entropy+no_shaping-rho=0.25-thresholds=0.3_0.7"]
    assert (experiment.selector.by, experiment.loss.shaping, float(experiment.mixer.share.rho)) == (
        "random",
        False,
        0.25,
    )
    assert experiment.params["DifficultyBuckets.thresholds"] == "(0.3, 0.7)"


def test_seeds_are_ranges_and_lists():
    assert [seeds(text) for text in ("0-3", "0,3,5", "7, 0-1")] == [(0, 1, 2, 3), (0, 3, 5), (7, 0, 1)]
    for text in ("", "3-1", "a", "-1", "0-2,1", "1.5"):
        with pytest.raises(ValueError, match=r"seed"):
            seeds(text)


SUITES = sorted(
    str(path.relative_to(ROOT))
    for path in [*(ROOT / "docs" / "study" / "suites").glob("*.gin"), ROOT / "gin" / "testbed" / "smoke.gin"]
)


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_builds_and_a_run_has_the_identity_that_its_process_will_find(name):
    suite = config.load_suite(name)
    runs = plan(of_suite(suite, name), suite.seeds, Path("unused"), config.load)
    assert len(runs) == len(suite.variants) * len(suite.seeds)
    last = runs[-1]
    assert last.identity == config.load(last.variant.files, last.variant.bindings, seed=last.seed).identity


def test_what_a_suites_file_binds_holds_for_every_run_unless_the_variant_says_otherwise(tmp_path):
    file = tmp_path / "mine.gin"
    file.write_text(
        "include 'base.gin'\nReplayMixer.rho = 0.1\ntrain.steps = 7\n"
        "Suite.variants = {'a': (), 'b': ('ablations/rho_75.gin',), 'c': ('ReplayMixer.rho = 0.2',)}\n"
    )
    runs = plan(of_suite(config.load_suite(file), str(file)), [0], Path("unused"), config.load)
    assert [(float(run.experiment.mixer.share.rho), run.steps) for run in runs] == [(0.1, 7), (0.75, 7), (0.2, 7)]
