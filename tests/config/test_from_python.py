"""A run from Python: what is written of its questions and its reward, what is refused, and a resumed run."""

from __future__ import annotations

import importlib
import json
import linecache
import math
import re
import subprocess
import sys
import xml.dom.minidom
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import cache
from itertools import count
from pathlib import Path

import matplotlib
import pytest
from run_builders import ROOT, environment, python, rows, small_bindings, train_in

from exgrpo_orlhf import train
from exgrpo_orlhf.checkpoints import RunFolderError, claim
from exgrpo_orlhf.config import from_python
from exgrpo_orlhf.config.function_source import source_of
from exgrpo_orlhf.grader.answer import Answer
from exgrpo_orlhf.questions import QuestionFile
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import function
from exgrpo_orlhf.testbed.modular_chains import ModularChains

LAST = re.compile(r"#(\d)$", re.IGNORECASE)
WEIGHTS = {"right": 1.0, "wrong": -0.5}
STARTED = count()


class Scale:
    def __init__(self, by=WEIGHTS):
        self.by = by


def _last(text):
    return found[1] if (found := LAST.search(text)) else ("" if math.isnan(1.0) else None)


def again(text, depth=2):
    return again(text, depth - 1) if depth else _last(text)


def reward(completions, answer, **kwargs):
    return [Scale().by["right" if again(text) == gold else "wrong"] for text, gold in zip(completions, answer)]  # noqa: B905


def other_reward(completions, **kwargs):
    return [0.0] * len(completions)


INFO = {"num_turns": 2, "rollout_reward_scores": {}}


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return extra_info["scale"]


def _verl_info(question: Question) -> dict:
    return function._verl(Answer(question.answer, "", meta=question.meta))["extra_info"]


def of_a_tree(completions, **kwargs):
    return [float(_depth(xml.etree.ElementTree.fromstring(text))) for text in completions]


def _depth(element):
    return 1 + max(map(_depth, element), default=0) if xml.dom.minidom.Node.ELEMENT_NODE else 0


def with_counter(completions, **kwargs):
    return [float(next(STARTED)) for _ in completions]


@cache
def _cached(text):
    return float(len(text))


_stripped = lambda text: text.strip()


def with_cached(completions, **kwargs):
    return [_cached(text) for text in completions]


def with_lambda(completions, **kwargs):
    return [float(_stripped(text) == "") for text in completions]


def undefined(completions, **kwargs):
    return [not_there(text) for text in completions]  # noqa: F821


def closure(scale):
    def inner(completions, **kwargs):
        return [scale for _ in completions]

    return inner


def typed():
    space = {"__name__": "__main__"}
    exec("def shown(completions): return [1.0]", space)
    return space["shown"]


def test_a_functions_source_is_enough_to_call_it(tmp_path):
    text = source_of(reward)
    assert text == source_of(reward)
    assert "other_reward" not in text
    space: dict = {"__name__": "elsewhere"}
    exec(compile(text, "reward.py", "exec"), space)
    assert space["reward"](["7+5=2;#2", "#3"], ["2", "2"]) == reward(["7+5=2;#2", "#3"], ["2", "2"]) == [1.0, -0.5]


def test_a_module_that_is_reached_through_its_package_is_imported_in_another_process_too(tmp_path):
    (tmp_path / "reward.py").write_text(source_of(of_a_tree))
    words = ["-c", "from reward import of_a_tree as f; print(f(['<a><b/></a>']))"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[2.0]\n", "")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions: [1.0], "must be a function made with def"),
        ([].append, "must be a function made with def"),
        (Scale, "must be a function made with def"),
        (closure(2.0), "inner uses scale of the function around it"),
        (with_counter, "uses STARTED, a count, which has no source"),
        (undefined, "undefined uses not_there, which is not defined"),
        (with_cached, "uses _cached, a _lru_cache_wrapper, which has no source"),
        (with_lambda, "uses _stripped, a function, which has no source"),
        ("rewards.py:accuracy", "must be a function made with def"),
        (typed(), "shown is in no file and no cell"),
    ],
)
def test_a_function_without_a_source_of_its_own_is_refused_in_one_sentence(function, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        source_of(function)
    assert "\n" not in str(caught.value)


def _written(items: list, path: Path) -> list[Question]:
    lines = [json.dumps(from_python._row(item, "questions[0]")) for item in items]
    path.write_text("\n".join(lines))
    return QuestionFile(str(path)).load()


def test_questions_keep_their_ids_in_the_runs_folder(tmp_path):
    questions = [
        *ModularChains(count=5, operands=(2, 3)).load(),
        Question.make("mine", (("system", "brief"), ("user", "2+2?")), ("4", "four")),
        Question.make("mine", "1/3 = ?", 0.5),
    ]
    assert [one.id for one in _written(questions, tmp_path / "q.jsonl")] == [one.id for one in questions]


def test_pairs_and_dicts_are_questions(tmp_path):
    pairs = _written([("2+2?", "4"), ("2+3?", 5)], tmp_path / "q.jsonl")
    dicts = _written([{"question": "2+2?", "answer": "4"}, {"question": "2+3?", "answer": 5}], tmp_path / "q.jsonl")
    assert [(one.prompt, one.answer) for one in pairs] == [(one.prompt, one.answer) for one in dicts]
    columns = from_python._columns([{"question": "2+2?", "answer": "4", "level": 1}], ("answer",), "questions")
    assert columns == ("answer", "level"), "the reward takes answer by name"
    assert from_python._columns([{"question": "2+2?", "answer": "4"}], (), "questions") == ()
    with pytest.raises(ValueError, match=r"questions\[1\] lacks level, which others have"):
        from_python._columns([{"prompt": "2+2?", "level": 1}, {"prompt": "2+3?"}], (), "questions")


@pytest.fixture
def read(tmp_path, monkeypatch):
    """read(…): the questions and those of validation that a run with these arguments of `train` reads."""
    sources: list = []
    monkeypatch.setattr(
        "exgrpo_orlhf.training.run.train",
        lambda experiment, *_, **__: sources.extend((experiment.questions, experiment.validation)),
    )

    def read(*arguments, **options) -> list[list[Question]]:
        model = ["PretrainedModel.path = 'some/model'", "Work.model = @PretrainedModel()"]
        train(*arguments, out=tmp_path / f"run{len(sources)}", bindings=model, **options)
        return [source.load() for source in sources[-2:] if source]

    return read


def test_a_column_of_a_questions_meta_does_not_pass_for_its_gold(read):
    for meta in ({"reward_model": {"ground_truth": "5"}}, {"gold": "5"}):
        [(asked,)] = read([Question.make("mine", "2+2?", "4", meta)], other_reward)
        assert (asked.prompt, asked.answer) == ("2+2?", "4")
        assert asked.meta == {"row": 0, **meta}


def test_the_reward_gets_of_a_files_questions_what_it_gets_of_the_file(read, tmp_path):
    path = tmp_path / "verl.jsonl"
    row = {"data_source": "mine", "prompt": "2+2?", "reward_model": {"ground_truth": "4"}, "extra_info": {"scale": 0.5}}
    path.write_text("".join(json.dumps({**row, "prompt": f"{i}+1?", "solution": str(i)}) + "\n" for i in range(3)))
    [of_the_file], [of_questions] = read(path, verl), read(QuestionFile(str(path)), verl)
    with_columns = QuestionFile(str(path), meta=("solution", "data_source"))
    [with_solutions] = read(with_columns, verl)
    for i, one in enumerate(of_the_file):
        assert _verl_info(one) == {**INFO, "row": i, "scale": 0.5}
        assert _verl_info(of_questions[i]) == {**_verl_info(one), "data_source": "mine"}
        assert _verl_info(with_solutions[i])["solution"] == str(i)
    assert read(with_columns, other_reward)[0][2].meta == with_columns.load()[2].meta
    [(first, *_, last)] = read([*of_the_file, Question.make("mine", "9+1?", "10")], verl)
    assert (_verl_info(first)["scale"], _verl_info(last)) == (0.5, {**INFO, "row": 3, "data_source": "mine"})


def test_validation_is_not_read_by_the_columns_of_the_questions(read, tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text('{"problem": "1+1?", "solution": "2", "answer": "two"}\n')
    for questions in ([("2+2?", "4")], [{"question": "2+2?", "answer": "4", "level": 1}]):
        asked, held_out = read(questions, other_reward, validation=path)
        assert [(one.prompt, one.answer) for one in (*asked, *held_out)] == [("2+2?", "4"), ("1+1?", "two")]
    _, held_out = read([("2+2?", "4")], other_reward, validation=[{"problem": "1+1?", "final_answer": "2"}])
    assert [(one.prompt, one.answer) for one in held_out] == [("1+1?", "2")]
    file = tmp_path / "mine.gin"  # what the user binds for it stays
    file.write_text("include 'base.gin'\nvalidation/QuestionFile.answer = 'solution'\n")
    _, held_out = read([("2+2?", "4")], other_reward, validation=path, gin=[file])
    assert [(one.prompt, one.answer) for one in held_out] == [("1+1?", "2")]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("question", "is 'question'; a question is a dict"),
        ({"prompt": "x", "answer": Decimal(1)}, "Decimal is not JSON serializable"),
        ({"prompt": "x", "answer": math.nan}, "not JSON compliant"),
        ({"prompt": "\ud800", "answer": "1"}, "surrogates not allowed"),
        ({"prompt": "x", "answer": "1", "tests": [{"by": {1: "2"}}]}, "the key 1 is no text"),
        (Question.make("mine", "x", "1", {"answer": "2"}), "has another 'answer' in its meta"),
    ],
)
def test_what_is_no_question_is_refused_with_its_place(item, message, tmp_path):
    with pytest.raises(ValueError, match=r"questions\[1\]") as caught:
        train([("2+2?", "4"), item], reward, out=tmp_path / "run")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_openrlhf_and_a_text_for_a_list_are_refused(tmp_path):
    with pytest.raises(ValueError, match="gin and bindings are lists"):
        train([("2+2?", "4")], reward, out=tmp_path / "run", bindings="train.steps = 2")
    path = "PretrainedModel.path = 'm'"
    with pytest.raises(ValueError, match="from Python the local engine trains"):
        train([("2+2?", "4")], reward, out=tmp_path, gin=["base.gin", "engines/openrlhf_8gpu.gin"], bindings=[path])


@pytest.mark.slow
def test_a_second_call_changes_no_file_of_a_run_that_is_under_way(tmp_path):
    files = {name: tmp_path / name for name in ("questions.jsonl", "reward.py")}
    for file in files.values():
        file.write_text("of the first\n")
    with claim(tmp_path, resume=False), pytest.raises(RunFolderError, match="another process is at work in"):
        train([("1+1=", "2")], reward, out=tmp_path, gin=["toy.gin"])
    assert {file.read_text() for file in files.values()} == {"of the first\n"}


def test_files_of_the_users_own_are_refused_and_those_of_a_start_that_failed_are_written_anew(tmp_path):
    file, other = tmp_path / "run" / "questions.jsonl", tmp_path / "mine" / "reward.py"
    other.parent.mkdir()
    options = {
        "out": file.parent,
        "gin": ["toy.gin"],
        "bindings": ["Verifier.kind = 'exact'", "Work.validation = None"],
    }
    for prompt in ("1+1=", "2+2="):
        with pytest.raises(ValueError, match="it takes one gold answer"):  # when the file is written
            train([(prompt, ["2", "4"])], **options)
        assert prompt in file.read_text()
    for path in (file, other):
        path.write_text("of the user\n")
    with pytest.raises(RunFolderError, match=r"questions\.jsonl is a file of yours"):
        train([("1+1=", "2")], **options)
    with pytest.raises(RunFolderError, match=r"reward\.py is a file of yours"):
        train([("1+1=", "2")], reward, out=other.parent, gin=["toy.gin"])
    assert [path.name for path in other.parent.glob("[!.]*")] == ["reward.py"]
    assert {path.read_text() for path in (file, other)} == {"of the user\n"}
    same, record = tmp_path / "questions.jsonl", tmp_path / ".written"
    same.write_text("of the user\n")
    from_python._write({same: b"of the user\n"}, record, begun=False)  # it is still the user's
    with pytest.raises(RunFolderError, match=r"questions\.jsonl is a file of yours"):
        from_python._write({same: b"another\n"}, record, begun=False)


def test_a_thread_of_a_server_can_train(warm_model, tmp_path):
    """Where Python lets nobody take signals."""
    settings = [one for one in small_bindings(warm_model, "train.steps = 1") if "validation" not in one]
    options = {"out": tmp_path, "gin": ["toy.gin"], "bindings": [*settings, "Work.validation = None"]}
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(train, **options).result().steps == 1


def test_a_run_from_python_is_continued_and_repeated_and_refuses_what_differs(warm_model, tmp_path):
    questions, held_out = (ModularChains(count=24, operands=(2, 3), split=part) for part in ("train", "validation"))
    replaced = ("Work.questions", "Work.validation", "Verifier.kind")
    settings = [one for one in small_bindings(warm_model) if not one.startswith(replaced)]

    def go(run, steps, questions=questions, reward=reward, resume=False):
        bindings = [*settings, f"train.steps = {steps}", "train.save_every = 1"]
        options = {"gin": ["toy.gin"], "bindings": bindings, "validation": held_out, "resume": resume}
        return train(questions, reward, out=run, **options)

    assert go(tmp_path / "straight", 3).steps == 3
    assert go(tmp_path / "run", 2).steps == 2
    with pytest.raises(RunFolderError, match=r"reward\.py is not what is given now"):
        go(tmp_path / "run", 3, reward=other_reward, resume=True)
    with pytest.raises(RunFolderError, match=r"questions\.jsonl is not what is given now"):
        go(tmp_path / "run", 3, questions=questions.load()[1:], resume=True)
    assert go(tmp_path / "run", 3, resume=True).steps == 3
    words = ["--gin", tmp_path / "straight" / "config.gin", "--out", tmp_path / "again"]
    assert python(ROOT / "scripts/train.py", *words, env=environment()).returncode == 0
    assert rows(tmp_path / "run")[-1]["reward/mean"] != 0
    timed = lambda row: {name: value for name, value in row.items() if not name.startswith("time")}
    straight = [timed(row) for row in rows(tmp_path / "straight")]
    assert [timed(row) for row in rows(tmp_path / "run")] == straight
    assert [timed(row) for row in rows(tmp_path / "again")] == straight


_SCRIPT = """\
import sys

from exgrpo_orlhf import train
from lengths import share
import ranks.digits as digits


def reward(completions, **kwargs):
    from lengths import LONGEST

    return [digits.in_text(text) * share(text, LONGEST) for text in completions]


if __name__ == "__main__":
    train(reward=reward, out=sys.argv[1], gin=["toy.gin"], bindings=sys.argv[2:])
"""


@pytest.fixture
def script(tmp_path) -> Path:
    """A user's script, with a module and a package beside it."""
    folder = tmp_path / "mine"
    (folder / "ranks").mkdir(parents=True)
    (folder / "ranks" / "digits.py").write_text("def in_text(text):\n    return sum(map(str.isdigit, text))\n")
    (folder / "lengths.py").write_text("LONGEST = 24\n\n\ndef share(text, longest):\n    return len(text) / longest\n")
    (folder / "script_of_mine.py").write_text(_SCRIPT)
    return folder / "script_of_mine.py"


def test_the_scripts_folder_is_named_only_where_a_module_of_it_is_imported(script, monkeypatch):
    monkeypatch.syspath_prepend(script.parent)
    module = importlib.import_module(script.stem)
    assert f"sys.path.insert(0, {str(script.parent)!r})" in source_of(module.reward)
    assert "sys.path" not in source_of(reward)


@pytest.mark.slow
def test_the_reward_of_a_script_imports_what_is_beside_it_in_the_grading_process_too(script, warm_model, tmp_path):
    bindings = [one for one in small_bindings(warm_model, "train.steps = 1") if not one.startswith("Verifier.kind")]
    done = python(script, tmp_path / "run", *bindings, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    train_in(tmp_path / "again", [], files=[tmp_path / "run" / "config.gin"])
    means = [rows(tmp_path / name)[-1]["reward/mean"] for name in ("run", "again")]
    assert means[0] == means[1] > 0


@pytest.mark.slow
def test_the_cells_of_the_first_hour_run_in_their_order(tmp_path, monkeypatch, capsys):
    matplotlib.use("agg")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = ROOT / "docs" / "first_hour.ipynb"
    assert path.stat().st_size < 300_000
    space = {"__name__": "__main__"}
    for i, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            source, name = "".join(cell["source"]).replace("train.steps = 24", "train.steps = 8"), f"<cell {i}>"
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # as IPython does
            exec(compile(source, name, "exec"), space)
            assert cell["outputs"] or source.startswith("import random"), f"cell {i} was not executed"
    assert space["outcome"].steps == 8
    assert " rows replayed" in capsys.readouterr().out
