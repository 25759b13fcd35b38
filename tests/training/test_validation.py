"""Evaluation during training: the batch evaluation's code, the same responses at every step, apart from the tests."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_builders import rows, small_bindings, train_small

from exgrpo_orlhf import checkpoints, config
from exgrpo_orlhf.evaluation import sets
from exgrpo_orlhf.evaluation.report import write_report
from exgrpo_orlhf.training.validation import metric_names

SAMPLED = ("Evaluation.samples = 4", "Evaluation.temperature = 0.8", "Evaluation.top_p = 0.95")


def trained(model: Path, run: Path, *more: str) -> list[dict]:
    train_small(model, run, *more)
    return rows(run)


def test_a_sampled_validation_has_its_metrics_and_keeps_the_best_checkpoint_by_one(warm_model, tmp_path):
    best = "train.best_metric = 'eval/validation/avg_at_4'"
    logged = trained(warm_model, tmp_path, *SAMPLED, "train.keep = 1", best)
    by_step = {row["step"]: row for row in logged if "eval/validation/avg_at_4" in row}
    assert list(by_step) == [0, 2, 4]
    for row in by_step.values():
        value = row["eval/validation/avg_at_4"]
        low, high = (row[f"interval/validation/avg_at_4_{end}"] for end in ("low", "high"))
        assert 0 <= low <= value <= high <= 1
        assert value <= row["eval/validation/pass_at_2"] <= row["eval/validation/pass_at_4"]
    kept = max((2, 4), key=lambda step: (by_step[step]["eval/validation/avg_at_4"], -step))
    assert (tmp_path / "best").resolve().name == f"checkpoint-{kept}"
    assert set(checkpoints.find(tmp_path)) == {kept, 4}


@pytest.mark.parametrize("more", [(), SAMPLED, ("Verifier.kind = 'exact'",)])
def test_the_metrics_are_those_that_were_announced(more, warm_model, tmp_path):
    experiment = config.load(("toy.gin",), small_bindings(warm_model, *more))
    names = {name for name in trained(warm_model, tmp_path, *more)[0] if name.startswith(("eval/", "interval/"))}
    assert names == {*metric_names(experiment.evaluation, experiment.validation.load(), experiment.verifier)}
    assert ("eval/lucky_guess_rate" in names) == (experiment.verifier.kind == "modular_chain"), (
        "what checks the reasoning"
    )


@pytest.mark.slow
def test_responses_have_the_same_seeds_at_every_step_and_training_is_not_touched(warm_model, tmp_path):
    """What changes from step to step is the policy; and how it is evaluated changes no step."""
    runs = trained(warm_model, tmp_path / "sampled", *SAMPLED), trained(warm_model, tmp_path / "greedy")
    kept = ("reward", "policy", "replay")
    a, b = ([{name: row[name] for name in row if name.startswith(kept)} for row in metrics] for metrics in runs)
    assert a == b
    folders = [tmp_path / "sampled" / "evaluation" / step for step in ("0", "4")]
    files = [folder / "validation" / "samples.jsonl" for folder in folders]
    first, last = ([line["seed"] for line in rows(file)] for file in files)
    assert first == last
    assert len(set(first)) == len(first) == 40
    write_report(folders, tmp_path / "steps.html")
    assert "data:image/svg+xml" in (tmp_path / "steps.html").read_text()


def prepared(folder: Path, question: str) -> None:
    """MATH-500 as scripts/prepare_data.py writes it, of two questions."""
    made = [
        {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": "7", "style": "rule"}}
        for text in (question, "What is 3 + 4?")
    ]
    pq.write_table(pa.Table.from_pylist(made), folder / "math500.parquet")


def test_a_validation_question_of_a_test_suite_is_refused(warm_model, tmp_path, monkeypatch):
    """T12: the official validation file holds the test questions, and the best checkpoint was chosen on them."""
    (tmp_path / "valid.jsonl").write_text(json.dumps({"q": "= 7 - 2", "a": "7"}) + "\n")
    monkeypatch.setattr(sets, "DATASETS", tmp_path)
    bindings = (
        "Work.validation = @validation/QuestionFile()",
        f"validation/QuestionFile.path = {str(tmp_path / 'valid.jsonl')!r}",
        "validation/QuestionFile.prompt = 'q'",
        "validation/QuestionFile.answer = 'a'",
        "validation/QuestionFile.source = None",
        "train.steps = 0",
        "Verifier.kind = 'exact'",
    )
    prepared(tmp_path, "=7-2")  # of characters that the model's tokenizer has
    with pytest.raises(ValueError, match=r"1 of 1 validation questions are in MATH-500 .*Work\.validation"):
        trained(warm_model, tmp_path / "run", *bindings)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert trained(warm_model, tmp_path / "again", *bindings, "Evaluation.disjoint_from = None")
    prepared(tmp_path, "Which number is it?")
    assert trained(warm_model, tmp_path / "other", *bindings)


def test_scores_by_level_are_of_levels_that_are_numbers(warm_model, tmp_path):
    """A field of the same name in a user's file may hold a text, such as the worked steps of each question."""
    lines = [{"prompt": f"{i}+5=", "answer": str((i + 5) % 10), "steps": f"add 5 to {i}"} for i in range(4)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = ("Work.validation = @validation/QuestionFile()", f"validation/QuestionFile.path = '{tmp_path}/own.jsonl'",
           "validation/QuestionFile.answer = 'answer'", "validation/QuestionFile.meta = ('steps',)",
           "Verifier.kind = 'exact'", "train.steps = 0")  # fmt: skip
    [row] = trained(warm_model, tmp_path / "run", *own)
    assert [name for name in row if name.startswith("eval/greedy_accuracy")] == ["eval/greedy_accuracy"]
