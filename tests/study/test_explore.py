"""The page of a run's experience shows what the log and the buffer say, also of very many questions."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drawn_charts import charts, of_class, opened
from mlflow import MlflowClient
from replay_builders import filled
from run_builders import MIXED_PHASE, rows, run_here, train_small
from step_builders import begin
from tracking_builders import tracked_runs, tracker

from exgrpo_orlhf import config
from exgrpo_orlhf.checkpoints import claim
from exgrpo_orlhf.replay import ReplayBuffer, RetirementPolicy
from exgrpo_orlhf.study.history import KINDS, History, diversity, forgotten_by_step
from exgrpo_orlhf.study.history import read as read_history
from exgrpo_orlhf.study.run_page import RunPage, explore
from exgrpo_orlhf.tracking.listener import ListenedRun
from exgrpo_orlhf.tracking.metrics_log import MetricsLog


@pytest.fixture(scope="module")
def run(warm_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "explored"
    phase = [
        *MIXED_PHASE,
        "ReplayBuffer.per_question = 3",
        "RetirementPolicy.revisits_every = 4",
        "RetirementPolicy.revisited_share = 1.0",
    ]
    run_here(warm_model, phase, folder, resume=False)
    return folder


@pytest.fixture(scope="module")
def made(run, tmp_path_factory) -> Path:
    """The page, with the prompts of the run's questions."""
    path = tmp_path_factory.mktemp("pages") / "explore.html"
    questions = config.load([run / "config.gin"]).questions.load()
    rated = [replace(one, meta={**one.meta, "pass_rate": 0.375}) for one in questions]
    path.write_text(explore(run, rated), encoding="utf-8")
    return path


def events_of(log: list[dict], question: str) -> list[tuple[int, str]]:
    """In a step a question returns, is sampled, loses trajectories, retires."""
    events = []
    for row in log:
        sampled = zip(row["questions"]["id"], row["questions"]["as"], strict=True)
        kinds = ["returned"] * row["returned"].count(question) + [kind for one, kind in sampled if one == question]
        kinds += [kind for kind in ("evicted", "retired") for _ in range(row[kind].count(question))]
        events += [(row["step"], kind) for kind in kinds]
    return events


def element(dom: str, name: str) -> str:
    return html.unescape(re.search(rf'id="{name}"[^>]*>(.*?)</', dom, re.DOTALL)[1])


def table(dom: str) -> list[list[str]]:
    body = re.search(r'id="rows">(.*?)</tbody>', dom, re.DOTALL)[1]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)]


@pytest.mark.slow
def test_a_questions_life_is_that_of_the_log(run, made, tmp_path):
    log = rows(run / "decisions.jsonl")
    counts = Counter(one for row in log for one in row["replays"].get("id", ()))
    for question in ("", min(one for row in log for one in row["retired"])):  # "": the first, with the most replays
        dom, console = opened(made, tmp_path, f"question={question}")
        assert console == []
        shown = element(dom, "name")
        assert shown == question or counts[shown] == max(counts.values())
        assert re.search("accuracy before the run</dt><dd[^>]*>38 %", dom)
        events = events_of(log, shown)
        life = table(dom)
        assert [(int(cells[0]), cells[1].replace(" ", "_")) for cells in life] == events
        assert sum(kind == "replayed" for _, kind in events) == counts[shown] == sum(bool(cells[6]) for cells in life)
        drawn = re.search(r'<div id="life".*?</svg>', dom, re.DOTALL)[0]
        sampled = [kind for _, kind in events if kind in KINDS[:4]]
        assert drawn.count("<circle") == len(sampled) + counts[shown]
        assert drawn.count('class="bar') == counts[shown]
        assert drawn.count('class="gone"') == sum(kind == "retired" for _, kind in events)
        for cells, (step, kind) in zip(life, events, strict=True):
            at = {row["step"]: row for row in log}[step]["questions"]
            if kind in KINDS[:4]:
                i = at["id"].index(shown)
                assert cells[2] == f"{at['correct'][i]}/{at['graded'][i]}"


@pytest.mark.slow
def test_search_and_filters_find_what_they_say(run, made, tmp_path):
    log = rows(run / "decisions.jsonl")
    dom, _ = opened(made, tmp_path)
    counts = dict(re.findall(r'data-filter="(\w+)"[^>]*>[a-z ]*?([\d,]+)<', dom))
    everyone = {one for row in log for one in row["questions"]["id"]}
    assert int(counts["all"]) == len(everyone) == 24
    assert int(counts["replayed"]) == len({one for row in log for one in row["replays"].get("id", ())})
    assert int(counts["returned"]) == len({one for row in log for one in row["returned"]}) > 0
    lucky = {q for row in log for q, n in zip(row["questions"]["id"], row["questions"]["lucky"], strict=True) if n}
    assert int(counts["lucky"]) == len(lucky) > 0
    wanted = max(everyone)
    dom, _ = opened(made, tmp_path, f"q={wanted}")
    assert element(dom, "shown").startswith("1 of 24 questions")
    assert element(dom, "name") == wanted
    prompt = element(dom, "prompt")
    dom, _ = opened(made, tmp_path, f"q={prompt.replace('+', '%2B')}")
    assert wanted in dom
    dom, _ = opened(made, tmp_path, "q=no such question")
    assert element(dom, "shown").startswith("0 of 24 questions")


def test_logged_rollouts_are_shown_with_the_chosen_one_marked(run, made, tmp_path):
    logged = rows(run / "rollouts.jsonl")
    [row] = [one for one in logged[-1]["questions"] if one["as"] == "replayed"]
    dom, console = opened(made, tmp_path, f"question={row['id']}")
    assert console == []
    assert element(dom, "prompt") == row["prompt"]
    newest = dom[dom.index(f"Step {logged[-1]['step']}, replayed") :]
    boxes = re.findall(r'<div class="answer ?(\w*)">(.*?)</div></div>', newest, re.DOTALL)
    for (marked, box), one in zip(boxes, row["responses"], strict=False):
        assert marked == ("chosen" if one.get("chosen") else "")
        spans = re.findall(r"<span[^>]*>([^<]*)</span>", box[box.index('class="tokens"') :])
        assert [html.unescape(text) for text in spans] == [piece or "\u25e6" for piece in one["text"]]
    assert len(boxes) >= len(row["responses"])


def test_the_page_is_one_file_without_network_and_its_charts_have_what_the_log_has(run, made):
    text = made.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(?!#|data:)", text)
    assert "default-src 'none'" in text
    [area] = charts(text, "buckets")
    last = rows(run / "decisions.jsonl")[-1]
    for level, colour in (("hard", "m1"), ("medium", "m2"), ("easy", "m0"), ("retired", "no_answer")):
        size = last["retired_in_all"] if level == "retired" else last["buckets"][level]
        assert len(of_class(area, "area", colour)) == 1
        assert f"{level}, {size} after step 12" in text


def test_the_script_writes_the_page_and_says_what_is_missing(run, run_script, tmp_path):
    done = run_script("explore.py", run, "--html", tmp_path / "page.html")
    assert (done.returncode, done.stdout) == (0, "")
    assert "Experience of explored" in (tmp_path / "page.html").read_text(encoding="utf-8")
    (bare := tmp_path / "before its first checkpoint").mkdir()
    for name in ("decisions.jsonl", "rollouts.jsonl"):
        shutil.copy(run / name, bare)
    assert run_script("explore.py", bare).returncode == 0
    (tmp_path / "explore.html").mkdir()  # or no permission to write in the run's folder
    done = run_script("explore.py", tmp_path)
    assert done.stderr.endswith("give the name of a file; name another file by --html\n")
    (tmp_path / "explore.html").rmdir()
    done = run_script("explore.py", tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path}/decisions.jsonl: no such log, or an empty one; is this a run's folder?\n"


@pytest.mark.slow
def test_a_killed_run_is_marked_so_when_its_page_is_made(warm_model, tmp_path, sqlite, run_script, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sqlite)
    folder = tmp_path / "run"
    train_small(warm_model, folder, "train.steps = 1", "Tracking.enabled = True")
    [tracked] = tracked_runs(sqlite)
    status = lambda: MlflowClient(sqlite).get_run(tracked.info.run_id).info.status
    MlflowClient(sqlite).update_run(tracked.info.run_id, status="RUNNING")  # as kill -9 leaves it
    with claim(folder, resume=True):
        assert run_script("explore.py", folder).returncode == 0
        assert status() == "RUNNING"
    assert run_script("explore.py", folder).returncode == 0
    assert status() == "KILLED"


@pytest.mark.parametrize(("kind", "checked"), [("exact", False), ("modular_chain", True)])
def test_a_short_run_shows_responses_every_gold_and_whether_reasoning_was_checked(kind, checked, warm_model, tmp_path):
    train_small(warm_model, tmp_path, "train.steps = 2", "train.eval_every = None", f"Verifier.kind = {kind!r}")
    [logged] = rows(tmp_path / "rollouts.jsonl")
    assert logged["step"] == 1
    assert logged["questions"][0]["responses"]
    questions = config.load([tmp_path / "config.gin"]).questions.load()
    text = explore(tmp_path, questions)
    inside = re.search(r'id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1]
    data = json.loads(gzip.decompress(base64.b64decode(json.loads(inside))))
    answers = {question.id[:12]: question.answer_text for question in questions}
    assert data["answers"] == [answers[one] for one in data["ids"]]
    assert (data["checked"], "Nothing checks the reasoning" in html.unescape(text)) == (checked, not checked)


ADDING = (  # rows that are stored with failures, and trained on beside whole groups
    *("ReplayMixer.store_rule = @AllFinished()", "MixedPolicyLoss.shaping = False"),
    *("MixedPolicyLoss.clips_replayed = True", "RetirementPolicy.at_accuracy = None", "ReplayMixer.rho = 0"),
)
INJECTIONS = {
    "Beside": (),
    "InPlace": (),
    "LateInjection": ("ReplayMixer.rho = 0",),
    "UnlessSolved": ("UnlessSolved.late = @LateInjection()",),
    "StoredGroup": (*ADDING, "StoredGroup.rows = 3", "StoredGroup.least = 2", "ReplayBuffer.per_question = 8"),
    "StoredRows": (*ADDING, "StoredRows.rows = 2", "ReplayBuffer.per_question = 8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("injection", INJECTIONS)
def test_every_replay_is_an_event_of_its_question(injection, warm_model, tmp_path):
    bindings = (f"ReplayMixer.injection = @{injection}()", "ReplayMixer.start_at_accuracy = None")
    run = begin(warm_model, tmp_path, "ModularChains.count = 12", *bindings, *INJECTIONS[injection])
    for _ in range(6):
        run.step()
    log = rows(tmp_path / "decisions.jsonl")
    history = read_history(tmp_path, ReplayBuffer(RetirementPolicy()), None, [], str)
    events, replays = history.events, [i for i in history.events["replay"] if i >= 0]
    assert sorted(replays) == list(range(len(history.replays["step"])))
    assert len(replays) == sum(len(row["replays"].get("id", ())) for row in log) > 0
    logged = Counter((row["step"], one) for row in log for one in row["replays"].get("id", ()))
    columns = zip(*(events[name] for name in ("q", "step", "kind", "replay")), strict=True)
    of_events = [(history.ids[q], step, KINDS[kind]) for q, step, kind, replay in columns if replay >= 0]
    assert Counter((step, q) for q, step, _ in of_events) == logged
    assert {kind for *_, kind in of_events} <= {"replayed", "injected"}
    assert events["step"] == sorted(events["step"])
    sampled = [(row["step"], q) for row in log for q in row["questions"]["id"]]
    graded = [
        (step, history.ids[q]) for q, step, n in zip(events["q"], events["step"], events["graded"], strict=True) if n
    ]
    assert Counter(graded) <= Counter(sampled), "an added row is no group"

    (tmp_path / "page.html").write_text(explore(tmp_path, []), encoding="utf-8")
    dom, console = opened(tmp_path / "page.html", tmp_path, "filter=replayed")
    assert console == []
    of_question = Counter(one for row in log for one in row["replays"].get("id", ()))
    [shown] = re.findall(r'data-filter="replayed"[^>]*>replayed ([\d,]+)<', dom)
    assert int(shown) == len(of_question)
    counts = [int(n) for n in re.findall(r"<small>[^<]*</small><small>(\d+)</small></button>", dom)]
    assert counts == sorted(of_question.values(), reverse=True)
    life = table(dom)  # of the first, with the most replays
    assert sum(bool(cells[6]) for cells in life) == max(of_question.values())
    groups = [row for row in log if element(dom, "name") in row["questions"]["id"]]
    assert sum("/" in cells[2] for cells in life) == len(groups)
    assert f"<dt>replays</dt><dd>{max(of_question.values())}</dd>" in dom


# -- while the run trains ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_is_sent_to_mlflow_and_takes_its_share_of_the_time_and_no_more(
    run, tmp_path, sqlite, no_tracking_server, monkeypatch
):
    folder, now = tmp_path / "run", [0.0]
    folder.mkdir()
    for name in ("decisions.jsonl", "rollouts.jsonl"):
        (folder / name).write_bytes((run / name).read_bytes())
    monkeypatch.setattr("exgrpo_orlhf.study.run_page.time.monotonic", lambda: now[0])
    sender = tracker(folder, sqlite)

    def costly(ids) -> str:
        now[0] += 0.1
        return "text"

    of_run = RunPage(ListenedRun(folder, MetricsLog(tmp_path / "metrics.jsonl"), sender, [], costly))
    buffer, made = filled(1), []
    for at in (99, 101, 110, 112, 113):  # the first is made after 100 s, and it takes 0.1 s; so the next after 10 s
        now[0] = float(at)
        (folder / "explore.html").unlink(missing_ok=True)
        of_run.saved(buffer, 12)
        made.append((folder / "explore.html").exists())
    assert made == [False, True, False, True, False]
    of_run.ended(buffer, 12)
    sender.close("FINISHED")
    there = MlflowClient(sqlite).download_artifacts(sender.run_id, "explore.html", str(tmp_path))
    assert Path(there).read_bytes() == (folder / "explore.html").read_bytes()


def test_a_page_that_cannot_be_made_does_not_stop_training(tmp_path, sqlite, no_tracking_server, caplog):
    sender = tracker(tmp_path, sqlite)
    page = RunPage(ListenedRun(tmp_path, MetricsLog(tmp_path / "metrics.jsonl"), sender, [], str))
    page.ended(filled(0), 0)
    assert "explore.html" not in caplog.text, "before the first step there is nothing to show"
    page.ended(filled(0), 12)
    assert "explore.html could not be made" in caplog.text
    sender.close("FINISHED")


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_diversity_is_0_of_equal_and_1_of_disjoint_responses():
    def ids(*values):
        return np.array(values, np.int32)

    assert diversity([ids(1, 2, 3)]) == -1
    assert diversity([ids(1, 2, 3)] * 4) == pytest.approx(0)
    assert diversity([ids(1, 2, 3), ids(4, 5, 6), ids(7, 8, 9)]) == pytest.approx(1)
    assert diversity([ids(1, 2, 3), ids(1, 2, 4)]) == pytest.approx(0.5)
    assert diversity([ids(1), ids(2)]) == 0


def test_a_forgotten_question_was_solved_once_and_is_at_0():
    events = [  # question, step, kind, correct, graded
        *((0, 1, 0, 2, 4), (1, 1, 0, 0, 4), (2, 1, 0, 1, 4)),
        *((0, 2, 1, 0, 3), (1, 2, 0, 1, 4), (2, 2, 0, 0, 0)),
        *((0, 3, 1, 0, 3), (1, 3, 1, 0, 3), (2, 3, 4, 0, 0)),
        *((0, 4, 1, 1, 3),),
    ]
    columns = dict(zip(("q", "step", "kind", "correct", "graded"), map(list, zip(*events, strict=True)), strict=True))
    assert forgotten_by_step(History(steps=[1, 2, 3, 4], events=columns)) == [0, 1, 2, 1]


# -- many questions ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_thousand_questions_make_a_page_of_a_megabyte_that_draws_a_screenful(run, tmp_path):
    """The run 500 times one after the other, each time with other questions."""
    log = rows(run / "decisions.jsonl")
    with (tmp_path / "decisions.jsonl").open("w") as file:
        for copy in range(500):
            for row in log:
                text = json.dumps({**row, "step": row["step"] + copy * len(log)})
                file.write(re.sub(r'"[0-9a-f]{4}([0-9a-f]{8})"', rf'"{copy:04x}\1"', text) + "\n")
    (tmp_path / "page.html").write_text(text := explore(tmp_path, []), encoding="utf-8")
    assert len(text) < 2e6
    dom, console = opened(tmp_path / "page.html", tmp_path)
    assert console == []
    assert element(dom, "shown").startswith("12,000 of 12,000 questions")
    assert 10 < dom.count('role="option"') < 100
    [forgotten] = re.findall(r">forgotten ([\d,]+)<", dom)
    assert f" {forgotten} questions forgotten at the end" in dom
    assert int(forgotten.replace(",", "")) > 500
    assert float(re.search(r'id="space"[^>]*height: ([^p]+)px', dom)[1]) == 30 * 12_000
