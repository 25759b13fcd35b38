"""Questions that are held out of a file: validated on by the whole run, trained on by no way."""

from __future__ import annotations

import json

import pytest
from run_builders import rows, small_bindings, train_small

from exgrpo_orlhf import config
from exgrpo_orlhf.checkpoints import UnusableCheckpoint
from exgrpo_orlhf.replay.snapshot import SnapshotError
from exgrpo_orlhf.testbed.modular_chains import ModularChains, right_reasoning
from exgrpo_orlhf.training.load_questions import load_questions


@pytest.fixture
def chains(tmp_path) -> list[str]:
    """Bindings of a run on a file of chains, which the file's verifier grades by their result."""
    file = tmp_path / "chains.jsonl"
    made = ModularChains(count=24, operands=(2,)).load()
    file.write_text("".join(json.dumps({"question": q.prompt, "answer": q.answer}) + "\n" for q in made))
    questions = ("Work.questions = @QuestionFile()", "Work.validation = None", f"QuestionFile.path = {str(file)!r}")
    return [*questions, "Verifier.kind = 'modular_chain'", "train.save_every = 2"]


def test_a_run_validates_on_what_it_holds_out_and_goes_on_with_the_same(warm_model, chains, tmp_path):
    bindings = [*chains, "QuestionFile.held_out = 6"]
    train_small(warm_model, tmp_path / "run", *bindings, "train.steps = 2")
    train_small(warm_model, tmp_path / "run", *bindings, "train.steps = 4", resume=True)
    train_small(warm_model, tmp_path / "straight", *bindings, "train.steps = 4")
    evaluated = [
        [(row["step"], row["eval/greedy_accuracy"]) for row in rows(tmp_path / name) if "eval/greedy_accuracy" in row]
        for name in ("run", "straight")
    ]
    assert [step for step, _ in evaluated[0]] == [0, 2, 4]
    assert evaluated[0] == evaluated[1]
    results = json.loads((tmp_path / "run" / "evaluation" / "4" / "results.json").read_text())
    assert results["benchmarks"]["validation"]["questions"] == 6
    trained, validated = load_questions(config.load(["toy.gin"], small_bindings(warm_model, *bindings)))
    log = (tmp_path / "run" / "decisions.jsonl").read_text().splitlines()
    asked = {question_id for line in log for question_id in json.loads(line)["questions"]["id"]}
    assert (len(trained), len(validated)) == (18, 6)
    assert asked == {question.id[:12] for question in trained}, "4 batches of 8 are more than an epoch"
    with pytest.raises(UnusableCheckpoint, match=r"QuestionFile\.held_out: 6 in the checkpoint, 5 now"):
        train_small(warm_model, tmp_path / "run", *chains, "QuestionFile.held_out = 5", resume=True)


def test_neither_a_buffer_nor_experts_bring_held_out_questions_into_training(warm_model, chains, tmp_path):
    train_small(warm_model, tmp_path / "all", *chains, "train.eval_every = None", "train.steps = 3")
    buffer = f"Work.experience = {str(tmp_path / 'all' / 'checkpoint-3')!r}"
    with pytest.raises(SnapshotError, match=r"not among the run's training questions; .* or are held out for"):
        train_small(warm_model, tmp_path / "run", *chains, buffer, "QuestionFile.held_out = 12")
    lines = [json.loads(line) for line in (tmp_path / "chains.jsonl").read_text().splitlines()]
    experts = [{"prompt": q["question"], "response": right_reasoning(q["question"])} for q in lines]
    (tmp_path / "experts.jsonl").write_text("".join(json.dumps(expert) + "\n" for expert in experts))
    named = f"Work.experience = {str(tmp_path / 'experts.jsonl')!r}"
    with pytest.raises(
        ValueError, match=r"experts\.jsonl, line \d+: none of the run's questions have .* held out for validation"
    ):
        train_small(warm_model, tmp_path / "run", *chains, named, "QuestionFile.held_out = 12")
