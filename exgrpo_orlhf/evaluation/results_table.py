"""The results of an evaluation as a table for the terminal, and the wording that all outputs share.

`results` is results.json as read. Its values are shares, 0 to 1; outputs show %.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..show.tables import NONE, aligned, percent
from .results_folder import Results

# plain: avg@k by math-verify's plain recipe; truncated to error: % of the samples; tokens: mean length of a response
HEAD = ("benchmark", "questions", "k", "avg@k, % [95 %]", "plain", "pass@k", "maj@k", "truncated", "no answer",
        "timeout / error", "tokens", "seconds")  # fmt: skip


def interval(estimate: dict[str, Any]) -> str:
    """A value with its 95 % interval."""
    return f"{percent(estimate['value'])} [{percent(estimate['low'])}, {percent(estimate['high'])}]"


def model_name(results: Results) -> str:
    """Run and step of a checkpoint, else the last part of the model's path."""
    model = results["record"]["model"]
    if model["run"] is None:
        return Path(model["path"]).name
    return model["run"] if model["step"] is None else f"{model['run']}, step {model['step']}"


def shortfall(benchmark: dict[str, Any]) -> str | None:
    """How the questions differ from the official set; None if they are all of it."""
    questions, rows, official = benchmark["questions"], benchmark["rows"], benchmark["official_rows"]
    if official is not None and rows != official:
        return f"{questions} questions of {rows} rows, {official} are official"
    return None if questions == rows else f"{questions} of {rows} questions"


def of_questions(benchmark: dict[str, Any]) -> str:
    """'30' for a whole set, '20/30' for a part, '20/40 (83)' where the set at hand is not the official one."""
    questions, rows, official = benchmark["questions"], benchmark["rows"], benchmark["official_rows"]
    if shortfall(benchmark) is None:
        return f"{questions:,}"
    return f"{questions:,}/{rows:,}" + ("" if official in (None, rows) else f" ({official:,})")


def missing(results: Results) -> str:
    """What an evaluation lacks: 'AMC 6/200 questions, GPQA-Diamond not run'; '' if all was run whole."""
    part = [
        f"{entry['title']} {of_questions(entry)} questions"
        for entry in results["benchmarks"].values()
        if shortfall(entry)
    ]
    return ", ".join([*part, *(f"{entry['title']} not run" for entry in results["not_run"].values())])


def means(results: Results) -> list[tuple[str, dict[str, Any], str]]:
    """(name, estimate, the benchmarks in it, out of how many, and which of them in part) of every mean."""
    macro, micro = results["means"]["macro"], results["means"]["micro"]
    every = [*macro["benchmarks"], *results["not_run"]]
    beside = [entry["title"] for key, entry in results["benchmarks"].items() if key not in every]
    outside = f"; not in it: {', '.join(beside)}" if beside else ""
    same = f"{micro['questions']:,} questions; over the same {len(micro['benchmarks'])} of {len(every)}"
    rows = [
        ("macro mean", macro, f"every benchmark counts the same; over {_over(results, macro, every)}{outside}"),
        ("micro mean", micro, f"every question counts the same, {same}"),
    ]
    titles = {key: entry["title"] for key, entry in (*results["benchmarks"].items(), *results["not_run"].items())}
    for name, mean in results["means"]["groups"].items():
        missing = [titles.get(key, key) for key in mean["of"] if key not in mean["benchmarks"]]
        without = f"; without {', '.join(missing)}" if missing else ""
        rows.append((f"{name} mean", mean, f"macro; over {_over(results, mean, mean['of'])}{without}"))
    return rows


def _over(results: Results, mean: dict[str, Any], names: Sequence[str]) -> str:
    titles = []
    for benchmark in map(results["benchmarks"].__getitem__, mean["benchmarks"]):
        part = "" if shortfall(benchmark) is None else f" (in part: {of_questions(benchmark)})"
        titles.append(benchmark["title"] + part)
    return f"{len(titles)} of {len(names)}: {', '.join(titles)}"


def notes(results: Results) -> list[tuple[str, str]]:
    """(about, note): whether the engine gives the same responses again, how the questions were asked, then benchmark by
    benchmark."""
    reason = results["record"]["engine"]["reproducible"]
    notes = [] if reason is None else [("responses may differ when repeated", reason)]
    notes += [("asked otherwise than in training", change) for change in results["record"].get("asked_otherwise", ())]
    titles: dict[str, list[str]] = {}
    for benchmark in results["benchmarks"].values():
        titles.setdefault(benchmark["ask"], []).append(benchmark["title"])
    notes += [(", ".join(titles[ask]), f"with each question stands {ask!r}") for ask in titles if ask]
    for benchmark in results["benchmarks"].values():
        notes += [(benchmark["title"], note) for note in benchmark["notes"]]
        if (lucky := benchmark["lucky_guess_rate"]) is not None:
            words = f"{percent(lucky)} % of the correct responses whose reasoning was checked are lucky guesses"
            notes.append((benchmark["title"], words))
    return notes


def benchmark_row(benchmark: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a benchmark under HEAD."""
    rates = {name: percent(rate) for name, rate in benchmark["rates"].items()}
    return (
        benchmark["title"],
        of_questions(benchmark),
        str(benchmark["avg"]["k"]),
        interval(benchmark["avg"]),
        percent(benchmark["plain"]["value"]) if benchmark["plain"] else NONE,
        *(_of_largest_k(benchmark[kind], benchmark["samples"]) for kind in ("pass", "maj")),
        rates["truncated"],
        rates["no_answer"],
        f"{rates['timeout']} / {rates['error']}",
        f"{benchmark['tokens']['response_mean']:,.0f}",
        f"{benchmark['seconds']:,.1f}",
    )


def _of_largest_k(estimates: dict[str, Any], samples: int) -> str:
    """With the k where it is not the number of samples."""
    if not estimates:
        return NONE
    k = max(estimates, key=int)
    return percent(estimates[k]["value"]) + ("" if int(k) == samples else f" @{k}")


def terminal(results: Results) -> str:
    """One line for each benchmark, the means, what was not run and why, and the notes."""
    record = results["record"]
    text = [f"{results['name']}: {model_name(results)}, {record['engine']['name']}, seed {record['seed']}", ""]
    text += aligned([HEAD, *map(benchmark_row, results["benchmarks"].values())], left=1)
    text += ["", *aligned([(name, interval(mean), over) for name, mean, over in means(results)], left=3, rule=False)]
    if results["not_run"]:
        text += ["", "Not run, and in no mean:"]
        text += [f"  {missing['title']}: {missing['reason']}" for missing in results["not_run"].values()]
    if remarks := notes(results):
        text += ["", "Notes:", *(f"  {about}: {note}" for about, note in remarks)]
    return "\n".join(text)
