"""Two results folders side by side: the right questions are paired, and what was not run alike is said."""

import json
from pathlib import Path

import numpy as np
import pytest

from exgrpo_orlhf.evaluation.compare import compare
from exgrpo_orlhf.evaluation.statistics import paired, paired_macro

ALIKE = {"samples": 4, "verifier": "math", "temperature": 0.6, "top_p": 1.0, "max_tokens": 8192, "ask": "Box it."}


def question(number: int) -> dict:
    return {"id": f"{number:032x}", "question": f"Question\u2028{number}", "gold": str(number)}


def rows(correct: np.ndarray, first: int = 0) -> list[tuple[dict, list[bool]]]:
    """(question, verdicts of its samples) for each row of a (Q, n) array."""
    return [(question(first + i), verdicts.tolist()) for i, verdicts in enumerate(np.asarray(correct, bool))]


def write(folder: Path, benchmarks: dict[str, list], template: str = "qwen_math", **changed) -> Path:
    """A results folder with what `compare` reads. changed: settings of all its benchmarks."""
    record = {
        "template": {"name": template, "system": None, "fingerprint": f"of {template}"},
        "engine": {"name": "vllm", "dtype": "bfloat16"},
        "git_commit": "a1",
    }
    results = {"format": 1, "name": folder.name, "complete": True, "record": record, "benchmarks": {}}
    for name, asked in benchmarks.items():
        counts = {"questions": len(asked), "samples": len(asked[0][1])}
        results["benchmarks"][name] = {"title": name.upper(), **ALIKE, **counts, **changed}
        path = folder / name / "samples.jsonl"
        path.parent.mkdir(parents=True)
        with path.open("w", newline="\n") as file:
            for row, (one, verdicts) in enumerate(asked):
                for sample, right in enumerate(verdicts):
                    verdict = "correct" if right else ("timeout", "wrong")[sample % 2]
                    line = {"row": row, "sample": sample, **one, "prompt": f"{template}: {one['question']}"}
                    line |= {"response": "\u2028\x85", "verdict": verdict, "extracted": None, "sound": None, "seed": 1}
                    line |= {"plain": None, "prompt_tokens": 1, "response_tokens": 1, "finish": "stop", "group": None}
                    # The text of U+2028 as it is, as a file that another program rewrote would have it.
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def drawn(questions: int, samples: int, chance: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((questions, samples)) < chance


def test_scores_and_tests_are_those_of_the_samples(tmp_path):
    weak, strong = drawn(40, 4, 0.2, 1), drawn(40, 4, 0.6, 2)
    other = drawn(25, 1, 0.5, 3), drawn(25, 1, 0.5, 4)
    a = write(tmp_path / "a", {"amc": rows(weak), "arc": rows(other[0])})
    b = write(tmp_path / "b", {"amc": rows(strong), "arc": rows(other[1])})
    found = compare(a, b, seed=5)
    rng = np.random.default_rng(5)
    pairs = [(weak.mean(axis=1), strong.mean(axis=1)), (other[0].mean(axis=1), other[1].mean(axis=1))]
    assert [one.paired for one in found.benchmarks] == [paired(*pair, rng) for pair in pairs]
    assert found.macro == paired_macro(pairs, rng)
    amc, arc = found.benchmarks
    assert (amc.name, amc.title, amc.questions) == ("amc", "AMC", 40)
    assert (amc.a, amc.b) == pytest.approx((weak.mean(), strong.mean()))
    assert amc.p_holm == pytest.approx(2 * amc.paired.p_value)
    assert arc.p_holm == pytest.approx(max(arc.paired.p_value, amc.p_holm))
    assert (found.a, found.b, found.only_a, found.only_b, found.warnings) == ("a", "b", (), (), ())


def test_the_same_seed_gives_the_same_comparison(tmp_path):
    a = write(tmp_path / "a", {"amc": rows(drawn(40, 4, 0.4, 1))})
    b = write(tmp_path / "b", {"amc": rows(drawn(40, 4, 0.5, 2))})
    assert compare(a, b, 0) == compare(a, b, 0) != compare(a, b, 1)


def test_questions_are_paired_by_id_whatever_their_order_and_limit(tmp_path):
    correct = drawn(30, 4, 0.5, 1)
    a = write(tmp_path / "a", {"amc": rows(correct)})
    b = write(tmp_path / "b", {"amc": rows(correct)[:20][::-1]})
    found = compare(a, b)
    (amc,) = found.benchmarks
    assert (amc.questions, amc.a, amc.b) == (20, pytest.approx(correct[:20].mean()), pytest.approx(amc.a))
    assert (amc.paired.difference, amc.paired.p_value) == (0, 1)
    assert found.warnings == ("AMC: 20 questions in common of 30 in a, 20 in b",)


def test_a_repeated_question_is_paired_by_its_occurrence(tmp_path):
    """AIME sets of 30 rows may hold a question twice."""
    twice = [(question(1), [True]), (question(2), [True]), (question(1), [False])]
    a = write(tmp_path / "a", {"aime": twice})
    b = write(tmp_path / "b", {"aime": [twice[0], twice[2], twice[1]]})
    (aime,) = compare(a, b).benchmarks
    assert (aime.questions, aime.paired.p_value) == (3, 1)


@pytest.mark.parametrize("changed", [{"question": "Another text"}, {"gold": "7"}])
def test_an_id_with_another_text_or_answer_is_another_question(tmp_path, changed):
    asked = rows(drawn(10, 4, 0.5, 1))
    a = write(tmp_path / "a", {"amc": asked})
    b = write(tmp_path / "b", {"amc": [({**asked[0][0], **changed}, asked[0][1]), *asked[1:]]})
    found = compare(a, b)
    assert found.benchmarks[0].questions == 9
    assert found.warnings == ("AMC: 9 questions in common of 10 in a, 10 in b",)


def test_other_templates_may_render_a_question_otherwise(tmp_path):
    asked = rows(drawn(10, 4, 0.5, 1))
    a = write(tmp_path / "a", {"amc": asked})
    b = write(tmp_path / "b", {"amc": asked}, "plain")
    found = compare(a, b)
    assert found.benchmarks[0].questions == 10
    assert found.warnings == ("the prompts were rendered by different templates: qwen_math in a, plain in b",)


@pytest.mark.parametrize(
    ("name", "value"),
    [("samples", 2), ("temperature", 1.0), ("top_p", 0.95), ("max_tokens", 512), ("verifier", "choice"), ("ask", None)],
)
def test_what_was_not_run_alike_is_said(tmp_path, name, value):
    a = write(tmp_path / "a", {"amc": rows(drawn(10, 4, 0.5, 1))})
    b = write(tmp_path / "b", {"amc": rows(drawn(10, 2 if name == "samples" else 4, 0.5, 1))}, **{name: value})
    assert compare(a, b).warnings == (f"AMC: {name} {ALIKE[name]} in a, {value} in b",)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"engine": {"name": "transformers", "dtype": "bfloat16"}}, "engine name: vllm in a, transformers in b"),
        ({"engine": {"name": "vllm", "dtype": "float32"}}, "engine dtype: bfloat16 in a, float32 in b"),
        ({"git_commit": "b2"}, "graded by different versions: a1 in a, b2 in b; regrade both"),
        ({"graded_with": {"git_commit": "c3"}}, "graded by different versions: a1 in a, c3 in b; regrade both"),
    ],
)
def test_another_engine_or_grader_is_said(tmp_path, record, said):
    folders = [write(tmp_path / name, {"amc": rows(drawn(10, 4, 0.5, 1))}) for name in "ab"]
    results = json.loads((folders[1] / "results.json").read_text())
    results["record"] |= record
    (folders[1] / "results.json").write_text(json.dumps(results))
    assert compare(*folders).warnings == (said,)


def test_an_incomplete_folder_is_said(tmp_path):
    a = write(tmp_path / "a", {"amc": rows(drawn(10, 4, 0.5, 1))})
    b = write(tmp_path / "b", {"amc": rows(drawn(10, 4, 0.5, 1))})
    path = b / "results.json"
    path.write_text(path.read_text().replace('"complete": true', '"complete": false'))
    assert compare(a, b).warnings == ("b is not complete",)


def test_what_only_one_has_is_named_and_in_no_mean(tmp_path):
    shared = rows(drawn(10, 4, 0.5, 1))
    a = write(tmp_path / "a", {"amc": shared, "arc": rows(drawn(5, 1, 0.5, 1))})
    b = write(tmp_path / "b", {"gpqa": rows(drawn(5, 1, 0.5, 1)), "amc": shared, "mmlu": rows(drawn(5, 1, 0.5, 1))})
    found = compare(a, b)
    assert (found.only_a, found.only_b) == (("ARC",), ("GPQA", "MMLU"))
    assert [one.name for one in found.benchmarks] == ["amc"]
    assert found.macro.difference == 0


def test_a_benchmark_with_no_common_question_is_left_out_and_said(tmp_path):
    shared = rows(drawn(10, 4, 0.5, 1))
    a = write(tmp_path / "a", {"amc": shared, "arc": rows(drawn(5, 4, 0.5, 1))})
    b = write(tmp_path / "b", {"amc": shared, "arc": rows(drawn(5, 4, 0.5, 1), first=50)})
    found = compare(a, b)
    assert [one.name for one in found.benchmarks] == ["amc"]
    assert found.warnings == ("ARC: no question in common, not compared",)


def test_folders_of_one_name_are_told_apart_by_their_paths(tmp_path):
    asked = {"amc": rows(drawn(10, 4, 0.5, 1))}
    a, b = write(tmp_path / "one" / "x", asked), write(tmp_path / "two" / "x", asked)
    assert (compare(a, b).a, compare(a, b).b) == (str(a), str(b))


def test_the_table_is_aligned_and_says_everything(tmp_path):
    a = write(tmp_path / "base", {"amc": rows(np.zeros((40, 4))), "arc": rows(drawn(5, 4, 0.5, 1))})
    b = write(tmp_path / "trained", {"amc": rows(np.ones((40, 4)))}, max_tokens=512)
    lines = compare(a, b).table().split("\n")
    assert lines[:2] == ["a: base", "b: trained"]
    assert lines[3].split() == [
        "benchmark",
        "questions",
        "a",
        "b",
        "b",
        "-",
        "a",
        "95",
        "%",
        "interval",
        "p",
        "p",
        "(Holm)",
    ]
    assert lines[5].split() == ["AMC", "40", "0.0", "100.0", "+100.0", "[+82.4,", "+100.0]", "0.0001", "0.0001"]
    assert lines[7].split()[:6] == ["macro", "mean", "40", "0.0", "100.0", "+100.0"]
    assert len({line.index(number) for line, number in ((lines[5], " 100.0"), (lines[7], " 100.0"))}) == 1
    assert lines[9] == "only in a: ARC"
    assert lines[11] == "warning: AMC: max_tokens 8192 in a, 512 in b"


def test_json_holds_what_the_comparison_does(tmp_path):
    a = write(tmp_path / "a", {"amc": rows(drawn(10, 4, 0.3, 1))})
    b = write(tmp_path / "b", {"amc": rows(drawn(10, 4, 0.6, 2))})
    found = compare(a, b)
    text = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert text["benchmarks"]["amc"]["paired"]["p_value"] == found.benchmarks[0].paired.p_value
    assert text["macro"]["low"] == found.macro.low
    assert set(text) == {"a", "b", "benchmarks", "macro", "only_a", "only_b", "warnings"}


def test_folders_that_cannot_be_compared_are_refused(tmp_path):
    a = write(tmp_path / "a", {"amc": rows(drawn(10, 4, 0.5, 1))})
    with pytest.raises(ValueError, match=r"none: no results\.json; is this the folder"):
        compare(a, tmp_path / "none")
    with pytest.raises(ValueError, match="no question in common: one has AMC, the other ARC"):
        compare(a, write(tmp_path / "b", {"arc": rows(drawn(10, 4, 0.5, 1))}))
    with pytest.raises(ValueError, match="no question in common"):
        compare(a, write(tmp_path / "c", {"amc": rows(drawn(10, 4, 0.5, 1), first=90)}))
    (tmp_path / "b" / "results.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match="format 2; this version reads format 1"):
        compare(a, tmp_path / "b")


def test_a_damaged_file_is_named_with_its_line(tmp_path):
    asked = {"amc": rows(drawn(10, 4, 0.5, 1))}
    a, b = write(tmp_path / "a", asked), write(tmp_path / "b", asked)
    samples = b / "amc" / "samples.jsonl"
    whole = samples.read_bytes()
    samples.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 40: not a sample"):
        compare(a, b)
    samples.write_bytes(whole + b'{"row": 3}\n')
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 41: not a sample"):
        compare(a, b)
    samples.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 1])
    with pytest.raises(ValueError, match=r"counts 40 .4 for each of 10 questions"):
        compare(a, b)
    samples.unlink()
    with pytest.raises(ValueError, match=r"amc/samples\.jsonl does not exist"):
        compare(a, b)
