"""Benchmarks, their sets and the model: how they are read, and clear errors before anything is generated."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from eval_builders import HERE, definition

from exgrpo_orlhf import checkpoints, config
from exgrpo_orlhf.evaluation import evaluated_model, sets
from exgrpo_orlhf.evaluation.benchmarks import DEFINITIONS, Benchmark, BenchmarkError, Definitions, override
from exgrpo_orlhf.grader import math
from exgrpo_orlhf.grader.answer import Answer
from exgrpo_orlhf.questions.hub import HubError, explain
from exgrpo_orlhf.questions.overlap import same_questions
from exgrpo_orlhf.questions.prompts import Prompts
from exgrpo_orlhf.testbed.word_problems import WordProblems


def mine(folder: Path, **more: str) -> Benchmark:
    return Definitions((DEFINITIONS, definition(folder, **more))).benchmark("mine")


def load(name: str, folder: Path, limit: int | None = None) -> sets.BenchmarkSet:
    return sets.load(Definitions().benchmark(name), (folder,), limit, hub=False)


@pytest.mark.slow
def test_official_row_counts_of_the_sets_that_are_here(shared_data):
    for name in ("aime24", "aime25", "math500", "minerva", "arc_c", "mmlu_pro", "gsm8k", "svamp"):
        questions = load(name, shared_data)
        assert questions.facts(None, [])["whole"], questions.notes
        assert len({row for row, _ in questions.rows}) == questions.size == questions.benchmark.rows
    small, large = (load("mmlu_pro", shared_data, limit) for limit in (30, 60))
    assert small.size == 12_032
    rows = [row for row, _ in small.rows]
    assert set(rows) < {row for row, _ in large.rows}, "a larger limit takes the questions of a smaller one too"
    assert rows == sorted(rows)
    assert len({question.meta["group"] for _, question in small.rows}) > 5, "spread over the set, sorted by subject"


@pytest.mark.parametrize(("name", "decimals"), [("svamp", 0), ("mawps", 182)])
def test_word_problems_by_people_are_graded_from_free_text(name, decimals, shared_data):
    golds = [question.answer for _, question in load(name, shared_data).rows]
    assert sum("." in gold for gold in golds) == decimals
    golds = golds[:150]
    for text in ("12 + 3 = 15. The answer is {}.", "The answer is {} apples.", "The answer is ${}."):
        assert {math.grade(Answer(gold, text.format(gold))).verdict for gold in golds} == {"correct"}
        assert {math.grade(Answer(gold, text.format(float(gold) + 1))).verdict for gold in golds} == {"wrong"}


@pytest.mark.slow
def test_word_problems_are_the_held_out_ones_by_steps():
    benchmark = Definitions().benchmark("word_problems")
    questions = sets.load(benchmark, (), None)
    made = [question for _, question in questions.rows]
    assert made == WordProblems(400, (1, 2, 3, 4), seed=100, split="validation").load()
    assert Counter(question.meta["group"] for question in made) == dict.fromkeys("1234", 100)
    assert questions.source == "made here"
    assert benchmark.instruction(silent=True) is None
    validation = config.load(["smollm2.gin"]).validation
    assert isinstance(validation, WordProblems)
    assert not same_questions(validation.load(), made)
    assert benchmark.grader(5.0, 1).kind == "word_problem"


def test_instructions_stand_below_the_question_unless_the_template_has_its_own(byte_model):
    model, _ = evaluated_model.load(str(byte_model))
    benchmark = override(Definitions().benchmark("math500"), max_tokens=8)
    question = sets.Question.make("math500", "What is 1 + 1?", "2")
    questions = sets.BenchmarkSet(benchmark, ((0, question),), 1, "here", ())
    box = "Be brief, and \\boxed{} the answer."
    settings = ("plain", None), ("chat", None), ("chat", "Be brief."), ("chat", box), ("simplerl", None)
    for template, system in settings:
        builder = evaluated_model.RequestBuilder(model, Prompts(template=template, system=system), 0)
        assert builder.requests([questions])[0].prompt.count("boxed") == 1, (template, system)
        own = replace(questions, benchmark=replace(benchmark, ask="Just guess."))
        assert "\n\nJust guess." in builder.requests([own])[0].prompt, "that of the block stands there in any case"


def test_the_defaults_of_a_file_are_of_its_own_benchmarks_alone(tmp_path):
    files = []
    for name, defaults in (("a", "[defaults]\nmax_tokens = 16\n"), ("b", "")):
        (tmp_path / name).mkdir()
        files.append(definition(tmp_path / name))
        files[-1].write_text(defaults + files[-1].read_text().replace("[mine]", f"[{name}]"))
    benchmarks = Definitions((DEFINITIONS, *files)).benchmarks
    assert [benchmarks[name].max_tokens for name in ("a", "b", "math500")] == [16, 8192, 8192]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"files": '[{ name = "a.jsonl", meta = "tests" }]'}, "files: meta takes tuple[str, ...], got 'tests'"),
        ({"sampels": "3"}, "there is no key 'sampels'; did you mean samples"),
        ({"samples": '"3"'}, "samples takes int, got '3'"),
        ({"verifier": '"maths"'}, "Verifier.kind must be one of"),
        ({"temperature": "0", "samples": "4"}, "would all be the same"),
        ({"public": '"aime"'}, "public = 'aime' is in no catalogue; did you mean aime2"),
        (
            {"files": '[{ name = "a.jsonl", convert = "after_hashes", question = "q" }]'},
            "convert = 'after_hashes' ignores question; leave one out",
        ),
        ({"files": "[]"}, "no source; give files, public, chains or word_problems or reasoning_gym"),
        (
            {"word_problems": "{ count = 4 }", "chains": "{ count = 4 }", "files": "[]"},
            "chains and word_problems are two",
        ),
        ({"word_problems": "{ count = 4 }"}, "word_problems and files are two sources; give one of them"),
        ({"word_problems": "{ steps = [5] }", "files": "[]"}, "WordProblems.steps must be at most 4, got (5,)"),
        ({"word_problems": "{ stops = [1] }", "files": "[]"}, "stops"),
        ({"word_problems": "3", "files": "[]"}, "word_problems is a table such as { count = 100 }, not 3"),
    ],
)
def test_a_block_that_is_not_well_defined_is_named_with_its_key(more, message, tmp_path):
    with pytest.raises(BenchmarkError, match=r"mine\.toml, block \[mine\]") as error:
        mine(tmp_path, **more)
    assert message in str(error.value)


def test_options_numbers_and_nested_fields_of_a_set_of_ones_own(tmp_path):
    rows = [
        {"data": {"q": "Which is red?"}, "opts": ["sky", "blood"], "right": 1, "kind": "colour"},
        {"data": {"q": "Which is wet?"}, "opts": ["water", "sand"], "right": "A", "kind": "touch"},
        {"data": {"q": "Which is old?"}, "opts": ["day", "sea", "moon"], "right": "sea", "kind": "age"},
    ]
    (tmp_path / "mc.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist([{**row, "right": str(row["right"])} for row in rows]), tmp_path / "mc.parquet")
    for name in ("mc.jsonl", "mc.parquet"):
        file = f'[{{ name = "{name}", question = "data.q", options = "opts", answer = "right" }}]'
        benchmark = mine(tmp_path, verifier='"choice"', files=file, by='"kind"')
        questions = [question for _, question in sets.load(benchmark, (), None).rows]
        assert [question.answer for question in questions] == ["B", "A", "B"]
        assert questions[2].prompt == "Which is old?\n\nA) day\nB) sea\nC) moon"
        assert [question.meta["group"] for question in questions] == ["colour", "touch", "age"]


@pytest.mark.parametrize(
    ("options", "answer", "gold"),
    [
        (["4", "2", "1", "3"], 1, "B"),  # a number counts
        (["4", "2", "1", "3"], "1", "names B and C"),
        (["C", "A", "B"], "A", "names A and B"),
        (["a", "b", "c"], "AB", "names none"),
        ("['x', 'y']", "x", "is no list of texts"),
        (["x", "y"], "y", "B"),
        (["x", "y"], "0", "A"),
    ],
)
def test_an_answer_that_names_two_options_or_none_is_refused(options, answer, gold, tmp_path):
    (tmp_path / "mc.jsonl").write_text(json.dumps({"q": "Which?", "o": options, "a": answer}) + "\n")
    file = '[{ name = "mc.jsonl", question = "q", options = "o", answer = "a" }]'
    benchmark = mine(tmp_path, verifier='"choice"', files=file)
    if len(gold) == 1:
        assert sets.load(benchmark, (), None).rows[0][1].answer == gold
    else:
        with pytest.raises(BenchmarkError, match=gold):
            sets.load(benchmark, (), None)


def test_a_parquet_file_of_the_blocks_name_is_read_as_the_block_says(tmp_path):
    rows = [{"data": {"q": "two?", "level": 3}, "answer": "2"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mine.parquet")
    benchmark = mine(tmp_path, files='[{ name = "mine.parquet", question = "data.q" }]', by='"data.level"')
    ((_, question),) = sets.load(benchmark, (), None).rows
    assert (question.prompt, question.answer, question.meta["group"]) == ("two?", "2", "3")


def test_folders_are_searched_in_their_order_whatever_the_name_of_the_file(tmp_path, monkeypatch):
    first, second, prepared = (tmp_path / name for name in ("first", "second", "datasets"))
    for folder in (first, second, prepared):
        folder.mkdir()
    (second / "math500_test.jsonl").write_text('{"problem": "two?", "answer": "2", "level": 5}\n')
    row = {"prompt": [{"role": "user", "content": "prepared?"}], "reward_model": {"ground_truth": "3", "style": "rule"}}
    pq.write_table(pa.Table.from_pylist([row]), prepared / "math500.parquet")
    monkeypatch.setattr(sets, "DATASETS", prepared)
    benchmark = Definitions().benchmark("math500")
    ((_, question),) = sets.load(benchmark, (first, second), None).rows
    assert (question.prompt, question.meta) == ("two?", {"group": "5"})
    questions = sets.load(benchmark, (first,), None)
    assert (questions.rows[0][1].prompt, questions.rows[0][1].meta) == ("prepared?", {})
    assert "no scores by level: no question of this set has it" in questions.notes


def test_scores_by_a_field_that_the_questions_made_here_do_not_have_are_missed_in_a_note(tmp_path):
    made = {"files": "[]", "verifier": '"modular_chain"', "chains": "{ count = 4 }"}
    assert sets.load(mine(tmp_path, **made, by='"operands"'), (), None).notes == ()
    (note,) = sets.load(mine(tmp_path, **made, by='"oprands"'), (), None).notes
    assert note == "no scores by oprands: no question of this set has it"


@pytest.mark.parametrize("task", ["chains", "word_problems"])
def test_questions_made_here_are_of_no_split_that_is_trained_on_unless_the_block_says_so_which_is_noted(task, tmp_path):
    made = {"files": "[]", "verifier": '"modular_chain"' if task == "chains" else '"word_problem"'}
    for words, split, notes in (("", "validation", 0), (', split = "train"', "train", 1)):
        benchmark = mine(tmp_path, **made, **{task: f"{{ count = 4{words} }}"})
        shown = sets.load(benchmark, (), None)
        trained_on = type(benchmark.made)(count=4).load()
        assert benchmark.made.split == split
        assert ([question for _, question in shown.rows] == trained_on) == (split == "train")
        assert ["split = 'train': " in note for note in shown.notes] == [True] * notes


# -- errors, before anything is generated -----------------------------------------------------------------------------


@pytest.fixture
def refused(bench, tmp_path):
    """The message of an evaluation that cannot be; nothing is there of it."""

    def run(*words: object) -> str:
        out = tmp_path / "refused"
        error = bench(*words, *HERE, "--out", out, status=2)
        assert not out.exists()
        return error.strip().split("\n")[-1]

    return run


def test_an_unknown_benchmark_or_suite_names_the_nearest(warm_model, refused):
    message = refused("--model", warm_model, "--benchmarks", "aime42,math500")
    assert message.endswith("there is no benchmark 'aime42'; did you mean aime25 or aime24?")
    assert "did you mean paper?" in refused("--model", warm_model, "--suite", "papr")
    assert "--suite or --benchmarks" in refused("--model", warm_model)


@pytest.mark.parametrize(
    ("lines", "more", "message"),
    [
        (None, {"files": '[{ name = "absent.jsonl" }]'}, "there is no mine.parquet or absent.jsonl in"),
        (
            None,
            {"files": '[{ name = "mine.jsonl", question = "question" }]'},
            "mine.jsonl: no column 'question', there are problem, answer",
        ),
        ('{"problem": "a?", "answer": ""}\n', {}, "line 1: the answer is empty"),
        (
            '{"problem": "a?", "answer": ["1", "2"]}\n',
            {},
            "mine.jsonl, line 1: not of the form expected (ValueError: the gold",
        ),
        ('{"problem": "a?", "answer"', {}, "mine.jsonl, line 1: not JSON"),
        ('{"problem": null, "answer": "1"}\n', {}, "line 1: not of the form expected"),
        ('{"problem": "a \\ud800 b", "answer": "1"}\n', {}, "line 1: not of the form expected"),
        (
            '{"problem": "Which?", "answer": "neither"}\n',
            {"verifier": '"choice"'},
            "'Which?' of 'mine', Verifier.kind = 'choice': the gold",
        ),
        ('{"problem": "7+7", "answer": "4"}\n', {"verifier": '"modular_chain"'}, "not a modular chain"),
        ('{"problem": "?", "answer": "print(4)"}\n', {"verifier": '"code"'}, "line 1 of the tests cannot be read: pri"),
        ('{"problem": "7", "answer": "4"}\n', {"verifier": '"function"', "function": '"no.py"'}, "no.py"),
        (
            None,
            {"verifier": '"function"', "function": '"rewards.py:by_level"'},
            "rewards.py takes level, which is no column of the questions",
        ),
        (None, {"by": '"knd"'}, "no column 'knd', there are problem, answer"),
        (
            None,
            {"files": '[{ name = "mine.jsonl", question = "problem", meta = ["tests"] }]'},
            "no column 'tests', there are problem, answer; correct `files` of benchmark 'mine'",
        ),
        ("", {}, "holds no questions; was it written to the end?"),
    ],
)
def test_a_set_that_could_not_be_read_or_graded_is_refused(
    lines, more, message, byte_model, tmp_path, refused, monkeypatch
):
    block = definition(tmp_path, **more)
    if lines is not None:
        (tmp_path / "mine.jsonl").write_text(lines)
    (tmp_path / "rewards.py").write_text("def by_level(prompts, completions, level): ...\n")
    words = ("--benchmarks", "mine", "--definitions", block, "--model", byte_model, "--max-tokens", 8)
    monkeypatch.chdir(tmp_path)
    assert message in refused(*words)


def test_a_set_requested_by_name_that_is_not_available_is_an_error(warm_model, refused, monkeypatch, tmp_path):
    def unreachable(set_id: str, *_: object) -> str:
        raise HubError(explain(OSError(f"Gated dataset: {set_id} is a gated repo"), set_id, "x"))

    monkeypatch.setattr(sets, "commit", unreachable)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    message = refused("--model", warm_model, "--benchmarks", "chains,gpqa", "--data", tmp_path)
    assert "benchmark 'gpqa' is not available: Idavidrein/gpqa is gated: accept its terms" in message
    assert f"it is not in {tmp_path}" in message


def test_a_model_that_cannot_be_evaluated_is_refused(warm_model, tmp_path, refused):
    words = ("--benchmarks", "chains", "--model")
    assert "there is no such folder" in refused(*words, tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "there is no config.json" in refused(*words, tmp_path / "empty")
    run = tmp_path / "run"
    checkpoints.save(run, 3, "an id", lambda folder: {}, 1)
    assert "checkpoint-3" in refused(*words, run)
    bare = tmp_path / "bare"
    shutil.copytree(warm_model, bare, ignore=shutil.ignore_patterns("token*", "vocab*", "merges*"))
    assert "there is no tokenizer" in refused(*words, bare)


def test_a_context_that_is_too_short_says_how_long_responses_can_be(warm_model, byte_model, tmp_path, bench, refused):
    words = ("--benchmarks", "chains", "--model", warm_model)
    message = refused(*words, "--max-tokens", 250)
    assert "exceed the 256 positions" in message
    room = int(message.rpartition("--max-tokens ")[2].split()[0])
    bench(*words, *HERE, "--limit", 3, "--max-tokens", room, "--out", tmp_path / "fits")
    block = definition(tmp_path)
    (tmp_path / "mine.jsonl").write_text(json.dumps({"problem": "x" * 9000, "answer": "1"}) + "\n")
    words = ("--benchmarks", "mine", "--definitions", block, "--model", byte_model, "--max-tokens", 8)
    assert "the model is too small for this benchmark" in refused(*words)
