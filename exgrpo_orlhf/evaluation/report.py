"""The report: one HTML page for one or several results folders, with charts, tables and a browser of samples.

Everything that a model wrote goes into the page as escaped data and from there into its elements as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ..files import write
from . import plots
from .folder import Results, ResultsFolder
from .html import figure, legend, page, panels, read, said, table, wide
from .plots import NAMES, SERIES, Point
from .results_table import NONE, interval, largest, means, missing, notes, of_questions, rates_and_tokens, shortfall
from .samples import VERDICTS, Line, Sample, choose

CELL = 120  # characters of an answer in the list of disagreements
Models = Sequence[tuple[str, ResultsFolder]]  # (name, folder)
Shown = Sequence[Mapping[str, Sequence[Line]]]  # of each model, by benchmark: the samples in the browser


def write_report(folders: Sequence[Path], out: Path, samples_per_benchmark: int = 200) -> None:
    """Write the page. The file appears whole or not at all.

    Args:
        folders: results folders, at most one for each colour.
        out: the HTML file.
        samples_per_benchmark: most samples of a model and benchmark in the browser; `choose` selects them.

    Raises:
        ValueError: no folder or too many, one without results.json, or samples that results.json does not count.
    """
    if not 1 <= len(folders) <= SERIES:
        raise ValueError(f"a report is of 1 to {SERIES} results folders, not {len(folders)}")
    read_folders = [ResultsFolder.read(Path(folder)) for folder in folders]
    names = [folder.results["name"] for folder in read_folders]
    if len(set(names)) < len(names):
        names = [str(folder.path) for folder in read_folders]
    models = list(zip(names, read_folders, strict=True))
    shown = [{key: choose(lines, samples_per_benchmark) for key, lines in model.lines.items()} for _, model in models]
    sections = [
        ("summary", "Results", _summary(models)),
        ("accuracy", "Accuracy", _accuracy(models)),
        ("curves", "pass@k", _pass_at_k(models)),
        ("lengths", "Response lengths", _lengths(models)),
        ("verdict-shares", "Verdicts", _verdicts(models)),
        ("graders", "Two graders", _two_graders(models) + _disagreements(models, shown)),
        ("samples", "Samples", read("browser.html")),
        ("record", "Record", _record(models)),
    ]
    title = "Evaluation: " + ", ".join(names)
    write(out, page(title, _models(models), sections, read("browser.js"), _data(models, shown)))


def _data(models: Models, shown: Shown) -> str:
    """The samples shown, as JSON that no HTML parser can leave: <, >, & and all that is not ASCII are escaped."""
    found: list[dict[str, Any]] = []
    for (name, model), chosen in zip(models, shown, strict=True):
        benchmarks = {}
        for key, lines in chosen.items():
            # A seed goes as text: beyond 2^53 JavaScript rounds numbers.
            samples = [{**sample, "seed": str(sample["seed"])} for sample in model.samples(key, lines)]
            title, total = model.results["benchmarks"][key]["title"], len(model.lines[key])
            benchmarks[key] = {"title": title, "total": total, "samples": samples}
        found.append({"name": name, "benchmarks": benchmarks})
    text = json.dumps(found, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _models(models: Models) -> str:
    lines = []
    for i, (name, model) in enumerate(models):
        record = model.results["record"]
        about = f"{record['model']['path']} · {record['engine']['name']} · seed {record['seed']} · {record['finished']}"
        part = f" · <strong>not complete: {escape(lacking)}</strong>" if (lacking := missing(model.results)) else ""
        lines.append(f'<li><i class="key m{i}"></i>{escape(name)} <span>{escape(about)}{part}</span></li>')
    return f'<ul class="models">{"".join(lines)}</ul>'


def _benchmarks(models: Models) -> Iterator[tuple[str, str, list[tuple[int, str, ResultsFolder]]]]:
    """(key, title, the models that were run on it, numbered) of every benchmark, in order."""
    titles = {key: known["title"] for _, model in models for key, known in model.results["benchmarks"].items()}
    for key, title in titles.items():
        yield key, title, [(i, name, model) for i, (name, model) in enumerate(models) if key in model.lines]


def _heading(models: Models, title: str, name: str) -> str:
    return title if len(models) == 1 else f"{title}, {name}"


# -- charts ----------------------------------------------------------------------------------------------------------


def _accuracy(models: Models) -> str:
    rows = [
        (title, [_point(i, name, model, key, "avg") for i, (name, model) in enumerate(models)])
        for key, title, _ in _benchmarks(models)
    ]
    about = said("avg@k with 95 % bootstrap intervals over questions. A hollow dot: part of the questions only.")
    marks = [*((f"m{i}", name) for i, (name, _) in enumerate(models)), ("hollow", "part of the questions")]
    return about + legend(marks) + wide(plots.intervals(rows, "avg@k, %"))


def _point(series: int, name: str, model: ResultsFolder, key: str, score: str) -> Point:
    known = model.results["benchmarks"].get(key)
    part = of_questions(known) if known and shortfall(known) else None
    return series, name, known[score] if known else None, part


def _pass_at_k(models: Models) -> str:
    found: dict[str, list[tuple[int, Results, Results]]] = {}
    for i, (_, model) in enumerate(models):
        for benchmark in model.results["benchmarks"].values():
            if len(benchmark["pass"]) > 1:
                found.setdefault(benchmark["title"], []).append((i, benchmark["pass"], benchmark["maj"]))
    if not found:
        return said("Every benchmark has one sample a question, so there is no curve over k.")
    top = plots.top_of([by_k[k]["high"] for lines in found.values() for _, by_k, _ in lines for k in by_k])
    about = said("Unbiased pass@k in % with 95 % intervals over questions, and maj@k from k = 4 on. k is logarithmic.")
    marks = [*((f"m{i}", name) for i, (name, _) in enumerate(models)), ("dash", "maj@k")]
    drawn = [figure(title, plots.pass_curves(title, lines, top)) for title, lines in found.items()]
    return about + legend(marks) + panels(drawn)


def _lengths(models: Models) -> str:
    drawn = []
    for key, title, those in _benchmarks(models):
        longest = max((line.tokens for _, _, model in those for line in model.lines[key]), default=1)
        for _, name, model in those:
            limit = model.results["benchmarks"][key]["max_tokens"]
            heading = _heading(models, title, name)
            drawn.append(figure(heading, plots.lengths(heading, model.lines[key], longest, limit)))
    marks = [("correct", "correct, upwards"), ("wrong", "not correct (all other verdicts), downwards")]
    about = "Number of samples by response length. Panels of one benchmark share the horizontal axis, not the vertical."
    return said(about) + legend([*marks, ("dash", "limit on response tokens")]) + panels(drawn)


def _verdicts(models: Models) -> str:
    rows = [
        (title, [(name if len(models) > 1 else "", model.lines[key]) for _, name, model in those])
        for key, title, those in _benchmarks(models)
    ]
    marks = [*((verdict, NAMES[verdict]) for verdict in VERDICTS), ("hatched", "truncated")]
    about = said("All samples. Timeout and error: the grader gave no verdict; avg@k counts these as not solved.")
    return about + legend(marks) + wide(plots.verdicts(rows))


def _two_graders(models: Models) -> str:
    rows = [
        (
            _heading(models, title, name),
            [_point(2, "ours", model, key, "avg"), _point(3, "plain math-verify", model, key, "plain")],
        )
        for key, title, those in _benchmarks(models)
        for _, name, model in those
        if model.results["benchmarks"][key]["plain"]
    ]
    if not rows:
        return said("No benchmark was also graded by the plain math-verify recipe.")
    about = said("avg@k of the same samples by this project's grader and by the plain math-verify recipe.")
    return about + legend([("m2", "ours"), ("m3", "plain math-verify")]) + wide(plots.intervals(rows, "avg@k, %"))


# -- tables; all text is escaped here --------------------------------------------------------------------------------


def _summary(models: Models) -> str:
    """Benchmarks, a line for each model; means with their benchmarks; what was not run; notes."""
    several = len(models) > 1
    head = ["benchmark", *(["model"] if several else []), "questions", "k", "avg@k [95 %]", "pass@k [95 %]", "maj@k"]
    head += ["truncated", "no answer", "timeout / error", "tokens", "seconds"]
    bodies = []
    for key, title, those in _benchmarks(models):
        rows: list[list[str]] = []
        for i, name, model in those:
            first = [
                "" if rows else f'<span class="name">{escape(title)}</span>',
                *([_key(i, name)] if several else []),
            ]
            rows.append([*first, *_numbers(model.results["benchmarks"][key])])
        bodies.append(rows)
    text = "Scores and rates in %. Questions: asked, or asked/official. Tokens: mean of a response. Seconds: wall time."
    found = table(head, bodies, 1 + several, text, "wide")

    of_mean: dict[str, list[list[str]]] = {}  # models of one mean side by side
    for i, (name, model) in enumerate(models):
        for what, mean, over in means(model.results):
            first = [f'<span class="nowrap">{escape(what)}</span>', *([_key(i, name)] if several else [])]
            value = f'<span class="nowrap">{_estimate(mean)}</span>'
            of_mean.setdefault(what, []).append([*first, value, escape(over)])
    head = ["mean", *(["model"] if several else []), "value [95 %]", "over"]
    found += table(head, [[cells for rows in of_mean.values() for cells in rows]], 4)
    absent = lambda results: [(each["title"], each["reason"]) for each in results["not_run"].values()]
    return found + _remarks("Not run, and in no mean", models, absent) + _remarks("Notes", models, notes)


def _numbers(benchmark: Results) -> list[str]:
    best, majority = largest(benchmark["pass"]), largest(benchmark["maj"])
    mark = f' title="{escape(part)}"' if (part := shortfall(benchmark)) else ""
    return [
        f"<span{mark}>{of_questions(benchmark)}</span>",
        str(benchmark["avg"]["k"]),
        _estimate(benchmark["avg"]),
        _at(best) if best else NONE,
        _at(majority) if majority else NONE,
        *rates_and_tokens(benchmark),
        f"{benchmark['seconds']:,.0f}",
    ]


def _at(found: tuple[str, Results]) -> str:
    return f"<small>@{escape(found[0])}</small> {_estimate(found[1])}"


def _estimate(estimate: Results) -> str:
    value, *bounds = interval(estimate).split(" ", 1)
    return f"{value} <small>{' '.join(bounds)}</small>"


def _remarks(title: str, models: Models, of: Callable[[Results], Sequence[tuple[str, str]]]) -> str:
    """Pairs (about, text), each once, with the models it holds for unless it holds for all."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, model in models:
        for pair in of(model.results):
            found.setdefault(pair, []).append(name)
    lines = ""
    for (about, text), those in found.items():
        names = "" if len(those) == len(models) else f" ({', '.join(those)})"
        lines += f"<li><strong>{escape(about + names)}</strong>: {escape(text)}</li>"
    return f"<h3>{title}</h3><ul>{lines}</ul>" if found else ""


def _disagreements(models: Models, shown: Shown) -> str:
    """How often one grader says correct and the other does not, and the cases, each with a link to the sample."""
    counts: list[list[str]] = []
    rows: list[list[str]] = []
    total = 0
    for i, (name, model) in enumerate(models):
        for key, lines in model.lines.items():
            asked = [line for line in lines if line.plain is not None]
            if not asked:
                continue
            title = _heading(models, model.results["benchmarks"][key]["title"], name)
            differ = [line for line in asked if line.disagree]
            ours = sum(line.verdict == "correct" for line in differ)
            counts.append([escape(title), *(f"{n:,}" for n in (len(asked), ours, len(differ) - ours))])
            total += len(differ)
            listed = [line for line in shown[i][key] if line.disagree]
            pairs = zip(listed, model.samples(key, listed), strict=True)
            rows += [_disagreement(i, key, title, line, sample) for line, sample in pairs]
    if not counts:
        return ""
    head = ["benchmark", "samples graded twice", "correct by ours alone", "correct by the plain one alone"]
    text = table(head, [counts], 1)
    if not rows:
        return text + "<p>The graders agree on every sample.</p>"
    caption = f"{len(rows):,} of {total:,} disagreements"
    return text + table(["benchmark", "sample", "gold", "extracted", "ours", "plain"], [rows], 6, caption, "scroll")


def _disagreement(model: int, key: str, title: str, line: Line, sample: Sample) -> list[str]:
    place = {"model": model, "benchmark": key, "verdict": "disagree", "sample": f"{line.row}.{line.sample}"}
    link = f'<a class="nowrap" href="#{escape(urlencode(place))}">row {line.row}, sample {line.sample}</a>'
    texts = (sample["gold"], sample["extracted"] or "")
    answers = [f"<code>{escape(plots.short(text, CELL))}</code>" for text in texts]
    return [escape(title), link, *answers, NAMES[line.verdict], NAMES[str(line.plain)]]


def _record(models: Models) -> str:
    """What was evaluated and with what, so that it can be repeated."""
    text = ""
    head = ["benchmark", "source", "questions", "rows", "official", "k", "temperature", "top-p", "max tokens"]
    for i, (name, model) in enumerate(models):
        fields = "".join(
            f"<dt>{escape(field)}</dt><dd><code>{escape(value)}</code></dd>"
            for field, value in _flat(model.results["record"])
        )
        rows, details = [], ""
        for known in model.results["benchmarks"].values():
            source = f"{escape(known['source'])}<br><code>{escape(known['fingerprint'])}</code>"
            numbers = [known[field] for field in ("questions", "rows", "official_rows", "samples")]
            counts = [NONE if number is None else f"{number:,}" for number in numbers]
            sampling = [f"{known['temperature']:g}", f"{known['top_p']:g}", f"{known['max_tokens']:,}"]
            rows.append([escape(known["title"]), source, *counts, *sampling])
            if groups := known["by_group"]:
                lines = [[escape(group), f"{each['questions']:,}", interval(each)] for group, each in groups.items()]
                inner = table(["group", "questions", "avg@k [95 %]"], [lines], 1)
                details += f"<details><summary>{escape(known['title'])} by group</summary>{inner}</details>"
        text += f'<h3>{_key(i, name)}</h3><dl class="record">{fields}</dl>'
        text += table(head, [rows], 2, box="wide") + details
    return text


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """('model.path', '…') of every field that has a value."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield prefix + key, value if isinstance(value, str) else json.dumps(value)


def _key(model: int, name: str) -> str:
    return f'<span class="name"><i class="key m{model}"></i>{escape(name)}</span>'
