"""scripts/measure.py says of a run what its files say, and asks a judge that was stopped only for the rest."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from statistics import mean

import pytest
from http_server import http_server
from run_builders import MIXED_PHASE, ROOT, rows, run_here

from exgrpo_orlhf import checkpoints, config
from exgrpo_orlhf.replay import DifficultyBuckets, snapshot
from exgrpo_orlhf.replay.plan import DynamicSampling

sys.path.insert(0, str(ROOT / "scripts"))  # the script's own module lies beside it
import paper_measures as measures

PROMPT = "Is this {response} a valid answer to {question}, which is {answer}? Braces {stay}."


@pytest.fixture(scope="module")
def run(warm_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "measured"
    run_here(warm_model, [*MIXED_PHASE, "ReplayBuffer.per_question = 3"], folder, resume=False)
    return folder


def measured(run_script, *words: object) -> list[dict[str, str]]:
    """The table that the script writes."""
    done = run_script("measure.py", *words, "--csv", (out := Path(str(words[1])) / "table.csv"))
    assert done.returncode == 0, done.stderr
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


def found(run: Path) -> list[measures.Response]:
    return measures.responses(run, config.load([run / "config.gin"]).questions.load())


def test_the_cost_of_a_step_is_that_of_the_metrics(run, tmp_path, run_script):
    logged = [row for row in rows(run) if "time/step" in row]
    (tmp_path / "again").symlink_to(run)
    first, again = measured(run_script, "cost", run, tmp_path / "again")
    assert float(first["mean s"]) == float(again["mean s"])
    assert float(first["mean s"]) == pytest.approx(mean(row["time/step"] for row in logged))
    assert float(first["greatest s"]) == max(row["time/step"] for row in logged)
    added = sum(row.get(f"time/{part}", 0) for row in logged for part in ("plan", "score", "inject", "store"))
    assert float(first["replay's part"]) == pytest.approx(added / sum(row["time/step"] for row in logged))
    assert int(first["stored"]) == logged[-1]["replay/trajectories"] > 0
    assert float(first["buffer MB"]) > 0
    assert float(first["of other"]) == 1


def test_entropy_is_that_of_the_logged_correct_responses_by_the_level_of_their_group(run, run_script):
    levels, buckets = Counter(), DifficultyBuckets()
    of_step = {row["step"]: row["questions"] for row in rows(run / "decisions.jsonl")}
    entropies = []
    for row in rows(run / "rollouts.jsonl"):
        for group in row["questions"]:
            table = of_step[row["step"]]
            place = table["id"].index(group["id"])
            share = table["correct"][place] / table["graded"][place]
            for one in group["responses"]:
                if one["kind"] == "fresh" and one["verdict"] == "correct":
                    name = (
                        "solved" if share == 1 else "hard" if share <= 0.25 else "medium" if share <= 0.75 else "easy"
                    )
                    levels[name] += 1
                    entropies.append(one["entropy"])
    table = measured(run_script, "entropy", run)
    table = [row for row in table if (row["kind"], row["reasoning"]) == ("fresh", "all")]
    assert {row["level"]: int(row["responses"]) for row in table} == levels
    assert sum(float(row["entropy"]) * int(row["responses"]) for row in table) == pytest.approx(sum(entropies))
    stored = [one for one in found(run) if one.kind == "stored"]
    assert len(stored) == rows(run)[-1]["replay/trajectories"]
    assert all(one.prompt and one.answer and one.entropy >= 0 for one in stored)
    lucky = [row for row in measures.entropy(stored, buckets) if row["reasoning"] == "lucky"]
    assert sum(row["responses"] for row in lucky) == sum(one.sound is False for one in stored)


def test_stored_failures_are_not_among_the_correct_responses(warm_model, tmp_path, run_script):
    stores_all = ("ReplayMixer.store_rule = @AllFinished()", "ReplayBuffer.per_question = 8")
    run_here(warm_model, [*MIXED_PHASE, *stores_all], tmp_path, resume=False)
    table = [row for row in measured(run_script, "entropy", tmp_path) if row["kind"] == "stored"]
    records = snapshot.read(max(checkpoints.find(tmp_path).items())[1] / "replay").records.values()
    rewards = [trajectory.reward for record in records for trajectory, *_ in record.stored]
    assert {*rewards} == {0.0, 1.0}
    assert sum(int(row["responses"]) for row in table if row["reasoning"] == "all") == sum(rewards)


def test_responses_that_continue_a_stored_one_are_not_among_the_fresh_ones(warm_model, tmp_path):
    continues = ("ReplayMixer.injection = @Prefix()", "ReplayBuffer.replays_unsolved = True", "Prefix.target = 0.9")
    run_here(warm_model, [*MIXED_PHASE, *continues], tmp_path, resume=False)
    logged = [
        (f"{row['step']}/{group['id']}/{i}", one.get("given", 0))
        for row in rows(tmp_path / "rollouts.jsonl")
        for group in row["questions"]
        for i, one in enumerate(group["responses"])
        if one["kind"] == "fresh"
    ]
    assert any(given for _, given in logged)
    keys = {one.key for one in found(tmp_path) if one.kind == "fresh"}
    assert keys == {key for key, given in logged if not given}


@pytest.mark.parametrize("words", [("valid", "invalid"), ("[[A]]", "[[B]]")])
def test_the_last_of_the_judges_words_is_its_verdict(words, tmp_path):
    response = measures.Response("fresh", "1/a/0", 1, "p", "a", "t", Fraction(1, 2), 0.5, True, None, True)
    row = {
        "key": response.judged_as,
        "prompt": measures._digest("m", PROMPT),
        "said": f"Not {words[1]}x, {words[1]}: {words[0]}.",
    }
    (tmp_path / measures.JUDGED).write_text(json.dumps(row) + "\n")
    [counts] = measures.verdicts(tmp_path, [response], PROMPT, "m", words, DifficultyBuckets())
    assert (counts["valid"], counts["invalid"], counts["unclear"]) == (1, 0, 0)


def test_blocks_of_code_are_counted_where_they_are(run, run_script, monkeypatch):
    texts = iter(["a ```python\n1``` b", *["none"] * 10_000])
    monkeypatch.setattr(measures, "decoder", lambda checkpoint: lambda ids: next(texts))
    table = measures.code(found(run), parts=3)
    monkeypatch.undo()
    stored = [row for row in table if row["kind"] == "stored"]
    assert sum(round(row["with code"] * row["responses"]) for row in stored) == 1
    assert all(row["with code"] == 0 for row in table if row["kind"] == "fresh")
    assert measured(run_script, "code", run)[0]["with code"] == "0.0"


def test_a_response_without_its_middle_is_left_out_of_the_share_of_code_whatever_its_ends_show():
    def response(i: int, text: str, step: int, whole: bool = True) -> measures.Response:
        return measures.Response("fresh", f"{step}/a/{i}", step, "p", "a", text, Fraction(1), 0.5, True, None, whole)

    long = [response(i, "```" if i == 0 else "text", 1, whole=False) for i in range(10)]
    short = [response(i, "```" if i == 0 else "text", 2) for i in range(4)]
    first, second = measures.code([*long, *short], parts=2)
    assert (first["responses"], first["left out"]) == (0, 10)
    assert math.isnan(first["with code"])
    assert (second["responses"], second["with code"], second["left out"]) == (4, 0.25, 0)


def test_questions_kept_are_those_in_the_range_of_a_mini_batch(run, run_script):
    log = rows(run / "decisions.jsonl")
    inside = [
        sum(
            0.3 <= right / of <= 0.8
            for right, of in zip(row["questions"]["correct"], row["questions"]["graded"], strict=True)
        )
        for row in log
    ]
    (row,) = measures.kept(run, DynamicSampling(masks=True, min_reward=0.3, max_reward=0.8), 2)
    assert (row["kept"], row["least"]) == (mean(inside) / 2, min(inside) / 2)
    assert 0 < row["kept"] < row["questions"]
    assert float(measured(run_script, "kept", run)[0]["kept"]) == 8


def test_a_judge_that_was_stopped_is_asked_for_the_rest_only_and_its_verdicts_are_joined(run, tmp_path, run_script):
    asked: list[str] = []
    most = 5  # answers of the server's first life

    def reply(method, path, headers, body):
        if method == "GET":
            return 200, {}, json.dumps({"data": [{"id": "judge"}]})
        text = json.loads(body)["messages"][0]["content"]
        if len(asked) >= most:
            return 400, {}, json.dumps({"error": {"message": "out of money"}})
        asked.append(text)
        said = "Not invalid: VALID." if len(asked) % 2 else "It looks valid. Verdict: invalid"
        usage = {"completion_tokens": 3, "prompt_tokens": 3}
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return 200, {}, json.dumps({"choices": [choice], "usage": usage})

    (tmp_path / "judge.txt").write_text(PROMPT)
    with http_server(reply) as url:
        words = ["judge", run, "--base-url", f"{url}/v1", "--model", "judge", "--prompt", tmp_path / "judge.txt"]
        stopped = run_script("measure.py", *words, "--concurrency", 1)
        assert stopped.returncode == 2
        assert "out of money" in stopped.stderr
        judged = run / measures.JUDGED
        with judged.open("a") as file:
            file.write('{"key": "tor')  # of a killed process
        most = 10_000
        table = measured(run_script, *words, "--concurrency", 1)
    wanted = [one for one in found(run) if one.correct and one.whole]
    assert len(asked) == len(wanted) == len({row["key"] for row in rows(judged)}) == len(rows(judged))
    assert all(re.fullmatch(r"Is this .* a valid answer to .*=, which is \d\? Braces \{stay\}\.", one) for one in asked)
    assert sum(int(row["valid"]) for row in table) == -(-len(wanted) // 2)
    assert sum(int(row["invalid"]) for row in table) == len(wanted) // 2
    keys = [row["key"] for row in rows(judged)]
    valid = [one.entropy for one in wanted if keys.index(one.judged_as) % 2 == 0]
    means = sum(float(row["entropy valid"] or 0) * int(row["valid"]) for row in table)
    assert means == pytest.approx(sum(valid))


@pytest.mark.parametrize("what", ["cost", "entropy", "code", "kept"])
def test_a_folder_that_is_no_run_is_named(what, tmp_path, run_script):
    done = run_script("measure.py", what, tmp_path)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr or "config.gin" in done.stderr
