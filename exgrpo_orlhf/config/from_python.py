"""A run from a script or a notebook: its questions and its reward are Python objects.

They are written into the run's folder, and bindings name these files: config.gin repeats the run, a grading process
loads the reward from there, and a resumed run compares them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoints import RunFolderError, claim, find, refuse_earlier, refuse_other
from ..checks import require
from ..experiment import Outcome
from ..io import terminal
from ..io.files import read_text, write
from ..io.paths import WORKPLACE
from ..io.provenance import git_commit
from ..questions import QuestionFile
from ..questions.reading import _COMMON
from ..records import EXTRA_INFO, Question
from ..tracking.client import own_tags
from .build import load
from .function_source import source_of
from .gin_files import find_all

_WRITTEN = ".written"  # in a run's folder: which of its files are from here


def train(
    questions: Any = None,
    reward: Callable[..., Any] | None = None,
    *,
    out: str | Path,
    validation: Any = None,
    gin: Sequence[str | Path] = ("base.gin",),
    bindings: Sequence[str] = (),
    resume: bool = False,
) -> Outcome:
    """Train on the local engine, in this process.

    questions, validation: a list of dicts (columns, as in a file), of pairs (prompt and answer) or of `Question`s; an
        object whose `load()` returns one; a file's path. None: as bound. The reward gets a tuple in them as a list
    reward: a function made with def, for OpenRLHF, TRL or verl (docs/reward_functions.md). None: as bound
    out: the run's folder
    gin, bindings: as --gin and --set of scripts/train.py; a binding wins over the arguments above
    resume: whether a run in `out` is continued

    Raises ConfigError, ValueError for what cannot be written, RunFolderError also for other questions or another reward
    than a resumed run began with and for files of the user's own in their places, and as `training.run.train`. A folder
    in which a run is under way stays as it is. In another thread than the main one, as in a server, no signal ends it.
    """
    from ..training.run import train as train_experiment

    require(not isinstance(gin, str) and not isinstance(bindings, str), "gin and bindings are lists of texts")
    terminal.messages()
    run, bound = Path(out).absolute(), list[str]()
    files = {} if reward is None else {"reward.py": source_of(reward)}
    refuse_earlier(run, resume)
    refuse_other(run)
    inherited: dict[str, Any] = {}  # the defaults of what is bound for the questions, which validation would inherit
    for name, source, scope in (("questions", questions, ""), ("validation", validation, "validation/")):
        if source is None:
            continue
        path = Path(source) if isinstance(source, str | Path) else run / f"{name}.jsonl"
        bound += [f"Work.{name} = @{scope}QuestionFile()", f"{scope}QuestionFile.path = {str(path)!r}"]
        columns = {**inherited}
        if not isinstance(source, str | Path):
            files[path.name], own = _lines(source, reward, name)
            columns |= own
        bound += [f"{scope}QuestionFile.{column} = {value!r}" for column, value in columns.items()]
        given = _bound_columns(gin, bindings)  # which validation may be meant to have
        inherited = {column: getattr(QuestionFile, column) for column in columns if column not in given}
    if reward is not None:
        function = f"{run / 'reward.py'}:{reward.__name__}"
        bound += ["Verifier.kind = 'function'", f"Verifier.function = {function!r}"]
    experiment = load(gin, [*bound, *bindings])
    require(
        experiment.openrlhf is None,
        "train.engine = 'openrlhf': from Python the local engine trains; start scripts/train.py with files instead",
    )
    with claim(run, resume):  # the files may be those of a run that is under way
        begun = resume and ((run / "metrics.jsonl").exists() or bool(find(run)))
        _write({run / name: text.encode() for name, text in files.items()}, run / _WRITTEN, begun)
    tags = {"seed": str(experiment.settings.seed), "git_commit": git_commit(), **own_tags(sys.argv[0])}
    uri = f"sqlite:///{WORKPLACE / 'mlflow.db'}"
    return train_experiment(experiment, run, resume=resume, tracking_uri=uri, tags=tags)


def _bound_columns(gin: Sequence[str | Path], bindings: Sequence[str]) -> set[str]:
    """Of `QuestionFile`, what a file that is named, or a binding, has for validation or for both."""
    texts = [*map(read_text, find_all(gin)), *bindings]
    return {name for text in texts for name in re.findall(r"^\s*(?:validation/)?QuestionFile\.(\w+)\s*=", text, re.M)}


def _lines(source: Any, reward: Callable[..., Any] | None, name: str) -> tuple[str, dict[str, Any]]:
    """The lines of a file of questions, and the columns that are bound to read them."""
    items = list(source.load() if hasattr(source, "load") else source)
    rows = [_row(item, f"{name}[{i}]") for i, item in enumerate(items)]
    kept = {*inspect.signature(reward).parameters} if reward else set()
    if "solution_str" in kept and all(isinstance(row.get("extra_info", {}), dict) for row in rows):
        kept -= {"extra_info"}  # a function for verl gets it without a binding, and some rows may lack it
    kept |= {column for item in items if isinstance(item, Question) for column in item.meta}
    columns: dict[str, Any] = {"meta": _columns(rows, kept, name)}
    if not any(isinstance(item, Mapping) for item in items):  # or a column of its meta may pass for the gold
        columns |= {"prompt": "prompt", "answer": "answer"}
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), columns


def _row(item: Any, where: str) -> dict[str, Any]:
    """A question as a line of a file. Raises ValueError for what is none, or what JSON cannot hold."""
    if isinstance(item, Question):
        meta = {column: value for column, value in item.meta.items() if column not in ("row", EXTRA_INFO)}
        turns = item.prompt if isinstance(item.prompt, tuple) else ()
        messages = [{"role": role, "content": content} for role, content in turns]
        row = {"data_source": item.source, "prompt": messages or item.prompt, "answer": item.answer}
        row |= {"extra_info": item.meta[EXTRA_INFO]} if EXTRA_INFO in item.meta else {}
        if taken := [column for column in row if column in meta and meta[column] != row[column]]:
            raise ValueError(
                f"{where} has another {taken[0]!r} in its meta, and a line has one: rename that of the meta"
            )
        row = {**meta, **row}
    elif isinstance(item, Mapping):
        row = dict(item)
    elif isinstance(item, tuple | list) and len(item) == 2:
        row = {"prompt": item[0], "answer": item[1]}
    else:
        raise ValueError(
            f"{where} is {item!r:.80}; a question is a dict, a pair of prompt and answer, or a Question (of a data "
            "frame: frame.to_dict('records'))"
        )
    try:
        _check_keys(row)
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} cannot be written into the run's folder: {error}") from None
    return row


def _check_keys(value: Any) -> None:
    """Raises TypeError for a key, at any depth, that JSON would turn into a text."""
    if isinstance(value, dict):
        if other := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"the key {other[0]!r} is no text, and would come back as one; make it a text")
        value = [*value.values()]
    for inner in value if isinstance(value, list | tuple) else ():
        _check_keys(inner)


def _columns(rows: Sequence[Mapping[str, Any]], kept: Container[str], where: str) -> tuple[str, ...]:
    """Those that are kept for the reward: all but prompt and answer, and these where they are in `kept`, the reward's
    parameters and what a `Question` has in its meta. Raises ValueError for one that some rows lack."""
    known = {name for names in _COMMON.values() for name in names} | {"data_source", "extra_info", "reward_model"}
    columns = tuple(dict.fromkeys(name for row in rows for name in row if name not in known or name in kept))
    for i, row in enumerate(rows):
        lacking = [column for column in columns if column not in row]
        require(not lacking, f"{where}[{i}] lacks {', '.join(lacking)}, which others have: give it to all or to none")
    return columns


def _write(files: Mapping[Path, bytes], record: Path, begun: bool) -> None:
    """record: holds the hashes of what was written here, one a line

    Raises RunFolderError, before anything is written, where a run that has begun has another content in one of these
    files, or where the file is not from here: it may be the user's only copy.
    """
    own = record.read_text(encoding="ascii").split() if record.exists() else []
    new = {path: content for path, content in files.items() if not path.exists() or path.read_bytes() != content}
    for path in filter(Path.exists, new):
        there = path.read_bytes()
        what = "reward" if path.suffix == ".py" else path.stem
        if begun:
            raise RunFolderError(
                f"{path} is not what is given now, and the run began with it: resume with the same {what}, or begin a "
                "run with another out"
            )
        if _hash(there) not in own:
            raise RunFolderError(
                f"{path} is a file of yours, which the run's own copy of its {what} would replace: name another folder "
                "by out, or move the file"
            )
    write(record, "".join(f"{line}\n" for line in sorted({*own, *map(_hash, new.values())})))
    for path, content in new.items():
        write(path, content)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
