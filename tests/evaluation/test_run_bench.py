"""evals/run_bench.py: what it was asked for, exactly once, whatever interrupts it."""

from __future__ import annotations

import ast
import json
import re
import shutil
import signal
import subprocess
import sys

import pytest
from eval_builders import CHAINS, HERE, RUN_BENCH, definition, results, samples, timeless_results
from full_disk import full_disk
from http_server import http_server
from mlflow.tracking import MlflowClient
from results_builder import make_results
from run_builders import BUILDERS, ROOT, python, rows, small_bindings, train_small, wait_until
from tracking_builders import tracked_runs

from exgrpo_orlhf import config
from exgrpo_orlhf.checkpoints import claim
from exgrpo_orlhf.io.files import write_json
from exgrpo_orlhf.sampling import EngineLost, Sampler, ServedRollout
from exgrpo_orlhf.training.run import train

# -- what it does -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_sets_that_are_here_are_run_and_the_others_are_in_no_mean(shared_data, byte_model, tmp_path):
    words = ["--model", byte_model, "--suite", "paper", "--data", shared_data, "--limit", 2, "--samples", 2]
    words += ["--max-tokens", 16, *HERE, "--out", tmp_path / "x"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = python(RUN_BENCH, *words, env=offline, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    content = results(tmp_path / "x")
    benchmarks, general = content["benchmarks"], content["means"]["groups"]["general"]
    here = {"aime24", "aime25", "amc", "math500", "minerva", "arc_c", "mmlu_pro"}
    assert set(benchmarks) == set(content["means"]["macro"]["benchmarks"]) == here
    assert set(content["not_run"]) == {"olympiad", "gpqa"}
    assert all("prepare_data.py" in each["reason"] for each in content["not_run"].values())
    assert not content["complete"]
    assert general["benchmarks"] == ["arc_c", "mmlu_pro"]
    assert set(general["of"]) == {"arc_c", "gpqa", "mmlu_pro"}
    assert (benchmarks["amc"]["rows"], benchmarks["amc"]["official_rows"]) == (40, 83)
    assert any("83 are official" in note for note in benchmarks["amc"]["notes"])
    for name in here:
        lines = samples(tmp_path / "x", name)
        places = [(line["row"], line["sample"]) for line in lines]
        assert places == sorted({(row, sample) for row, _ in places for sample in (0, 1)})
        assert len(places) == 4
        assert all(line["prompt"].endswith("<|assistant|>") and line["response_tokens"] <= 16 for line in lines)
        assert lines[0]["plain"] is not None
        assert benchmarks[name]["plain"] is not None
    assert "OlympiadBench" in done.stdout
    assert "over 7 of 9" in done.stdout
    assert "–" in (tmp_path / "x" / "paper.md").read_text()
    assert "data:image/svg+xml" in (tmp_path / "x" / "report.html").read_text()


def test_chains_score_as_in_training(warm_model, tmp_path, bench):
    """The validation questions of base.gin: the same greedy responses, one by one, and the same score."""
    more = (
        *("train.steps = 2", "train.eval_every = 2", "Prompts.max_tokens = 40"),
        *("validation/ModularChains.count = 240", "validation/ModularChains.operands = (3, 4, 5, 6, 7, 8)"),
    )
    run = tmp_path / "run"
    train_small(warm_model, run, *more, files=["base.gin"])
    bench("--model", run / "checkpoint-2", *CHAINS, "--temperature", 0, "--out", tmp_path / "x")
    trained = rows(run)[-1]
    by_length = [trained[f"eval/greedy_accuracy_{n}_operands"] for n in (3, 4, 5, 6, 7)]
    chains = results(tmp_path / "x")["benchmarks"]["chains"]
    assert chains["avg"]["value"] == pytest.approx(sum(by_length) / 5)
    assert chains["avg"]["value"] > 0
    assert [each["value"] for each in chains["by_group"].values()] == pytest.approx(by_length)
    then = {line["id"]: line["response"] for line in samples(run / "evaluation" / "2", "validation")}
    assert all(then[line["id"]] == line["response"] for line in samples(tmp_path / "x"))
    model = results(tmp_path / "x")["record"]["model"]
    assert (model["run"], model["step"]) == ("run", 2)


def test_two_runs_with_one_seed_are_the_same_file_and_another_seed_or_number_of_rows_is_another(tmp_path, chains):
    """Another number of rows at a time changes rounding, and next to no response."""
    for name, seed, at_once in (("a", 0, 64), ("b", 0, 64), ("c", 1, 64), ("d", 0, 5)):
        chains("--limit", 12, "--samples", 3, "--seed", seed, "--rows", at_once, out=tmp_path / name)
    a, b, c = ((tmp_path / name / "chains" / "samples.jsonl").read_bytes() for name in "abc")
    assert a == b != c
    assert timeless_results(tmp_path / "a") == timeless_results(tmp_path / "b")
    lines = samples(tmp_path / "a")
    assert len({line["seed"] for line in lines}) == len(lines) == 36
    assert len({line["response"] for line in lines}) > 12, "samples of a question differ"
    pairs = zip(lines, samples(tmp_path / "d"), strict=True)
    assert sum(a["response"] == b["response"] for a, b in pairs) >= 34
    assert "rows" in results(tmp_path / "d")["record"]["engine"]["reproducible"]


def test_more_questions_and_more_samples_go_on_from_what_is_there(tmp_path, chains):
    chains("--limit", 6, "--samples", 2)
    before = {(line["row"], line["sample"]): line for line in samples(tmp_path)}
    chains("--limit", 9, "--samples", 3)
    after = {(line["row"], line["sample"]): line for line in samples(tmp_path)}
    assert len(after) == 27
    assert before.items() <= after.items()
    assert results(tmp_path)["benchmarks"]["chains"]["questions"] == 9
    error = chains("--limit", 6, "--samples", 3, status=2)
    assert "chains.limit: 9 there, 6 now: it can only be raised" in error


def test_two_benchmarks_one_after_the_other_share_a_folder(warm_model, tmp_path, bench):
    words = ("--model", warm_model, *HERE, "--limit", 4)
    for name in ("chains", "chains_beyond"):
        bench(*words, "--benchmarks", name, "--out", tmp_path)
    assert set(results(tmp_path)["benchmarks"]) == {"chains", "chains_beyond"}
    bench(*words, "--suite", "chains", "--out", tmp_path / "x")
    assert timeless_results(tmp_path / "x") == timeless_results(tmp_path)


def test_the_means_are_over_the_suites_whatever_else_is_evaluated_in_the_folder(warm_model, tmp_path, bench):
    """In whatever order, and over all where there is none."""
    (tmp_path / "own.toml").write_text('[suites]\nlong = ["chains_beyond"]\n')
    words = ("--model", warm_model, *HERE, "--definitions", tmp_path / "own.toml", "--limit", 2, "--max-tokens", 8)
    calls = [
        (("--benchmarks", "chains"), ["chains"]),
        (("--benchmarks", "chains_beyond"), ["chains", "chains_beyond"]),
        (("--suite", "long"), ["chains_beyond"]),
        (("--benchmarks", "chains"), ["chains_beyond"]),
        (("--suite", "chains"), ["chains", "chains_beyond"]),
    ]
    for call, names in calls:
        bench(*words, *call, "--out", tmp_path / "x")
        means = results(tmp_path / "x")["means"]
        assert sorted(means["macro"]["benchmarks"]) == sorted(means["micro"]["benchmarks"]) == names, call


def test_the_finished_runs_of_a_suite_are_evaluated_once_and_the_others_are_named(
    warm_model, tmp_path, bench, script, monkeypatch, caplog
):
    runs, out = tmp_path / "runs", tmp_path / "out"
    one_step = ("train.steps = 1", "train.eval_every = None")
    train_small(warm_model, runs / "ExGRPO" / "seed0", *one_step, files=["paper/table7.gin", "testbed/rare.gin"])
    half = shutil.copytree(runs / "ExGRPO" / "seed0", runs / "retired_back" / "seed3") / "config.gin"
    half.write_text(half.read_text().replace("train.steps = 1", "train.steps = 10"))
    words = ("table", ROOT / "gin" / "paper" / "table7.gin", "--runs", runs, "--out", out, *CHAINS, "--limit", 3)
    assert "not evaluated" in bench(*words, "--dry-run") + caplog.text
    assert not out.exists()
    assert re.search(r"\n  seed0 +–.*\n", bench(*words)), "chains are in no column of the paper"
    assert f"{runs / 'retired_back' / 'seed3'}: no finished run" in caplog.text
    assert not (out / "retired_back").exists()
    evaluated = samples(out / "ExGRPO" / "seed0")
    assert results(out / "ExGRPO" / "seed0")["record"]["model"]["step"] == 1
    monkeypatch.setattr(script, "_engine", lambda _, model, __: (pytest.fail, model))  # called where one is missing
    bench(*words)
    assert samples(out / "ExGRPO" / "seed0") == evaluated
    assert "leave out --model" in bench(*words, "--model", warm_model, status=2)


# -- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_random_kills_change_nothing(warm_model, tmp_path, bench):
    words = ["--model", warm_model, "--definitions", definition(tmp_path, samples="3", verifier='"math"')]
    words += ["--benchmarks", "chains,mine", "--limit", 60, "--samples", 4, "--max-tokens", 48, "--rows", 3]
    words += [*HERE, "--template", "plain"]
    bench(*words, "--out", tmp_path / "whole")
    killer = (BUILDERS / "bench_killer.py", 8, tmp_path / "killed", "--")
    done = python(*killer, *words, "--out", tmp_path / "killed", env={"OMP_NUM_THREADS": "1"}, timeout=600)
    assert done.stdout.strip().endswith("8 killed, then exit status 0"), done.stdout[-500:] + done.stderr[-3000:]
    assert timeless_results(tmp_path / "killed") == timeless_results(tmp_path / "whole")
    for benchmark in ("chains", "mine"):
        a, b = ((tmp_path / name / benchmark / "samples.jsonl").read_bytes() for name in ("killed", "whole"))
        assert a == b


@pytest.mark.slow
def test_ctrl_c_saves_what_is_under_way_and_the_same_command_continues(warm_model, tmp_path, bench):
    words = ["--model", warm_model, *CHAINS, "--limit", 100, "--samples", 4, "--rows", 4, "--max-tokens", 48]
    command = [sys.executable, RUN_BENCH, *words, "--out", tmp_path / "x"]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    file = tmp_path / "x" / "chains" / "samples.jsonl"
    wait_until(lambda: file.exists() and file.stat().st_size)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGINT, error
    assert re.search(r"stopped at chains \d+/400 responses; the same command continues", error)
    assert 0 < len(samples(tmp_path / "x")) < 400
    assert not (tmp_path / "x" / "results.json").exists()
    bench(*words, "--out", tmp_path / "x")
    bench(*words, "--out", tmp_path / "whole")
    assert timeless_results(tmp_path / "x") == timeless_results(tmp_path / "whole")


def test_a_torn_last_line_is_generated_again_and_a_bad_line_is_named(tmp_path, chains):
    chains("--limit", 6)
    file = tmp_path / "chains" / "samples.jsonl"
    content = file.read_bytes()
    file.write_bytes(content[:-40])
    chains("--limit", 6)
    assert file.read_bytes() == content
    lines = content.split(b"\n")
    file.write_bytes(b"\n".join([lines[0], b'{"row": 1}', *lines[2:]]))
    assert f"{file}, line 2: not a sample" in chains("--limit", 6, status=2)
    file.write_bytes(b"\n".join([lines[0], *lines]))
    assert "line 2: row" in chains("--limit", 6, status=2)


def test_the_folder_of_a_run_is_no_place_for_results(raw_model, tmp_path, bench):
    (tmp_path / "metrics.jsonl").touch()
    error = bench("--model", raw_model, *CHAINS, "--limit", 4, "--out", tmp_path, status=2)
    assert f"--out {tmp_path} is the folder of a training run" in error
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_folder_of_another_configuration_is_refused_with_the_differences(raw_model, tmp_path, bench, chains):
    chains("--limit", 4)
    before = (tmp_path / "chains" / "samples.jsonl").read_bytes()
    words = ("--model", raw_model, *CHAINS, "--limit", 4, "--seed", 3, "--temperature", 1, "--out", tmp_path)
    error = bench(*words, status=2)
    assert "model.hash: " in error
    assert re.search(rf"the model: /\S+ there, {raw_model} now", error)
    assert "seed: 0 there, 3 now" in error
    assert "chains.temperature: 0.6 there, 1.0 now" in error
    assert (tmp_path / "chains" / "samples.jsonl").read_bytes() == before


def test_the_limit_of_a_verdict_is_one_for_all_of_a_benchmark_and_regrading_changes_it(byte_model, tmp_path, bench):
    out = tmp_path / "x"
    block = ("--definitions", definition(tmp_path), "--benchmarks", "mine", *HERE, "--max-tokens", 2, "--out", out)
    words = ("--model", byte_model, *block, "--limit")
    bench(*words, 1)
    assert "mine.timeout: 5.0 there, 9.0 now" in bench(*words, 2, "--timeout", 9, status=2)
    bench("regrade", out, "--timeout", 9)
    bench(*words, 2, "--timeout", 9)
    assert "mine.timeout: 9.0 there, 5.0 now" in bench(*words, 3, status=2)


def test_the_folder_of_an_earlier_version_is_continued(byte_model, tmp_path, bench):
    """It had no limit of verdicts, and of a server's model the name alone."""
    block = ("--definitions", definition(tmp_path), "--benchmarks", "mine", *HERE, "--max-tokens", 2)
    words, path = ("--model", byte_model, *block, "--out", tmp_path / "x", "--limit"), tmp_path / "x" / "config.json"
    bench(*words, 1)
    config = json.loads(path.read_text())
    config["common"]["model"] = {"path": str(byte_model)}
    del config["benchmarks"]["mine"]["timeout"]
    path.write_text(json.dumps(config))
    bench(*words, 2)
    config["common"]["model"] = {"path": "another"}
    path.write_text(json.dumps(config))
    assert f"the model: {byte_model} there" in bench(*words, 3, status=2)


@pytest.fixture
def served(bench, tmp_path):
    """An evaluation of a server's model on a benchmark of sums, of whose responses all are the same."""

    def run(*words: object, root: str | None = None, text: str = "3", status: int = 0, **block: str) -> str:
        def reply(method, path, headers, body):
            if method == "GET":
                return 200, {}, json.dumps({"data": [{"id": "policy", "root": root}]})
            usage = {"prompt_tokens": len(json.loads(body).get("prompt", "")) or 9, "completion_tokens": 2}
            choice = {"finish_reason": "stop", "text": text, "message": {"content": text}}
            return 200, {}, json.dumps({"choices": [choice], "usage": usage})

        with http_server(reply) as url:
            block = ("--definitions", definition(tmp_path, **block), "--benchmarks", "mine", "--no-mlflow")
            server = ("--model", "policy", "--engine", "openai", "--base-url", f"{url}/v1")
            few = ("--limit", 3, "--max-tokens", 8)
            return bench(*server, *block, *few, *words, "--out", tmp_path / "x", status=status)

    return run


def test_another_checkpoint_under_the_name_of_a_servers_model_does_not_go_on_from_its_responses(
    byte_model, tmp_path, served
):
    state = {"step": 7, "identity": {"Prompts.template": "'plain'"}}
    for name in "ab":
        write_json(shutil.copytree(byte_model, tmp_path / name / "checkpoint-7") / "trainer" / "state.json", state)
    weights = tmp_path / "b" / "checkpoint-7" / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    served("--tokenizer", tmp_path / "a" / "checkpoint-7")
    served("--tokenizer", tmp_path / "a" / "checkpoint-7")
    error = served("--tokenizer", tmp_path / "b" / "checkpoint-7", status=2)
    assert "model.tokenizer_of.run: 'a' there, 'b' now" in error
    assert "model.tokenizer_of.hash: " in error
    assert results(tmp_path / "x")["record"]["model"]["tokenizer_of"]["step"] == 7


def test_what_a_server_says_that_it_has_loaded_tells_its_model_and_a_name_alone_is_doubted(tmp_path, served, caplog):
    served("--api", "chat", root="runs/a/checkpoint-7")
    assert "model.root: 'runs/a/checkpoint-7' there, 'runs/b' now" in served("--api", "chat", root="runs/b", status=2)
    served("--api", "chat", root="runs/a/checkpoint-7")
    assert "the model's name" not in caplog.text
    shutil.rmtree(tmp_path / "x")
    served("--api", "chat")
    assert "the model's name" not in caplog.text
    served("--api", "chat")
    assert "the model's name, policy, is all that is known of the model of its responses" in caplog.text
    served("--api", "chat", root="runs/b")
    assert len(caplog.text.split("the model's name")) == 3


@pytest.mark.parametrize(("api", "note"), [("completions", "end tokens"), ("chat", "its messages' text")])
def test_a_function_gets_the_prompt_that_a_servers_model_read_and_a_note_says_what_it_does_not_get(
    api, note, byte_model, tmp_path, served
):
    function = tmp_path / "f.py"
    function.write_text(
        "def reward_func(queries, prompts, labels):\n"
        f"    with open({str(tmp_path / 'seen')!r}, 'a') as file:\n"
        "        print(repr((prompts[0], queries[0])), file=file)\n"
        "    return [float(labels[0] in queries[0][len(prompts[0]):])]\n"
    )
    block = {"verifier": '"function"', "function": f'"{function}"'}
    words = ("--tokenizer", byte_model) if api == "completions" else ("--api", api)
    served(*words, "--system", "Be brief.", text="It is 3.", **block)
    pairs = [ast.literal_eval(line) for line in (tmp_path / "seen").read_text().splitlines()]
    prompts = [line["prompt"] for line in samples(tmp_path / "x", "mine")]
    assert {*pairs} == {(prompt, f"{prompt}It is 3.") for prompt in prompts}
    assert all("Be brief." in prompt for prompt in prompts)
    result = results(tmp_path / "x")["benchmarks"]["mine"]
    assert result["avg"]["value"] == pytest.approx(1 / 3)
    assert note in result["notes"][-1]


def test_an_option_is_right_by_its_text_too_also_when_it_is_graded_again(tmp_path, served, bench):
    row = {"q": "The capital of France?", "o": ["1) Rome", "2) Paris"], "a": 1}
    (tmp_path / "mc.jsonl").write_text(json.dumps(row) + "\n")
    files = '[{ name = "mc.jsonl", question = "q", options = "o", answer = "a" }]'
    served("--api", "chat", text="So it is \\boxed{Paris}.", verifier='"choice"', files=files)
    (sample,) = samples(tmp_path / "x", "mine")
    assert (sample["verdict"], sample["gold"]) == ("correct", "B")
    assert sample["options"] == {"A": "Rome", "B": "Paris"}
    bench("regrade", tmp_path / "x")
    assert samples(tmp_path / "x", "mine") == [sample]


@pytest.mark.slow
def test_regrading_needs_no_model_and_corrects_verdicts(warm_model, tmp_path, bench):
    model, out = tmp_path / "model", tmp_path / "x"
    shutil.copytree(warm_model, model)
    block = definition(tmp_path, verifier='"math"')
    words = ("--definitions", block, "--benchmarks", "chains,mine", "--template", "plain", *HERE)
    bench("--model", model, *words, "--limit", 8, "--max-tokens", 24, "--out", out)
    before, content = (out / "chains" / "samples.jsonl").read_bytes(), timeless_results(out)
    shutil.rmtree(model)
    spoiled = [{**line, "verdict": "timeout", "extracted": "7", "sound": None} for line in samples(out)]
    (out / "chains" / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in spoiled))
    bench("regrade", out)
    assert (out / "chains" / "samples.jsonl").read_bytes() == before
    again = timeless_results(out)
    assert again["record"].pop("graded_with")
    assert again == content


def test_regrading_keeps_verdicts_that_depend_on_more_than_a_sample_has(byte_model, tmp_path, bench, caplog):
    takes_no_empty_response = "queries[0][len(prompts[0]) :][0] != '' and 'Th.' in prompts[0]"
    head = "def reward_func(queries, prompts, labels):\n"
    (tmp_path / "f.py").write_text(f"{head}    return [float({takes_no_empty_response})]\n")
    block = definition(tmp_path, verifier='"function"', function=f'"{tmp_path}/f.py"', ask='"Th."')
    words = ("--definitions", block, "--benchmarks", "mine", *HERE, "--limit", 2, "--max-tokens", 2)
    bench("--model", byte_model, *words, "--out", tmp_path / "x")
    before = samples(tmp_path / "x", "mine")
    assert {line["verdict"] for line in before} == {"correct"}
    bench("regrade", tmp_path / "x")
    assert samples(tmp_path / "x", "mine") == before
    assert "mine: left as it is" in caplog.text


def test_a_report_is_made_of_an_evaluations_folders(tmp_path, bench):
    for name in "ab":
        make_results(tmp_path / name, {"math500": (4, 4, 4, 1)})
    bench("report", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "both.html")
    assert "data:image/svg+xml" in (tmp_path / "both.html").read_text()


def test_a_file_of_the_folder_that_is_damaged_or_gone_is_named(tmp_path, chains):
    """Nothing is generated on what nobody can compare."""
    chains("--limit", 4)
    absent = "does not exist; without it nothing says "
    for name, content, message in (
        *((f"{name}.json", b'{"common": ', "is damaged, it is not JSON") for name in ("results", "sessions", "config")),
        ("config.json", None, absent + "how the responses were made"),
        ("sessions.json", None, absent + "what generated the responses"),
    ):
        path = tmp_path / name
        whole = path.read_bytes()
        path.unlink() if content is None else path.write_bytes(content)
        error = chains("--limit", 4, status=2)
        assert f"{path} {message}" in error
        assert "Traceback" not in error
        assert len(samples(tmp_path)) == 4
        path.write_bytes(whole)
    before = results(tmp_path)["benchmarks"]
    (tmp_path / "results.json").unlink()
    chains("--limit", 4)
    assert results(tmp_path)["benchmarks"] == before


def test_an_evaluation_that_is_not_complete_reports_how_many_of_its_responses_there_are(
    warm_model, tmp_path, chains, bench
):
    chains("--limit", 10, "--samples", 2)
    path = tmp_path / "chains" / "samples.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:6]))
    message = f"{path} holds 6 samples, results.json counts 20 (2 for each of 10 questions): run the evaluation"
    assert message in bench("regrade", tmp_path, status=2)
    other = ("--benchmarks", "chains_beyond", *HERE, "--limit", 2, "--out", tmp_path)
    assert message in bench("--model", warm_model, *other, status=2), "before it generates"
    (tmp_path / "results.json").unlink()
    message = f"{tmp_path}: not complete: chains 6/20 responses; the command that began it continues it"
    for words in (("regrade", tmp_path), ("report", tmp_path, "--html", "x.html")):
        assert message in bench(*words, status=2)
    path.unlink()
    assert "not complete: chains 0/20 responses" in bench("regrade", tmp_path, status=2)


class Failing(Sampler):
    """Two portions, then the engine dies; between the two there is time."""

    def sample(self, requests, done=()):
        for begin in (0, 2):
            yield [(i, [ServedRollout([], "stop", text="1+1=2;#2", tokens=8)]) for i in (begin, begin + 1)]
        raise EngineLost("the engine died")

    def describe(self):
        return {"name": "failing", "dtype": "float32"}


def test_responses_finished_before_an_engine_died_are_kept(tmp_path, chains, script, monkeypatch):
    monkeypatch.setattr(script, "_engine", lambda _, model, __: (Failing, model))
    assert "the engine died; the responses so far are kept" in chains("--limit", 6, status=1)
    assert len(samples(tmp_path)) == 4


@pytest.mark.slow
def test_a_full_disk_leaves_complete_lines_and_nothing_behind_them(tmp_path, chains):
    words = ("--limit", 40, "--rows", 1)
    files = {name: tmp_path / name / "chains" / "samples.jsonl" for name in ("whole", "full")}
    chains(*words, out=tmp_path / "whole")
    whole = files["whole"].read_bytes().splitlines(keepends=True)
    limit = sum(map(len, whole)) * 3 // 4
    with full_disk(limit):
        assert "File too large" in chains(*words, out=tmp_path / "full", status=2)
    written = files["full"].read_bytes().splitlines(keepends=True)
    assert set(written) < set(whole), "half a line is taken back"
    assert limit - max(map(len, whole)) < sum(map(len, written)) < limit
    chains(*words, out=tmp_path / "full")
    assert files["full"].read_bytes() == files["whole"].read_bytes()


def test_an_attempt_without_a_response_does_not_bind_later_ones(tmp_path, chains):
    for device, reason in (("cuda:99", r"torch sees (no|\d+) GPU here"), ("moon", "Expected one of cpu, cuda")):
        error = chains("--limit", 4, "--device", device, "--dtype", "bfloat16", "--samples", 9, status=1)
        assert re.search(rf"--device = '{device}'.*{reason}", error)
    chains("--limit", 4)
    assert results(tmp_path)["benchmarks"]["chains"]["samples"] == 1


CHANGES = {  # what of the block or its files is changed between two calls, and what the second one says
    "the questions": ({}, lambda text: text.replace("What is", "How much is"), "another prompt than would be asked"),
    "the instruction": ({"ask": '"Just guess."'}, None, "answers another prompt than would be asked now"),
    "the grader's file": ({}, lambda text: text.replace("1.0", "0.5"), "mine.function_sha256: "),
    "the groups": ({"by": '"problem"'}, None, "mine.by: None there, 'problem' now"),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_a_block_whose_set_instruction_grader_or_groups_have_changed_is_refused(
    changed, byte_model, tmp_path, bench, monkeypatch
):
    more, rewrite, message = CHANGES[changed]
    monkeypatch.chdir(tmp_path)
    grader = tmp_path / "rewards.py"
    grader.write_text("def reward_func(queries, prompts, labels): return 1.0\n")
    block = {"verifier": '"function"', "function": '"rewards.py"'}
    words = ("--definitions", definition(tmp_path, **block), "--benchmarks", "mine", *HERE, "--max-tokens", 8)
    words = ("--model", byte_model, *words, "--limit", 4, "--out", tmp_path / "x")
    bench(*words)
    definition(tmp_path, **block, **more)
    file = grader if changed == "the grader's file" else tmp_path / "mine.jsonl"
    file.write_text(rewrite(file.read_text()) if rewrite else file.read_text())
    assert message in bench(*words, status=2)


def test_two_processes_do_not_work_in_one_folder(tmp_path, chains):
    with claim(tmp_path, resume=True):
        assert f"another process is at work in {tmp_path}" in chains("--limit", 4, status=2)
    assert not (tmp_path / "chains").exists()


def test_the_record_of_what_generated_an_evaluation_stays_and_its_dtype_binds_later_benchmarks(
    warm_model, tmp_path, bench, monkeypatch
):
    words = ("--model", warm_model, *HERE, "--limit", 3, "--out", tmp_path, "--benchmarks")
    bench(*words, "chains")
    before = timeless_results(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("exgrpo_orlhf.io.provenance.versions", lambda: {"torch": "another"})
        bench(*words, "chains")
    assert timeless_results(tmp_path) == before
    error = bench(*words, "chains_beyond", "--dtype", "bfloat16", status=2)
    assert "computed in float32, now it would be bfloat16; give --dtype float32" in error
    bench(*words, "chains_beyond", "--dtype", "float32", "--rows", 2)
    assert [session["engine"]["rows"] for session in results(tmp_path)["record"]["sessions"]] == [64, 2]


# -- MLflow -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_results_are_on_the_training_run_once_and_without_one_on_a_run_of_their_own(
    warm_model, tmp_path, bench, monkeypatch
):
    """And on the training run only what means there what its name says."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    bindings = [b for b in small_bindings(warm_model, "train.steps = 2") if not b.startswith("Tracking.enabled")]
    run = tmp_path / "run"
    train(config.load(("toy.gin",), bindings), run, resume=False, tracking_uri=uri, tags={})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    client = MlflowClient(uri)
    (trained,) = tracked_runs(uri)
    words = ("--model", run / "checkpoint-2", "--engine", "transformers", "--suite", "chains")
    for _ in range(2):
        bench(*words, "--out", tmp_path / "x")
    (measured,) = client.get_metric_history(trained.info.run_id, "eval/chains/avg_at_1")
    assert measured.step == 2
    assert measured.value == results(tmp_path / "x")["benchmarks"]["chains"]["avg"]["value"]
    there = set(client.get_run(trained.info.run_id).data.metrics)
    assert "eval/avg_chains" in there
    assert "eval/avg" not in there, "that is the paper's suite"
    names = {file.path for file in client.list_artifacts(trained.info.run_id, "evaluation/x")}
    assert names == {"evaluation/x/results.json", "evaluation/x/report.html"}
    others = {
        "part": ("--limit", 8),
        "hot": ("--temperature", 1.5),
        "seed": ("--seed", 1),
        "asked": ("--template", "simplerl", "--max-tokens", 64),
    }
    for name, more in others.items():
        bench(*words, *more, "--out", tmp_path / name)
    bench("--model", warm_model, "--engine", "transformers", "--benchmarks", "chains", "--out", tmp_path / "raw")
    history = client.get_metric_history(trained.info.run_id, "eval/chains/avg_at_1")
    assert [each.value for each in history] == [measured.value], "no other score under that name"
    by_name = {each.info.run_name: each.data for each in tracked_runs(uri, "exgrpo-eval")}
    assert set(by_name) == {*others, "raw"}
    assert by_name["part"].tags["trained_by"] == trained.info.run_id
    assert "eval/avg" not in by_name["part"].metrics, "no mean of parts"
    assert "eval/avg_chains" not in by_name["raw"].metrics, "the group was not run whole"


def test_an_mlflow_that_does_not_answer_loses_nothing(warm_model, tmp_path, bench, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    words = ("--benchmarks", "chains", "--engine", "transformers", "--limit", 2, "--max-tokens", 24)
    bench("--model", warm_model, *words, "--out", tmp_path / "x")
    assert "run the same command again" in caplog.text
    assert results(tmp_path / "x")["benchmarks"]["chains"]["questions"] == 2


@pytest.mark.slow
def test_a_task_of_reasoning_gym_is_a_benchmark_with_its_own_checker(byte_model, tmp_path, bench):
    pytest.importorskip("reasoning_gym", reason="make reasoning-gym")
    block = tmp_path / "mine.toml"
    settings = "settings = { min_word_len = 3, max_word_len = 4 }, count = 6, split = 'validation'"
    table = f"{{ tasks = 'spell_backward', {settings} }}"
    lines = ["[backward]", 'title = "Words backward"', 'verifier = "reasoning_gym"', f"reasoning_gym = {table}"]
    block.write_text("\n".join([*lines, *("samples = 1", "temperature = 0.0", "max_tokens = 8", "top_p = 1.0")]))
    bench("--model", byte_model, "--definitions", block, "--benchmarks", "backward", *HERE, "--out", tmp_path / "x")
    result = results(tmp_path / "x")["benchmarks"]["backward"]
    assert (result["questions"], result["avg"]["value"]) == (6, 0)
    lines = samples(tmp_path / "x", "backward")
    assert all("<answer> and </answer>" in line["prompt"] for line in lines)
    assert {line["verdict"] for line in lines} == {"no_answer"}, "the model writes nonsense"
