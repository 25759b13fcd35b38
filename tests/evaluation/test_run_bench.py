"""evals/run_bench.py: what it was asked for, exactly once, whatever interrupts it; and clear errors before any work."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from mlflow.tracking import MlflowClient
from run_builders import ROOT, byte_tokenizer, small_bindings
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from exgrpo_orlhf import checkpoints, config
from exgrpo_orlhf.checkpoints import claim
from exgrpo_orlhf.evaluation import sets, subject
from exgrpo_orlhf.evaluation.benchmarks import DEFINITIONS, BenchmarkError, Definitions, override
from exgrpo_orlhf.evaluation.engines import EngineFailure, Response
from exgrpo_orlhf.evaluation.samples import Sample, SampleFile
from exgrpo_orlhf.questions.prompts import Prompts
from exgrpo_orlhf.run import train

RUN_BENCH = ROOT / "evals" / "run_bench.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("run_bench", RUN_BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench(script, monkeypatch, capsys):
    """run_bench.py in this process: (exit status, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["run_bench.py", *map(str, words)])
        capsys.readouterr()
        status = script.main()
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory) -> Path:
    """A model of bytes that has learnt nothing: any text goes in."""
    folder = tmp_path_factory.mktemp("bytes") / "model"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=260, hidden_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
                intermediate_size=64, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None,
                eos_token_id=0, initializer_range=0.2,
            )
        )  # fmt: skip
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


CHAINS = ("--benchmarks", "chains", "--engine", "transformers", "--no-mlflow", "--max-tokens", 24)


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def timeless(folder: Path) -> dict:
    """results.json without its times, its name and what was typed."""
    known = results(folder)
    for name in ("finished", "command"):
        del known["record"][name]
    for benchmark in known["benchmarks"].values():
        del benchmark["seconds"]
    del known["name"]
    return known


def samples(folder: Path, benchmark: str = "chains") -> list[dict]:
    return [json.loads(line) for line in (folder / benchmark / "samples.jsonl").read_bytes().split(b"\n") if line]


def definition(folder: Path, name: str = "mine", **more: str) -> Path:
    """A benchmark of twelve sums, as a file of definitions."""
    rows = [{"problem": f"What is {i} + {i + 3}?", "answer": str(2 * i + 3)} for i in range(12)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "title": '"Mine"',
        "verifier": '"math"',
        "files": f'[{{ name = "{name}.jsonl", question = "problem", answer = "answer" }}]',
        **more,
    }
    path = folder / f"{name}.toml"
    path.write_text(f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items()))
    return path


# -- what it does -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_sets_that_are_here_are_run_and_the_others_are_in_no_mean(shared_data, byte_model, tmp_path):
    words = ["--model", byte_model, "--suite", "paper", "--data", shared_data, "--limit", 2, "--samples", 2]
    words += ["--max-tokens", 16, "--engine", "transformers", "--no-mlflow", "--out", tmp_path / "x"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(
        [sys.executable, RUN_BENCH, *map(str, words)], env=offline, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    known = results(tmp_path / "x")
    here = {"aime24", "aime25", "amc", "math500", "minerva", "arc_c", "mmlu_pro"}
    assert set(known["benchmarks"]) == here
    assert set(known["not_run"]) == {"olympiad", "gpqa"}
    for each in known["not_run"].values():
        assert "prepare_data.py" in each["reason"]
    assert not known["complete"]
    assert set(known["means"]["macro"]["benchmarks"]) == here
    assert known["means"]["groups"]["general"]["benchmarks"] == ["arc_c", "mmlu_pro"]
    assert set(known["means"]["groups"]["general"]["of"]) == {"arc_c", "gpqa", "mmlu_pro"}
    assert known["benchmarks"]["amc"]["rows"] == 40
    assert known["benchmarks"]["amc"]["official_rows"] == 83
    assert any("83 are official" in note for note in known["benchmarks"]["amc"]["notes"])
    for name in here:
        lines = samples(tmp_path / "x", name)
        assert [(line["row"], line["sample"]) for line in lines] == sorted(
            {(li["row"], s) for li in lines for s in (0, 1)}
        )
        assert len(lines) == 4
        assert all(line["prompt"].endswith("<|assistant|>") and line["response_tokens"] <= 16 for line in lines)
        assert (lines[0]["plain"] is None) == (known["benchmarks"][name]["plain"] is None) is False
    assert "OlympiadBench" in done.stdout
    assert "over 7 of 9" in done.stdout
    assert "–" in (tmp_path / "x" / "paper.md").read_text()
    assert "<svg" in (tmp_path / "x" / "report.html").read_text()


def test_official_row_counts_of_the_sets_that_are_here(shared_data):
    definitions = Definitions()
    counts = {}
    for name in ("aime24", "aime25", "math500", "minerva", "arc_c", "mmlu_pro", "gsm8k"):
        found = sets.load(definitions.benchmark(name), (shared_data,), None, hub=False)
        counts[name] = found.found
        assert found.whole, found.notes
        assert len({row for row, _ in found.rows}) == found.found == found.benchmark.rows
    assert counts["mmlu_pro"] == 12_032


def test_a_limit_takes_questions_spread_over_the_set_and_a_larger_one_takes_them_too(shared_data):
    benchmark = Definitions().benchmark("mmlu_pro")
    small, large = (sets.load(benchmark, (shared_data,), limit, hub=False) for limit in (30, 60))
    rows = [row for row, _ in small.rows]
    assert set(rows) < {row for row, _ in large.rows}
    assert rows == sorted(rows)
    assert len({question.meta["group"] for _, question in small.rows}) > 5, (
        "not the first rows, which are of one subject"
    )


def test_chains_score_as_in_training(warm_model, tmp_path, bench):
    """The validation questions of base.gin: the same greedy responses, one by one, and the same score."""
    experiment = config.load(
        ("base.gin",),
        [
            *small_bindings(warm_model, "train.steps = 2", "train.eval_every = 2"),
            "validation/ModularChains.count = 240",
            "validation/ModularChains.operands = (3, 4, 5, 6, 7, 8)",
            "Prompts.max_tokens = 40",
        ],
    )
    run = tmp_path / "run"
    train(experiment, run, resume=False, tracking_uri="unused", tags={})
    status, _, error = bench("--model", run / "checkpoint-2", *CHAINS, "--temperature", 0, "--out", tmp_path / "x")
    assert status == 0, error
    trained = json.loads((run / "metrics.jsonl").read_text().strip().split("\n")[-1])
    by_length = [trained[f"eval/greedy_accuracy_{n}_operands"] for n in (3, 4, 5, 6, 7)]
    measured = results(tmp_path / "x")["benchmarks"]["chains"]
    assert measured["avg"]["value"] == pytest.approx(sum(by_length) / 5)
    assert measured["avg"]["value"] > 0
    assert [each["value"] for each in measured["by_group"].values()] == pytest.approx(by_length)
    then = {line["id"]: line["response"] for line in samples(run / "evaluation" / "2", "validation")}
    assert all(then[line["id"]] == line["response"] for line in samples(tmp_path / "x"))
    assert results(tmp_path / "x")["record"]["model"]["run"] == "run"
    assert results(tmp_path / "x")["record"]["model"]["step"] == 2


def test_two_runs_with_one_seed_are_the_same_file_and_another_seed_is_another(warm_model, tmp_path, bench):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        bench("--model", warm_model, *CHAINS, "--limit", 12, "--samples", 3, "--seed", seed, "--out", tmp_path / name)
    a, b, c = ((tmp_path / name / "chains" / "samples.jsonl").read_bytes() for name in "abc")
    assert a == b != c
    assert timeless(tmp_path / "a") == timeless(tmp_path / "b")
    lines = samples(tmp_path / "a")
    assert len({line["seed"] for line in lines}) == len(lines) == 36
    assert len({line["response"] for line in lines}) > 12, "samples of a question differ"


def test_another_number_of_rows_at_a_time_is_said_to_change_rounding_and_next_to_nothing_else(
    warm_model, tmp_path, bench
):
    for rows in (5, 64):
        words = ("--limit", 20, "--samples", 2, "--rows", rows, "--out", tmp_path / str(rows))
        bench("--model", warm_model, *CHAINS, *words)
    same = [
        a["response"] == b["response"] for a, b in zip(samples(tmp_path / "5"), samples(tmp_path / "64"), strict=True)
    ]
    assert sum(same) >= 38
    assert "rows" in results(tmp_path / "5")["record"]["engine"]["reproducible"]


def test_more_questions_and_more_samples_go_on_from_what_is_there(warm_model, tmp_path, bench):
    out = tmp_path / "x"
    bench("--model", warm_model, *CHAINS, "--limit", 6, "--samples", 2, "--out", out)
    before = {(line["row"], line["sample"]): line for line in samples(out)}
    status, _, error = bench("--model", warm_model, *CHAINS, "--limit", 9, "--samples", 3, "--out", out)
    assert status == 0, error
    after = {(line["row"], line["sample"]): line for line in samples(out)}
    assert len(after) == 27
    assert before.items() <= after.items()
    assert results(out)["benchmarks"]["chains"]["questions"] == 9
    status, _, error = bench("--model", warm_model, *CHAINS, "--limit", 6, "--samples", 3, "--out", out)
    assert status == 2
    assert "chains.limit: 9 there, 6 now: it can only be raised" in error


def test_two_benchmarks_one_after_the_other_share_a_folder(warm_model, tmp_path, bench):
    for name in ("chains", "chains_beyond"):
        words = ("--benchmarks", name, "--engine", "transformers", "--no-mlflow", "--limit", 4, "--out", tmp_path)
        assert bench("--model", warm_model, *words)[0] == 0
    assert set(results(tmp_path)["benchmarks"]) == {"chains", "chains_beyond"}
    words = ("--suite", "chains", "--engine", "transformers", "--no-mlflow", "--limit", 4, "--out", tmp_path / "x")
    assert bench("--model", warm_model, *words)[0] == 0
    assert timeless(tmp_path / "x") == timeless(tmp_path)


def test_a_benchmark_of_ones_own_is_one_block(byte_model, tmp_path, bench):
    block = definition(tmp_path, rows="15", samples="2")
    words = ("--definitions", block, "--benchmarks", "mine", "--engine", "transformers", "--no-mlflow")
    status, out, error = bench("--model", byte_model, *words, "--max-tokens", 12, "--out", tmp_path / "x")
    assert status == 0, error
    known = results(tmp_path / "x")["benchmarks"]["mine"]
    assert (known["questions"], known["samples"], known["official_rows"]) == (12, 2, 15)
    assert "12 rows, 15 are official" in out


def test_instructions_stand_below_the_question_unless_the_template_has_its_own(byte_model):
    model, _ = subject.load(str(byte_model))
    benchmark = override(Definitions().benchmark("math500"), max_tokens=8)
    question = sets.Question.make("math500", "What is 1 + 1?", "2")
    asked = sets.BenchmarkSet(benchmark, ((0, question),), 1, "here", ())

    def prompt(template: str, system: str | None = None) -> str:
        return subject.Asker(model, Prompts(template=template, system=system), 0).requests([asked])[0].prompt

    assert "boxed" in prompt("plain")
    assert prompt("chat").count("boxed") == 1
    assert prompt("chat", "Be brief.").count("boxed") == 1
    assert prompt("chat", "Be brief, and \\boxed{} the answer.").count("boxed") == 1
    assert prompt("simplerl").count("boxed") == 1


# -- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_twenty_random_kills_change_nothing(warm_model, tmp_path, bench):
    block = definition(tmp_path, samples="3")
    words = [
        "--model",
        warm_model,
        "--definitions",
        block,
        "--benchmarks",
        "chains,mine",
        "--limit",
        60,
        "--samples",
        4,
    ]
    words += ["--max-tokens", 48, "--rows", 3, "--engine", "transformers", "--no-mlflow", "--template", "plain"]
    status, _, error = bench(*words, "--out", tmp_path / "whole")
    assert status == 0, error
    killer = [sys.executable, ROOT / "tests" / "builders" / "bench_killer.py", 20, tmp_path / "killed", "--"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, killer), *map(str, words), "--out", str(tmp_path / "killed")],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.stdout.strip().endswith("20 killed, then exit status 0"), done.stdout[-500:] + done.stderr[-3000:]
    assert timeless(tmp_path / "killed") == timeless(tmp_path / "whole")
    for benchmark in ("chains", "mine"):
        a, b = ((tmp_path / name / benchmark / "samples.jsonl").read_bytes() for name in ("killed", "whole"))
        assert a == b


@pytest.mark.slow
def test_ctrl_c_saves_what_is_under_way_and_the_same_command_continues(warm_model, tmp_path, bench):
    words = ["--model", warm_model, *CHAINS, "--limit", 100, "--samples", 4, "--rows", 4, "--max-tokens", 48]
    command = [sys.executable, RUN_BENCH, *words, "--out", tmp_path / "x"]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    file = tmp_path / "x" / "chains" / "samples.jsonl"
    deadline = time.monotonic() + 120
    while not (file.exists() and file.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, error
    assert "the same command continues" in error
    assert 0 < len(samples(tmp_path / "x")) < 400
    assert not (tmp_path / "x" / "results.json").exists()
    assert bench(*words, "--out", tmp_path / "x")[0] == 0
    assert bench(*words, "--out", tmp_path / "whole")[0] == 0
    assert timeless(tmp_path / "x") == timeless(tmp_path / "whole")


def test_a_torn_last_line_is_generated_again_and_a_bad_line_is_named(warm_model, tmp_path, bench):
    words = ("--model", warm_model, *CHAINS, "--limit", 6, "--out", tmp_path)
    bench(*words)
    file = tmp_path / "chains" / "samples.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    assert bench(*words)[0] == 0
    assert file.read_bytes() == whole
    lines = whole.split(b"\n")
    file.write_bytes(b"\n".join([lines[0], b'{"row": 1}', *lines[2:]]))
    status, _, error = bench(*words)
    assert status == 2
    assert f"{file}, line 2: not a sample" in error
    file.write_bytes(b"\n".join([lines[0], *lines]))
    assert "line 2: row" in bench(*words)[2]


def test_a_folder_of_another_configuration_is_refused_with_the_differences(warm_model, raw_model, tmp_path, bench):
    bench("--model", warm_model, *CHAINS, "--limit", 4, "--out", tmp_path)
    before = (tmp_path / "chains" / "samples.jsonl").read_bytes()
    status, _, error = bench(
        "--model", raw_model, *CHAINS, "--limit", 4, "--seed", 3, "--temperature", 1, "--out", tmp_path
    )
    assert status == 2
    assert "model.hash: " in error
    assert "seed: 0 there, 3 now" in error
    assert "chains.temperature: 0.6 there, 1.0 now" in error
    assert (tmp_path / "chains" / "samples.jsonl").read_bytes() == before


def test_regrading_needs_no_model_and_mends_verdicts(warm_model, tmp_path, bench):
    model = tmp_path / "model"
    shutil.copytree(warm_model, model)
    block = definition(tmp_path)
    words = ("--definitions", block, "--benchmarks", "chains,mine", "--template", "plain", "--engine", "transformers")
    out = tmp_path / "x"
    bench("--model", model, *words, "--no-mlflow", "--limit", 8, "--max-tokens", 24, "--out", out)
    before, known = (out / "chains" / "samples.jsonl").read_bytes(), timeless(out)
    shutil.rmtree(model)
    spoiled = [{**line, "verdict": "timeout", "extracted": "7", "sound": None} for line in samples(out)]
    (out / "chains" / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in spoiled))
    status, _, error = bench("regrade", out)
    assert status == 0, error
    assert (out / "chains" / "samples.jsonl").read_bytes() == before
    again = timeless(out)
    assert again["record"].pop("graded_with")
    assert again == known


def test_compare_and_report_work_on_what_was_written(warm_model, raw_model, tmp_path, bench):
    for name, model in (("a", warm_model), ("b", raw_model)):
        bench("--model", model, *CHAINS, "--limit", 30, "--out", tmp_path / name)
    status, out, error = bench("compare", tmp_path / "a", tmp_path / "b", "--json", tmp_path / "c.json")
    assert status == 0, error
    assert "Modular chains" in out
    assert json.loads((tmp_path / "c.json").read_text())
    status, _, error = bench("report", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "both.html")
    assert status == 0, error
    assert "<svg" in (tmp_path / "both.html").read_text()


def killed_while_extending(bench, model: Path, out: Path, *more: object) -> None:
    """As if a kill had come after some lines of a larger evaluation."""
    bench("--model", model, *CHAINS, *more, "--out", out)
    before = (out / "results.json").read_bytes()
    larger = [8 if word == 4 else 3 if word == 2 else word for word in more]
    bench("--model", model, *CHAINS, *larger, "--out", out)
    lines = (out / "chains" / "samples.jsonl").read_bytes().split(b"\n")
    (out / "chains" / "samples.jsonl").write_bytes(b"\n".join([*lines[:-3], b""]))
    (out / "results.json").write_bytes(before)


@pytest.mark.parametrize("more", [("--limit", 4), ("--limit", 6, "--samples", 2)])
def test_a_benchmark_that_is_being_extended_is_in_no_results_of_others(more, warm_model, tmp_path, bench):
    killed_while_extending(bench, warm_model, tmp_path, *more)
    status, _, error = bench("regrade", tmp_path)
    assert status == 2
    assert "chains was extended and did not come to its end" in error
    words = ("--benchmarks", "chains_beyond", "--engine", "transformers", "--no-mlflow", "--limit", 2)
    assert bench("--model", warm_model, *words, "--out", tmp_path)[0] == 0
    assert set(results(tmp_path)["benchmarks"]) == {"chains_beyond"}


class Failing:
    """Two portions, then the engine dies; between the two there is time."""

    reproducible = None

    def generate(self, requests, done):
        for begin in (0, 2):
            yield [Response(request, "1+1=2;#2", 8, "stop") for request in requests[begin : begin + 2]]
        raise EngineFailure("the engine died")

    def describe(self):
        return {"name": "failing", "dtype": "float32"}

    def close(self):
        pass


def test_what_was_finished_before_an_engine_died_is_there(warm_model, tmp_path, bench, script, monkeypatch):
    monkeypatch.setattr(script, "_engine", lambda *_: Failing)
    status, _, error = bench("--model", warm_model, *CHAINS, "--limit", 6, "--out", tmp_path)
    assert status == 1
    assert "the engine died" in error
    assert len(samples(tmp_path)) == 4


def test_a_disk_that_is_full_leaves_whole_lines_and_nothing_behind_them(warm_model, tmp_path, bench, monkeypatch):
    """Sixty portions wait when the second write fails: none of them is written behind it."""
    words = ("--model", warm_model, *CHAINS, "--limit", 70, "--rows", 1, "--out", tmp_path)
    written = []

    def full(self, samples):
        written.append(samples)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        append(self, samples)

    append = SampleFile.append
    monkeypatch.setattr(SampleFile, "append", full)
    assert bench(*words)[0] == 2
    assert len(written) == 2
    monkeypatch.setattr(SampleFile, "append", append)
    assert len(samples(tmp_path)) == 1
    assert bench(*words)[0] == 0


def test_half_a_line_is_taken_back_where_a_write_fails(tmp_path, monkeypatch):
    file = SampleFile(tmp_path / "x" / "samples.jsonl")
    line = dict.fromkeys(Sample.__annotations__, "") | {"row": 0, "sample": 0, "seed": 1}
    file.append([line])
    before = file.path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.append([{**line, "sample": 1}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, old)
    assert file.path.read_bytes() == before


def test_what_generated_earlier_benchmarks_is_remembered_and_its_dtype_binds_later_ones(warm_model, tmp_path, bench):
    words = ("--model", warm_model, "--engine", "transformers", "--no-mlflow", "--limit", 3, "--out", tmp_path)
    assert bench(*words, "--benchmarks", "chains")[0] == 0
    status, _, error = bench(*words, "--benchmarks", "chains_beyond", "--dtype", "bfloat16")
    assert status == 2
    assert "computed in float32, now it would be bfloat16; give --dtype float32" in error
    assert bench(*words, "--benchmarks", "chains_beyond", "--dtype", "float32", "--rows", 2)[0] == 0
    rows = [session["engine"]["rows"] for session in results(tmp_path)["record"]["sessions"]]
    assert rows == [64, 2]


def test_an_attempt_without_a_response_binds_nobody(warm_model, tmp_path, bench):
    words = ("--model", warm_model, *CHAINS, "--limit", 4, "--out", tmp_path)
    assert bench(*words, "--device", "cuda:7", "--dtype", "bfloat16", "--samples", 9)[0] == 1
    assert bench(*words)[0] == 0
    assert results(tmp_path)["benchmarks"]["chains"]["samples"] == 1


def test_a_set_or_an_instruction_that_has_changed_is_refused(byte_model, tmp_path, bench):
    block = definition(tmp_path)
    words = ("--definitions", block, "--benchmarks", "mine", "--engine", "transformers", "--no-mlflow")
    words = ("--model", byte_model, *words, "--max-tokens", 8, "--out", tmp_path / "x")
    assert bench(*words, "--limit", 4)[0] == 0
    definition(tmp_path, ask='"Just guess."')
    assert "answers another prompt than would be asked now" in bench(*words, "--limit", 6)[2]
    definition(tmp_path)
    rows = (tmp_path / "mine.jsonl").read_text().replace("What is", "How much is")
    (tmp_path / "mine.jsonl").write_text(rows)
    status, _, error = bench(*words, "--limit", 4)
    assert status == 2
    assert "answers another prompt than would be asked now" in error


def test_two_processes_do_not_work_in_one_folder(warm_model, tmp_path, bench):
    with claim(tmp_path, resume=True):
        status, _, error = bench("--model", warm_model, *CHAINS, "--limit", 4, "--out", tmp_path)
    assert status == 2
    assert f"another process is at work in {tmp_path}" in error
    assert not (tmp_path / "chains").exists()


def test_a_finished_evaluation_keeps_the_record_of_what_generated_it(warm_model, tmp_path, bench, monkeypatch):
    words = ("--model", warm_model, *CHAINS, "--limit", 4, "--out", tmp_path)
    bench(*words)
    before = timeless(tmp_path)
    monkeypatch.setattr("exgrpo_orlhf.evaluation.environment.versions", lambda: {"torch": "another"})
    bench(*words)
    assert timeless(tmp_path) == before


# -- errors, before anything is generated -----------------------------------------------------------------------------


def refused(bench, tmp_path: Path, *words: object) -> str:
    """The message of an evaluation that cannot be; nothing is there of it."""
    out = tmp_path / "refused"
    given = () if "--out" in words else ("--out", out)
    status, _, error = bench(*words, "--no-mlflow", "--engine", "transformers", *given)
    assert status == 2, error
    assert not out.exists()
    return error.strip().split("\n")[-1]


def test_an_unknown_benchmark_or_suite_names_the_nearest(warm_model, tmp_path, bench):
    message = refused(bench, tmp_path, "--model", warm_model, "--benchmarks", "aime42,math500")
    assert message.endswith("there is no benchmark 'aime42'; did you mean aime25 or aime24?")
    assert "did you mean paper?" in refused(bench, tmp_path, "--model", warm_model, "--suite", "papr")
    assert "--suite or --benchmarks" in refused(bench, tmp_path, "--model", warm_model)


def test_a_missing_file_a_wrong_field_and_an_empty_answer_are_named(warm_model, tmp_path, bench):
    words = ("--model", warm_model, "--benchmarks", "mine", "--definitions")
    block = definition(tmp_path, files='[{ name = "absent.jsonl" }]')
    assert "there is no mine.parquet or absent.jsonl in" in refused(bench, tmp_path, *words, block)
    block = definition(tmp_path, files='[{ name = "mine.jsonl", question = "question" }]')
    message = refused(bench, tmp_path, *words, block)
    assert "mine.jsonl: no column 'question', there are problem, answer" in message
    block = definition(tmp_path)
    (tmp_path / "mine.jsonl").write_text('{"problem": "a?", "answer": ""}\n')
    assert "row 0: the answer is empty" in refused(bench, tmp_path, *words, block)
    (tmp_path / "mine.jsonl").write_text('{"problem": "a?", "answer"')
    assert "mine.jsonl, line 1: not JSON" in refused(bench, tmp_path, *words, block)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"sampels": "3"}, "there is no key 'sampels'; did you mean samples"),
        ({"samples": '"3"'}, "samples takes int, got '3'"),
        ({"verifier": '"maths"'}, "Verifier.kind must be one of"),
        ({"temperature": "0", "samples": "4"}, "would all be the same"),
        ({"public": '"aime"'}, "public = 'aime' is in no catalogue; did you mean aime2"),
        ({"files": "[]"}, "no source"),
    ],
)
def test_a_block_that_is_not_well_defined_is_named_with_its_key(more, said, tmp_path):
    with pytest.raises(BenchmarkError, match=r"mine\.toml, block \[mine\]") as error:
        Definitions((DEFINITIONS, definition(tmp_path, **more)))
    assert said in str(error.value)


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
        blocks = definition(tmp_path, verifier='"choice"', files=file, by='"kind"')
        found = sets.load(Definitions((DEFINITIONS, blocks)).benchmark("mine"), (), None)
        questions = [question for _, question in found.rows]
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
    benchmark = Definitions((DEFINITIONS, definition(tmp_path, verifier='"choice"', files=file))).benchmark("mine")
    if len(gold) == 1:
        assert sets.load(benchmark, (), None).rows[0][1].answer == gold
    else:
        with pytest.raises(BenchmarkError, match=gold):
            sets.load(benchmark, (), None)


def test_a_parquet_file_that_bears_the_blocks_name_is_read_as_the_block_says(tmp_path):
    rows = [{"data": {"q": "two?", "level": 3}, "answer": "2"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mine.parquet")
    files = '[{ name = "mine.parquet", question = "data.q" }]'
    blocks = definition(tmp_path, files=files, by='"data.level"')
    ((_, question),) = sets.load(Definitions((DEFINITIONS, blocks)).benchmark("mine"), (), None).rows
    assert (question.prompt, question.answer, question.meta["group"]) == ("two?", "2", "3")


def test_folders_are_looked_at_in_their_order_whatever_the_name_of_the_file(tmp_path, monkeypatch):
    benchmark = Definitions().benchmark("aime24")
    first, second, prepared = (tmp_path / name for name in ("first", "second", "datasets"))
    for folder in (first, second, prepared):
        folder.mkdir()
    (second / "aime24_test.jsonl").write_text('{"problem": "two?", "expected_answer": "2"}\n')
    row = {"prompt": [{"role": "user", "content": "prepared?"}], "reward_model": {"ground_truth": "3", "style": "rule"}}
    pq.write_table(pa.Table.from_pylist([row]), prepared / "aime24.parquet")
    monkeypatch.setattr(sets, "DATASETS", prepared)
    assert sets.load(benchmark, (first, second), None).rows[0][1].prompt == "two?"
    assert sets.load(benchmark, (first,), None).rows[0][1].prompt == "prepared?"


@pytest.mark.parametrize(
    ("row", "more", "said"),
    [
        ({"problem": None, "answer": "1"}, {}, "row 0: not of the form expected"),
        ({"problem": "a \ud800 b", "answer": "1"}, {}, "row 0: not of the form expected"),
        ({"problem": "Which?", "answer": "neither"}, {"verifier": '"choice"'}, "row 0 has no answer of that kind"),
        ({"problem": "7+7", "answer": "4"}, {"verifier": '"modular_chain"'}, "not a modular chain"),
        ({"problem": "7", "answer": "4"}, {"verifier": '"function"', "function": '"no.py"'}, "no.py"),
        ({"problem": "7", "answer": "4"}, {"by": '"knd"'}, "no column 'knd', there are problem, answer"),
    ],
)
def test_a_set_that_could_not_be_graded_is_refused_before_anything_is_generated(
    row, more, said, byte_model, tmp_path, bench
):
    block = definition(tmp_path, **more)
    (tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n")
    words = ("--benchmarks", "mine", "--definitions", block, "--model", byte_model, "--max-tokens", 8)
    assert said in refused(bench, tmp_path, *words)


def test_weights_that_are_not_there_or_not_numbers_end_it_with_a_clear_message(byte_model, tmp_path, bench):
    block = definition(tmp_path)
    words = ("--benchmarks", "mine", "--definitions", block, "--max-tokens", 8, "--engine", "transformers")
    for name, change, said in (
        ("torn", None, "no causal language model for transformers"),
        ("missing", lambda weights: {k: w for k, w in weights.items() if "mlp.up" not in k}, "lacks 1 of its weights"),
        ("nan", lambda weights: {k: w * float("nan") for k, w in weights.items()}, "are not finite"),
    ):
        model = tmp_path / name
        shutil.copytree(byte_model, model)
        file = model / "model.safetensors"
        if change:
            save_file(change(load_file(file)), file, metadata={"format": "pt"})
        else:
            file.write_bytes(file.read_bytes()[:1000])
        status, _, error = bench("--model", model, *words, "--no-mlflow", "--out", tmp_path / f"x-{name}")
        assert status == 1
        assert said in error


def test_a_model_that_cannot_be_evaluated_is_refused(warm_model, tmp_path, bench):
    words = ("--benchmarks", "chains", "--model")
    assert "there is no such folder" in refused(bench, tmp_path, *words, tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "there is no config.json" in refused(bench, tmp_path, *words, tmp_path / "empty")
    run = tmp_path / "run"
    checkpoints.save(run, 3, lambda folder: (folder / "x").write_text(""), 1)
    assert "checkpoint-3" in refused(bench, tmp_path, *words, run)
    bare = tmp_path / "bare"
    shutil.copytree(warm_model, bare, ignore=shutil.ignore_patterns("token*", "vocab*", "merges*"))
    assert "there is no tokenizer" in refused(bench, tmp_path, *words, bare)


def test_a_context_that_is_too_short_says_how_long_responses_can_be(warm_model, byte_model, tmp_path, bench):
    words = ("--benchmarks", "chains", "--model", warm_model, "--max-tokens", 250)
    message = refused(bench, tmp_path, *words)
    assert "exceed the 256 positions" in message
    room = int(message.rpartition("--max-tokens ")[2].split()[0])
    words = ("--benchmarks", "chains", "--model", warm_model, "--engine", "transformers", "--no-mlflow", "--limit", 3)
    assert bench(*words, "--max-tokens", room, "--out", tmp_path / "fits")[0] == 0
    block = definition(tmp_path)
    (tmp_path / "mine.jsonl").write_text(json.dumps({"problem": "x" * 9000, "answer": "1"}) + "\n")
    words = ("--benchmarks", "mine", "--definitions", block, "--model", byte_model, "--max-tokens", 8)
    assert "the model is too small for this benchmark" in refused(bench, tmp_path, *words)


def test_a_set_that_was_asked_for_by_name_and_cannot_be_had_is_an_error(warm_model, tmp_path, bench, monkeypatch):
    monkeypatch.setattr(sets, "commit", unreachable)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    message = refused(bench, tmp_path, "--model", warm_model, "--benchmarks", "chains,gpqa")
    assert "benchmark 'gpqa' is not available: Idavidrein/gpqa is gated: accept its terms" in message


def unreachable(set_id: str, *_: object) -> str:
    from exgrpo_orlhf.questions.hub import HubError, explain

    raise HubError(explain(OSError(f"Gated dataset: {set_id} is a gated repo"), set_id, "x"))


# -- MLflow -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_results_are_on_the_training_run_once_and_without_one_on_a_run_of_their_own(
    warm_model, tmp_path, bench, monkeypatch
):
    """And on the training run only what means there what its name says."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    bindings = [b for b in small_bindings(warm_model, "train.steps = 2") if not b.startswith("Tracking.enabled")]
    run = tmp_path / "run"
    train(config.load(("base.gin",), bindings), run, resume=False, tracking_uri=uri, tags={})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    client = MlflowClient(uri)
    (trained,) = client.search_runs([client.get_experiment_by_name("exgrpo").experiment_id])
    words = ("--model", run / "checkpoint-2", "--engine", "transformers", "--suite", "chains")
    for _ in range(2):
        status, _, error = bench(*words, "--out", tmp_path / "x")
        assert status == 0, error
    (measured,) = client.get_metric_history(trained.info.run_id, "eval/chains/avg_at_1")
    assert measured.step == 2
    assert measured.value == results(tmp_path / "x")["benchmarks"]["chains"]["avg"]["value"]
    there = set(client.get_run(trained.info.run_id).data.metrics)
    assert "eval/avg_chains" in there
    assert "eval/avg" not in there, "that is the paper's suite"
    names = {file.path for file in client.list_artifacts(trained.info.run_id, "evaluation/x")}
    assert names == {"evaluation/x/results.json", "evaluation/x/report.html"}
    for name, more in (
        ("part", ("--limit", 8)),
        ("hot", ("--temperature", 1.5)),
        ("seed", ("--seed", 1)),
        ("asked", ("--template", "simplerl", "--max-tokens", 64)),
    ):
        bench(*words, *more, "--out", tmp_path / name)
    bench("--model", warm_model, "--engine", "transformers", "--benchmarks", "chains", "--out", tmp_path / "raw")
    history = client.get_metric_history(trained.info.run_id, "eval/chains/avg_at_1")
    assert [each.value for each in history] == [measured.value], "no other score under that name"
    own = client.search_runs([client.get_experiment_by_name("exgrpo-eval").experiment_id])
    by_name = {each.info.run_name: each.data for each in own}
    assert set(by_name) == {"part", "hot", "seed", "asked", "raw"}
    assert by_name["part"].tags["trained_by"] == trained.info.run_id
    assert "eval/avg" not in by_name["part"].metrics, "no mean of parts"
    assert "eval/avg_chains" not in by_name["raw"].metrics, "the group was not run whole"


def test_an_mlflow_that_does_not_answer_loses_nothing(warm_model, tmp_path, bench, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    words = ("--benchmarks", "chains", "--engine", "transformers", "--limit", 2, "--max-tokens", 24)
    assert bench("--model", warm_model, *words, "--out", tmp_path / "x")[0] == 0
    assert "run the same command again" in caplog.text
    assert results(tmp_path / "x")["benchmarks"]["chains"]["questions"] == 2
