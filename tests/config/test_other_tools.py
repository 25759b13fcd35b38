"""Names of TRL, verl and OpenRLHF, values that gin cannot read, and files in an order that undoes one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from exgrpo_orlhf import config
from exgrpo_orlhf.config import other_tools

ROOT = Path(__file__).parents[2]
LAYOUT = {"--train.colocate_all", "--vllm.enable_sleep"}  # on in the layouts
MACROS = ("MAX_RESPONSE_TOKENS", "--out", "--resume", "--gin")


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("lr", "Optimizer.learning_rate"),
        ("train.lr", "Optimizer.learning_rate"),
        ("Optimizer.lr", "Optimizer.learning_rate"),
        ("max_tokens", "MAX_RESPONSE_TOKENS"),
        ("Sampling.max_tokens", "MAX_RESPONSE_TOKENS"),
        ("num_generations", "train.group_size"),
        ("beta", "MixedPolicyLoss.kl_coef (of the KL term in the loss; MixedPolicyLoss.beta is the shaping's)"),
        ("GRPOConfig.beta", "MixedPolicyLoss.kl_coef"),
        ("kl_coef", "MixedPolicyLoss.kl_coef (in the loss; there is none in the reward)"),
        ("actor_rollout_ref.rollout.n", "train.group_size"),
        ("algorithm.kl_ctrl.kl_coef", "MixedPolicyLoss.kl_coef"),
        ("trainer.test_freq", "train.eval_every"),
        ("algo.kl.init_coef", "MixedPolicyLoss.kl_coef"),
        ("per_device_train_batch_size", "train.questions_per_step (questions, not rows"),
    ],
)
def test_a_name_of_another_tool_leads_to_ours(name, setting):
    with pytest.raises(config.ConfigError, match=rf"{re.escape(name)}\b.*; here it is {re.escape(setting)}"):
        config.load("toy.gin", f"{name} = 1")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--lr", "1e-6"], "--set Optimizer.learning_rate=1e-6"),
        (["--actor.adam.lr", "1e-6"], "--set Optimizer.learning_rate=1e-6"),
        (["--num-generations=4"], "--set train.group_size=4"),
        (["--output_dir", "x"], "--out"),
        (["--group_size=4"], "--set train.group_size=4"),
    ],
)
def test_a_flag_of_another_tool_too(words, option, run_script):
    done = run_script("train.py", "--gin", "toy.gin", *words)
    assert done.returncode == 2
    assert f"; a setting is bound by {option}" in done.stderr


def test_what_they_lead_to_is_there():
    settings = {name.partition(" ")[0] for name in other_tools._NAMES}
    assert settings - set(config.all_settings()) - {*MACROS} == set()


def test_the_names_of_the_page_lead_to_what_the_page_says():
    page = (ROOT / "docs" / "from_other_tools.md").read_text()
    table = page[page.index("## Names") : page.index("## Defaults")]
    rows: dict[str, str] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        for name in re.findall(r"`(-{0,2}[a-z][\w.]*[a-z])`", " ".join(cells[1:4])) if len(cells) == 5 else ():
            if "." in name or "_" in name:  # else it is a value, or a word of the language
                rows[name] = rows.get(name, "") + cells[4]
    leads = {name: re.findall(r"[A-Za-z]+\.\w+|--\w+|[A-Z_]{9,}", other_tools.here(name) or "") for name in rows}
    wrong = {name for name, own in leads.items() if not any(each in rows[name] for each in own)}
    without = {name for name in rows if "none: importance weights" in rows[name]}
    assert len(rows) > 100
    assert wrong - without == {"data_source", "extra_logs", "dr_grpo", "vllm_mode", *LAYOUT}


@pytest.mark.parametrize(
    ("binding", "corrected"),
    [
        ("train.generate_ahead=true", "train.generate_ahead=True"),
        ("train.best_metric=none", "train.best_metric=None"),
        ("Work.questions=ModularChains()", "Work.questions=@ModularChains()"),
        ("QuestionFile.meta=(options)", "QuestionFile.meta=('options',)"),
        ("QuestionFile.held_out=5%", "QuestionFile.held_out=0.05"),
        ("Prompts.chat_template_kwargs={'a': b}", "Prompts.chat_template_kwargs={'a': 'b'}"),
        ("Optimizer.betas=(low, 0.9)", "Optimizer.betas=('low', 0.9)"),
    ],
)
def test_a_value_that_gin_cannot_read_is_refused_with_the_whole_corrected_set(binding, corrected):
    with pytest.raises(config.ConfigError) as caught:
        config.load("toy.gin", binding)
    (command,) = re.findall(r'; in a shell (--set "(?:\\.|[^"\\])*"):', str(caught.value))
    option, override = shlex.split(command)
    assert (option, override) == ("--set", corrected)


def test_a_tuple_of_one_without_its_comma_is_shown_with_it():
    with pytest.raises(config.ConfigError, match=r"got 'options'; a tuple of one is written \('options',\)"):
        config.load("toy.gin", "QuestionFile.meta = ('options')")


@pytest.mark.parametrize(
    ("files", "warned"),
    [
        (
            ["recipes/lora.gin", "toy.gin"],
            "Optimizer.learning_rate = 0.0001 of gin/toy.gin replaces 0.0002 of gin/recip",
        ),
        (["toy.gin", "recipes/lora.gin"], None),
        (["ablation_no_entropy.gin", "toy.gin"], None),  # base.gin, which it includes, is everybody's
        (["base.gin", "toy.gin"], None),
        (
            ["models/chain_weak.gin", "toy.gin"],
            "ChainModel.preset = 'normal' of gin/toy.gin replaces 'weak' of gin/model",
        ),
    ],
)
def test_a_task_that_undoes_a_file_named_before_it_is_warned_of(files, warned, caplog):
    config.load(files)
    undone = [record.getMessage() for record in caplog.records if " last if that is meant" in record.getMessage()]
    assert len(undone) == (warned is not None)
    assert warned is None or undone[0].startswith(warned)
    assert warned is None or undone[0].endswith(f"; name gin/{files[0]} last if that is meant")
