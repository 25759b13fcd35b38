"""The report's tables: results with intervals, disagreements of the graders, record. All text is escaped here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any
from urllib.parse import urlencode

from .charts import NAMES
from .report_charts import Models, benchmarks
from .results_folder import Line
from .tables import NONE, interval, largest, means, notes, of_questions, percent, shortfall

CELL = 120  # characters of an answer in the list of disagreements


def summary(models: Models, names: Sequence[str]) -> str:
    """Benchmarks, a line a model; means with what they are over; what was not run; notes."""
    several = len(models) > 1
    head = ["benchmark", *(["model"] if several else []), "questions", "k", "avg@k [95 %]", "pass@k [95 %]", "maj@k"]
    head += ["truncated", "no answer", "timeout / error", "tokens", "seconds"]
    bodies = []
    for key, title in benchmarks(models).items():
        rows = []
        for i, (model, name) in enumerate(zip(models, names, strict=True)):
            if key in model.results["benchmarks"]:
                first = [escape(title) if not rows else ""] + ([_key(i, name)] if several else [])
                rows.append(_row([*first, *_numbers(model.results["benchmarks"][key])], left=1 + several))
        bodies.append(f"<tbody>{''.join(rows)}</tbody>")
    text = (
        "Scores and rates in %. Questions: asked, or asked/official. Tokens: mean of a response. Seconds: wall clock."
    )
    table = (
        f'<div class="wide"><table><caption>{text}</caption>{_head(head, 1 + several)}{"".join(bodies)}</table></div>'
    )

    rows = []
    for i, (model, name) in enumerate(zip(models, names, strict=True)):
        for what, mean, over in means(model.results):
            first = [f'<span class="nowrap">{escape(what)}</span>'] + ([_key(i, name)] if several else [])
            rows.append((what, [*first, f'<span class="nowrap">{_estimate(mean)}</span>', escape(over)]))
    order = list(dict.fromkeys(what for what, _ in rows))
    rows.sort(key=lambda row: order.index(row[0]))  # models of one mean side by side
    head = ["mean", *(["model"] if several else []), "value [95 %]", "over"]
    table += f"<table>{_head(head, 4)}<tbody>{''.join(_row(cells, left=4) for _, cells in rows)}</tbody></table>"
    return table + _not_run(models, names) + _notes(models, names)


def _numbers(benchmark: dict[str, Any]) -> list[str]:
    best, majority, rates = largest(benchmark["pass"]), largest(benchmark["maj"]), benchmark["rates"]
    mark = f' title="{escape(part)}"' if (part := shortfall(benchmark)) else ""
    return [
        f"<span{mark}>{of_questions(benchmark)}</span>",
        str(benchmark["avg"]["k"]),
        _estimate(benchmark["avg"]),
        _at(best) if best and best[0] != "1" else NONE,
        _at(majority) if majority else NONE,
        percent(rates["truncated"]),
        percent(rates["no_answer"]),
        f"{percent(rates['timeout'])} / {percent(rates['error'])}",
        f"{benchmark['tokens']['response_mean']:,.0f}",
        f"{benchmark['seconds']:,.0f}",
    ]


def _at(found: tuple[str, dict[str, Any]]) -> str:
    return f"<small>@{escape(found[0])}</small> {_estimate(found[1])}"


def _estimate(estimate: dict[str, Any]) -> str:
    value, *bounds = interval(estimate).split(" ", 1)
    return f"{value} <small>{' '.join(bounds)}</small>"


def _not_run(models: Models, names: Sequence[str]) -> str:
    said = {}
    for model, name in zip(models, names, strict=True):
        for missing in model.results["not_run"].values():
            said.setdefault((missing["title"], missing["reason"]), []).append(name)
    about = [(f"{title}{_of(those, models)}", reason) for (title, reason), those in said.items()]
    return _list("Not run, and in no mean", about)


def _notes(models: Models, names: Sequence[str]) -> str:
    said = {}
    for model, name in zip(models, names, strict=True):
        for about, note in notes(model.results):
            said.setdefault((about, note), []).append(name)
    return _list("Notes", [(f"{about}{_of(those, models)}", note) for (about, note), those in said.items()])


def _of(those: Sequence[str], models: Models) -> str:
    return "" if len(those) == len(models) else f" ({', '.join(those)})"


def _list(title: str, items: Sequence[tuple[str, str]]) -> str:
    lines = "".join(f"<li><strong>{escape(about)}</strong>: {escape(text)}</li>" for about, text in items)
    return f"<h3>{title}</h3><ul>{lines}</ul>" if items else ""


def disagreements(models: Models, names: Sequence[str], shown: Sequence[dict[str, list[Line]]]) -> str:
    """How often one grader says correct and the other does not, and the cases, each with a link to the sample."""
    head = ["benchmark", "sample", "gold", "extracted", "ours", "plain"]
    counts, rows, total = [], [], 0
    for i, (model, name) in enumerate(zip(models, names, strict=True)):
        for key, lines in model.lines.items():
            asked = [line for line in lines if line.plain is not None]
            if not asked:
                continue
            title = model.results["benchmarks"][key]["title"] + (f", {name}" if len(models) > 1 else "")
            differ = [line for line in asked if line.disagree]
            ours = sum(line.verdict == "correct" for line in differ)
            numbers = [f"{n:,}" for n in (len(asked), ours, len(differ) - ours)]
            counts.append(_row([escape(title), *numbers], left=1))
            total += len(differ)
            listed = [line for line in shown[i][key] if line.disagree]
            for line, sample in zip(listed, model.samples(key, listed), strict=True):
                rows.append(_case(i, key, title, line, sample))
    if not counts:
        return ""
    head_of_counts = ["benchmark", "samples graded twice", "correct by ours alone", "correct by the plain one alone"]
    text = f"<table>{_head(head_of_counts, 1)}<tbody>{''.join(counts)}</tbody></table>"
    if not rows:
        return text + "<p>The graders agree on every sample.</p>"
    caption = f"<caption>{len(rows):,} of {total:,} disagreements</caption>"
    return text + f'<div class="scroll"><table>{caption}{_head(head, 6)}<tbody>{"".join(rows)}</tbody></table></div>'


def _case(model: int, key: str, title: str, line: Line, sample: dict[str, Any]) -> str:
    place = {"model": model, "benchmark": key, "verdict": "disagree", "sample": f"{line.row}.{line.sample}"}
    link = f'<a class="nowrap" href="#{escape(urlencode(place))}">row {line.row}, sample {line.sample}</a>'
    answers = [
        f"<code>{escape(text if len(text) <= CELL else text[:CELL] + '…')}</code>"
        for text in (sample["gold"], sample["extracted"] or "")
    ]
    return _row([escape(title), link, *answers, NAMES[line.verdict], NAMES[str(line.plain)]], left=6)


def record(models: Models, names: Sequence[str]) -> str:
    """What was run, on what, by whom to be repeated."""
    text = ""
    for i, (model, name) in enumerate(zip(models, names, strict=True)):
        fields = "".join(
            f"<dt>{escape(field)}</dt><dd><code>{escape(value)}</code></dd>"
            for field, value in _flat(model.results["record"])
        )
        text += f'<h3>{_key(i, name)}</h3><dl class="record">{fields}</dl>'
        head = ["benchmark", "source", "questions", "rows", "official", "k", "temperature", "top-p", "max tokens"]
        rows = []
        for benchmark in model.results["benchmarks"].values():
            source = f"{escape(benchmark['source'])}<br><code>{escape(benchmark['fingerprint'])}</code>"
            numbers = [benchmark[field] for field in ("questions", "rows", "official_rows", "samples")]
            shown = [NONE if number is None else f"{number:,}" for number in numbers]
            shown += [f"{benchmark['temperature']:g}", f"{benchmark['top_p']:g}", f"{benchmark['max_tokens']:,}"]
            rows.append(_row([escape(benchmark["title"]), source, *shown], left=2))
        text += f'<div class="wide"><table>{_head(head, 2)}<tbody>{"".join(rows)}</tbody></table></div>'
        text += "".join(map(_groups, model.results["benchmarks"].values()))
    return text


def _groups(benchmark: dict[str, Any]) -> str:
    if not benchmark["by_group"]:
        return ""
    rows = (
        _row([escape(name), f"{group['questions']:,}", interval(group)], left=1)
        for name, group in benchmark["by_group"].items()
    )
    table = f"<table>{_head(['group', 'questions', 'avg@k [95 %]'], 1)}<tbody>{''.join(rows)}</tbody></table>"
    return f"<details><summary>{escape(benchmark['title'])} by group</summary>{table}</details>"


def _flat(record: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """('model.path', '…') of every field that has a value."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield prefix + key, value if isinstance(value, str) else json.dumps(value)


def _key(model: int, name: str) -> str:
    return f'<span class="nowrap"><i class="key m{model}"></i>{escape(name)}</span>'


def _head(names: Sequence[str], left: int) -> str:
    cells = "".join(f'<th scope="col"{_left(i, left)}>{escape(name)}</th>' for i, name in enumerate(names))
    return f"<thead><tr>{cells}</tr></thead>"


def _row(cells: Sequence[str], left: int) -> str:
    """Cells are HTML; the first `left` are flush left, the others are numbers and do not wrap."""
    return "<tr>" + "".join(f"<td{_left(i, left, 'num')}>{cell}</td>" for i, cell in enumerate(cells)) + "</tr>"


def _left(i: int, left: int, right: str = "") -> str:
    cls = "left" if i < left else right
    return f' class="{cls}"' if cls else ""
