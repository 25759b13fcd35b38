"""gin/paper/: one file for each of the paper's models, one suite for each of its tables."""

from __future__ import annotations

import math

import pytest
from run_builders import ROOT, small_bindings, timeless, train_in

from exgrpo_orlhf import config
from exgrpo_orlhf.study.suite import of_suite

PAPER = ROOT / "gin" / "paper"
TABLES = sorted(PAPER.glob("table*.gin"))
MODELS = sorted(set(PAPER.glob("*.gin")) - {*TABLES, PAPER / "openr1.gin"})
ROWS = [(table.stem, variant) for table in TABLES for variant in of_suite(config.load_suite(table), str(table))]


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_a_models_file_is_the_papers_run(file):
    experiment = config.load([file])
    settings, sampling, loss = experiment.settings, experiment.sampling, experiment.loss
    sizes = (settings.questions_per_step, settings.group_size, experiment.optimizer.steps_per_batch)
    assert sizes == (128, 8, 2)
    assert settings.steps == (700 if file.stem == "qwen2_5_math_7b" else 500)
    assert (sampling.max_response_tokens, experiment.prompts.max_tokens, sampling.temperature) == (8192, 1024, 1.0)
    assert (loss.clip(mixed=True), loss.clip(mixed=False)) == (None, (0.2, 0.2)), "D.1, and the official trainer"
    assert (loss.entropy_coef, loss.kl_coef) == (0.001, 0.0)
    assert (loss.beta, loss.normalizer, loss.response_length) == (0.1, "constant", 8192)
    assert experiment.optimizer.learning_rate == 1e-6
    assert experiment.mixer.rho == 0.5
    assert (experiment.mixer.start_at_accuracy is None) == (file.stem == "llama3_1_8b")
    assert settings.engine == "openrlhf"
    assert experiment.questions.path == experiment.validation.path == "datasets/openr1.parquet"
    assert (experiment.questions.part, experiment.validation.part) == ("train", "validation")


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_on_policy_behind_it_is_the_baseline(file):
    ours, theirs = (config.load([file, *more]).params for more in ([], ["baselines/on_policy.gin"]))
    assert {name for name in ours if ours[name] != theirs[name]} == {"ReplayMixer.rho"}


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_a_table_with_another_models_file_behind_it_is_that_models_run(file):
    assert config.load([PAPER / "table1.gin", file]).params == config.load([file]).params


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_the_rows_of_a_table_differ_from_its_reference_in_what_they_say(table):
    """And on the test bed in the same."""
    suite = config.load_suite(table)
    variants = {variant.name: variant for variant in of_suite(suite, str(table))}
    for more in ([], ["testbed/rare.gin"]):
        params = {
            name: config.load([*variant.files, *more], variant.bindings).params for name, variant in variants.items()
        }
        reference = params[suite.baseline]
        changed = {n: {key for key in p if p[key] != reference[key]} for n, p in params.items() if n != suite.baseline}
        assert all(1 <= len(names) <= 3 for names in changed.values()), changed
        owners = {"ReplayMixer", "QuestionSampler", "TrajectorySelector", "MixedPolicyLoss", "DynamicSampling"}
        assert {key.split(".")[0] for keys in changed.values() for key in keys} <= owners | {"RetirementPolicy"}


@pytest.mark.slow
@pytest.mark.parametrize(("table", "variant"), ROWS, ids=[f"{table}-{variant.name}" for table, variant in ROWS])
def test_every_row_of_every_table_trains(table, variant, warm_model, tmp_path):
    """At a small size, by the recipe as it was trained."""
    small = [*variant.bindings, *small_bindings(warm_model), "train.steps = 3", "RetirementPolicy.revisits_every = 2"]
    if table != "table7":
        small.pop()
    train_in(tmp_path / "run", small, [*variant.files, "testbed/rare.gin"])
    rows = timeless(tmp_path / "run")
    assert rows[-1]["step"] == 3
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
