"""Gin files as text: where they are, what they include, their statements."""

from __future__ import annotations

import difflib
import io
import itertools
import logging
import re
import tokenize
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import gin
from gin import config_parser

from ..checks import ConfigError
from ..io.files import read_text
from ..io.paths import PROJECT
from ..io.redaction import REDACTED, redacted

GIN_FOLDER = PROJECT / "gin"
log = logging.getLogger(__name__)
# Classes whose bindings may have no use, or have a line of their own about it.
_OWN_LINES = ("LocalEngine", "OpenRLHF", "LoRA", "Environment", "Suite", "Reincarnation", "ConvexKL")
# What says that a run has a model or questions of its own: where nothing but base.gin does, the toy stands in.
BINDS_A_TASK = re.compile(r"^\s*(Work\.(model|questions)|PretrainedModel\.path|QuestionFile\.path)\s*=", re.M)
# Settings that were bound under other names, and how to bind them now.
RENAMED = {
    "ReplayMixer.fresh_beside": "ReplayMixer.injection: @Beside() with Beside.rollouts for a number, @InPlace() for "
    "'all', @UnlessSolved() for 'unless_solved'",
    "ReplayMixer.late_injection": "ReplayMixer.injection = @LateInjection() with LateInjection.choice = 'newest' or "
    "'selected', @Beside() for None; beside 'unless_solved' UnlessSolved.late = @LateInjection()",
    "ReplayMixer.store_up_to": "ReplayMixer.store_rule: @Successes() with Successes.up_to for an accuracy or None, "
    "@OneSuccess() for 'one_success'",
    "Environment.recheck_every": "done wherever a stored episode is continued (@Prefix()); ReplayBuffer.max_age bounds "
    "the age of those that are replayed as rows",
    "ReplayMixer.stores": "ReplayMixer.store_rule: @Successes(), @AboveMean() for 'above_mean', @AllFinished() for "
    "'all'",
}


def warn_of_unused(params: Mapping[str, str], made_at: Mapping[str, str], variants: Collection[str]) -> None:
    """A line for each class whose bindings, by --set or in a file of the user's own, no reference uses: its data, or
    its model, would be another's in silence.

    params: what is used; made_at: where each binding was made; variants: classes that have a line of their own
    """
    used = {*params, *(name.rpartition("/")[2] for name in params)}
    unused: dict[str, list[str]] = {}
    for binding, where in made_at.items():
        owner = binding.rpartition(".")[0]
        own = (
            owner
            and owner[0] != "%"
            and owner not in (*variants, *_OWN_LINES)
            and not where.startswith(("gin/", "docs/"))
        )
        if own and binding not in used:
            unused.setdefault(owner, []).append(f"{binding} ({where})")
    for owner, bindings in unused.items():
        log.warning("%s: no effect, because nothing that is used refers to @%s()", ", ".join(bindings[:6]), owner)


def find(file: str | Path, included_by: str | None, beside: Path | None = None) -> Path:
    """The file as given (if it is named on the command line), in gin/, from the project's folder, or beside the file
    that includes it."""
    places = [*([] if included_by else [Path.cwd()]), GIN_FOLDER, PROJECT, *([beside] if beside else [])]
    candidates = [place / file for place in places]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    where = f"{included_by}: " if included_by else ""
    if folder := next(filter(Path.is_dir, candidates), None):
        raise ConfigError(f"{where}{folder} is a folder, not a gin file; give one of the files in it")
    shipped = {str(path.relative_to(GIN_FOLDER)): path.stem for path in sorted(GIN_FOLDER.rglob("*.gin"))}
    near = difflib.get_close_matches(str(file).removeprefix("gin/"), shipped, n=3)
    stems = dict.fromkeys(difflib.get_close_matches(Path(file).stem, shipped.values(), n=3))
    near = near or [name for stem in stems for name, file_stem in shipped.items() if file_stem == stem][:3]
    raise ConfigError(
        f"{where}there is no gin file {str(file)!r}; "
        + (f"did you mean {' or '.join(near)}?" if near else f"those of the project are in {GIN_FOLDER}")
        + f" (it is not at {', '.join(dict.fromkeys(map(str, candidates)))})"
    )


def find_all(names: Sequence[str | Path]) -> list[Path]:
    """The files of a command. Raises ConfigError for two layouts of OpenRLHF: what the later one leaves to openrlhf.gin
    would be the other's."""
    files = [find(name, None) for name in names]
    layouts = [file for file in files if file.parent == GIN_FOLDER / "engines" and file.stem.startswith("openrlhf")]
    if len(different := dict.fromkeys(map(name_of, layouts))) > 1:
        raise ConfigError(
            f"{' and '.join(different)} are layouts of OpenRLHF, and a run has one: leave out all but one"
        )
    return files


def includes(path: Path, classes: tuple[str, ...], trail: tuple[Path, ...] = ()) -> list[Path]:
    """All files that a file includes, at any depth, each after the files it includes itself."""
    if path in trail:
        raise ConfigError(f"{name_of(path)} includes itself: {' → '.join(map(name_of, (*trail, path)))}")
    files: list[Path] = []
    has_bindings = False
    for statement in statements(read_text(path), name_of(path), classes):
        if not isinstance(statement, config_parser.IncludeStatement):
            has_bindings = True
            continue
        where = f"{name_of(path)}, line {statement.location.line_num}"
        if has_bindings:
            raise ConfigError(f"{where}: an include must stand before the bindings, which it would undo")
        included = find(statement.filename, where, path.parent)
        files += [*includes(included, classes, (*trail, path)), included]
    return list(dict.fromkeys(files))


def in_order(named: Sequence[Path], classes: tuple[str, ...]) -> list[Path]:
    """The files that the named ones include, then these, also one that a file named before it includes; but base.gin,
    which almost all include, stays before them."""
    inner = [includes(file, classes) for file in named]
    late = {file for i, file in enumerate(named) if any(file in each for each in inner[:i])} - {GIN_FOLDER / "base.gin"}
    return [*(file for each in inner for file in each if file not in late), *named]


def warn_of_order(files: Sequence[Path], tasks: Sequence[Path], classes: tuple[str, ...]) -> None:
    """Log a warning where a file with a model or questions replaces what a file without, named before it, binds: that
    one was likely to change the task. files: those that are named, as they are read; tasks: all that bind one"""
    values: dict[str, tuple[Path, Any]] = {}
    for path in files:
        is_task = any(each in tasks for each in (path, *includes(path, classes)))
        for statement in statements(read_text(path), name_of(path), classes):
            if not isinstance(statement, config_parser.BindingStatement):
                continue
            name = "/".join(filter(None, [statement.scope, statement.selector])) + f".{statement.arg_name or ''}"
            earlier, value = values.get(name, (path, statement.value))
            if is_task and repr(value) != repr(statement.value):
                log.warning(
                    "%s = %r of %s replaces %r of %s; name %s last if that is meant",
                    *(name.rstrip("."), statement.value, name_of(path), value, name_of(earlier), name_of(earlier)),
                )
            if not is_task:
                values[name] = path, statement.value


def taken_back(files: Sequence[Path], message: str, classes: tuple[str, ...]) -> list[str]:
    """Of the settings that must be bound by a message: where a named file leaves to the user (%gin.REQUIRED) what one
    that is named before it binds. files: in that order"""
    missing = message.partition(" must be bound")[0].split(", ")
    places: dict[str, tuple[str, Any]] = {}
    notes: dict[str, str] = {}
    for path in files:
        for statement in statements(read_text(path), name_of(path), classes):
            if isinstance(statement, config_parser.BindingStatement) and statement.arg_name:
                name = "/".join(filter(None, [statement.scope, statement.selector])) + f".{statement.arg_name}"
                here = f"{name_of(path)}, line {statement.location.line_num}"
                if repr(statement.value) != "%gin.REQUIRED":
                    places[name] = here, statement.value
                elif name in places and name in missing:
                    there, value = places[name]
                    notes[name] = f"{here}, takes back {value!r} of {there}: name that file after this one"
    return [*notes.values()]


@lru_cache(maxsize=64)  # each file is read for its includes and again for its bindings
def statements(text: str, name: str, classes: tuple[str, ...]) -> Sequence[Any]:
    """name: of the file, or of the --set; classes: those that a reference can name. Raises ConfigError."""
    parser = None
    try:
        parser = config_parser.ConfigParser(io.StringIO(text), gin.config.ParserDelegate())
        return tuple(parser)
    except SyntaxError as error:
        line_text = error.text or text
        hint = _quoting(line_text, error.msg, name, classes)
        if re.match(r"[\w.]+:(\s|$)", (error.text or "").strip()):
            hint = "this is YAML, not gin: a binding is written as train.steps = 200"
        line, message = error.lineno, f"{hint or error.msg}: {(error.text or text).strip()!r}"
    except tokenize.TokenError as error:  # an open bracket or quote, noticed at the end of the file
        line, message = error.args[1][0] - 1, f"{error.args[0]}: a bracket or quote is not closed"
    except ValueError as error:  # a reference to something that is not there
        line = parser.current_token.start[0] if parser else 0
        message = str(error).split("\n")[0].strip().rstrip(".") + f"; known are {', '.join(f'@{n}' for n in classes)}"
    raise ConfigError(f"{name}: {message}" if name.startswith("--set") else f"{name}, line {line}: {message}")


def _quoting(text: str, message: str, name: str, classes: tuple[str, ...]) -> str:
    """How a value is written that gin cannot read, in a --set the whole of it; '' if it is not a matter of spelling."""
    token = re.search(r"Failed to parse token '(\w+)'", message)
    word = re.search(r"^[^=]*=\s*([^\s'\"([{@%#][^#]*?)\s*(?:#.*)?$", text)  # of a path more than a word
    word = word or (token and re.search(rf"(?<!['\"\w])({token[1]})\b(?=[^=]*$)", text))
    if not word:
        return ""
    constant = {"true": "True", "false": "False", "none": "None"}.get(word[1].lower())
    if constant:
        value, why = constant, f"it is written {constant}"
    elif (bare := word[1].removesuffix("()")) in classes:
        value, why = f"@{bare}()", f"a reference is written @{bare}()"
    elif re.fullmatch(r"\d+(\.\d+)?%", word[1]):
        value = repr(float(word[1][:-1]) / 100)
        why = f"a share is written {value}"
    else:
        value, why = repr(word[1]), f"a text needs quotes ({word[1]!r}), True, False and None a capital"
    if text[: word.start(1)].endswith("(") and text[word.end(1) :].startswith(")"):
        value += ","  # of a tuple of one
    hint = f"{word[1]} is no value; {why}"
    if name.startswith("--set"):  # a shell takes quotes away
        written = (text[: word.start(1)] + value + text[word.end(1) :]).replace('"', '\\"')
        hint += f'; in a shell --set "{written}"'
    return hint


def place_of(name: str, made_at: Mapping[str, str]) -> str:
    """Where a setting is bound, or the macro that it refers to."""
    value = gin.query_parameter(name)
    if isinstance(value, gin.config.ConfigurableReference) and value.selector.endswith("gin.macro"):
        macro = f"%{'/'.join(value.scopes)}"
        return f"{macro}, bound in {made_at[macro]}"
    return f"bound in {made_at[name]}"


def flatten(text: str) -> dict[str, str]:
    """An operative config as {"ReplayMixer.rho": "0.5", …}, with the values of macros."""
    params = {}
    for statement in config_parser.ConfigParser(text, gin.config.ParserDelegate()):
        if isinstance(statement, config_parser.BindingStatement) and statement.arg_name:
            scope = f"{statement.scope}/" if statement.scope else ""
            params[f"{scope}{statement.selector}.{statement.arg_name}"] = repr(resolved(statement.value))
    return params


def resolved(value: Any) -> Any:
    """A bound value with those of the macros in it, at any depth. References to classes stay."""
    if isinstance(value, gin.config.ConfigurableReference) and value.selector.endswith("gin.macro"):
        return resolved(gin.query_parameter(f"%{value.scoped_selector.rpartition('/')[0]}"))
    if isinstance(value, dict):
        return {key: resolved(inner) for key, inner in value.items()}
    return type(value)(map(resolved, value)) if isinstance(value, list | tuple) else value


def redact() -> None:
    """Hide keys, tokens and passwords in what gin holds, once all is built: what is written is printed from there."""
    bindings = [*gin.config._CONFIG.items(), *gin.config._OPERATIVE_CONFIG.items()]
    references = _scopes(bindings)
    for (scope, selector), values in bindings:
        values |= {name: redacted(scope if selector == "gin.macro" else name, value) for name, value in values.items()}
    for (scope, selector), values in bindings:  # macros that only secrets refer to
        if selector == "gin.macro" and scope in references - _scopes(bindings):
            values["value"] = REDACTED


def _scopes(bindings: list[Any]) -> set[str]:
    """Of all references; that of a macro is its name."""
    return {"/".join(ref.scopes) for ref in gin.config.iterate_references([values for _, values in bindings])}


def hypothesis(path: Path) -> str:
    """What an ablation file wants to find out: its first comment, if that begins with "Hypothesis:"; else ''."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), read_text(path).splitlines())
    words = " ".join(line.removeprefix("#").strip() for line in comment)
    return words.removeprefix("Hypothesis:").strip() if words.startswith("Hypothesis:") else ""


def name_of(path: Path) -> str:
    """For messages."""
    return f"gin/{path.relative_to(GIN_FOLDER)}" if path.is_relative_to(GIN_FOLDER) else str(path)
