"""Compute results.json from graded samples, and metrics from results.json."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ..questions.text import normalised_answer
from ..records import Question
from ..rewards import Verifier
from .at_k import maj_at_k, pass_at_k
from .bootstrap import Array, interval, intervals, mean_over
from .samples import Sample, SampleFile

RESULTS = "results.json"
FORMAT = 1  # of results.json
RATES = ("truncated", "correct_truncated", "no_answer", "timeout", "error")
MAJORITY_FROM = 4  # samples
COMPARED = ("math", "math_verify")  # verifiers whose equality is more than that of texts
_MOST_GROUPS = 64  # with more, the column tells questions apart rather than groups


def summarise(
    name: str,
    record: Mapping[str, Any],
    facts: Mapping[str, Mapping[str, Any]],
    not_run: Mapping[str, Mapping[str, str]],
    files: Mapping[str, SampleFile],
    seconds: Mapping[str, float],
    grader: Verifier | None = None,
) -> dict[str, Any]:
    """The content of results.json.

    A response that could not be graded counts as not solved, and its rate stands beside the score. A mean names the
    benchmarks in it; what was not run is in none. The macro and the micro mean are over the benchmarks with `in_mean`,
    or over all if none has it.

    Args:
        record: what was evaluated, and with what.
        facts: benchmark -> what its entry says besides what is measured here.
        not_run: benchmark -> title, group and reason.
        files: benchmark -> its samples.
        seconds: benchmark -> wall time of its responses.
        grader: its time limit, memory and workers are those of the benchmarks' graders, which decide on equal votes.
            None: votes are compared as text.
    """
    benchmarks: dict[str, dict[str, Any]] = {}
    scores: dict[str, Array] = {}
    for benchmark, entry in facts.items():
        judge = None
        if grader and entry["verifier"] in COMPARED:
            judge = replace(grader, kind=entry["verifier"], function=None, url=None, format=None, max_failed_share=1.0)
        measures, scores[benchmark] = _measures(files[benchmark], _rng(benchmark), judge)
        benchmarks[benchmark] = {**entry, **measures, "seconds": round(seconds.get(benchmark, 0.0), 1)}
    groups = {entry["group"]: entry["of_group"] for entry in facts.values()}
    counted = [name for name, entry in facts.items() if entry["in_mean"]] or list(facts)
    return {
        "format": FORMAT,
        "name": name,
        "complete": not not_run and all(entry["whole"] for entry in facts.values()),
        "record": dict(record),
        "benchmarks": benchmarks,
        "not_run": dict(not_run),
        "means": {
            "macro": _mean(scores, counted, "macro"),
            "micro": {**_mean(scores, counted, "micro"), "questions": sum(len(scores[name]) for name in counted)},
            "groups": {
                group: {**_mean(scores, [b for b in members if b in scores], "macro"), "of": list(members)}
                for group, members in groups.items()
            },
        },
    }


def metrics(results: Mapping[str, Any], means: bool = True) -> dict[str, float]:
    """Metrics by their MLflow names: eval/<benchmark>/avg_at_32, pass_at_8, maj_at_32, rates; eval/avg: macro mean.

    A mean is left out unless every benchmark that its name stands for was run whole.
    """
    values: dict[str, float] = {}
    for benchmark, entry in results["benchmarks"].items():
        prefix, k = f"eval/{benchmark}", entry["avg"]["k"]
        average = f"{prefix}/avg_at_{k}"
        values[average] = entry["avg"]["value"]
        values |= {bound_of(average, end): entry["avg"][end] for end in ("low", "high")}
        for kind in ("pass", "maj"):
            values |= {f"{prefix}/{kind}_at_{k}": estimate["value"] for k, estimate in entry[kind].items() if k != "1"}
        values |= {f"{prefix}/{rate}_rate": value for rate, value in entry["rates"].items()}
        values[f"{prefix}/response_tokens"] = entry["tokens"]["response_mean"]
        if entry["plain"]:
            values[f"{prefix}/plain_avg_at_{k}"] = entry["plain"]["value"]
    if not means:
        return values
    complete = {benchmark for benchmark, entry in results["benchmarks"].items() if entry["whole"]}
    if not results["not_run"] and set(results["means"]["macro"]["benchmarks"]) <= complete:
        values["eval/avg"] = results["means"]["macro"]["value"]
        values["eval/micro_avg"] = results["means"]["micro"]["value"]
    for group, mean in results["means"]["groups"].items():
        if set(mean["of"]) <= complete:
            values[f"eval/avg_{group}"] = mean["value"]
    return values


def bound_of(metric: str, end: str) -> str:
    """The metric of a bound of a score's interval, such as 'interval/validation/avg_at_4_low'. It has its own prefix:
    MLflow orders metrics by name, and shows bounds after all scores."""
    return f"interval/{metric.removeprefix('eval/')}_{end}"


def _measures(file: SampleFile, rng: np.random.Generator, grader: Verifier | None) -> tuple[dict[str, Any], Array]:
    """(what results.json says of a benchmark's samples, the share of correct ones of each question, (Q,))."""
    by_row: dict[int, list[Sample]] = defaultdict(list)
    for sample in file.read():
        slim = {**sample, "question": "", "prompt": "", "response": ""}  # the texts may be gigabytes
        by_row[sample["row"]].append(slim)  # type: ignore[arg-type]
    rows = [sorted(by_row[row], key=lambda sample: sample["sample"]) for row in sorted(by_row)]  # Q of n samples
    samples = [sample for row in rows for sample in row]
    sound = [s["sound"] for s in samples if s["verdict"] == "correct" and s["sound"] is not None]
    truncated = [sample["verdict"] for sample in samples if sample["finish"] == "length"]
    counts = Counter(sample["verdict"] for sample in samples)
    counts |= {"truncated": len(truncated), "correct_truncated": truncated.count("correct")}
    tokens = [sample["response_tokens"] for sample in samples]

    # (Q, n): 1 for a sample that a grader says is correct, else 0
    correct = np.array([[sample["verdict"] == "correct" for sample in row] for row in rows], float)
    graded_twice = all(sample["plain"] is not None for sample in samples)
    plain = np.array([[s["plain"] == "correct" for s in row] for row in rows], float) if graded_twice else None
    answers = [[sample["extracted"] for sample in row] for row in rows]
    n, score = correct.shape[1], correct.mean(axis=1)
    ks = at_k(n)
    # Without an answer every vote is 0; where responses are graded and nothing is extracted, nothing is voted on.
    votable = any(key is not None for row in answers for key in row) or not counts["correct"] + counts["wrong"]
    voting = [k for k in ks if k >= MAJORITY_FROM] if votable else []
    keys = votes(answers, grader if voting else None)
    values = [score, *(pass_at_k(correct.sum(1), n, k) for k in ks), *(maj_at_k(keys, correct, k) for k in voting)]
    if plain is not None:
        values.append(plain.mean(axis=1))
    average, *others = [asdict(estimate) for estimate in intervals(np.array(values), rng)]
    groups = [row[0]["group"] for row in rows]
    names = sorted({group for group in groups if group is not None})
    of_groups = {name: score[[group == name for group in groups]] for name in names if len(names) <= _MOST_GROUPS}
    return {
        "avg": {"k": n, **average},
        "pass": dict(zip(map(str, ks), others, strict=False)),
        "maj": dict(zip(map(str, voting), others[len(ks) :], strict=False)),
        "rates": {rate: counts[rate] / len(samples) for rate in RATES},
        "lucky_guess_rate": sound.count(False) / len(sound) if sound else None,
        "by_group": {name: {"questions": len(part), **asdict(interval(part, rng))} for name, part in of_groups.items()},
        "plain": None if plain is None else {**others[-1], "disagreements": int((plain != correct).sum())},
        "tokens": {
            "prompt": sum(sample["prompt_tokens"] for sample in samples),
            "response": sum(tokens),
            "response_mean": float(np.mean(tokens)),
            "response_p95": float(np.percentile(tokens, 95)),
        },
    }, score


def at_k(n: int) -> list[int]:
    """The k of pass@k and maj@k with n samples: 1, 2, 4 … up to n, and n itself."""
    return sorted({*(1 << i for i in range(n.bit_length())), n})


def votes(answers: Sequence[Sequence[str | None]], grader: Verifier | None) -> list[list[str | None]]:
    """A key for each answer to each question, the same for answers that differ in typesetting only or that the grader
    finds equal (1/2 and 0.5). None for no answer."""
    keys = [[None if text is None else normalised_answer(text) for text in row] for row in answers]
    if grader is None:
        return keys
    groups: list[dict[str, str]] = [{} for _ in keys]  # of each question: from a key to that of its group
    texts = [{k: t for k, t in zip(*row, strict=True) if k and t} for row in zip(keys, answers, strict=True)]
    while any(texts):  # the first answer left to each question, against all others left
        pairs, places = [], []
        for group, remaining in zip(groups, texts, strict=True):
            if remaining:
                first = next(iter(remaining))
                gold = Question.make("votes", "", remaining.pop(first))
                pairs += [(gold, f"\\boxed{{{text}}}") for text in remaining.values()]
                places += [(group, remaining, key, first) for key in remaining]
        for (group, remaining, key, first), grade in zip(places, grader.grade_all(pairs), strict=True):
            if grade.correct:
                group[key] = first
                del remaining[key]
    return [[key and group.get(key, key) for key in row] for row, group in zip(keys, groups, strict=True)]


def _mean(scores: Mapping[str, Array], benchmarks: Sequence[str], kind: str) -> dict[str, Any]:
    mean = mean_over([scores[benchmark] for benchmark in benchmarks], _rng(kind), micro=kind == "micro")
    return {**asdict(mean), "benchmarks": list(benchmarks)}


def _rng(name: str) -> np.random.Generator:
    """A generator by name: the same samples have the same intervals, whatever other benchmarks there are."""
    return np.random.default_rng(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big"))
