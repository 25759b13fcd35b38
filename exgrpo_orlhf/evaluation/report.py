"""The report: one HTML page for one or several results folders, with charts, tables and a browser of samples.

Everything that a model wrote goes into the page as escaped data and from there into its elements as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..files import write
from . import plots
from .folder import Results, ResultsFolder
from .html import figure, legend, page, panels, paragraph, read, table, wide
from .plots import SERIES
from .results_table import HEAD, NONE, benchmark_row, interval, means, missing, notes, of_questions, shortfall
from .samples import choose

Models = Sequence[tuple[str, ResultsFolder]]  # (name, folder)


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
    results = [ResultsFolder.read(Path(folder)) for folder in folders]
    names = [folder.results["name"] for folder in results]
    if len(set(names)) < len(names):
        names = [str(folder.path) for folder in results]
    models = list(zip(names, results, strict=True))
    sections = [
        ("summary", "Results", _summary(models)),
        ("accuracy", "Accuracy", _accuracy(models)),
        ("curves", "pass@k", _pass_at_k(models)),
        ("lengths", "Response lengths", _lengths(models)),
        ("graders", "Two graders", _two_graders(models)),
        ("samples", "Samples", read("browser.html")),
        ("record", "Record", "".join(_record(i, *model) for i, model in enumerate(models))),
    ]
    data = _data(models, samples_per_benchmark)
    write(out, page("Evaluation: " + ", ".join(names), _models(models), sections, read("browser.js"), data))


def _data(models: Models, samples_per_benchmark: int) -> str:
    """The samples shown, as JSON that no HTML parser can leave: <, >, & and all that is not ASCII are escaped."""
    data: list[dict[str, Any]] = []
    for name, model in models:
        benchmarks = {}
        for key, lines in model.lines.items():
            # A seed goes as text: beyond 2^53 JavaScript rounds numbers.
            samples = model.samples(key, choose(lines, samples_per_benchmark))
            samples_as_text = [{**sample, "seed": str(sample["seed"])} for sample in samples]
            title = model.results["benchmarks"][key]["title"]
            benchmarks[key] = {"title": title, "total": len(lines), "samples": samples_as_text}
        data.append({"name": name, "benchmarks": benchmarks})
    text = json.dumps(data, separators=(",", ":"))
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
    titles = {key: entry["title"] for _, model in models for key, entry in model.results["benchmarks"].items()}
    for key, title in titles.items():
        yield key, title, [(i, name, model) for i, (name, model) in enumerate(models) if key in model.lines]


def _heading(models: Models, title: str, name: str) -> str:
    return title if len(models) == 1 else f"{title}, {name}"


# -- charts ----------------------------------------------------------------------------------------------------------


def _accuracy(models: Models) -> str:
    rows = []
    for key, title, _ in _benchmarks(models):
        entries = [model.results["benchmarks"].get(key) for _, model in models]
        parts = [of_questions(entry) if entry and shortfall(entry) else None for entry in entries]
        averages = [entry and entry["avg"] for entry in entries]
        names = [name for name, _ in models]
        rows.append((title, list(zip(range(len(models)), names, averages, parts, strict=True))))
    about = paragraph("avg@k with 95 % bootstrap intervals over questions. A hollow dot: part of the questions only.")
    marks = [*((f"m{i}", name) for i, (name, _) in enumerate(models)), ("hollow", "part of the questions")]
    return about + legend(marks) + wide(plots.intervals(rows, "avg@k, %"))


def _pass_at_k(models: Models) -> str:
    curves: dict[str, list[tuple[int, Results, Results]]] = {}
    for i, (_, model) in enumerate(models):
        for benchmark in model.results["benchmarks"].values():
            if len(benchmark["pass"]) > 1:
                curves.setdefault(benchmark["title"], []).append((i, benchmark["pass"], benchmark["maj"]))
    if not curves:
        return paragraph("Every benchmark has one sample a question, so there is no curve over k.")
    top = plots.top_of([by_k[k]["high"] for lines in curves.values() for _, by_k, _ in lines for k in by_k])
    about = "Unbiased pass@k in % with 95 % intervals over questions, and maj@k from k = 4 on. k is logarithmic."
    marks = [*((f"m{i}", name) for i, (name, _) in enumerate(models)), ("dash", "maj@k")]
    charts = [figure(title, plots.pass_curves(title, lines, top)) for title, lines in curves.items()]
    return paragraph(about) + legend(marks) + panels(charts)


def _lengths(models: Models) -> str:
    charts = []
    for key, title, runs in _benchmarks(models):
        longest = max((line.tokens for _, _, model in runs for line in model.lines[key]), default=1)
        for _, name, model in runs:
            limit = model.results["benchmarks"][key]["max_tokens"]
            heading = _heading(models, title, name)
            charts.append(figure(heading, plots.lengths(heading, model.lines[key], longest, limit)))
    marks = [("correct", "correct, upwards"), ("wrong", "not correct (all other verdicts), downwards")]
    about = "Number of samples by response length. Panels of one benchmark share the horizontal axis, not the vertical."
    return paragraph(about) + legend([*marks, ("dash", "limit on response tokens")]) + panels(charts)


# -- tables; all text is escaped here --------------------------------------------------------------------------------


def _summary(models: Models) -> str:
    """Benchmarks, a line for each model; means with their benchmarks; what was not run; notes."""
    several = len(models) > 1
    model_head = ["model"] * several
    bodies = []
    for key, _, runs in _benchmarks(models):
        body: list[list[str]] = []
        for i, name, model in runs:
            title, *cells = map(escape, benchmark_row(model.results["benchmarks"][key]))
            body.append(["" if body else f'<span class="name">{title}</span>', *[_key(i, name)] * several, *cells])
        bodies.append(body)
    about = (
        "Scores and rates in %. Questions: asked, or asked/official. plain: avg@k by math-verify's plain recipe. "
        "Timeout and error: no verdict, which counts as not solved. Tokens: mean of a response. Seconds: wall time."
    )
    text = table([HEAD[0], *model_head, *HEAD[1:]], bodies, 1 + len(model_head), about, "wide")

    of_mean: dict[str, list[list[str]]] = {}  # models of one mean side by side
    for i, (name, model) in enumerate(models):
        for mean, estimate, over in means(model.results):
            cells = [f'<span class="nowrap">{escape(cell)}</span>' for cell in (mean, interval(estimate))]
            of_mean.setdefault(mean, []).append([cells[0], *[_key(i, name)] * several, cells[1], escape(over)])
    rows = [cells for rows in of_mean.values() for cells in rows]
    text += table(["mean", *model_head, "value [95 %]", "over"], [rows], 4)
    absent = lambda results: [(each["title"], each["reason"]) for each in results["not_run"].values()]
    return text + _remarks("Not run, and in no mean", models, absent) + _remarks("Notes", models, notes)


def _remarks(title: str, models: Models, of: Callable[[Results], Sequence[tuple[str, str]]]) -> str:
    """Pairs (about, text), each once, with the models it holds for unless it holds for all."""
    remarks: dict[tuple[str, str], list[str]] = {}
    for name, model in models:
        for pair in of(model.results):
            remarks.setdefault(pair, []).append(name)
    lines = ""
    for (about, text), names in remarks.items():
        models_of_it = "" if len(names) == len(models) else f" ({', '.join(names)})"
        lines += f"<li><strong>{escape(about + models_of_it)}</strong>: {escape(text)}</li>"
    return f"<h3>{title}</h3><ul>{lines}</ul>" if remarks else ""


def _two_graders(models: Models) -> str:
    """How often one grader says correct and the other does not. The browser shows these samples."""
    rows: list[list[str]] = []
    for i, (name, model) in enumerate(models):
        for key, lines in model.lines.items():
            if not (graded_twice := [line for line in lines if line.plain is not None]):
                continue
            differ = [line for line in graded_twice if line.disagree]
            ours = sum(line.verdict == "correct" for line in differ)
            link = f"#model={i}&amp;benchmark={escape(key)}&amp;verdict=disagree"
            title = escape(_heading(models, model.results["benchmarks"][key]["title"], name))
            counts = [f"{n:,}" for n in (len(graded_twice), ours, len(differ) - ours)]
            rows.append([f'<a href="{link}">{title}</a>' if differ else title, *counts])
    if not rows:
        return paragraph("No benchmark was also graded by the plain math-verify recipe.")
    head = ["benchmark", "samples graded twice", "correct by ours alone", "correct by the plain one alone"]
    return table(head, [rows], 1, "A link leads to the samples in question; those that have room are on the page.")


def _record(number: int, name: str, model: ResultsFolder) -> str:
    """What was evaluated and with what, so that it can be repeated."""
    fields = "".join(
        f"<dt>{escape(field)}</dt><dd><code>{escape(value)}</code></dd>"
        for field, value in _flat(model.results["record"])
    )
    rows, details = [], ""
    for entry in model.results["benchmarks"].values():
        source = f"{escape(entry['source'])}<br><code>{escape(entry['fingerprint'])}</code>"
        numbers = [entry[field] for field in ("questions", "rows", "official_rows", "samples")]
        counts = [NONE if number is None else f"{number:,}" for number in numbers]
        sampling = [f"{entry['temperature']:g}", f"{entry['top_p']:g}", f"{entry['max_tokens']:,}"]
        rows.append([escape(entry["title"]), source, *counts, *sampling])
        if groups := entry["by_group"]:
            lines = [[escape(group), f"{each['questions']:,}", interval(each)] for group, each in groups.items()]
            inner = table(["group", "questions", "avg@k [95 %]"], [lines], 1)
            details += f"<details><summary>{escape(entry['title'])} by group</summary>{inner}</details>"
    head = ["benchmark", "source", "questions", "rows", "official", "k", "temperature", "top-p", "max tokens"]
    text = f'<h3>{_key(number, name)}</h3><dl class="record">{fields}</dl>'
    return text + table(head, [rows], 2, box="wide") + details


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """('model.path', '…') of every field that has a value."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield prefix + key, value if isinstance(value, str) else json.dumps(value)


def _key(model: int, name: str) -> str:
    return f'<span class="name"><i class="key m{model}"></i>{escape(name)}</span>'
