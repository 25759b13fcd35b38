"""The report: one HTML file for one or several results folders, with charts and a browser of samples.

It needs no network and no library. Whatever a model wrote goes into it as data, escaped, and from there into the page
as text; the page's policy (CSP) allows no script but its own, by hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..files import write
from . import report_charts, report_tables
from .results_folder import Line, ResultsFolder, choose

MODELS = 8  # colours
_HERE = Path(__file__).parent


def write_report(folders: Sequence[Path], out: Path, samples_per_benchmark: int = 200) -> None:
    """Write the page; it appears whole or not at all.

    samples_per_benchmark: most samples of a model and benchmark that the browser holds; choose() says which

    Raises ValueError for no folder or too many, one without results.json, or samples that results.json does not count.
    """
    if not 1 <= len(folders) <= MODELS:
        raise ValueError(f"a report is of 1 to {MODELS} results folders, not {len(folders)}")
    models = [ResultsFolder.read(Path(folder)) for folder in folders]
    names = labels(models)
    shown = [{key: choose(lines, samples_per_benchmark) for key, lines in model.lines.items()} for model in models]
    script = (_HERE / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": escape("Evaluation: " + ", ".join(names)),
        "style": (_HERE / "report.css").read_text(encoding="utf-8"),
        "script": script,
        "script_hash": f"sha256-{digest}",
        "models": _models(models, names),
        "summary": report_tables.summary(models, names),
        "accuracy": report_charts.accuracy(models, names),
        "curves": report_charts.pass_at_k(models, names),
        "lengths": report_charts.response_lengths(models, names),
        "verdicts": report_charts.verdict_shares(models, names),
        "graders": report_charts.two_graders(models, names) + report_tables.disagreements(models, names, shown),
        "record": report_tables.record(models, names),
        "data": data(models, names, shown),
    }
    template = (_HERE / "report.html").read_text(encoding="utf-8")
    page = re.sub(r"\{\{(\w+)\}\}", lambda field: parts[field[1]], template)  # one pass: what goes in is not read again
    write(out, page)


def labels(models: Sequence[ResultsFolder]) -> list[str]:
    """The names of the results; the folders' paths if two are the same."""
    names = [model.results["name"] for model in models]
    return names if len(set(names)) == len(names) else [str(model.path) for model in models]


def data(models: Sequence[ResultsFolder], names: Sequence[str], shown: Sequence[dict[str, list[Line]]]) -> str:
    """The samples shown, as JSON that no HTML parser can leave: <, >, & and all that is not ASCII are escaped."""
    found: list[dict[str, Any]] = []
    for model, name, chosen in zip(models, names, shown, strict=True):
        benchmarks = {}
        for key, lines in chosen.items():
            samples = model.samples(key, lines)
            for sample in samples:
                sample["seed"] = str(sample["seed"])  # beyond 2^53 a number of JavaScript is rounded
            title, total = model.results["benchmarks"][key]["title"], len(model.lines[key])
            benchmarks[key] = {"title": title, "total": total, "samples": samples}
        found.append({"name": name, "benchmarks": benchmarks})
    text = json.dumps(found, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _models(models: Sequence[ResultsFolder], names: Sequence[str]) -> str:
    lines = []
    for i, (model, name) in enumerate(zip(models, names, strict=True)):
        record = model.results["record"]
        about = f"{record['model']['path']} · {record['engine']['name']} · seed {record['seed']} · {record['finished']}"
        part = "" if model.results["complete"] else " · <strong>not every benchmark was run whole</strong>"
        lines.append(f'<li><i class="key m{i}"></i>{escape(name)} <span>{escape(about)}{part}</span></li>')
    return f'<ul class="models">{"".join(lines)}</ul>'
