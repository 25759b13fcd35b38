"""The card of a checkpoint on the Hugging Face hub, from its files and those of its run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import __version__
from ..io.paths import run_name
from ..tracking.metrics_log import MetricsLog

_PAPER = "[ExGRPO](https://arxiv.org/abs/2510.02245)"
# Of a quoted absolute path, or of a database's, all but its last part. A text with a space may be a prompt.
_FOLDERS = re.compile(r"(?:(?<=['\"])|(?<=:///))[~/][^'\"\s]*/(?=[^/'\"\s])")


def card(checkpoint: Path, license_id: str | None = None) -> tuple[str, list[str]]:
    """README.md of a run's checkpoint with the hub's metadata, and what it cannot say.

    license_id: as the hub names licences, such as 'apache-2.0'
    Raises ValueError for a folder that is no checkpoint of a run.
    """
    from huggingface_hub import ModelCardData

    if not (file := checkpoint / "trainer" / "state.json").is_file():
        raise ValueError(f"{checkpoint} is no checkpoint of a run, as runs/x/checkpoint-120 or runs/x/best is one")
    state = json.loads(file.read_text(encoding="utf-8"))
    run, step, identity = checkpoint.parent, state["step"], state["identity"]
    model, questions, validation = (_reached(identity, f"Work.{name}") for name in ("model", "questions", "validation"))
    supervised = [_reached(identity, name) for name in model if name.endswith("SupervisedModel.examples")]
    by_rl = step > 0 or not supervised
    data_of = {key: value for part in [*supervised, *([questions] * by_rl)] for key, value in part.items()}
    base, datasets = (
        [v[1:-1] for name, v in bindings.items() if name.endswith(field) and is_hub_id(v[1:-1], checkpoint)] or None
        for bindings, field in ((model, "PretrainedModel.path"), (data_of, "QuestionHub.id"))
    )
    log = run / "metrics.jsonl"
    rows = {row["step"]: row for row in MetricsLog(log).rows()} if log.exists() else {}
    replay, metrics, versions = _replay(identity, rows), _metrics(rows, step), _versions(run, step)
    absent = {
        "license: give --license, in agreement with the base model's and the questions'": not license_id,
        "base_model: the model that the run began with has no id of the hub": not base,
        "datasets: the questions have no id of the hub": not datasets,
        f"metrics: {run / 'metrics.jsonl'} has no row of step {step}": not metrics,
        f"versions: {run / 'evaluation'} has no evaluation up to step {step}, which would hold them": not versions,
    }
    tags = ["reinforcement-learning", "rlvr", *(["exgrpo", "experience-replay"] if replay else ["grpo"])] * by_rl
    tags += ["sft"] * bool(supervised)
    data = ModelCardData(license=license_id, library_name="transformers", tags=tags, base_model=base, datasets=datasets)
    buffer = json.loads((checkpoint / "replay" / "manifest.json").read_text(encoding="utf-8"))
    counts = "{trajectories:,} stored trajectories, {questions:,} questions with an accuracy, {retired:,} retired"
    sections = {
        "Method": "Supervised training on given responses (SFT). " * bool(supervised) + _method(state, replay) * by_rl,
        "Recipe": f"`config.gin` is the whole configuration: `exgrpo-train --gin config.gin`.{_code(model)}",
        "Data": _code(data_of | validation | _settings(identity, "Verifier")).strip(),
        "Replay buffer": f"{counts.format(**buffer)}; not published." if replay else "None.",
        "Metrics": metrics or "None are known.",
        "Versions": versions or f"torch {state['torch']}; no others are known.",
        "Licence": license_id or "Not stated. Those of the base model and of the questions apply.",
    }
    body = "".join(f"\n## {title}\n\n{text}\n" for title, text in sections.items())
    head = f"---\n{data.to_yaml()}\n---\n\n# {run_name(run).replace('/', '-')}-{step}\n"
    missing = [text for text, is_absent in absent.items() if is_absent]
    return f"{head}{body}\nWritten by exgrpo-orlhf {__version__}.\n", missing


def is_hub_id(name: str, checkpoint: Path) -> bool:
    """Whether a model or a set is named by its id on the hub. A folder may look like one, such as runs/x: it is there,
    seen from here or from a folder above the checkpoint, or was beside the run's own in runs/."""
    above = checkpoint.absolute().parents
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and name.partition("/")[0] not in {folder.name for folder in above}
    return bool(is_id) and not any((folder / name).exists() for folder in (Path(), *above))


def without_folders(text: str) -> str:
    """A text in which quoted absolute paths have their last part alone: they would tell of this machine."""
    return _FOLDERS.sub("", text)


def _replay(identity: Mapping[str, str], rows: Mapping[int, Mapping[str, float]]) -> dict[str, str]:
    """What is bound of replay; {} where nothing is ever replayed: then no row of the run's log is about it."""
    bindings = {**_settings(identity, "ReplayMixer"), **_reached(identity, "ReplayMixer.injection")}
    shares = (float(bindings.get(f"ReplayMixer.{name}", 0)) for name in ("rho", "rho_end"))
    return bindings if any(shares) or any(name.startswith("replay/") for row in rows.values() for name in row) else {}


def _method(state: Mapping[str, Any], replay: Mapping[str, str]) -> str:
    identity, how = state["identity"], f"after {_PAPER}" if replay else "without replay"
    b, k, engine = (identity[f"train.{name}"] for name in ("questions_per_step", "group_size", "engine"))
    done = f"{state['step']} steps of {b} questions in groups of {k}, {state['generated_tokens']:,} generated tokens"
    lora = _settings(identity, "LoRA") if "LoRA.rank" in _settings(identity, "LoRA") else {}
    text = f"Reinforcement learning from verifiable rewards, {how}: {done}, {engine[1:-1]} engine."
    text += " LoRA; the weights at the root are merged." * bool(lora)
    return text + _code({**replay, **lora, **_settings(identity, "Optimizer")})


def _settings(identity: Mapping[str, str], owner: str) -> dict[str, str]:
    """What is bound of a class. owner: its name, with its scope"""
    return {name: value for name, value in identity.items() if name.rpartition(".")[0] == owner and value != "None"}


def _reached(identity: Mapping[str, str], name: str) -> dict[str, str]:
    """A binding, and what is bound of the classes that it refers to."""
    bindings = {name: identity[name]} if identity.get(name, "None") != "None" else {}
    for owner in re.findall(r"@([\w/.]+)", bindings.get(name, "")):
        for inner in _settings(identity, owner):
            bindings |= _reached(identity, inner)
    return bindings


def _code(bindings: Mapping[str, str]) -> str:
    lines = "\n".join(f"{name} = {value}" for name, value in bindings.items())
    return f"\n\n```\n{without_folders(lines)}\n```"


def _metrics(rows: Mapping[int, Mapping[str, float]], step: int) -> str:
    """A table of a step's evaluation and rewards, beside those before training; '' without that row. rows: by step"""
    last, lines = rows.get(step, {}), [f"| metric | step 0 | step {step} | 95 % interval |", "|---|---|---|---|"]
    for name in [name for name in last if name.startswith("eval/") or name in ("reward/mean", "cost/generated_tokens")]:
        ends = (f"interval/{name.removeprefix('eval/')}_{end}" for end in ("low", "high"))
        interval = " to ".join(f"{last[end]:.4g}" for end in ends if end in last)
        before, after = (f"{row[name]:.6g}" if name in row else "" for row in (rows.get(0, {}), last))
        lines.append(f"| `{name}` | {before} | {after} | {interval} |")
    return "\n".join(lines) if last else ""


def _versions(run: Path, step: int) -> str:
    """Those that the newest evaluation up to a step was made with; '' without one."""
    done = {int(path.parent.name): path for path in run.glob("evaluation/*/results.json")}
    if not (steps := [number for number in done if number <= step]):
        return ""
    record = json.loads(done[max(steps)].read_text(encoding="utf-8"))["record"]
    return ", ".join(f"{name} {version}" for name, version in record["versions"].items()) + f"; {record['git_commit']}"
