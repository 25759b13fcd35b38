"""Several rewards at once: their weighted sum, which of them decides on success, and the advantages of each."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from run_builders import rows, train_small
from thought_builders import OWN, TAGS

from exgrpo_orlhf import config
from exgrpo_orlhf.grader.grade import Grade
from exgrpo_orlhf.objective import GroupAdvantages
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import GradingError, Verifier, Written
from exgrpo_orlhf.rewards.grading import in_format
from exgrpo_orlhf.workers.fork_server import close_workers

FUNCTIONS = """
def brief(completions, **kwargs):
    shortest = min(map(len, completions))
    return [float(len(text) == shortest) for text in completions]

def polite(solution_str, ground_truth):
    if "!" in solution_str:
        return None
    return 0.5 if "please" in solution_str else -0.5

def silent(solution_str, ground_truth):
    return None

def broken(solution_str, ground_truth):
    return 1 / 0
"""
QUESTION = Question.make("t", "6*7?", "42")
RESPONSES = ("\\boxed{42} please", "\\boxed{42}", "\\boxed{41}!", "no idea, please")


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "style.py"
    path.write_text(FUNCTIONS)
    yield path
    close_workers()


@pytest.mark.slow
def test_the_reward_is_the_weighted_sum_without_those_that_abstain_and_the_first_decides(functions):
    rewards = {"math": 1.0, f"{functions}:brief": 0.25, f"{functions}:polite": 2.0}
    grades = Verifier(rewards=rewards).grade_all([(QUESTION, text) for text in RESPONSES])
    parts = [
        {"math": 1.0, "brief": 0.0, "polite": 0.5},
        {"math": 1.0, "brief": 1.0, "polite": -0.5},
        {"math": 0.0, "brief": 0.0},
        {"math": 0.0, "brief": 0.0, "polite": 0.5},
    ]
    weights = {"math": 1.0, "brief": 0.25, "polite": 2.0}
    assert [dict(grade.parts) for grade in grades] == parts
    assert [grade.reward for grade in grades] == [sum(weights[k] * v for k, v in each.items()) for each in parts]
    assert [grade.verdict for grade in grades] == ["correct", "correct", "wrong", "no_answer"]
    assert grades[0].extracted == "42"


@pytest.mark.slow
def test_another_reward_can_decide_and_where_it_abstains_there_is_no_success(functions):
    rewards = {"math": 1.0, f"{functions}:polite": 1.0}
    verifier = Verifier(rewards=rewards, success_by="polite", success_at=0.5)
    grades = verifier.grade_all([(QUESTION, text) for text in RESPONSES])
    assert [grade.verdict for grade in grades] == ["correct", "wrong", "no_answer", "correct"]
    assert verifier.deciding.kind == "function"


@pytest.mark.slow
def test_a_failure_of_one_or_the_silence_of_all_is_no_reward(functions, caplog):
    pairs = [(QUESTION, text) for text in RESPONSES]
    with pytest.raises(GradingError, match="4 of 4"):
        Verifier(rewards={"math": 1.0, f"{functions}:broken": 1.0}).grade_all(pairs)
    assert "style.py, line 15: ZeroDivisionError" in caplog.text
    caplog.clear()
    verifier = Verifier(rewards={f"{functions}:silent": 1.0, f"{functions}:polite": 1.0}, max_failed_share=1.0)
    assert [grade.reward for grade in verifier.grade_all(pairs)] == [0.5, -0.5, None, 0.5]
    assert not caplog.text, "to abstain is no failure where there are others"
    assert Verifier("function", f"{functions}:silent").grade(QUESTION, "42").reward is None
    assert "style.py, line 11: it returned None" in caplog.text


@pytest.mark.slow
def test_a_required_format_makes_the_sum_0_and_no_success(functions):
    rewards = {"math": 1.0, f"{functions}:polite": 1.0}
    [boxed, bare] = Verifier(rewards=rewards, format="boxed").grade_all([(QUESTION, RESPONSES[0]), (QUESTION, "42")])
    assert (boxed.verdict, boxed.reward) == ("correct", 1.5)
    assert (bare.verdict, bare.reward, dict(bare.parts)) == ("wrong", 0.0, {"math": 1.0, "polite": -0.5})


@pytest.mark.parametrize(("begin", "end"), [*TAGS, ("<THINK>", "</THINK>"), ("<ponder>", "</ponder>")])
def test_a_box_in_a_thought_of_any_spelling_is_none_as_in_grading(begin, end):
    def reward(text: str, in_thought: bool = False) -> float | None:
        return in_format(Grade("correct", 1.0), "boxed", Written(text, in_thought, tags=OWN)).reward

    box = "\\boxed{42}"
    assert [reward(f"{begin}5{end} {box}"), reward(f"{begin}{box}{end} 42"), reward(f"{begin}{box}")] == [1.0, 0.0, 0.0]
    assert [reward(f"5{end} {box}", True), reward(f"{box}{end} 42", True), reward(box, True)] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "reward"), [("\\fbox{9}", 1.0), ("\\boxed 9", 1.0), ("\\boxed{}", 0.0), ("\\boxed{9", 0.0)]
)
def test_what_is_a_box_in_grading_is_one_in_the_format(text, reward):
    assert in_format(Grade("correct", 1.0), "boxed", Written(text)).reward == reward


def test_a_response_that_lacks_the_format_does_not_escape_a_negative_reward():
    grade = Verifier(rewards={"exact": -1.0}, format="boxed").grade(QUESTION, "42")
    assert (grade.verdict, grade.reward) == ("wrong", -1.0)


def test_rewards_take_the_place_of_a_kind_and_a_function_becomes_one_of_them_as_the_refusal_says():
    two = {"a.py:x": 1.0, "a.py:y": 0.2}
    for kind in ("modular_chain", "http", "function"):
        assert [part.function for part in Verifier(kind=kind, rewards=two).parts.values()] == [*two]
    bindings = ["Verifier.kind = 'function'", "Verifier.function = 'a.py:x'", f"Verifier.rewards = {two}"]
    with pytest.raises(ValueError, match=r"make the function one of the rewards, and set Verifier\.function = None"):
        config.load(["toy.gin"], bindings)
    config.load(["toy.gin"], [*bindings, "Verifier.function = None"])


def test_the_advantages_of_each_reward_are_gdpos():
    """Equation by hand in numpy, a reward that abstains among them; and a sum that hides one reward does not."""
    rng, weights = np.random.default_rng(0), (1.0, 0.25)
    rewards = rng.normal(size=(2, 3, 4))
    rewards[1] *= 1e-3
    rewards[1, 0, 2] = np.nan
    rewards[0, 2] = 1.0  # no signal of the first in the last group
    total = np.zeros((3, 4))
    for r, w in zip(rewards, weights, strict=True):
        centred = r - np.nanmean(r, 1, keepdims=True)
        total += w * np.nan_to_num(centred / (np.nanstd(r, 1, ddof=1, keepdims=True) + 1e-6))
    expected = (total - total.mean()) / (total.std(ddof=1) + 1e-6)
    advantages = GroupAdvantages(scale_by_std=True, of_each_reward=True)
    assert advantages.of_several(rewards, weights).numpy() == pytest.approx(expected, abs=1e-12)
    equal = advantages.of_several(np.array([[[1.0, 0.0], [1.0, 1.0]], [[0.0, 1.0], [0.5, 0.5]]]), (1.0, 0.5)).numpy()
    assert equal[0, 0] > 0 > equal[0, 1]
    assert (equal[1] == 0).all(), "exactly: such rows cost no backward pass"
    with pytest.raises(ValueError, match="of_each_reward needs scale_by_std"):
        GroupAdvantages(of_each_reward=True)


SHORT = """
def short(completions, **kwargs):
    return [1.0 - len(text) / 100 for text in completions]
"""


@pytest.mark.slow
@pytest.mark.parametrize("each", [False, True])
def test_a_run_trains_on_several_and_logs_each(each, warm_model, tmp_path):
    (tmp_path / "short.py").write_text(SHORT)
    rewards = {"modular_chain": 1.0, f"{tmp_path}/short.py:short": 0.5}
    bindings = [f"Verifier.rewards = {rewards!r}", "Verifier.kind = 'modular_chain'", "train.save_every = 2"]
    bindings += ["train.steps = 5", "train.eval_every = 5", "ReplayMixer.start_at_accuracy = None"]
    if each:
        bindings += ["GroupAdvantages.scale_by_std = True", "GroupAdvantages.of_each_reward = True"]
    straight = tmp_path / "straight"
    train_small(warm_model, straight, *bindings)
    log, stored = rows(straight), pq.read_table(straight / "checkpoint-5" / "replay" / "trajectories.parquet")
    assert any(row["replay/actual_share"] for row in log[1:])
    assert all(json.loads(one)[0] == ["modular_chain", 1.0] for one in stored["parts"].to_pylist())
    last = log[-1]
    assert 0 < last["reward_part/short"] < 1
    assert last["reward_part/modular_chain"] == last["reward/pass_at_1"]
    assert last["reward/mean"] == pytest.approx(last["reward_part/modular_chain"] + 0.5 * last["reward_part/short"])
    assert last["reward_part/short_groups_with_signal"] >= last["reward_part/modular_chain_groups_with_signal"]
    samples = (straight / "evaluation" / "5" / "validation" / "samples.jsonl").read_text().splitlines()
    assert set(json.loads(samples[0])["rewards"]) == {"modular_chain", "short"}
    results = json.loads((straight / "evaluation" / "5" / "results.json").read_text())
    assert results["benchmarks"]["validation"]["verifier"] == "modular_chain"
    shown = [json.loads(line) for line in (straight / "rollouts.jsonl").read_text().splitlines()]
    assert "'rewards': {'modular_chain':" in str(shown)


BY_THE_SUM = ("Verifier.format = 'boxed'", "Verifier.overlong_share = 0.5", "DynamicSampling.max_rounds = 1")


@pytest.mark.parametrize("more", [*BY_THE_SUM, "Environment.path = 'chain_calculator.py'"])
def test_what_goes_by_the_sum_is_refused_with_advantages_of_each(more, warm_model, tmp_path):
    bindings = ["Verifier.rewards = {'modular_chain': 1.0}", "GroupAdvantages.scale_by_std = True"]
    bindings += ["GroupAdvantages.of_each_reward = True", "Environment.stop = ('=',)", more]
    with pytest.raises(ValueError, match=r"of_each_reward needs Verifier\.rewards, and neither"):
        train_small(warm_model, tmp_path / "run", *bindings)


def test_an_environment_that_grades_leaves_no_rewards_unread(warm_model, tmp_path):
    bindings = ["Environment.path = 'chain_calculator.py'", "Environment.stop = ('=',)"]
    with pytest.raises(ValueError, match=r"\.rewards and \.function need Environment\.reward = 'verifier'"):
        train_small(warm_model, tmp_path / "run", *bindings, "Verifier.rewards = {'modular_chain': 1.0}")


def test_a_function_that_takes_one_response_cannot_get_a_batch(functions):
    verifier = Verifier("function", f"{functions}:polite", gets="batch")
    with pytest.raises(GradingError, match="takes one response at a time"):
        verifier.check_questions([QUESTION])
