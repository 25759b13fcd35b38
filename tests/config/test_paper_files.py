"""gin/paper/: one file for each of the paper's models, one suite for each of its tables."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from run_builders import ROOT

from exgrpo_orlhf import config
from exgrpo_orlhf.replay.sampling import IndexedSet
from exgrpo_orlhf.study.suite import of_suite

PAPER = ROOT / "gin" / "paper"
TABLES = sorted(PAPER.glob("table*.gin"))
MODELS = sorted(set(PAPER.glob("*.gin")) - {*TABLES, PAPER / "openr1.gin"})
COPY = ("chat", None, "Elliott/Qwen2.5-Math-7B-16k-think")
PROMPTS = {  # E.1: one for all, which the 7B copies bring; G.1: but Llama's base model
    "qwen2_5_math_1_5b": COPY,
    "qwen2_5_7b_instruct": COPY,
    "llama3_1_8b_instruct": COPY,
    "llama3_1_8b": ("User: {question} Answer: Let's think step by step.\n", "", None),
}
RECIPES = ("paper", "official")
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
    assert experiment.mixer.share.rho == 0.5
    assert (experiment.mixer.share.start_at_accuracy is None) == (file.stem == "llama3_1_8b")
    prompts, expected = experiment.prompts, PROMPTS.get(file.stem, ("chat", None, None))
    assert (prompts.template, prompts.system, prompts.chat_template_from) == expected
    assert settings.engine == "openrlhf"
    assert experiment.questions.path == experiment.validation.path == "datasets/openr1.parquet"
    assert (experiment.questions.part, experiment.validation.part) == ("train", "validation")


@pytest.mark.parametrize("layout", ["local_cpu", "local_gpu"])
def test_a_local_layout_behind_it_replaces_its_layout(layout):
    experiment = config.load([MODELS[0], f"engines/{layout}.gin"])
    assert experiment.settings.engine == "local"
    assert experiment.openrlhf is None


def test_the_layout_of_a_cpu_leaves_nothing_of_a_gpus():
    """A CPU with a GPU's micro batches is slow and may run out of memory."""
    alone, behind = (
        config.load(["toy.gin", *more, "engines/local_cpu.gin"]) for more in ([], ["engines/local_gpu.gin"])
    )
    assert behind.local == alone.local


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


@pytest.mark.parametrize("variant", ["wo_question_selection", "wo_both"])
def test_without_question_selection_every_candidate_is_equally_likely_whatever_its_bucket(variant):
    suite = config.load_suite(PAPER / "table6.gin")
    (row,) = (row for row in of_suite(suite, str(PAPER / "table6.gin")) if row.name == variant)
    mixer = config.load(row.files, row.bindings).mixer
    candidates = {Fraction(1, 8): IndexedSet(["alone"]), Fraction(1, 2): IndexedSet(map(str, range(19)))}
    rng = np.random.default_rng(0)
    drawn = [mixer.sampler.sample(candidates, 10, 8, mixer.buckets, rng) for _ in range(2000)]
    share = np.mean(["alone" in ids for ids in drawn])
    assert abs(share - 10 / 20) < 5 * (0.25 / len(drawn)) ** 0.5


def test_the_released_checkpoints_recipe_is_the_papers_with_the_official_scripts_settings():
    paper, official = (config.load([PAPER / "qwen2_5_math_7b.gin", f"recipes/{name}.gin"]).params for name in RECIPES)
    assert {name: text for name, text in official.items() if text != paper[name]} == {
        "QuestionSampler.unit": "'successes'",
        "QuestionSampler.mu": "4.0",
        "RetirementPolicy.leaves_fresh": "True",
        "Optimizer.skip_above_grad_norm": "500.0",
        "Optimizer.weight_decay": "0.01",
    }


def test_a_row_of_the_same_name_is_the_same_run_in_every_table():
    """So that tests/scripts/test_product_path.py trains it once."""
    runs = {(variant.name, config.load(variant.files, variant.bindings).config_hash) for _, variant in ROWS}
    assert len(runs) == len({name for name, _ in runs}) < len(ROWS)
