"""The hub's library, mixes by weight, and the length filter."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_builders import ROOT, python, small_bindings

from exgrpo_orlhf import config
from exgrpo_orlhf.questions import LengthFilter, QuestionFile, QuestionHub, QuestionMix, fingerprint
from exgrpo_orlhf.records import Question

# -- the hub's library ------------------------------------------------------------------------------------------------


@pytest.fixture
def hub_set(tmp_path, monkeypatch) -> Path:
    """A folder as the hub has it: two subsets, two splits, a card that names them."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "sums"
    for subset, split, numbers in [("easy", "train", (1, 2)), ("easy", "test", (3,)), ("hard", "train", (40, 50, 60))]:
        (folder / subset).mkdir(parents=True, exist_ok=True)
        rows = [{"q": f"{n}+1?", "gold": {"value": str(n + 1), "unit": ""}, "image": "x" * 50} for n in numbers]
        pq.write_table(pa.Table.from_pylist(rows), folder / subset / f"{split}-00000-of-00001.parquet")
    files = "".join(
        f"- config_name: {subset}\n  data_files:\n" + "".join(
            f"  - split: {split}\n    path: {subset}/{split}-*\n" for split in splits
        ) for subset, splits in (("easy", ("train", "test")), ("hard", ("train",)))
    )  # fmt: skip
    (folder / "README.md").write_text(f"---\nconfigs:\n{files}---\n")
    return folder


def hub(folder: Path, subset: str | None = "easy", **more) -> QuestionHub:
    return QuestionHub(str(folder), subset, **{"prompt": "q", "answer": "gold.value", **more})


def test_a_set_of_the_hub_loads_by_subset_split_and_nested_fields(hub_set):
    first, second = hub(hub_set).load()
    assert (first.prompt, first.answer, first.source, first.meta) == ("1+1?", "2", "sums", {"row": 0})
    assert second.answer == "3"
    assert [question.answer for question in hub(hub_set, split="test").load()] == ["4"]
    assert [question.answer for question in hub(hub_set, "hard", split="train[1:]").load()] == ["51", "61"]
    assert len(hub(hub_set, "hard", limit=2).load()) == 2
    path = hub_set / "easy" / "train-00000-of-00001.parquet"
    from_file = QuestionFile(str(path), prompt="q", answer="gold.value", source=None).load()
    assert [(q.prompt, q.answer) for q in from_file] == [(q.prompt, q.answer) for q in (first, second)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "question"}, r"no column 'question', there are q, gold, gold\.value.*set QuestionHub\.prompt"),
        ({"answer": "gold.text"}, r"no column 'gold\.text'.*QuestionHub\.answer"),
        ({"source": "set"}, r"QuestionHub\.source \(None"),
        ({"split": "validation"}, r"sums: .*validation.*set QuestionHub\.subset and QuestionHub\.split"),
        ({"subset": "middle"}, r"sums: .*middle.*set QuestionHub\.subset"),
        ({"subset": None}, r"sums: .*easy.*set QuestionHub\.subset"),
    ],
)
def test_a_wrong_field_split_or_subset_names_the_binding(hub_set, change, message):
    with pytest.raises(ValueError, match=message):
        hub(hub_set, **change).load()


def test_a_folder_of_save_to_disk_is_read_by_split(tmp_path):
    sums = datasets.Dataset.from_list([{"q": f"{n}+1?", "a": n + 1} for n in range(10)])
    sums.save_to_disk(tmp_path / "sums")
    datasets.DatasetDict({"train": sums, "test": sums.select([3])}).save_to_disk(tmp_path / "both")

    def answers(name: str, **more) -> list[int]:
        return [one.answer for one in QuestionHub(str(tmp_path / name), prompt="q", answer="a", **more).load()]

    assert answers("sums") == answers("both") == [*range(1, 11)]
    assert answers("both", split="test") == [4]
    assert answers("sums", split="train[2:5]") == [3, 4, 5]
    for more in ({"split": "test"}, {"subset": "main"}):
        with pytest.raises(
            ValueError, match="a folder of save_to_disk has no subsets; the splits of this one are train; set"
        ):
            answers("sums", **more)


def test_nothing_heavy_is_imported_before_the_hub_is_asked_and_without_a_network_the_error_says_what_to_do(tmp_path):
    """From the project's root, where sys.path begins with it and the folder datasets hides no library."""
    code = (
        "import sys, exgrpo_orlhf.questions as questions\n"
        "print({'torch', 'transformers', 'datasets'} & set(sys.modules))\n"
        "try: questions.QuestionHub('somebody/some-set').load()\n"
        "except ValueError as error: print(error)"
    )
    process = python("-c", code, cwd=ROOT, env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)})
    assert process.stdout.startswith("set()\nsomebody/some-set: the hub cannot be reached"), process.stderr
    assert "hf download --repo-type dataset somebody/some-set" in process.stdout


# -- mixes ------------------------------------------------------------------------------------------------------------


class Made:
    """A source of n questions."""

    def __init__(self, name: str, n: int, first: int = 0, answer: str = "1") -> None:
        self.questions = [Question.make(name, f"{i} apples?", answer) for i in range(first, first + n)]

    def load(self) -> list[Question]:
        return list(self.questions)


def counts(mix: QuestionMix) -> Counter[str]:
    return Counter(question.source for question in mix.load())


A, B, C = Made("a", 100), Made("b", 100, 1000), Made("c", 100, 2000)


@pytest.mark.parametrize(
    ("mix", "expected"),
    [
        (QuestionMix((A, B), (3, 1), size=80), {"a": 60, "b": 20}),
        (QuestionMix((A, B, C), (1, 1, 1), size=100), {"a": 34, "b": 33, "c": 33}),
        (QuestionMix((A, B), (0.5, 0.25), size=90), {"a": 60, "b": 30}),
        # Without a size: the largest mix that keeps the shares. Without weights: every question.
        (QuestionMix((A, Made("b", 10, 1000)), (3, 1)), {"a": 30, "b": 10}),
        (QuestionMix((Made("a", 7), B), (1, 2)), {"a": 7, "b": 14}),
        (QuestionMix((Made("a", 5), Made("b", 3, 100))), {"a": 5, "b": 3}),
    ],
)
def test_a_mix_has_the_weights_shares_to_the_question(mix, expected):
    assert counts(mix) == expected


def test_a_mix_depends_on_its_seed_alone_and_grows_without_changing_its_questions():
    first = QuestionMix((A, B), (1, 1), size=40).load()
    assert fingerprint(QuestionMix((A, B), (1, 1), size=40).load()) == fingerprint(first)
    assert fingerprint(QuestionMix((A, B), (1, 1), size=40, seed=1).load()) != fingerprint(first)
    assert set(first) < set(QuestionMix((A, B), (1, 1), size=60).load())
    assert first != A.questions[:20] + B.questions[:20]


def test_a_question_of_two_sources_comes_once_and_other_answers_are_said(caplog):
    caplog.set_level(logging.INFO)
    a, b = Made("a", 10), Made("b", 10, 5, answer="2")
    assert counts(QuestionMix((a, b))) == {"a": 10, "b": 5}
    assert "source 1 repeats 5 questions of earlier sources: left out" in caplog.text
    assert "5 of them have an answer that is written differently there, such as '2' and '1'" in caplog.text
    assert "10 of 10 questions of source 0 (a), 66.7 % of the mix" in caplog.text
    with pytest.raises(ValueError, match="source 1 holds no question that the sources before it do not hold"):
        QuestionMix((a, Made("b", 3))).load()


def test_a_size_that_a_source_cannot_fill_says_how_large_it_can_be():
    mix = QuestionMix((Made("a", 100), Made("b", 10, 1000)), (1, 1), size=50)
    with pytest.raises(ValueError, match=r"size = 50 asks source 1 for 25 .* it has 10; .* can be 20 at most"):
        mix.load()
    with pytest.raises(ValueError, match="source 1 would give no question"):
        QuestionMix((Made("a", 100), Made("b", 10, 1000)), (99, 1), size=3).load()


# -- length, and all of it from gin -----------------------------------------------------------------------------------


def mixed_bindings(tmp_path: Path, model: Path) -> list[str]:
    short = [{"question": f"{a}+{b}=", "answer": (a + b) % 10} for a in range(10) for b in range(2)]
    (tmp_path / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
    long = [f"{a}+{b}*{c}-1+2+3+4=,1\n" for a in range(3) for b in range(2) for c in range(2)]
    (tmp_path / "long.csv").write_text("".join(["question,answer\n7*7=,9\n7*8=,6\n", *long]))
    return small_bindings(
        model,
        "Work.questions = @LengthFilter()",
        "LengthFilter.questions = @QuestionMix()",
        "LengthFilter.model = @PretrainedModel()",
        "LengthFilter.prompts = @Prompts()",
        "QuestionMix.sources = (@a/QuestionFile(), @b/QuestionFile())",
        "QuestionMix.weights = (2, 1.0)",
        "QuestionMix.size = 27",
        f"a/QuestionFile.path = {str(tmp_path / 'short.jsonl')!r}",
        f"b/QuestionFile.path = {str(tmp_path / 'long.csv')!r}",
        "b/QuestionFile.source = None",
        "QuestionFile.prompt = 'question'",
        "QuestionFile.answer = 'answer'",
        "Prompts.max_tokens = 8",
        "Work.validation = None",
        "train.eval_every = None",
    )


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path, raw_model, caplog):
    caplog.set_level(logging.INFO)
    source = config.load(["toy.gin"], mixed_bindings(tmp_path, raw_model)).questions
    assert isinstance(source, LengthFilter)
    kept = source.load()
    left_out = [question for question in source.questions.load() if question not in kept]
    assert {len(question.prompt) for question in kept} == {4}
    assert {len(question.prompt) for question in left_out} == {14}
    text = f"{len(kept)} of 27 questions kept, {len(left_out)} longer than Prompts.max_tokens = 8 left out (the longest"
    assert f"LengthFilter: {text} has 14 tokens)" in caplog.text


def test_a_filter_that_leaves_nothing_or_misses_a_part_is_refused(tmp_path, raw_model):
    bindings = mixed_bindings(tmp_path, raw_model)
    source = config.load(["toy.gin"], [*bindings, "Prompts.max_tokens = 3"]).questions
    with pytest.raises(ValueError, match=r"all 27 questions are longer than Prompts\.max_tokens = 3 .* has 4 tokens"):
        source.load()
    with pytest.raises(config.ConfigError, match=r"LengthFilter\.model"):
        config.load(["toy.gin"], [b for b in bindings if not b.startswith("LengthFilter.model")])
    with pytest.raises(config.ConfigError, match=r"LengthFilter\.prompts takes Prompts, got None"):
        config.load(["toy.gin"], [*bindings, "LengthFilter.prompts = None"])
