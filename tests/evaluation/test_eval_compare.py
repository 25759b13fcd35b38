"""Two results folders side by side: the right questions are paired, and what was not run alike is said."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from results_builder import line

from exgrpo_orlhf.evaluation.compare import ResultsComparison, compare
from exgrpo_orlhf.evaluation.statistics import paired

ALIKE = {"samples": 4, "verifier": "math", "temperature": 0.6, "top_p": 1.0, "max_tokens": 8192, "ask": "Box it."}


def question(number: int) -> dict:
    return {"id": f"{number:032x}", "question": f"Question\u2028{number}", "gold": str(number)}


def rows(correct: np.ndarray, first: int = 0) -> list[tuple[dict, list[bool]]]:
    """(question, verdicts of its samples) for each row of a (Q, n) array."""
    return [(question(first + i), verdicts.tolist()) for i, verdicts in enumerate(np.asarray(correct, bool))]


def write(folder: Path, benchmarks: dict[str, list], **changed) -> Path:
    """A results folder with what `compare` reads. changed: settings of all its benchmarks."""
    template = {"name": "qwen_math", "fingerprint": "of qwen_math"}
    record = {"template": template, "engine": {"name": "vllm", "dtype": "bfloat16"}, "git_commit": "a1"}
    results = {"format": 1, "name": folder.name, "record": record, "benchmarks": {}, "not_run": {}}
    for name, questions in benchmarks.items():
        n, k = len(questions), len(questions[0][1])
        counts = {"questions": n, "samples": k, "rows": n, "official_rows": None, "in_mean": True}
        results["benchmarks"][name] = {"title": name.upper(), **ALIKE, **counts, **changed}
        path = folder / name / "samples.jsonl"
        path.parent.mkdir(parents=True)
        with path.open("w", newline="\n") as file:
            for row, (one, verdicts) in enumerate(questions):
                for sample, right in enumerate(verdicts):
                    verdict = "correct" if right else ("timeout", "wrong")[sample % 2]
                    # The text of U+2028 as it is, as a file that another program rewrote would have it.
                    text = json.dumps(line(row, sample, verdict, response="\u2028\x85", **one), ensure_ascii=False)
                    file.write(text + "\n")
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def drawn(questions: int, samples: int, chance: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((questions, samples)) < chance


TEN = rows(drawn(10, 4, 0.5, 1))


def compared(tmp_path: Path, first: dict[str, list], second: dict[str, list], **changed) -> ResultsComparison:
    """changed: settings of the second folder's benchmarks"""
    return compare(write(tmp_path / "a", first), write(tmp_path / "b", second, **changed))


def test_scores_and_tests_are_those_of_the_samples(tmp_path):
    weak, strong = drawn(40, 4, 0.2, 1), drawn(40, 4, 0.6, 2)
    other = drawn(25, 1, 0.5, 3), drawn(25, 1, 0.5, 4)
    a = write(tmp_path / "a", {"amc": rows(weak), "arc": rows(other[0])})
    b = write(tmp_path / "b", {"amc": rows(strong), "arc": rows(other[1])})
    result = compare(a, b, seed=5)
    rng = np.random.default_rng(5)
    pairs = [(weak.mean(axis=1), strong.mean(axis=1)), (other[0].mean(axis=1), other[1].mean(axis=1))]
    assert [one.paired for one in result.benchmarks] == [paired([pair], rng) for pair in pairs]
    assert result.macro == paired(pairs, rng)
    amc, arc = result.benchmarks
    assert (amc.name, amc.title, amc.questions) == ("amc", "AMC", 40)
    assert (amc.a, amc.b) == pytest.approx((weak.mean(), strong.mean()))
    assert amc.p_holm == pytest.approx(2 * amc.paired.p_value)
    assert arc.p_holm == pytest.approx(max(arc.paired.p_value, amc.p_holm))
    assert (result.a, result.b, result.only_a, result.only_b, result.warnings) == ("a", "b", (), (), ())
    assert result == compare(a, b, seed=5) != compare(a, b, seed=1)

    text = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert text["benchmarks"]["amc"]["paired"]["p_value"] == amc.paired.p_value
    assert text["macro"]["low"] == result.macro.low
    assert set(text) == {"a", "b", "benchmarks", "macro", "only_a", "only_b", "warnings"}


NINE = "AMC: 9 questions in common of 10 in a, 10 in b"
TWICE = [(question(1), [True]), (question(2), [True]), (question(1), [False])]  # AIME sets of 30 rows may


@pytest.mark.parametrize(
    ("first", "second", "questions", "warnings"),
    [
        (TEN, TEN[:6][::-1], 6, ("AMC: 6 questions in common of 10 in a, 6 in b",)),  # another order and limit
        (TWICE, [TWICE[0], TWICE[2], TWICE[1]], 3, ()),  # a repeated question is paired by its occurrence
        # Another text or answer is another question in spite of its id.
        (TEN, [({**TEN[0][0], "question": "other"}, TEN[0][1]), *TEN[1:]], 9, (NINE,)),
        (TEN, [({**TEN[0][0], "gold": "7"}, TEN[0][1]), *TEN[1:]], 9, (NINE,)),
    ],
)
def test_questions_are_paired_by_id_occurrence_text_and_answer(tmp_path, first, second, questions, warnings):
    result = compared(tmp_path, {"amc": first}, {"amc": second})
    (amc,) = result.benchmarks
    assert (amc.questions, amc.paired.difference, amc.paired.p_value) == (questions, 0, 1)
    assert amc.a == pytest.approx(amc.b)
    assert result.warnings == warnings


@pytest.mark.parametrize(
    ("place", "change", "warning"),
    [
        *(
            ("settings", {name: value}, f"AMC: {name} {ALIKE[name]} in a, {value} in b")
            for name, value in (
                ("temperature", 1.0),
                ("top_p", 0.95),
                ("max_tokens", 512),
                ("verifier", "choice"),
                ("ask", None),
            )
        ),
        (
            "record",
            {"template": {"name": "plain", "fingerprint": "of plain"}},
            "the prompts were rendered by different templates: qwen_math in a, plain in b",
        ),
        ("record", {"engine": {"name": "hf", "dtype": "bfloat16"}}, "engine name: vllm in a, hf in b"),
        ("record", {"engine": {"name": "vllm", "dtype": "float32"}}, "engine dtype: bfloat16 in a, float32 in b"),
        ("record", {"git_commit": "b2"}, "graded by different versions: a1 in a, b2 in b; regrade both"),
        (
            "record",
            {"graded_with": {"git_commit": "c3"}},
            "graded by different versions: a1 in a, c3 in b; regrade both",
        ),
        ("part", {"rows": 200}, "b is not complete: AMC 10/200 questions, GPQA not run"),
    ],
)
def test_a_difference_of_settings_template_engine_grader_or_extent_is_a_warning(tmp_path, place, change, warning):
    a, b = (write(tmp_path / name, {"amc": TEN}, **(change if place != "record" else {}) if name == "b" else {})
            for name in "ab")  # fmt: skip
    results = json.loads((b / "results.json").read_text())
    results["record"] |= change if place == "record" else {}
    results["not_run"] = {"gpqa": {"title": "GPQA", "reason": "gated"}} if place == "part" else {}
    (b / "results.json").write_text(json.dumps(results))
    comparison = compare(a, b)
    assert comparison.warnings == (warning,)
    assert comparison.benchmarks[0].questions == 10


def test_what_only_one_has_is_named_and_in_no_mean_and_samples_may_be_fewer(tmp_path):
    few = rows(drawn(5, 4, 0.5, 1))
    half = [(one, verdicts[:2]) for one, verdicts in TEN]
    second = {"gpqa": few, "amc": half, "mmlu": few, "aime": rows(drawn(5, 4, 0.5, 1), first=50)}
    result = compared(tmp_path, {"amc": TEN, "arc": few, "aime": few}, second)
    assert (result.only_a, result.only_b) == (("ARC",), ("GPQA", "MMLU"))
    assert [one.name for one in result.benchmarks] == ["amc"]
    assert result.macro.difference == result.benchmarks[0].paired.difference
    assert result.warnings == ("AMC: samples 4 in a, 2 in b", "AIME: no question in common, not compared")


def test_folders_of_one_name_are_told_apart_by_their_paths(tmp_path):
    a, b = (write(tmp_path / each / "x", {"amc": TEN}) for each in ("one", "two"))
    assert (compare(a, b).a, compare(a, b).b) == (str(a), str(b))


def test_the_table_is_aligned_and_says_everything(tmp_path):
    a = write(tmp_path / "base", {"amc": rows(np.zeros((40, 4))), "arc": rows(drawn(5, 4, 0.5, 1))})
    b = write(tmp_path / "trained", {"amc": rows(np.ones((40, 4)))}, max_tokens=512)
    lines = compare(a, b).table().split("\n")
    assert lines[:2] == ["a: base", "b: trained"]
    head = ["benchmark", "questions", "a", "b", "b - a", "95 % interval", "p", "p (Holm)"]
    assert re.split("  +", lines[3]) == head
    assert lines[5].split() == ["AMC", "40", "0.0", "100.0", "+100.0", "[+82.4,", "+100.0]", "0.0001", "0.0001"]
    assert lines[7].split()[:6] == ["macro", "mean", "40", "0.0", "100.0", "+100.0"]
    assert lines[5].index(" 100.0") == lines[7].index(" 100.0")
    assert lines[9] == "only in a: ARC"
    assert lines[11] == "warning: AMC: max_tokens 8192 in a, 512 in b"


def test_folders_that_cannot_be_compared_are_refused(tmp_path):
    a, b, c = (
        write(tmp_path / name, {benchmark: questions})
        for name, benchmark, questions in (
            ("a", "amc", TEN), ("b", "arc", TEN), ("c", "amc", rows(drawn(10, 4, 0.5, 1), first=90))
        )
    )  # fmt: skip
    with pytest.raises(ValueError, match="no question in common: one has AMC, the other ARC"):
        compare(a, b)
    with pytest.raises(ValueError, match="no question in common"):
        compare(a, c)
    samples = a / "amc" / "samples.jsonl"
    content = samples.read_bytes()
    samples.write_bytes(content + b'{"row": 3}\n')
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 41: not a sample"):
        compare(c, a)
    samples.write_bytes(content[: content.rindex(b"\n", 0, -1) + 1])
    with pytest.raises(ValueError, match=r"counts 40 .4 for each of 10 questions"):
        compare(c, a)
    (b / "results.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match="format 2; this version reads format 1"):
        compare(a, b)
