"""The log of decisions says what the real step did, is bounded, and is cut back with its run."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from replay_builders import QUESTIONS, trajectory
from run_builders import byte_tokenizer, rows
from step_builders import begin, watched
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from exgrpo_orlhf.grader.grade import Grade
from exgrpo_orlhf.records import MixedBatch, Rollout, RolloutGroup, Row
from exgrpo_orlhf.replay.injection import Choice
from exgrpo_orlhf.replay.stored import Changes
from exgrpo_orlhf.tracking import decisions as log
from exgrpo_orlhf.tracking.decisions import DecisionLog


def table(columns: dict[str, list]) -> list[dict]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


OPTIONS = {  # bindings, and what happens at least once
    "paper": (["RetirementPolicy.revisits_every = 3"], ("fresh", "replayed", "lucky", "retired")),
    "forgetting": (
        ["ReplayBuffer.per_question = 2", "ReplayBuffer.max_age = 2", "RetirementPolicy.at_accuracy = 0.5",
         "RetirementPolicy.revisits_every = 2", "RetirementPolicy.revisited_share = 1.0"],
        ("replayed", "retired", "returned", "evicted"),
    ),
    "in place": (
        ["ReplayMixer.injection = @InPlace()", "DynamicSampling.max_rounds = 1", "TrajectorySelector.by = 'length'"],
        ("replayed", "left_out"),
    ),
    "late": (
        ["ReplayMixer.rho = 0.0", "ReplayMixer.injection = @LateInjection()", "LateInjection.choice = 'selected'",
         "RetirementPolicy.at_accuracy = None"],
        ("fresh", "injected"),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_each_row_is_what_the_step_did(name, warm_model, tmp_path, monkeypatch):
    bindings, expected = OPTIONS[name]
    run = begin(warm_model, tmp_path, *bindings, "ReplayMixer.start_at_accuracy = None")
    seen, buffer = watched(run, monkeypatch), run.buffer
    happened = Counter()
    for step in range(1, 13):
        before = {q: buffer.trajectories(q) for q in buffer.records}
        retired_before = dict(buffer.retired)
        metrics = run.step()
        batch, stats = seen[-1]
        row = rows(tmp_path / "decisions.jsonl")[-1]
        assert row["step"] == step
        assert row["buckets"] == {key[14:]: n for key, n in metrics.items() if key.startswith("replay/bucket_")}
        assert row["retired_in_all"] == len(buffer.retired)
        left = {q[:12] for q in retired_before}
        for event in ("returned", "retired"):  # a question may return and retire again in one step
            left = left - set(row[event]) if event == "returned" else left | set(row[event])
        assert left == {q[:12] for q in buffer.retired}
        assert len(row["evicted"]) == metrics.get("replay/evicted", 0)

        logged = {one["id"]: one for one in table(row["questions"])}
        assert len(logged) == 8 + metrics.get("rollout/filtered_groups", 0)
        first, replays = 0, {one["id"]: one for one in table(row["replays"])}
        assert len(replays) == sum(row.trajectory is not None for row in batch.flat_rows())
        for group, own in zip(batch.groups, batch.rows, strict=True):
            one = logged.pop(group.question.id[:12])
            correct = [rollout.grade for rollout in group.rollouts if rollout.grade.correct]
            again = [i for i, row in enumerate(own) if row.trajectory is not None]
            fresh = [stats.entropies[first + i] for i in range(len(own)) if i not in again]
            assert one["as"] == ("replayed" if group.planned_replay else "injected" if again else "fresh")
            assert (one["rollouts"], one["graded"]) == (len(group.rollouts), group.graded)
            assert (one["correct"], one["checked"]) == (len(correct), len(correct))
            assert one["lucky"] == sum(not grade.sound for grade in correct)
            assert one["entropy"] == pytest.approx(np.mean(fresh), abs=1e-4)
            for i in again:
                chosen, pick = own[i].trajectory, replays.pop(one["id"])
                candidates = before[group.question.id]
                assert pick["of"] >= 1
                if not row["evicted"]:  # else what was too old went before the choice
                    assert candidates[pick["place"]] is chosen
                    assert pick["of"] == len(candidates)
                assert pick["trajectory"] == chosen.key.hex()[:12]
                assert (pick["age"], pick["tokens"], pick["sound"]) == (step - chosen.step, len(chosen), chosen.sound)
                policy, stored = stats.policy_logprobs[first + i], chosen.behaviour_logprobs
                assert pick["log_weight"] == pytest.approx(np.mean(policy - stored), abs=1e-3)
                assert pick["log_weight_max"] == pytest.approx(np.max(policy - stored), abs=1e-3)
                assert pick["surprisal"] == pytest.approx(-np.mean(stored), abs=1e-3)
                assert pick["entropy"] == pytest.approx(stats.entropies[first + i], abs=1e-4)
                assert (pick["others"] is not None) == (pick["of"] > 1 and name != "in place")
                if pick["others"] is not None:
                    assert pick["entropy"] <= pick["others"] + 1e-3, "the lowest was chosen"
            first += len(own)
            happened[one["as"]] += 1
            happened["lucky"] += one["lucky"]
        assert not replays
        assert {one["as"] for one in logged.values()} <= {"left_out"}
        happened["left_out"] += len(logged)
        assert sum(row["questions"]["stored"]) == metrics["replay/stored"]
        for event in ("retired", "returned", "evicted"):
            happened[event] += len(row[event])
    assert all(happened[event] > 0 for event in expected), happened


@pytest.mark.slow
def test_every_fifth_step_logs_a_fresh_and_a_replayed_question_as_text(warm_model, tmp_path, monkeypatch):
    run = begin(warm_model, tmp_path, "RetirementPolicy.at_accuracy = None")
    seen, several = watched(run, monkeypatch), 0
    for step in range(1, 16):
        before = {q: run.buffer.trajectories(q) for q in run.buffer.records}
        run.step()
        batch, stats = seen[-1]
        if step % 5:
            continue
        row = rows(tmp_path / "rollouts.jsonl")[-1]
        assert row["step"] == step
        assert [one["as"] for one in row["questions"]] == ["fresh", "replayed"]
        first = np.cumsum([0, *map(len, batch.rows)])
        for logged in row["questions"]:
            [g] = [i for i, group in enumerate(batch.groups) if group.question.id.startswith(logged["id"])]
            kind = [one.question.id for one in batch.groups if one.planned_replay == batch.groups[g].planned_replay]
            question, stored = batch.groups[g].question, before.get(batch.groups[g].question.id, [])
            assert question.id == min(kind)
            assert (logged["prompt"], logged["answer"]) == (question.prompt, question.answer)
            fresh = [one for one in logged["responses"] if one["kind"] == "fresh"]
            assert len(fresh) == min(4, len(batch.groups[g].rollouts))
            in_batch = [
                (run.engine.decode(row.token_ids), stats.policy_logprobs[first[g] + i].tolist())
                for i, row in enumerate(batch.rows[g])
            ]
            for one in fresh:
                matches = [logprobs for text, logprobs in in_batch if text == "".join(one["text"])]
                assert any(one["now"] == pytest.approx(logprobs, abs=0.006) for logprobs in matches)
                assert len(one["text"]) == len(one["now"]) == one["tokens"]
            if batch.groups[g].planned_replay:
                old = [one for one in logged["responses"] if one["kind"] == "stored"]
                assert len(old) == min(4, len(stored))
                several += len(old) > 1
                [chosen] = [one for one in old if one["chosen"]]
                assert chosen["now"] == pytest.approx(in_batch[-1][1], abs=0.006)
                for one in old:
                    [kept] = [t for t in stored if t.key.hex().startswith(one["trajectory"])]
                    assert "".join(one["text"]) == run.engine.decode(kept.token_ids)
                    assert one["then"] == pytest.approx(kept.behaviour_logprobs.tolist(), abs=0.006)
                    assert one["age"] == step - kept.step
                    assert {"now", "entropy"} <= one.keys(), "each candidate was scored for the choice"
    assert several > 0


def test_a_corrupt_line_is_named(tmp_path):
    (tmp_path / "decisions.jsonl").write_text('{"step":1}\nnonsense\n{"step":3}\n')
    with pytest.raises(ValueError, match=r"decisions.jsonl, line 2: not a row with a 'step' .*correct or remove"):
        DecisionLog(tmp_path)


# -- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hundred_steps_at_the_quickstarts_size_are_less_than_a_megabyte(warm_model, tmp_path):
    quickstart = ("train.questions_per_step = 32", "train.group_size = 8", "ModularChains.count = 300")
    run = begin(warm_model, tmp_path, *quickstart, "ModularChains.operands = (2, 3, 4)")
    for _ in range(5):
        run.step()
    lines = (tmp_path / "decisions.jsonl").read_bytes().split(b"\n")
    assert len(json.loads(lines[4])["replays"]["id"]) > 10
    assert 100 * max(map(len, lines)) < 1_000_000


def test_texts_are_bounded_whatever_a_group_and_its_responses_have():
    """64 rollouts of 5,000 tokens beside 20 stored ones."""
    draw = np.random.default_rng(0)

    def ids(n):
        return draw.integers(1, 100, n).astype(np.int32)

    stored = [trajectory(ids(5000), step=n) for n in range(20)]
    grades = [Grade("correct", 1.0) if i % 7 == 0 else Grade("wrong", 0.25 if i == 1 else 0.0) for i in range(64)]
    rollouts = tuple(Rollout(ids(5000), "stop", grade) for grade in grades)
    group = RolloutGroup(QUESTIONS[0], rollouts, planned_replay=True)
    in_group = [Row(QUESTIONS[0], one, 0.1, True) for one in (*rollouts, stored[17])]
    logprobs = [np.linspace(-1, 0, 5000, dtype=np.float32)] * 65
    step = log.StepRecord(
        step=30,
        sampled=[group],
        batch=MixedBatch([group], [in_group], 65),
        choices={QUESTIONS[0].id: Choice(stored, [], 17)},
        **{"entropies": [0.5] * 65, "policy": logprobs, "behaviour": logprobs},
        **{"stored": [], "retired": {}, "changes": Changes(), "buckets": {}},
    )
    for spreads, logged in (({QUESTIONS[0].id: 0.25}, [0.25]), ({"another": 0.25}, [None])):  # None: not measured
        step.changes.spreads = spreads
        assert log.decisions(step)["questions"]["spread"] == logged
    [question] = log.texts(step, lambda ids: " ".join(map(str, ids)))
    kinds = Counter((one["kind"], one.get("verdict")) for one in question["responses"])
    assert kinds == {("fresh", "correct"): 2, ("fresh", "wrong"): 2, ("stored", None): 4}
    assert [one.get("reward") for one in question["responses"][:4]] == [None, None, 0.25, None]
    assert [one["chosen"] for one in question["responses"][4:]].count(True) == 1
    for one in question["responses"]:
        assert (one["tokens"], one["left_out"], len(one["text"])) == (5000, 4488, 512)
        values = one["now"] if one["kind"] == "fresh" else one["then"]
        assert len(values) == 512
        if one["kind"] == "fresh":
            assert (values[0], values[-1]) == (-1, 0)
    assert len(json.dumps(question)) < 200_000


# -- text of tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["7+5=2;#6", "naïve café", "日本語 テスト", "😀 x 😀😀", "", "a\n\n b"])
def test_the_texts_of_bytes_are_together_the_text_and_none_has_half_a_character(text):
    tokenizer = byte_tokenizer()
    ids = np.array(tokenizer.encode(text), np.int32)
    pieces = log.pieces(ids, lambda part: tokenizer.decode(part.tolist()))
    assert "".join(pieces) == text
    assert len(pieces) == len(ids) == len(text.encode())
    assert "\ufffd" not in "".join(pieces)


def test_a_token_that_begins_a_word_keeps_its_space_and_bytes_that_are_no_text_are_shown_as_such():
    words = ["<unk>", "\u2581the", "\u2581cat", "s", "\u2581sat"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    pieces = log.pieces(np.array([1, 2, 3, 4], np.int32), lambda part: tokenizer.decode(part.tolist()))
    assert pieces == ["the", " cat", "s", " sat"]
    by_byte = byte_tokenizer()
    ids = np.array([*by_byte.encode("é")[:1] * 6, *by_byte.encode("x")], np.int32)
    broken = log.pieces(ids, lambda part: by_byte.decode(part.tolist()))
    assert len(broken) == 7
    assert broken[-1].endswith("x")
