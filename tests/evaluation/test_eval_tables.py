"""The terminal's table and the row beside the paper's: every number with what it is over, nothing pretended."""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from dataclasses import replace

import pytest
from results_builder import TITLES, make_results
from run_builders import ROOT

from exgrpo_orlhf import config
from exgrpo_orlhf.evaluation.paper import markdown, read_paper
from exgrpo_orlhf.evaluation.results_table import terminal
from exgrpo_orlhf.show.seeds import mean

sys.path.insert(0, str(ROOT / "evals"))  # the script's own module lies beside it
from paper_table import suite_table

PUBLISHED = read_paper(ROOT / "evals" / "paper.toml")
PAPER = replace(PUBLISHED, questions={})  # the sets made here have 12 questions
BACKBONE = "Qwen2.5-Math-7B"
TABLES = {None: 26, "table2": 2, "table3": 4, "table6": 8, "table6_repo": 1, "table7": 2, "table9": 3}  # rows
SIZES = {key: (12, 12, 12, PAPER.samples[key]) for key in TITLES}
PARTLY = {"aime24": (12, 12, 12, 32), "aime25": (5, 12, 12, 32), "amc": (10, 10, 83, 4), "arc_c": (12, 12, 12, 1)}
RATES = ("truncated", "no_answer", "timeout", "error")
REASONS = {key: f"no {key} here" for key in TITLES if key not in PARTLY}


def line_of(text: str, start: str) -> str:
    return next(line for line in text.split("\n") if line.startswith(start))


def cells(text: str, row: str) -> list[str]:
    """Of a row of the Markdown table, without its name."""
    return [cell.strip() for cell in line_of(text, f"| {row} |").split(" | ")[1:]]


def test_every_benchmark_has_a_line_with_its_numbers_and_no_mean_hides_what_is_missing_or_in_part(tmp_path):
    results = make_results(tmp_path / "mine", PARTLY, REASONS)
    results["record"]["engine"]["reproducible"] = "the server promises nothing"
    results["benchmarks"]["aime24"]["lucky_guess_rate"] = 0.125
    text = terminal(results)
    for benchmark in results["benchmarks"].values():
        line, average = line_of(text, benchmark["title"]), benchmark["avg"]
        bounds = f"[{100 * average['low']:.1f}, {100 * average['high']:.1f}]"
        assert f"{100 * average['value']:.1f} {bounds}" in line
        assert all(f"{100 * rate:.1f}" in line for name, rate in benchmark["rates"].items() if name in RATES)
        assert f"{benchmark['tokens']['response_mean']:,.0f}" in line
    assert "5/12" in line_of(text, "AIME25")
    assert "10/10 (83)" in line_of(text, "AMC")
    assert "/12 " not in line_of(text, "AIME24")
    assert len({len(line_of(text, title)) for title in ("benchmark", "AIME24", "AIME25", "AMC", "ARC-c")}) == 1
    macro = line_of(text, "macro mean")
    assert "over 4 of 9: AIME24, AIME25 (in part: 5/12), AMC (in part: 10/10 (83)), ARC-c" in macro
    assert "39 questions; over the same 4 of 9" in line_of(text, "micro mean")
    math = line_of(text, "math mean")
    assert "over 3 of 6" in math
    assert "without MATH-500, Minerva, OlympiadBench" in math
    assert "over 1 of 3: ARC-c; without GPQA-Diamond, MMLU-Pro" in line_of(text, "general mean")
    assert all(f"  {TITLES[key]}: {reason}" in text for key, reason in REASONS.items())
    assert "  AMC: 10 rows, 83 are official" in text
    assert "the server promises nothing" in text
    assert "AIME24: 12.5 % of the correct responses" in text


def test_the_papers_averages_follow_from_its_columns_but_for_one():
    """GPG-Zero's OOD average is printed so in the paper; its columns have mean 53.7."""
    assert Counter(suite for suite, *_ in PAPER.rows) == TABLES
    uneven = []
    for model, row in PAPER.rows.items():
        for average, of in PAPER.averages.items():
            if not {average, *of} <= row.keys():
                continue
            mean = sum(row[column] for column in of) / len(of)
            if abs(mean - row[average]) > 0.1 + 1e-9:  # both are rounded to 0.1
                uneven.append((*model[1:], average, row[average], round(mean, 1)))
    assert uneven == [("Qwen2.5-Math-7B", "GPG-Zero", "ood_avg", 41.6, 53.7)]


def test_the_papers_columns_are_the_suite_and_a_row_with_a_value_too_few_is_refused(tmp_path):
    suites = tomllib.loads((ROOT / "evals" / "benchmarks.toml").read_text(encoding="utf-8"))["suites"]
    assert list(PAPER.samples) == suites["paper"]
    assert PAPER.averages == {"id_avg": suites["math"], "ood_avg": suites["general"]}
    assert [column for column in PAPER.titles if column not in PAPER.averages] == suites["paper"]
    text = (ROOT / "evals" / "paper.toml").read_text(encoding="utf-8")
    (tmp_path / "paper.toml").write_text(text.replace("11.5, 4.9,", "11.5,"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"Qwen2\.5-Math-7B, base: 10 values, 11 columns"):
        read_paper(tmp_path / "paper.toml")


@pytest.mark.parametrize("file", sorted((ROOT / "gin" / "paper").glob("table*.gin")), ids=lambda file: file.stem)
def test_every_variant_of_the_papers_suites_has_its_row(file):
    variants = config.load_suite(file).variants
    own = {variant for suite, _, variant in PAPER.rows if suite == file.stem}
    assert own <= variants.keys(), "a row for which there is no variant"
    assert all(variant in own or (None, BACKBONE, variant) in PAPER.rows for variant in variants)


def test_the_papers_differences_that_one_run_cannot_show_are_marked():
    suite = config.load_suite(ROOT / "gin" / "paper" / "table6.gin")
    text = suite_table(PUBLISHED, "table6", suite.baseline, BACKBONE, {variant: {} for variant in suite.variants})
    widths = dict(zip(PAPER.titles, line_of(text, "± of one run").split()[4:], strict=True))
    row, numbers = PAPER.rows[None, BACKBONE, "ExGRPO"], (30, 30, 83, 500, 272, 675, 1172, 198, 12032)
    sizes = dict(zip(TITLES, numbers, strict=True))
    sizes_and_samples = [f"{n:,} · {samples}" for n, samples in zip(numbers, PAPER.samples.values(), strict=True)]
    assert re.findall(r"[\d,]+ · \d+", line_of(text, "questions · samples")) == sizes_and_samples
    variances = {column: row[column] * (100 - row[column]) / n for column, n in sizes.items()}
    for column, width in widths.items():
        of = PAPER.averages.get(column, [column])
        expected = 1.96 * sum(variances[each] for each in of) ** 0.5 / len(of)
        assert float(width) == pytest.approx(expected, rel=0.08, abs=0.06)
    beyond = set()
    for variant in suite.variants:
        marked = re.findall(r"\d\d\.\d(?: ~)?|–", line_of(text, f"{variant}, the paper"))[-len(PAPER.titles) :]
        beyond |= {(variant, column) for column, cell in zip(PAPER.titles, marked, strict=True) if cell[-1].isdigit()}
    assert {("wo_shaping", "math500"), ("rho_75", "math500"), ("on-policy", "mmlu_pro")} < beyond
    assert ("rho_75", "amc") not in beyond


def test_an_accuracy_of_0_still_has_an_interval():
    text = suite_table(PAPER, "table1", "on-policy", "Llama-3.1-8B", {"on-policy": {}})
    widths = line_of(text, "± of one run").split()[4:]
    assert float(widths[8]) == pytest.approx(50 * (1 - 0.025 ** (1 / 198)), abs=0.1), "GPQA: 0 of 198"
    assert float(widths[0]) > 196 * (0.004 * 0.996 / 30) ** 0.5, "AIME24: 0.4 % of 30, less than one question"


def test_runs_of_a_suite_stand_below_the_papers_rows_and_several_seeds_become_a_mean(tmp_path):
    few = {"aime24": (12, 12, 12, 32), "math500": (12, 12, 12, 2)}
    runs = {variant: {} for variant in ("ExGRPO", "wo_both", "mine")}
    runs["mine"] = {"seed0": make_results(tmp_path / "mine", few)}
    runs["wo_both"] = {f"seed{i}": make_results(tmp_path / f"seed{i}", few, seed=i) for i in range(3)}
    text = suite_table(PAPER, "table6", "ExGRPO", BACKBONE, runs).split("\n")
    values = [results["benchmarks"]["aime24"]["avg"]["value"] for results in runs["wo_both"].values()]
    begin = text.index(line_of("\n".join(text), "wo_both, the paper"))
    assert [line.split()[1] for line in text[begin + 1 : begin + 4]] == [f"{100 * value:.1f}" for value in values]
    over_seeds = mean(values)
    assert text[begin + 4].split()[:5] == ["mean", "of", "the", "seeds", f"{100 * over_seeds.value:.1f}"]
    low, high = (f"{100 * bound:.1f}" for bound in over_seeds.bounds)
    assert text[begin + 5].split()[:5] == ["95", "%", low, "to", high]
    begin = text.index(line_of("\n".join(text), "mine, the paper"))
    average = runs["mine"]["seed0"]["benchmarks"]["math500"]["avg"]
    assert set(text[begin].split()[3:]) == {"–"}, "the paper has no such row"
    assert text[begin + 1].split()[4] == f"{100 * average['value']:.1f}*"
    assert f"{100 * average['low']:.1f} to {100 * average['high']:.1f}" in text[begin + 2]
    assert "MATH-500: avg@2, avg@1 in the paper." in text
    assert "AMC: not asked for." in text


def test_a_whole_run_stands_beside_the_paper_with_its_averages(tmp_path):
    results = make_results(tmp_path / "mine", SIZES)
    shown = terminal(results)
    assert "over 9 of 9" in line_of(shown, "macro mean")
    assert not re.search("in part|without|Not run|Notes", shown)
    text = markdown(results, PAPER)
    ours = cells(text, "**mine, step 120**")
    values = [results["benchmarks"][key]["avg"]["value"] for key in TITLES]
    assert ours[:6] == [f"{100 * value:.1f}" for value in values[:6]]
    assert float(ours[6]) == pytest.approx(100 * sum(values[:6]) / 6, abs=0.0501)
    assert float(ours[10].strip(" |")) == pytest.approx(100 * sum(values[6:]) / 3, abs=0.0501)
    assert "\\*" not in " ".join(ours)
    assert "\n- " not in text  # no footnote
    assert len(re.findall(r"^\| ", text, re.MULTILINE)) == 2 + 3 + 26
    math = results["means"]["groups"]["math"]
    assert cells(text, "95 % interval")[6] == f"{100 * math['low']:.1f} to {100 * math['high']:.1f}"


def test_what_was_run_in_part_or_otherwise_has_a_star_and_makes_no_average(tmp_path):
    text = markdown(make_results(tmp_path / "mine", PARTLY, REASONS), PAPER)
    ours = cells(text, "**mine, step 120**")
    assert "\\*" not in ours[0]
    assert ours[1].endswith("\\*")
    assert ours[2].endswith("\\*")
    assert ours[3:7] == ["–"] * 4
    assert ours[10] == "– |"
    assert "- AIME25: 5 of 12 questions." in text
    assert "- AMC: 10 questions of 10 rows, 83 are official; avg@4, avg@32 in the paper." in text
    assert "- MATH-500: not run (no math500 here)." in text
    assert "- ID avg: no average, because not all of it was run whole (AIME25: 5 of 12 questions; AMC:" in text


@pytest.mark.parametrize(
    ("field", "value", "note"),
    [
        ("temperature", 1.0, "temperature 1.0"),
        ("top_p", 0.9, "top-p 0.9"),
        ("departures", ["temperature 0.6, not 1.0", "max_tokens 256, not 8192"], "max_tokens 256, not 8192"),
        (None, None, "12 questions, 198 in the paper's file"),
    ],
)
def test_other_sampling_or_another_set_marks_the_column_and_its_average(tmp_path, field, value, note):
    results = make_results(tmp_path / "mine", SIZES)
    if field:
        results["benchmarks"]["gpqa"][field] = value
    text = markdown(results, PAPER if field else replace(PAPER, questions={"gpqa": 198}))
    ours = cells(text, "**mine, step 120**")
    assert [i for i, cell in enumerate(ours) if "\\*" in cell] == [8, 10]
    assert f"- GPQA: {note}." in text
    assert "- OOD avg: holds GPQA, not sampled as in the paper." in text


def test_a_name_cannot_break_the_table_and_the_plain_recipes_score_stands_below(tmp_path):
    results = make_results(tmp_path / "mine", SIZES)
    results["record"]["model"]["run"] = "a|b"
    text = markdown(results, PUBLISHED)
    assert "- Olympiad: 12 questions, 675 in the paper's file." in text
    assert len(cells(text, "**a\\|b, step 120**")) == len(PUBLISHED.titles)
    plain = cells(text, "by math-verify's plain recipe")
    assert plain[0] == f"{100 * results['benchmarks']['aime24']['plain']['value']:.1f}"
    assert plain[1] == "–"
