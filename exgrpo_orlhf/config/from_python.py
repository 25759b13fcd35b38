"""A run from a script or a notebook: its questions and its reward are Python objects.

They are written into the run's folder, and the run is that of gin files and bindings which name those files: its
config.gin repeats it, a grading process loads the reward from there, and a resumed run compares.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoints import RunFolderError, find, refuse_earlier, refuse_other
from ..checks import require
from ..experiment import Experiment, Outcome
from ..io import terminal
from ..io.files import write
from ..io.paths import WORKPLACE
from ..io.provenance import git_commit
from ..questions.reading import _COMMON
from ..records import EXTRA_INFO, Question
from ..tracking.client import own_tags
from .build import load, overrides_as_bound
from .function_source import source_of
from .gin_files import find as find_gin
from .gin_files import hypothesis


def train(
    questions: Any = None,
    reward: Callable[..., Any] | None = None,
    *,
    out: str | Path,
    validation: Any = None,
    gin: Sequence[str | Path] | str | Path = "base.gin",
    bindings: Sequence[str] = (),
    resume: bool = False,
) -> Outcome:
    """Train on the local engine, in this process.

    questions, validation: each a list of questions, or an object whose `load()` returns one, or a file's path. A
        question is a dict of columns as a file has them, a pair of prompt and answer, or a `Question`. None: what the
        gin files bind
    reward: a function made with def, for OpenRLHF, TRL or verl (docs/reward_functions.md). Its source is what another
        process loads, so it keeps nothing of this one but functions, constants and imports. None: as bound
    out: the run's folder
    gin, bindings: as --gin and --set of scripts/train.py; a binding wins over what the arguments above bind
    resume: whether a run in `out` is continued

    Returns the steps that are done; Ctrl-C ends the run after a step, with a checkpoint. Raises ConfigError, ValueError
    for a reward or a question that cannot be written, RunFolderError for other ones than those that a resumed run began
    with, and as `training.run.train`.
    """
    from ..training.run import train as train_experiment

    terminal.messages()
    run, files, bound = Path(out).absolute(), dict[str, str](), list[str]()
    refuse_earlier(run, resume)
    refuse_other(run)
    for name, source, scope in (("questions", questions, ""), ("validation", validation, "validation/")):
        if source is None:
            continue
        path = Path(source) if isinstance(source, str | Path) else run / f"{name}.jsonl"
        bound += [f"Work.{name} = @{scope}QuestionFile()", f"{scope}QuestionFile.path = {str(path)!r}"]
        if not isinstance(source, str | Path):
            rows = _rows(source, name)
            files[path.name] = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
            bound += [f"{scope}QuestionFile.meta = {_columns(rows, reward)!r}"]
    if reward is not None:
        files["reward.py"] = source_of(reward)
        function = f"{run / 'reward.py'}:{reward.__name__}"
        bound += ["Verifier.kind = 'function'", f"Verifier.function = {function!r}"]
    bound += [bindings] if isinstance(bindings, str) else bindings
    gin_files = [gin] if isinstance(gin, str | Path) else gin
    experiment = load(gin_files, bound)
    require(
        experiment.openrlhf is None,
        "train.engine = 'openrlhf': a run from Python takes the local engine; put questions and reward into files, and "
        "start scripts/train.py",
    )
    _write(run, files, resume)
    tags = tags_of(experiment, gin_files, overrides_as_bound(bound), sys.argv[0])
    uri = f"sqlite:///{WORKPLACE / 'mlflow.db'}"
    return train_experiment(experiment, run, resume=resume, tracking_uri=uri, tags=tags)


def tags_of(
    experiment: Experiment, files: Sequence[str | Path], overrides: Sequence[str], program: str
) -> dict[str, str]:
    """Of a run in MLflow. overrides: its bindings as they may be written; program: the file that trains"""
    tags = {
        "gin": " ".join(Path(file).name for file in files),
        "engine": experiment.settings.engine,
        "seed": str(experiment.settings.seed),
        "git_commit": (commit := git_commit()),
        "mlflow.source.git.commit": commit.removesuffix("-dirty"),
        **own_tags(program),
        **({"set": "\n".join(overrides)} if overrides else {}),
    }
    if hypotheses := [text for file in files if (text := hypothesis(find_gin(file, None)))]:
        tags["mlflow.note.content"] = "\n\n".join(hypotheses)  # the description at the top of the run's page
    return tags


def _rows(source: Any, name: str) -> list[dict[str, Any]]:
    """Questions as the lines of a file. Raises ValueError for one that is none, or that JSON cannot hold."""
    rows = []
    items: Iterable[Any] = source.load() if hasattr(source, "load") else source
    for i, item in enumerate(items):
        if isinstance(item, Question):
            prompt = [{"role": role, "content": text} for role, text in item.prompt]
            meta = {column: value for column, value in item.meta.items() if column not in ("row", EXTRA_INFO)}
            own = {"data_source": item.source, "prompt": prompt if isinstance(item.prompt, tuple) else item.prompt}
            row = {**meta, **own, "answer": item.answer}
        elif isinstance(item, Mapping):
            row = dict(item)
        elif isinstance(item, tuple | list) and len(item) == 2:
            row = {"prompt": item[0], "answer": item[1]}
        else:
            raise ValueError(
                f"{name}[{i}] is {item!r:.80}; a question is a dict, a pair of prompt and answer, or a Question (of a "
                "data frame: frame.to_dict('records'))"
            )
        try:
            json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}[{i}] cannot be written into the run's folder: {error}") from None
        rows.append(row)
    return rows


def _columns(rows: Sequence[Mapping[str, Any]], reward: Callable[..., Any] | None) -> tuple[str, ...]:
    """Those that are kept for the reward: all but prompt and answer, and these where it takes them by name."""
    known = {name for names in _COMMON.values() for name in names} | {"data_source", "extra_info", "reward_model"}
    taken = inspect.signature(reward).parameters if reward else {}
    return tuple(dict.fromkeys(name for row in rows for name in row if name not in known or name in taken))


def _write(run: Path, files: Mapping[str, str], resume: bool) -> None:
    """Raises RunFolderError where a run that has begun has others."""
    begun = resume and ((run / "metrics.jsonl").exists() or find(run))
    for name, text in files.items():
        path = run / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if begun:
            what = "another reward" if name == "reward.py" else "other questions"
            raise RunFolderError(
                f"{path} is not what is given now: the run began with {what}. Resume it with what it began with, or "
                "begin a run with another out"
            )
        run.mkdir(parents=True, exist_ok=True)
        write(path, text)
