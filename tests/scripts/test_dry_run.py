"""--dry-run of train.py: the plan of a run, what is missing or wrong, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from copy import deepcopy
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from layouts import MODELS
from run_builders import byte_tokenizer, set_words, small_bindings, train_small

from exgrpo_orlhf.config import load
from exgrpo_orlhf.preflight.needs import needs
from exgrpo_orlhf.records import Trajectory
from exgrpo_orlhf.replay import ReplayBuffer, RetirementPolicy, snapshot
from exgrpo_orlhf.testbed.tiny_models import ChainModel

ON_8_GPUS = ["recipes/paper.gin", "engines/openrlhf_8gpu.gin"]


@pytest.fixture
def big_model(tmp_path: Path) -> Path:
    """Configuration and tokenizer of a model of Qwen2.5-7B's sizes, without weights."""
    folder = tmp_path / "model"
    config = deepcopy(MODELS["7B"])
    config.update({"max_position_embeddings": 16384, "architectures": ["Qwen2ForCausalLM"]})
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def questions_file(folder: Path) -> Path:
    rows = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i), "data_source": "sums"} for i in range(200)]
    file = folder / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def dry_run(run_script, tmp_path):
    """train.py --dry-run with gin files and bindings → status, its lines by their first word, and the errors."""

    def go(files: list[str], bindings: list[str]):
        words = [word for file in files for word in ("--gin", file)]
        done = run_script("train.py", *words, *set_words(bindings), "--dry-run", "--out", tmp_path / "runs" / "run")
        assert not (tmp_path / "runs").exists()
        lines = {line[:12].strip(): line[12:] for line in done.stdout.splitlines() if line[:12].strip()}
        return done, lines, [line for line in done.stderr.splitlines() if line.startswith("error: ")]

    return go


def own_questions(model: Path, folder: Path, rows: list[dict], kind: str) -> list[str]:
    """Bindings of a small run on these rows."""
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ["Work.questions = @QuestionFile()", f"QuestionFile.path = {str(folder / 'q.jsonl')!r}"]
    more += ["Work.validation = None", "train.eval_every = None", f"Verifier.kind = {kind!r}"]
    return small_bindings(model, *more)


def paper_run(model: Path, questions: Path) -> list[str]:
    return [
        f"PretrainedModel.path = {str(model)!r}",
        f"QuestionFile.path = {str(questions)!r}",
        "QuestionFile.answer = 'answer'",
        "train.steps = 700",
    ]


def test_the_plan_of_a_run_on_openrlhf_has_its_prompt_and_what_it_needs(dry_run, big_model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it would fail
    monkeypatch.setitem(sys.modules, "openrlhf", None)
    bindings = paper_run(big_model, questions_file(tmp_path))
    done, lines, errors = dry_run(ON_8_GPUS, bindings)
    assert done.returncode == 2
    (error,) = errors  # all that is missing: they would be 15 GB
    assert "its weights are not there" in error
    assert lines["questions"] == "200 to train on, 0 for validation"
    assert lines["model"] == f"{big_model}: 7,615.6 million parameters, 16384 positions"
    assert lines["prompt"].startswith(f"{len('<|user|>What is 0 + 0?<|assistant|>')} tokens, with a question of sums")
    assert "\n            <|user|>What is 0 + 0?<|assistant|>\n" in done.stdout
    assert lines["answer"] == "'0' to the first question; graded by 'math'"
    assert lines["device"] == "8 GPUs of this machine"
    assert "NOT THERE: it has 0; OpenRLHF.ray_address names a cluster that has 8" in done.stdout
    assert lines["batch"] == "128 questions × 8 rows of at most 9,216 tokens; 2 optimiser steps"
    assert lines["steps"].startswith("700; no validation; a checkpoint every 20, 2 of them kept")
    assert "ρ = 0.5, 64 questions of a batch, from the step after a batch whose Pass@1 exceeds 0.35" in lines["replay"]
    assert "model 29.6, update 38.8, rollout 63.2 of 80.0 GB (A100); vLLM's cache 484,248 tokens" in lines["GPU memory"]
    assert lines["host memory"].startswith("estimated: 228.5 GB a node")
    assert "6 min a step, 69 h a run, 554 GPU-hours" in lines["time"]
    assert "a checkpoint, at most " in lines["disk"]
    assert all(lines[name].startswith("estimated") for name in ("GPU memory", "host memory", "time", "disk"))
    done, _, _ = dry_run(ON_8_GPUS, [*bindings, "MixedPolicyLoss.kl_coef = 0.1"])
    short = "TOO LITTLE: vllm.gpu_memory_utilization = 0.6 of 80.0 GB, 30.5 GB of the policy, the reference"
    assert short in done.stdout


def test_the_plan_counts_frozen_copies_and_says_where_they_do_not_fit(dry_run, big_model, tmp_path):
    """7.6 billion parameters: in float32 weights, gradient, Adam and two copies, 6 · 30.5 GB; in bf16 15.2 each."""
    bindings = paper_run(big_model, questions_file(tmp_path))
    done, lines, _ = dry_run(["baselines/remix.gin"], bindings)
    assert lines["anew"] == "after step 50, on-policy"
    assert "182.8 GB, 60.9 GB of it copies of the base and the preceding policy, activations and" in lines["memory"]
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert (f"TOO LITTLE: there are {there / 1e9:.1f} GB" in done.stdout) == (there < 182.8e9)
    elsewhere, _, _ = dry_run(["baselines/remix.gin"], [*bindings, "LocalEngine.device = 'cuda:7'"])
    assert "TOO LITTLE" not in elsewhere.stdout, "this machine's memory says nothing about a GPU that it lacks"
    assert "a checkpoint, at most " in lines["disk"]
    convex = ["MixedPolicyLoss.kl_coef = 0.1", "MixedPolicyLoss.kl_convex = @ConvexKL()"]
    done, _, _ = dry_run(ON_8_GPUS, [*bindings, *convex])
    short = "45.7 GB of the policy, the reference model, the copy of the preceding policy and about 5 GB"
    assert f"TOO LITTLE: vllm.gpu_memory_utilization = 0.6 of 80.0 GB, {short}" in done.stdout


QWEN_3B = 3_085_938_688  # parameters of Qwen2.5-3B
A_THIRD = ["LocalEngine.sampler_memory = 0.3"]  # vLLM stays awake
KL = ["MixedPolicyLoss.kl_coef = 0.001"]


@pytest.mark.parametrize(
    ("parameters", "bindings", "short"),
    [
        (QWEN_3B, [], None),
        (QWEN_3B, ["LocalEngine.sampler_memory = 0.6"], "37.0 GB of weights and Adam .*: at most 0.53 fits$"),
        (QWEN_3B, A_THIRD, None),
        (
            QWEN_3B,
            ["LocalEngine.sampler_memory = 0.4"],
            "49.4 GB of weights, gradients and Adam .*: at most 0.53 fits$",
        ),
        (QWEN_3B, KL, "49.4 GB of weights and Adam .*: at most 0.24 fits, less what activations take$"),
        (QWEN_3B, [*KL, *A_THIRD], "61.7 GB of weights, gradients and Adam .*: at most 0.24 fits, less"),
        (4_000_000_000, KL, "no share fits; bind LocalEngine.sampler = 'loop' or train an adapter"),
        (6_000_000_000, [], "there are 85.5 GB; train an adapter"),
        (6_000_000_000, ["LoRA.rank = 16"], None),
        (QWEN_3B, [*KL, "LocalEngine.sampler = 'loop'"], None),
    ],
)
def test_vllm_beside_the_local_engine_is_in_its_sum(parameters, bindings, short, monkeypatch, tmp_path):
    """On an H100 of 80 GB: while vLLM samples there are weights and Adam, 12 bytes a parameter, and in an update 16,
    beside which vLLM is awake where its share is half of the GPU or less."""
    monkeypatch.setattr("exgrpo_orlhf.preflight.needs._local_memory", lambda experiment: 85.5e9)
    bound = ["PretrainedModel.path = 'model'", "QuestionFile.path = 'questions'", "LocalEngine.sampler = 'vllm'"]
    experiment = load(["one_gpu.gin"], [*bound, *bindings])
    trained = parameters if experiment.lora.rank is None else 30_000_000
    lines = [*needs(experiment, MODELS["1.5B"], (parameters, trained), tmp_path / "run")]
    said = [line.partition("TOO LITTLE: ")[2] for line in lines if "TOO LITTLE" in line]
    assert len(said) == (short is not None), lines
    assert short is None or re.search(short, said[0]), said
    by_vllm = experiment.local.sampler == "vllm"
    assert any("of it vLLM takes" in line for line in lines) == by_vllm


def planned_of(files: list[str], bindings: list[str], folder: Path) -> dict[str, str]:
    """The lines of `needs`, by their first word."""
    named = ["PretrainedModel.path = 'model'", "QuestionFile.path = 'questions.parquet'", "train.steps = 700"]
    lines = [*needs(load(files, [*named, *bindings]), MODELS["7B"], (7_615_616_512,) * 2, folder / "run")]
    return {line[:12].strip() or "below": line[12:] for line in lines}


@pytest.mark.parametrize("layout", ["openrlhf_8gpu", "local_gpu"])
def test_further_rounds_are_said_to_be_in_no_time(layout, tmp_path):
    files = ["recipes/paper.gin", f"engines/{layout}.gin"]
    without, rounds = (planned_of([*files, *more], [], tmp_path) for more in ([], ["baselines/dapo.gin"]))
    assert "NOT COUNTED" not in without.get("below", "")
    assert (
        rounds["below"]
        == "NOT COUNTED: DynamicSampling.max_rounds = 8 further rounds, each at most a batch's generation"
    )
    assert "NOT COUNTED" not in planned_of(["toy.gin", "baselines/dapo.gin"], [], tmp_path).get("below", ""), "no time"


def test_what_a_run_begins_with_is_in_its_buffer(tmp_path):
    """A buffer by its own bytes, 8 for a token and 64 for a trajectory; a file of experts by three bytes a token."""
    ids, logprobs = np.arange(1000, dtype=np.int32), np.zeros(1000, np.float32)
    buffer = ReplayBuffer(RetirementPolicy())
    buffer.record("q", Fraction(1, 2), 0)
    buffer.store([("q", Trajectory(np.roll(ids, i), logprobs, 1.0, 0)) for i in range(300)])
    snapshot.save(buffer, tmp_path / "replay", "f")
    (tmp_path / "experts.jsonl").write_text("x" * 3_000_000)
    layout = ["recipes/paper.gin", "engines/openrlhf_8gpu.gin"]

    def said(path: str, *files: str) -> str:
        planned = planned_of([*layout, *files], [f"Work.experience = {path!r}"], tmp_path)
        return planned["host memory"].partition("and ")[2]

    pool = f"a replay buffer of {300 * 8064 / 1e6:.1f} MB, {300 * 8064 / 1e6:.1f} MB of it from Work.experience"
    assert said(str(tmp_path / "replay"), "baselines/rlep.gin") == pool
    own = 700 * 1024 * 0.5 * 16064 / 1e9
    both = (
        f"a replay buffer of {own + 0.0024:.1f} GB, 2.4 MB of it from Work.experience if half of the rollouts are right"
    )
    assert said(str(tmp_path / "replay")) == both
    experts = "a replay buffer of 8.0 MB, 8.0 MB of it from Work.experience"
    assert said(str(tmp_path / "experts.jsonl"), "baselines/luffy.gin") == experts
    assert said("nowhere") == f"a replay buffer of {own:.1f} GB if half of the rollouts are right", (
        "as another line says"
    )


@pytest.mark.slow
def test_the_merged_copy_with_which_the_loop_samples_is_in_the_sum(monkeypatch, tmp_path):
    """Of the adapted layers, float32: 1,543.7 million parameters less the embedding of 151,936 × 1,536 and what is no
    matrix, 1,310.1 million; vLLM takes them one after another."""
    bound = ["PretrainedModel.path = 'model'", "QuestionFile.path = 'questions'", "LoRA.rank = 16"]
    sums = {}
    for sampler in ("loop", "vllm"):
        experiment = load(["one_gpu.gin"], [*bound, f"LocalEngine.sampler = {sampler!r}"])
        (line,) = (each for each in needs(experiment, MODELS["1.5B"], (1_543_714_304, 18_464_768), tmp_path / "run")
                   if each.startswith("memory"))  # fmt: skip
        sums[sampler] = float(re.search(r"estimated: ([\d.]+) GB", line)[1])
    assert sums == {"vllm": 6.5, "loop": 11.6}


def test_the_llama_base_models_file_begins_on_the_official_rows(dry_run, big_model, tmp_path):
    """Each has a system message of its own, which the prompt of this model leaves out."""
    rows = [
        {
            "data_source": "openr1",
            "prompt": [{"role": "system", "content": "Be thorough."}, {"role": "user", "content": f"What is {i}?"}],
            "reward_model": {"ground_truth": str(i), "style": "rule"},
            "extra_info": {"index": i, "split": "default"},
        }
        for i in range(600)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "openr1.parquet")
    bindings = [
        f"PretrainedModel.path = {str(big_model)!r}",
        f"QuestionFile.path = {str(tmp_path / 'openr1.parquet')!r}",
    ]
    done, lines, errors = dry_run(["paper/llama3_1_8b.gin"], bindings)
    fewer, weights = errors
    assert "its weights are not there" in weights
    assert "FEWER than train.questions_per_step = 128: no batch is whole; OpenRLHF needs whole ones" in fewer
    assert lines["questions"] == "100 to train on, 500 for validation"
    (number,) = re.findall(r"\n {12}User: What is (\d+)\? Answer: Let's think step by step\.\n", done.stdout)
    text = f"User: What is {number}? Answer: Let's think step by step.\n"
    assert lines["prompt"] == f"{len(text)} tokens, with a question of openr1:", "a byte each, the line break too"
    assert "from the first step" in lines["replay"]


@pytest.mark.parametrize(
    ("file", "model", "remedy"),
    [
        ("qwen2_5_math_7b", "7,615.6 million parameters, 16384 ", "hf download Elliott/Qwen2.5-Math-7B-16k-think"),
        ("qwen2_5_math_1_5b", "1,543.7 million parameters, 16384 ", "there is no such folder"),
        ("qwen2_5_7b_instruct", "7,615.6 million parameters, 32768 ", "hf download Qwen/Qwen2.5-7B-Instruct"),
        ("llama3_1_8b", "8,030.3 million parameters, 131072 ", "hf download meta-llama/Llama-3.1-8B"),
        ("llama3_1_8b_instruct", "8,030.3 million parameters, 131072 ", "meta-llama/Llama-3.1-8B-Instruct"),
        ("continual", "7,615.6 million parameters, 16384 ", "hf download Elliott/LUFFY-Qwen-Math-7B-Zero"),
    ],
)
def test_without_the_hub_a_paper_file_is_planned_by_its_models_published_sizes(
    file, model, remedy, dry_run, tmp_path, monkeypatch
):
    """And what is missing is a line each, with the command that gets it."""
    monkeypatch.setattr(
        "huggingface_hub.HfApi.model_info", lambda *_, **__: (_ for _ in ()).throw(OSError("no network"))
    )
    done, lines, errors = dry_run([f"paper/{file}.gin"], [f"QuestionFile.path = {str(tmp_path / 'openr1.parquet')!r}"])
    assert done.returncode == 2
    assert len(errors) == 2
    assert "openr1.parquet: no such file" in errors[0]
    assert "python scripts/prepare_data.py --only openr1 " in errors[0]
    assert remedy in errors[1]
    needs = {"GPU memory", "host memory", "time", "disk"}
    assert lines.keys() == {"model", "batch", "steps", "replay", "device"} | needs  # what needs no file
    assert f": {model}positions, as published" in lines["model"]
    assert all(lines[name].startswith("estimated") for name in needs)


def test_weights_that_are_not_in_the_hubs_cache_are_missing(dry_run, big_model, tmp_path, monkeypatch):
    """As after a run of the tokenizer alone, or of another dry run where the hub answers."""
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "1"
    shutil.copytree(big_model, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    bindings = [*paper_run(big_model, questions_file(tmp_path)), "PretrainedModel.path = 'some/model'"]
    _, lines, errors = dry_run(ON_8_GPUS, bindings)
    assert errors == ["error: the weights of some/model are not in the hub's cache here: hf download some/model"]
    assert lines["model"].startswith("some/model: 7,615.6 million")


WRONG_FLAGS = [  # where OpenRLHF is not installed: the others are in test_openrlhf_flags.py, which is skipped there
    ({"train.seed": 1}, "train.seed is decided by"),
    ({"vllm.gpu_memory_utilisation": 0.5}, "no flag 'vllm.gpu_memory_utilisation'; nearest: vllm.gpu_memory_ut"),
    ({"train.max_tokens_per_gpu": "12288"}, "train.max_tokens_per_gpu takes int, got '12288'"),
    *(({"vllm.num_engines": n}, f"vllm.num_engines must be at least 1, got {n}") for n in (None, 0)),
    ({"ds.zero_stage": 4}, "ds.zero_stage must be 1, 2 or 3, got 4"),
    ({"train.colocate_all": False}, "vllm.enable_sleep needs train.colocate_all"),
    ({"actor.num_gpus_per_node": 6}, "train.questions_per_step = 128 must be a multiple of 6, .* 6 ranks"),
    ({"vllm.num_engines": 4}, r"train\.colocate_all puts actors and engines on the same GPUs, .* = 8 and .* = 4"),
]


@pytest.mark.parametrize(("flags", "wrong"), WRONG_FLAGS)
def test_what_is_wrong_is_a_line_each(dry_run, big_model, tmp_path, flags, wrong):
    bindings = [*paper_run(big_model, questions_file(tmp_path)), "MAX_RESPONSE_TOKENS = 20000"]
    bindings += ["Prompts.max_tokens = 30", f"OpenRLHF.more_flags = {flags!r}"]
    done, _, errors = dry_run(ON_8_GPUS, bindings)
    assert done.returncode == 2
    said = ("16384 positions", "its weights are not there", r"Prompts\.max_tokens = 30", wrong)
    assert all(re.search(part, error) for error, part in zip(errors, said, strict=True)), errors


def test_the_local_engine_plans_too_and_a_model_that_is_not_there_yet_is_not_trained(
    dry_run, raw_model, tmp_path, monkeypatch
):
    done, lines, errors = dry_run(["toy.gin"], small_bindings(raw_model))
    assert (done.returncode, errors) == (0, [])
    assert lines["questions"] == "24 to train on, 10 for validation"
    assert lines["memory"].startswith("estimated: ")
    assert lines["device"] == "cpu, float32, 1 CPU threads; sampled by a loop in torch"
    assert lines["replay"] == "ρ = 0.5, 4 questions of a batch, from the first step"
    rising = ("ReplayMixer.rho = 0.0", "ReplayMixer.rho_end = 0.5", "ReplayMixer.rho_steps = 9")
    revisits = ("ReplayMixer.injection = @UnlessSolved()", "UnlessSolved.late = @LateInjection()")
    _, lines, _ = dry_run(["toy.gin"], small_bindings(raw_model, *rising, *revisits))
    planned = "ρ = 0, 0 questions of a batch, to ρ = 0.5 in 9 steps and late injection, from the first step"
    assert lines["replay"] == planned
    _, lines, errors = dry_run(["toy.gin", "baselines/repo_all.gin"], small_bindings(raw_model))
    assert (lines["replay"], errors) == ("added rows, from the first step", [])
    assert "; up to 16 stored rows are added to each: @StoredGroup(); " in lines["batch"]
    _, lines, errors = dry_run(["toy.gin", "ablations/prefix_both.gin"], small_bindings(raw_model))
    of_both = "the beginning of stored successes and failures, at most 88% of one: @AdaptiveShare()"
    assert (lines["given"], errors) == (of_both, [])
    monkeypatch.setattr(ChainModel, "prepare", lambda self: pytest.fail("it was trained"))
    done, lines, errors = dry_run(["toy.gin"], [f"ChainModel.cache = {str(tmp_path / 'cache')!r}"])
    assert (done.returncode, errors) == (0, [])
    assert "trained when the run begins" in lines["model"]


def test_what_would_go_wrong_later_is_named(dry_run, raw_model, tmp_path, monkeypatch):
    (tmp_path / "reward.py").write_text("def right(completions, solution, **kwargs): return [1.0]")
    bindings = own_questions(
        raw_model, tmp_path, [{"prompt": f"1+{i}=", "answer": i + 1} for i in range(3)], "function"
    )
    bindings += [f"Verifier.function = {f'{tmp_path}/reward.py:right'!r}", "Optimizer.learning_rate = 1.0"]
    bindings += ["LocalEngine.threads = 4096"]
    done, _, (error,) = dry_run(["toy.gin"], bindings)
    assert done.returncode == 2
    assert "reward.py takes solution, which is no column of the questions: add it to QuestionFile.meta" in error
    assert "LocalEngine.threads = 4096, but this process has" in done.stderr
    assert "Optimizer.learning_rate = 1: AdamW moves each weight by up to that an update" in done.stderr
    (tmp_path / "reward.py").write_text("def right(completions, **kwargs): return [1.0]")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    done, _, (error,) = dry_run(["toy.gin"], bindings)
    assert (done.returncode, f"no permission to write in {tmp_path}" in error) == (2, True)
    monkeypatch.undo()
    done, lines, errors = dry_run(["toy.gin"], bindings)
    assert (done.returncode, errors) == (0, [])
    assert lines["answer"] == f"1 to the first question; graded by 'function' ({tmp_path}/reward.py:right)"
    assert "FEWER than train.questions_per_step = " in done.stdout


@pytest.mark.parametrize("meta", [(), ("options",)])
def test_a_column_of_options_that_is_not_bound_is_named(meta, dry_run, raw_model, tmp_path):
    rows = [{"prompt": f"{i}+1=\nA) 4\nB) 5", "answer": "A", "options": ["4", "5"]} for i in range(8)]
    bindings = own_questions(raw_model, tmp_path, rows, "choice")
    _, lines, _ = dry_run(["toy.gin"], [*bindings, f"QuestionFile.meta = {meta!r}", "QuestionFile.held_out = 1"])
    assert ("QuestionFile.meta lacks 'options'" in lines.get("likely wrong", "")) == (not meta)


def test_options_that_the_model_never_sees_are_named_until_they_stand_in_the_prompts(dry_run, raw_model, tmp_path):
    for ending, unseen in (("", 4), ("\nA) 40\nB) 50", 0)):
        rows = [{"prompt": f"1+{i}={ending}", "answer": "A", "options": ["A)40", "B)50"]} for i in range(4)]
        bindings = own_questions(raw_model, tmp_path, rows, "choice")
        done, _, _ = dry_run(["toy.gin"], [*bindings, "QuestionFile.meta = ('options',)"])
        assert (f"NOT IN THE PROMPT: of {unseen} questions no option's text" in done.stdout) == bool(unseen)
        assert ("NOT IN THE PROMPT" in done.stdout) == bool(unseen)


def test_the_local_engine_on_a_gpu_has_hours_that_say_on_which_card_their_figures_were_measured(
    dry_run, big_model, tmp_path
):
    """8 questions × 8 rows of 100 + 100 tokens, without replay."""
    bindings = [*paper_run(big_model, questions_file(tmp_path)), "train.questions_per_step = 8"]
    bindings += ["MAX_RESPONSE_TOKENS = 100", "Prompts.max_tokens = 100", "LocalEngine.generation_rows = 32"]
    update = 64 * 6 * 7.6156e9 * 200 / (0.18 * 989e12)
    vllm = 4000 * 7.62e9 / 7.6156e9  # tokens a second
    for sampler, speed, said in (
        ("loop", 46 * 32, "the loop's tokens measured"),
        ("vllm", vllm, "vLLM's tokens assumed"),
    ):
        more = ["ReplayMixer.rho = 0.0", f"LocalEngine.sampler = {sampler!r}"]
        _, lines, _ = dry_run(["base.gin", "engines/local_gpu.gin"], [*bindings, *more])
        seconds = 1.1 * (64 * 100 / speed + update)
        assert lines["time"] == (
            f"estimated for one H200, from another model's update, {said}: {seconds:.0f} s a step, "
            f"{700 * seconds / 3600:.0f} h a run"
        )
    _, lines, _ = dry_run(["base.gin", "engines/local_cpu.gin"], bindings)
    assert "time" not in lines


def test_an_experience_that_is_not_there_is_named(dry_run, warm_model):
    done, _, errors = dry_run(["toy.gin"], [*small_bindings(warm_model), "Work.experience = '/nowhere/experts.jsonl'"])
    assert (done.returncode, errors) == (2, ["error: /nowhere/experts.jsonl: no such file (Work.experience)"])


def test_a_folder_of_other_things_is_named_and_a_checkpoint_that_is_not_there_begins_no_run(
    run_script, raw_model, tmp_path
):
    (tmp_path / "train.parquet").touch()
    words = ("train.py", "--gin", "toy.gin", *set_words(small_bindings(raw_model)), "--dry-run", "--out")
    done = run_script(*words, tmp_path)
    assert done.returncode == 2
    assert f"error: {tmp_path} is not empty and holds no run (it has train.parquet)" in done.stderr
    for option, begins in ((["--resume"], True), (["--resume-from", "checkpoint-5"], False)):
        done = run_script(*words, tmp_path / "new", *option)
        assert ("nothing to resume, the run begins" in done.stderr) == begins


@pytest.mark.slow
def test_a_folder_that_the_run_would_refuse_is_refused_and_one_to_resume_is_not(run_script, raw_model, tmp_path):
    run = tmp_path / "run"
    train_small(raw_model, run, "train.steps = 2", "train.save_every = 1", "train.eval_every = None")
    before = sorted(run.rglob("*"))
    for words, more, error in (
        ([], [], f"{run} holds a run already: continue it with --resume"),
        (["--resume"], [], None),
        (["--resume-from", "checkpoint-1"], [], None),
        (["--resume-from", "checkpoint-999"], [], f"--resume-from checkpoint-999: {run} has no such checkpoint"),
        (["--resume"], ["ReplayMixer.rho = 0.25"], "checkpoint-2 was made with another configuration"),
        (
            ["--resume-from", "checkpoint-1"],
            ["ReplayMixer.rho = 0.25"],
            "checkpoint-1 was made with another configurat",
        ),
    ):
        bindings = set_words(small_bindings(raw_model, "train.eval_every = None", *more))
        done = run_script("train.py", "--gin", "toy.gin", *bindings, "--out", run, "--dry-run", *words)
        assert done.returncode == (2 if error else 0), (words, done.stderr)
        assert error is None or f"error: {error}" in done.stderr.replace(f"{run}/", ""), done.stderr
    assert sorted(run.rglob("*")) == before


def test_golds_stand_beside_their_questions_and_lengths_and_likely_mistakes_are_said(dry_run, raw_model, tmp_path):
    rows = [{"question": f"{i}+1{'+0' * 20 * (i % 10 == 5)}=", "answer": i + 1} for i in range(20)]
    (tmp_path / "q.json").write_text(json.dumps(rows))
    bindings = [
        *small_bindings(raw_model),
        *("Work.questions = @QuestionFile()", "Work.validation = None", "Verifier.kind = 'math'"),
        *(f"QuestionFile.path = {str(tmp_path / 'q.json')!r}", "train.questions_per_step = 4"),
    ]
    done, lines, errors = dry_run(["toy.gin"], bindings)
    assert (done.returncode, len(errors)) == (2, 1)
    assert "2 of 20 prompts are too long" in errors[0]
    assert "; 2 of 20 (10.0%) exceed Prompts.max_tokens = 32" in lines["lengths"]
    assert [line.split() for line in done.stdout.splitlines() if re.match(r" {12}\d+ +\d+\+1=", line)] == [
        ["1", "0+1="],
        ["11", "10+1="],
        ["20", "19+1="],
    ]
    assert lines["likely wrong"].startswith(" QuestionFile.held_out = 0: without validation")
    (command,) = re.findall(r"left out with (.*)", done.stdout)
    filtered = shlex.split(command)[1::2]  # the advice is followed
    done, lines, errors = dry_run(["toy.gin"], [*bindings, *filtered, "QuestionFile.held_out = 5"])
    assert (done.returncode, errors, "likely wrong" in lines) == (0, [], False)
    assert re.match(r"1[3-5] to train on, [3-5] for validation", lines["questions"])


@pytest.mark.parametrize(
    ("answers", "more", "hint"),
    [
        (["A", "B", "C", "12"], [], "Verifier.kind = 'math': 3 of 4 answers are one capital letter; 'choice'"),
        (["x" * 300] * 4, [], "QuestionFile.answer: 4 of 4 answers have more than 200 characters"),
        (["7"] * 4, ["LoRA.rank = 4", "Optimizer.learning_rate = 1e-6"], "with LoRA.rank: LoRA needs about ten times"),
        (["7", "['7']", "8", "9"], [], "an answer is \"['7']\"; give the answer alone, several as a list of JSON"),
        (["7", "8", "The answer is 4.", "9"], [], "an answer is 'The answer is 4.'; give the answer alone"),
        (["7"] * 4, [], None),
    ],
)
def test_a_setting_that_is_likely_wrong_is_named(answers, more, hint, dry_run, raw_model, tmp_path):
    rows = [{"question": f"{i}+1=", "answer": answer} for i, answer in enumerate(answers)]
    (tmp_path / "q.json").write_text(json.dumps(rows))
    bindings = [
        *small_bindings(raw_model),
        *("Work.questions = @QuestionFile()", "Work.validation = None", "Verifier.kind = 'math'"),
        *(f"QuestionFile.path = {str(tmp_path / 'q.json')!r}", "QuestionFile.held_out = 1", *more),
    ]
    _, lines, _ = dry_run(["toy.gin"], bindings)
    assert (hint or "no hint") in lines.get("likely wrong", "no hint")
