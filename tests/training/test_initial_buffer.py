"""Expert trajectories from a file: taken as they stand, told what is wrong with them, and never replaced."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from run_builders import ends_by_its_template, small_bindings, timeless, train_small
from run_builders import rows as rows_of
from transformers import AutoTokenizer

from exgrpo_orlhf import config
from exgrpo_orlhf.io.paths import PROJECT
from exgrpo_orlhf.questions.prompts import PromptEncoder
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.replay import snapshot
from exgrpo_orlhf.replay.prefix import Prefix
from exgrpo_orlhf.testbed.modular_chains import ModularChains, right_reasoning
from exgrpo_orlhf.testbed.tiny_models import END, PAD
from exgrpo_orlhf.training import initial_buffer

QUESTIONS = ModularChains(count=24, operands=(2, 3)).load()
FIRST = QUESTIONS[0]


def load(model: Path, file: Path, *more: str, questions=QUESTIONS):
    experiment = config.load(
        ["baselines/luffy.gin"], [*small_bindings(model), f"Work.experience = {str(file)!r}", *more]
    )
    return initial_buffer.load(
        experiment, questions, PromptEncoder(experiment.prompts, AutoTokenizer.from_pretrained(model))
    )


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def expert(question: Question, **more: object) -> dict:
    return {"prompt": question.prompt, "response": right_reasoning(question.prompt), **more}


def test_a_response_is_its_own_tokens_and_one_end_token_with_probability_one(warm_model, tmp_path):
    buffer = load(
        warm_model,
        write(
            tmp_path / "experts.jsonl",
            expert(FIRST),
            {"id": QUESTIONS[1].id, "response": right_reasoning(QUESTIONS[1].prompt)},
            expert(QUESTIONS[2], id=QUESTIONS[2].id),
        ),
    )
    tokenizer = AutoTokenizer.from_pretrained(warm_model)
    for question in QUESTIONS[:3]:
        [stored] = buffer.trajectories(question.id)
        assert tokenizer.convert_ids_to_tokens(stored.token_ids) == [*right_reasoning(question.prompt), "<end>"]
        assert stored.behaviour_logprobs.tolist() == [0.0] * len(stored)
        assert (stored.reward, stored.step, stored.sound, stored.finish) == (1.0, 0, True, "stop")
    assert set(buffer.candidates) == {Fraction(1, 2)}
    assert buffer.n_candidates == 3


def test_where_a_template_closes_turns_a_response_is_closed_as_the_policys_own_are(warm_model, tmp_path):
    model = ends_by_its_template(warm_model, tmp_path / "model")
    file = write(tmp_path / "experts.jsonl", expert(FIRST))
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.eos_token == PAD
    [stored] = load(model, file, "Prompts.template = 'chat'").trajectories(FIRST.id)
    assert tokenizer.convert_ids_to_tokens(stored.token_ids)[-1] == END
    for end in (PAD, END):
        write(file, {"prompt": FIRST.prompt, "response": right_reasoning(FIRST.prompt) + end})
        with pytest.raises(ValueError, match=r"line 1: the response holds an end token"):
            load(model, file, "Prompts.template = 'chat'")


@pytest.fixture
def experts(tmp_path) -> Path:
    """Of every question, and of five of them twice."""
    pairs = [(question, right_reasoning(question.prompt)) for question in QUESTIONS]
    initial_buffer.write_experts(tmp_path / "experts.jsonl", [*pairs, *pairs[:5]])
    return tmp_path / "experts.jsonl"


def test_what_is_written_is_read_and_the_same_response_is_kept_once(warm_model, experts):
    buffer = load(warm_model, experts)
    assert buffer.n_candidates == buffer.n_trajectories == len(QUESTIONS)


def test_the_documentations_own_line_is_one_of_the_default_questions(warm_model, tmp_path):
    page = (PROJECT / "docs" / "baselines.md").read_text(encoding="utf-8")
    [line] = re.findall(r'^{"prompt".*}$', page, re.MULTILINE)
    assert load(warm_model, write(tmp_path / "experts.jsonl", line), questions=ModularChains().load()).n_candidates == 1


def test_chat_messages_are_a_prompt_too_and_lines_end_at_line_feeds_alone(warm_model, tmp_path):
    """U+2028 is a line's end to str.splitlines and stands unescaped in public files."""
    question = Question.make("chat", (("user", "7+\u20285="),), "7+5=2;#2")
    line = {"prompt": [{"role": "user", "content": "7+\u20285="}], "response": "7+5=2;#2"}
    file = tmp_path / "experts.jsonl"
    file.write_text(json.dumps(line, ensure_ascii=False) + "\n", encoding="utf-8")
    buffer = load(warm_model, file, "Verifier.kind = 'exact'", questions=[question])
    assert len(buffer.trajectories(question.id)) == 1


RIGHT = right_reasoning(FIRST.prompt)
WRONG = f"{RIGHT[:-1]}{(int(RIGHT[-1]) + 1) % 10}"
BAD = [
    ("[1]", "a row is an object"),
    ('{"prompt": ', "not JSON"),
    ({"prompt": FIRST.prompt}, 'needs "prompt" or "id", and "response", a text'),
    ({"response": RIGHT}, 'needs "prompt" or "id"'),
    (expert(FIRST, response=""), 'needs "prompt" or "id", and "response", a text'),
    (expert(FIRST, response=7), 'needs "prompt" or "id", and "response", a text'),
    (expert(FIRST, prompt="1+1="), "none of the run's questions have '1\\+1='"),
    (expert(FIRST, id="0" * 32), "none of the run's questions have '0000"),
    (expert(FIRST, id=QUESTIONS[1].id), "none of the run's questions have"),
    (expert(FIRST, prompt=[]), "a prompt is text or a list"),
    (expert(FIRST, response=f"{RIGHT}<end>"), "holds an end token"),
    (expert(FIRST, response="1" * 24), r"25 tokens with its end token; allowed are Sampling\.max_response_tokens = 24"),
    (expert(FIRST, response=WRONG), "must be correct; the verdict is 'wrong', the answer"),
    (expert(FIRST, response="1"), "must be correct; the verdict is 'no_answer'"),
    # What is graded is what would be trained on: the answer's digit in another script is no token of the tokenizer.
    (expert(FIRST, response=f"{RIGHT[:-1]}{chr(0x0660 + int(RIGHT[-1]))}"), "must be correct"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_line_that_cannot_be_used_is_named_with_what_is_wrong(line, message, warm_model, tmp_path):
    file = write(tmp_path / "experts.jsonl", expert(QUESTIONS[1]), line)
    with pytest.raises(ValueError, match=message) as caught:
        load(warm_model, file)
    assert str(caught.value).startswith(f"{file}, line 2: ")


def test_a_prompt_that_two_questions_share_has_to_be_told_by_its_id(warm_model, tmp_path):
    twin = Question.make("elsewhere", FIRST.prompt, FIRST.answer)
    with pytest.raises(ValueError, match="line 1: 2 of the run's questions have"):
        load(warm_model, write(tmp_path / "a.jsonl", expert(FIRST)), questions=[FIRST, twin])
    buffer = load(warm_model, write(tmp_path / "b.jsonl", expert(FIRST, id=twin.id)), questions=[FIRST, twin])
    assert list(buffer.records) == [twin.id]


def test_experience_that_was_looked_at_before_the_start_is_loaded_again_as_it_is(warm_model, tmp_path):
    """From a file and from another run's buffer: the OpenRLHF driver looks first, then the run loads it."""
    file = write(tmp_path / "experts.jsonl", *map(expert, QUESTIONS[:3]))
    experiment = config.load(["toy.gin"], small_bindings(warm_model, f"Work.experience = {str(file)!r}"))
    prompts = PromptEncoder(experiment.prompts, AutoTokenizer.from_pretrained(warm_model))
    first = initial_buffer.load(experiment, QUESTIONS, prompts)
    snapshot.save(first, tmp_path / "replay", prompts.fingerprint())
    borrowing = replace(experiment, experience=str(tmp_path / "replay"))
    for source in (experiment, borrowing, borrowing):
        assert initial_buffer.load(source, QUESTIONS, prompts).n_trajectories == first.n_trajectories == 3
        assert source.buffer.n_trajectories == 0


def test_a_file_that_is_not_there_and_one_of_nothing_are_refused(warm_model, tmp_path):
    """Nothing is collected here."""
    with pytest.raises(FileNotFoundError, match=r"experts\.jsonl: no such file \(Work\.exp"):
        load(warm_model, tmp_path / "experts.jsonl")
    with pytest.raises(ValueError, match=r"experts\.jsonl: there is nothing to replay in it"):
        load(warm_model, write(tmp_path / "experts.jsonl"))


# -- in a run ---------------------------------------------------------------------------------------------------------


def go(model: Path, run: Path, file: Path, *more: str, resume=False) -> list[dict]:
    more = (f"Work.experience = {str(file)!r}", "train.eval_every = None", *more)
    train_small(model, run, *more, files=["baselines/luffy.gin"], resume=resume)
    return rows_of(run)


@pytest.mark.slow
def test_a_model_that_is_next_to_never_right_learns_from_experts_in_every_group(raw_model, tmp_path):
    """Eight questions, which on-policy training from here would learn nothing about in as many steps."""
    questions = ModularChains(count=8, operands=(2,)).load()
    initial_buffer.write_experts(tmp_path / "experts.jsonl", [(q, right_reasoning(q.prompt)) for q in questions])
    more = ["ModularChains.count = 8", "ModularChains.operands = (2,)", "Optimizer.learning_rate = 3e-3"]
    rows = go(raw_model, tmp_path / "run", tmp_path / "experts.jsonl", "train.steps = 70", *more)[1:]
    assert all(row["replay/actual_share"] == row["reward/groups_with_signal"] == 1 for row in rows[:10])
    rewards = [row["reward/mean"] for row in rows]
    assert np.mean(rewards[:10]) < 0.05
    assert np.mean(rewards[-10:]) > 0.2


def test_a_run_that_collects_nothing_leaves_its_experience_as_it_came(warm_model, experts, tmp_path):
    rows = go(warm_model, tmp_path / "run", experts, "train.steps = 4", "RetirementPolicy.at_accuracy = 0.25")
    assert any(row["reward/pass_at_1"] > 0 for row in rows[1:]), "there were successes to store and to retire by"
    assert all(row["replay/stored"] == row.get("replay/retired", 0) == 0 for row in rows[1:])
    folder = tmp_path / "run" / "checkpoint-4" / "replay"
    kept = pq.read_table(folder / "trajectories.parquet").to_pydict()
    assert len(kept["step"]) == len(QUESTIONS)
    assert set(kept["step"]) == {0}
    assert not np.concatenate(kept["behaviour_logprobs"]).any()
    assert set(pq.read_table(folder / "questions.parquet").to_pydict()["observed_step"]) == {0}


@pytest.mark.slow
def test_experts_are_read_once_and_a_resumed_run_has_them_from_its_checkpoint(warm_model, experts, tmp_path):
    go(warm_model, tmp_path / "straight", experts, "train.steps = 4")
    go(warm_model, tmp_path / "run", experts, "train.steps = 2")
    experts.unlink()
    go(warm_model, tmp_path / "run", experts, "train.steps = 4", resume=True)
    assert timeless(tmp_path / "run") == timeless(tmp_path / "straight")


def test_failures_of_another_run_are_checked_and_a_pool_without_what_is_replayed_is_refused(
    warm_model, tmp_path, monkeypatch, caplog
):
    """`Prefix.of = 'failures'` draws from a pool of its own; late injection plans no question and needs any success."""
    prefix = [
        "ReplayMixer.injection = @Prefix()",
        "ReplayMixer.rho = 0.5",
        "Prefix.target = 0.2",
        "train.eval_every = None",
    ]
    checked: list[bool] = []
    monkeypatch.setattr(Prefix, "check_stored", lambda self, one, *rest: checked.append(one.correct))
    pools = {}
    for of in ("successes", "failures"):
        train_small(warm_model, tmp_path / of, *prefix, f"Prefix.of = '{of}'", "train.steps = 8")
        pools[of] = f"Work.experience = {str(tmp_path / of / 'checkpoint-8')!r}"
    alone = ["ReplayMixer.collects = False", "ReplayBuffer.replays_unsolved = True", "train.steps = 1"]
    with pytest.raises(ValueError, match="there is nothing to replay in it"):
        train_small(warm_model, tmp_path / "none", *prefix, *alone, pools["successes"], "Prefix.of = 'failures'")
    assert "replay has no failures that Prefix.of = 'failures' could continue" in caplog.text
    caplog.clear()
    assert all(checked)
    train_small(warm_model, tmp_path / "failures_again", *prefix, *alone, pools["failures"], "Prefix.of = 'failures'")
    assert "has no failures" not in caplog.text
    assert not all(checked)
    late = ["ReplayMixer.injection = @LateInjection()", "ReplayMixer.rho = 0.0", "train.eval_every = None"]
    train_small(warm_model, tmp_path / "late", *late, *alone, pools["successes"])
