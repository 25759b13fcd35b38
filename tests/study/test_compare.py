"""scripts/compare.py: a real MLflow server over HTTP with 2,000 runs, tables of their curves, the page in a browser."""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import re
import shlex
import shutil
import signal
import socket
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from drawn_charts import charts as drawn_charts
from drawn_charts import horizontal, numbers, of_class, opened, points
from mlflow.entities import Metric, Param
from mlflow.store.tracking.dbmodels import models
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracking import MlflowClient
from mlflow_server import Server
from study_builders import made, script

from exgrpo_orlhf.config import all_settings
from exgrpo_orlhf.study.comparison import MEASURES, compare
from exgrpo_orlhf.study.comparison_tables import curves_csv, values_csv
from exgrpo_orlhf.study.store import PAGE, Store, StoreError
from exgrpo_orlhf.tracking import client

METRIC, OLD = "eval/avg", "eval/old"
STEPS = 20
RATES = {"on_policy": 100, "paper": 125, "official": 120, "ours": 150, "weak": 200}  # tokens a step
PACES = {"on_policy": 2.0, "paper": 2.5, "official": 2.0, "ours": 3.0, "weak": 2.0}  # seconds a step
RISES = {"on_policy": 0.2, "paper": 0.3, "official": 0.21, "ours": 0.4, "weak": 0.1}
OLD_RUNS = (
    2000 - 40 - 8 - 3
)  # beside the group `paper`, the group `messy`, two runs without a variant and an evaluation
START = 0.25
pytestmark = pytest.mark.usefixtures("no_tracking_server")


def final(variant: str, seed: int) -> float:
    """Curves are straight lines from START to here."""
    if (variant, seed) == ("weak", 3):
        return 0.1
    return START + RISES[variant] + 0.01 * seed + 0.003 * (seed * (2 + [*RISES].index(variant)) % 5)


@pytest.fixture(scope="module")
def server(tmp_path_factory, made_database):
    folder = tmp_path_factory.mktemp("mlflow")
    shutil.copy(made_database, folder / "server.db")
    fill(folder / "server.db", folder)
    server = Server(folder)
    server.start()
    yield server
    server.stop()


def fill(database: Path, folder: Path) -> None:
    """2,000 runs: most of them old ones, written by MLflow's own tables in a transaction; ours by its client."""
    store = SqlAlchemyStore(f"sqlite:///{database}", str(folder / "artifacts"))
    experiment = store.create_experiment("exgrpo")
    store.create_experiment("exgrpo-eval")
    ids = [uuid.uuid4().hex for _ in range(OLD_RUNS)]
    run = {"status": "FINISHED", "lifecycle_stage": "active", "experiment_id": int(experiment), "user_id": "somebody"}
    run |= {"source_type": "LOCAL", "source_name": "", "source_version": "", "entry_point_name": "", "end_time": 2}
    tag = {"gin": "old.gin", "engine": "local"}
    with store.ManagedSessionMaker(read_only=False) as session:
        session.bulk_insert_mappings(
            models.SqlRun, [{**run, "run_uuid": i, "name": "old", "start_time": 1, "artifact_uri": ""} for i in ids]
        )
        for number, i in enumerate(ids):
            tags = [{"run_uuid": i, "key": k, "value": v} for k, v in {**tag, "seed": str(number)}.items()]
            session.bulk_insert_mappings(models.SqlTag, tags)
        last = {"key": OLD, "value": 0.5, "timestamp": 1, "step": 1, "is_nan": False}
        session.bulk_insert_mappings(models.SqlLatestMetric, [{**last, "run_uuid": i} for i in ids])
    client = MlflowClient(f"sqlite:///{database}")
    client.create_run(experiment, tags={"group": "paper"}, run_name="paper")
    client.create_run(experiment, tags={"evaluation": "of a released model"}, run_name="released")
    for variant in RISES:
        for seed in range(8):
            tags = {"group": "paper", "variant": variant, "seed": str(seed)}
            line = [START + (final(variant, seed) - START) * step / STEPS for step in range(STEPS + 1)]
            rho = "0.0" if variant == "on_policy" else "0.5"
            params = {"train.seed": str(seed), "ReplayMixer.rho": rho, "text": "<script>alert(1)</script>" + variant}
            add(client, experiment, tags, line[::5], 5, (RATES[variant], PACES[variant]), params=params)
    messy = {"group": "messy", "gin": "x.gin"}
    client.create_run(experiment, tags=messy, run_name="messy")
    add(client, experiment, {**messy, "variant": "a", "seed": "0"}, [0.0, 0.1], 10, started=10)
    for seed in (0, 1):
        add(client, experiment, {**messy, "variant": "a", "seed": str(seed)}, [0.2, 0.4 + seed / 10], 10, started=20)
        tags = {**messy, "variant": "b", "seed": str(seed), "engine": "openrlhf"}
        add(client, experiment, tags, [0.2, 0.5], 10, started=20, params={"train.steps": str(seed)})
    add(client, experiment, {**messy, "variant": "a", "seed": "2"}, [0.2, 0.9], 10, status="FAILED")
    add(client, experiment, {**messy, "variant": "c", "seed": "0"}, [0.2, 0.3, 0.4], 10)
    add(client, experiment, {**messy, "variant": "d", "seed": "0"}, [], 10)


def add(client, experiment, tags, values, every, rates=(100, 2.0), *, status="FINISHED", started=30, params=None):
    """A run with a value every `every` steps, tokens and seconds at every step."""
    tags = {"engine": "local", **tags}
    run = client.create_run(experiment, started, tags, f"{tags['variant']}-seed{tags['seed']}").info.run_id
    metrics = [Metric(METRIC, value, 1, every * i) for i, value in enumerate(values)]
    metrics += [Metric("cost/generated_tokens", rates[0] * step, 1, step) for step in range(STEPS + 1)]
    metrics += [Metric("time/step", rates[1], 1, step) for step in range(1, STEPS + 1)]
    client.log_batch(run, metrics, [Param(name, value) for name, value in (params or {}).items()])
    client.set_terminated(run, status)


def requests(server: Server) -> list[str]:
    """What it was asked so far, without health checks."""
    log = (server.folder / "server.log").read_text()
    return [line for line in re.findall(r'"(?:GET|POST) (\S+) HTTP', log) if line != "/health"]


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def comparable(text: str) -> list:
    """A table's cells, numbers rounded, without what the server calls a run."""
    number = lambda cell: f"{float(cell):.9g}" if re.fullmatch(r"-?[\d.]+(e-?\d+)?", cell) else cell
    return sorted([number(cell) for name, cell in row.items() if name not in ("run", "name")] for row in read(text))


@pytest.mark.slow
def test_a_group_among_two_thousand_runs_takes_few_requests_and_comes_out_as_its_curves(server, tmp_path, capsys):
    before = len(requests(server))
    files = {name: tmp_path / "new" / name for name in ("v.csv", "c.csv", "p.html", "p.png", "p.md")}
    options = [*("--csv", files["v.csv"]), *("--curves", files["c.csv"]), *("--out", files["p.html"])]
    options += ["--png", files["p.png"], "--markdown", files["p.md"], "--baseline", "on_policy"]
    assert script("compare", "--uri", server.uri, "--group", "paper", "--metric", METRIC, *options) == 0
    calls = requests(server)[before:]
    assert sum("runs/search" in each for each in calls) == 1  # one page: the server chose
    assert sum("get-history" in each for each in calls) == 40 * 3
    assert len(calls) <= 40 * 3 + 3
    assert sorted(path.name for path in files["p.md"].parent.iterdir()) == sorted(files)

    curves = []
    for variant, seed in itertools.product(RISES, range(8)):
        line, about = np.linspace(START, final(variant, seed), 5), dict(steps=range(0, STEPS + 1, 5), metric=METRIC)
        curves.append(made(variant, seed, line, tokens=RATES[variant], seconds=PACES[variant], **about))
    compared = [compare(METRIC, curves, "on_policy")]
    for name, text in (("v.csv", values_csv(compared)), ("c.csv", curves_csv(compared))):
        assert comparable(files[name].read_text(encoding="utf-8")) == comparable(text)
    printed = capsys.readouterr().out
    for text in (printed, files["p.md"].read_text()):
        assert "weak: 1 of 8 seeds collapsed" in text
        assert "with 8 seeds it is never below 2/256 = 0.00781" in text
        assert "at 0.002 million generated tokens" in text
        assert "at equal steps: after 20 steps" in text
        assert f"{np.mean([final('ours', seed) for seed in range(8)]):.3f} ± " in text
    assert files["p.png"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_without_a_group_runs_come_by_pages_and_their_gin_files_are_the_variant(server):
    before = len(requests(server))
    store = Store(server.uri)
    runs, _ = store.select("exgrpo", None, [OLD], None, False)
    assert {run.variant for run in runs} == {"old.gin"}
    assert sorted(run.seed for run in runs) == list(range(OLD_RUNS))
    assert sum("runs/search" in each for each in requests(server)[before:]) == math.ceil(OLD_RUNS / PAGE)
    either, _ = store.select("exgrpo", None, [OLD, METRIC], "tags.seed = '7'", False)
    assert sorted(run.variant for run in either) == sorted([*RISES, "old.gin"])


@pytest.mark.slow
def test_what_is_left_out_or_unlike_is_said(server, tmp_path, capsys):
    chosen = ["--uri", server.uri, "--group", "messy", "--metric", METRIC]
    assert script("compare", *chosen, "--baseline", "a", "--out", tmp_path / "p.html") == 0
    output = capsys.readouterr().out
    assert re.search(r"1 run not finished and left out .*: a, seed 2 \(a-seed2, \w{32}\): FAILED", output)
    assert re.search(r"a, seed 0: 2 runs; the newest is taken, \w{32}, and not \w{32}", output)
    assert re.search(r"without eval/avg: d, seed 0", output)
    assert "runs of different engines are compared: local: a (2 runs), c (1 run); openrlhf: b (2 runs)" in output
    assert "one seed only, so no interval: c" in output
    assert "c: one seed in common with a: a difference without interval or p-value" in output
    assert "c: no run of seed 1" in output
    assert "step 10 (4 runs), step 20 (1 run)" in output
    assert "b: all seeds end at the same value" in output
    assert "b: its runs differ in more than the seed: train.steps" in output
    assert re.search(r"^a \(baseline\) +2 +– +0\.450 ± 0\.635", output, re.MULTILINE)  # t of 1 degree: 12.7 · 0.05
    assert re.search(r"^c +1 +– +0\.400  ", output, re.MULTILINE)
    assert script("compare", *chosen, "--metric", "time/step") == 0
    output = capsys.readouterr().out
    assert re.search(r"^d +1 ", output.partition("time/step: mean")[2], re.MULTILINE)
    assert not re.search(r"^d ", output.partition("time/step: mean")[0], re.MULTILINE)
    assert script("compare", *chosen, "--unfinished") == 0
    output = capsys.readouterr().out
    assert "unfinished runs are compared too: 1 FAILED" in output
    assert re.search(r"^a +3 ", output, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--experiment exgrpo_eval", "has no experiment 'exgrpo_eval'; the nearest are exgrpo-eval, exgrpo"),
        ("--group papers", "no runs in the group 'papers'; groups: messy (8 runs), paper (40 runs)"),
        ("--group paper --metric eval/awg", "none of 40 runs has the metric 'eval/awg'; metrics: eval/avg (40 runs), "),
        ("--metric nope --filter \"tags.variant = 'd'\"", "has the metric 'nope'; metrics: cost/generated"),
        ("--group paper --filter \"tags.seed = '9'\"", "none of 40 runs of the group 'paper' passes"),
        ("--group paper --filter 'seed is 9'", "Invalid"),
        ("--experiment exgrpo-eval", "experiment 'exgrpo-eval' has no runs"),
        (
            "--group paper --metric eval/avg --baseline onpolicy",
            "'onpolicy' is not among the variants that have eval/avg: official, on_policy, ours, paper, weak",
        ),
        (
            "--group messy --metric eval/avg --filter \"tags.seed = '2'\"",
            "none of 1 run can be compared by 'eval/avg': 1 run not",
        ),
    ],
)
def test_what_cannot_be_compared_ends_with_what_there_is(server, tmp_path, capsys, arguments, message):
    out = tmp_path / "page.html"
    out.write_text("the one of yesterday")
    assert script("compare", "--uri", server.uri, "--out", out, *shlex.split(arguments)) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.startswith("error: ")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the one of yesterday"]


def test_a_metric_that_the_baseline_does_not_have_is_shown_without_differences(sqlite, tmp_path, capsys):
    """On-policy training has none of replay's, which is no reason to compare nothing."""
    client = MlflowClient(sqlite)
    experiment = client.create_experiment("exgrpo")
    for variant, values in (("b", [0.2, 0.5]), ("d", [])):
        add(client, experiment, {"group": "messy", "variant": variant, "seed": "0"}, values, 10)
    words = ["--group", "messy", "--baseline", "d", "--metric", "cost/generated_tokens", "--metric", METRIC]
    assert script("compare", "--uri", sqlite, *words, "--csv", tmp_path / "v.csv") == 0
    assert f"d has no {METRIC}: the others are not compared with it" in capsys.readouterr().out
    kinds = {(row["metric"], row["kind"], row["variant"]) for row in read((tmp_path / "v.csv").read_text())}
    assert (METRIC, "run", "b") in kinds
    assert ("cost/generated_tokens", "difference", "b") in kinds
    assert not any(metric == METRIC and kind == "difference" for metric, kind, _ in kinds)


def test_seeds_from_before_and_after_a_setting_are_one_variant(sqlite, capsys):
    client = MlflowClient(sqlite)
    experiment = client.create_experiment("exgrpo")
    for seed, params in enumerate(({}, {"ReplayMixer.rho": all_settings()["ReplayMixer.rho"]})):
        tags = {"group": "upgraded", "variant": "v", "seed": str(seed)}
        add(client, experiment, tags, [0.2, 0.5 + seed / 10], 10, params=params)
    assert script("compare", "--uri", sqlite, "--group", "upgraded", "--metric", METRIC) == 0
    output = capsys.readouterr().out
    assert re.search(r"^v +2 ", output, re.MULTILINE)
    assert "ReplayMixer.rho" not in output


def test_a_server_that_does_not_answer_and_a_database_that_is_not_there_are_said(tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    before = time.monotonic()
    assert script("compare", "--uri", f"http://me:secret@127.0.0.1:{port}") == 2
    assert time.monotonic() - before < 60  # seconds; MLflow's own retries would take minutes
    output = capsys.readouterr().err
    assert f"error: MLflow at http://127.0.0.1:{port}: " in output
    assert "secret" not in output
    assert "Traceback" not in output
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    assert script("compare") == 2
    assert f"there is no MLflow database at {tmp_path}/none.db" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    (tmp_path / "none.db").write_bytes(b"no database at all, but as long as one may be" * 50)
    assert script("compare") == 2
    assert re.search(r"error: MLflow at sqlite.*none\.db: .*not a database", capsys.readouterr().err)


@pytest.mark.slow
def test_a_busy_server_has_longer_than_a_training_run_would_wait(server, monkeypatch):
    for name in client.READING:
        monkeypatch.delenv(name, raising=False)
    store = Store(server.uri)
    os.killpg(server.process.pid, signal.SIGSTOP)
    going_on = threading.Timer(6, os.killpg, (server.process.pid, signal.SIGCONT))
    going_on.start()
    try:
        assert store.select("exgrpo", None, [OLD], "tags.seed = '7'", False)[0]
    finally:
        going_on.join()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_an_error_with_its_run(sqlite, value):
    client = MlflowClient(sqlite)
    experiment = client.create_experiment(f"broken {value}")
    add(client, experiment, {"group": "g", "variant": "v", "seed": "0"}, [0.1, value], 10)
    store = Store(sqlite)
    runs = store.select(f"broken {value}", "g", [METRIC], None, False)[0]
    with pytest.raises(StoreError, match=r"v, seed 0 \(v-seed0, \w{32}\): eval/avg is \S+ at step 10: no number"):
        store.curves(runs, [METRIC])
    if math.isnan(value):  # which no filter of MLflow's finds
        assert len(store.select(f"broken {value}", None, [METRIC], None, False)[0]) == 1


def test_of_several_values_at_a_step_the_latest_counts_and_tokens_never_fall(sqlite):
    """As after a resumed run, or an evaluation repeated."""
    client = MlflowClient(sqlite)
    experiment = client.create_experiment("resumed")
    tags = {"group": "g", "variant": "v", "seed": "0"}
    run = client.create_run(experiment, tags=tags).info.run_id
    tokens = [(0, 0), (10, 1000), (11, 1100), (12, 1050), (20, 2000)]
    metrics = [Metric("cost/generated_tokens", total, 1, step) for step, total in tokens]
    metrics += [Metric("time/step", 2.0, 1, step) for step in range(1, 21)]
    metrics += [Metric(METRIC, value, at, step) for value, at, step in [(0.2, 5, 0), (0.9, 7, 12), (0.3, 9, 12)]]
    client.log_batch(run, [*metrics, Metric(METRIC, 0.8, 8, 12)])
    client.set_terminated(run)
    store = Store(sqlite)
    (curve,) = store.curves(store.select("resumed", "g", [METRIC], None, False)[0], [METRIC])[METRIC]
    points = zip(curve.steps, curve.values, curve.tokens, curve.seconds, strict=True)
    assert [tuple(map(float, point)) for point in points] == [(0, 0.2, 0, 0), (12, 0.3, 1100, 24)]


@pytest.mark.slow
def test_the_page_shows_every_curve_and_run_in_a_browser(server, tmp_path):
    out = tmp_path / "page.html"
    chosen = ["--uri", server.uri, "--group", "paper", "--metric", METRIC, "--baseline", "on_policy"]
    assert script("compare", *chosen, "--out", out) == 0
    dom, console = opened(out, tmp_path)
    assert console == []
    drawn = {kind: drawn_charts(dom, kind) for kind in ("learning", "finals", "differences")}
    assert {kind: len(charts) for kind, charts in drawn.items()} == {"learning": 3, "finals": 1, "differences": 1}
    for chart in drawn["learning"]:
        assert len(of_class(chart, "band")) == len(of_class(chart, "curve")) == 5
        assert len(of_class(chart, "thin")) == 40
    (last,) = drawn["finals"]
    dots = of_class(last, "dot")
    assert len(dots) == 40
    assert len(of_class(last, "hollow")) == 1  # weak, seed 3
    (zero, left), (end, right) = horizontal(last)
    places = [left + (right - left) * (final(v, s) - zero) / (end - zero) for v in RISES for s in range(8)]
    assert sorted(points(dot)[0][0] for dot in dots) == pytest.approx(sorted(places), abs=0.11)
    (forest,) = drawn["differences"]
    assert len(of_class(forest, "whisker")) == 4 * len(MEASURES)
    assert len(set(re.findall(rf'href="{server.uri}/#/experiments/\d+/runs/(\w{{32}})"', dom))) == 40
    assert "nan" not in "".join(text for of_kind in drawn.values() for chart in of_kind for text in numbers(chart))
    text = out.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;ours" in text  # a setting's value
    assert not re.search(r'@import|url\(|\ssrc="(?!data:)', text)
    before = out.read_bytes()
    assert script("compare", *chosen, "--out", out) == 0
    assert out.read_bytes() == before
