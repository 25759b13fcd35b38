"""The report: one file, opened in a real browser; whatever a model wrote stays text."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from drawn_charts import charts, horizontal, numbers, of_class, opened, points, size, texts
from eval_builders import samples
from results_builder import make_results

from exgrpo_orlhf.evaluation.report import choose, write_report
from exgrpo_orlhf.evaluation.results_folder import ResultsFolder
from exgrpo_orlhf.evaluation.results_table import benchmark_row, interval, means
from exgrpo_orlhf.tracking.samples import VERDICTS, Line

SIZES = {"aime24": (30, 30, 30, 8), "amc": (10, 40, 83, 4), "math500": (90, 90, 90, 1)}
NOT_RUN = {"gpqa": "gated: <needs> a token & a licence"}
UNGRADED = ("timeout", "error")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("results")
    make_results(root / "first", SIZES, NOT_RUN, plain=("aime24", "math500"))
    make_results(root / "second", {"aime24": SIZES["aime24"]}, {}, skill=0.2, seed=1, plain=("aime24",))
    return [root / "first", root / "second"]


@pytest.fixture(scope="module")
def page(folders, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("report") / "new" / "report.html"
    write_report(folders, out, samples_per_benchmark=100)
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    return out


def disagree(sample: dict) -> bool:
    return sample["plain"] is not None and (sample["plain"] == "correct") != (sample["verdict"] == "correct")


def well_formed(text: str) -> str:
    """As a browser shows it: half a surrogate pair is no character."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def driven(page: Path, tmp_path: Path, script: str, state: str = "") -> str:
    """The DOM after a further script, on a copy of the page without the policy that would forbid it."""
    text = page.read_text(encoding="utf-8")
    text, count = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert count == 1
    copy = tmp_path / "driven.html"
    copy.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return opened(copy, tmp_path, state)[0]


def listed(dom: str) -> list[str]:
    """The verdicts of the samples in the browser's list."""
    return re.findall(r'<li data-verdict="(\w+)"', dom)


def shown(dom: str, name: str) -> str:
    return unescape(re.search(rf'<\w+[^>]* id="{name}"[^>]*>(.*?)</(?:pre|p|span)>', dom, re.DOTALL)[1])


def noted(dom: str) -> Any:
    """What a further script has left in data-seen."""
    return json.loads(unescape(re.search(r'data-seen="([^"]*)"', dom)[1]))


def test_the_page_has_the_cells_of_the_terminals_table_the_means_the_record_and_the_reasons(page, folders):
    html = page.read_text(encoding="utf-8")
    results = ResultsFolder.read(folders[0]).results
    cells = [unescape(re.sub("<[^>]+>", "", cell)) for cell in re.findall("<td[^>]*>(.*?)</td>", html)]
    for benchmark in results["benchmarks"].values():
        title, *numbers = benchmark_row(benchmark)
        begin = cells.index(title)
        assert cells[begin + 1 : begin + 13] == ["first", *numbers]
    for name, mean, over in means(results):
        begin = cells.index(name)
        assert cells[begin : begin + 4] == [name, "first", interval(mean), over]
    text = unescape(re.sub(r"<[^>]+>", " ", html))
    assert "GPQA-Diamond (first) : gated: <needs> a token & a licence" in text
    assert "AMC (first) : 40 rows, 83 are official" in text
    assert text.count("not complete:") == 1
    assert "not complete: AMC 10/40 (83) questions, GPQA-Diamond not run" in text
    for entry in (results["record"]["model"]["hash"], "qwen_math", "2.13.0", "9a6dcf7", results["record"]["command"]):
        assert entry in text


def test_the_accuracy_chart_has_every_point_at_its_value(page, folders):
    (chart,) = charts(page.read_text(encoding="utf-8"), "intervals")
    (zero, left), (end, right) = horizontal(chart)
    place = lambda share: left + (right - left) * (100 * share - zero) / (end - zero)
    expected, drawn = [], []
    for model, folder in enumerate(folders):
        for key in ResultsFolder.read(folder).results["benchmarks"]:
            average = ResultsFolder.read(folder).results["benchmarks"][key]["avg"]
            expected.append((f"m{model}", *(round(place(average[b]), 1) for b in ("value", "low", "high"))))
    for dot, whisker in zip(of_class(chart, "dot"), of_class(chart, "whisker"), strict=True):
        assert dot.get("id").split("-")[1] == whisker.get("id").split("-")[1]
        ((low, _), (high, _)), ((middle, _),) = points(whisker), points(dot)
        drawn.append((dot.get("id").split("-")[1], *(round(n, 1) for n in (middle, low, high))))
    assert len(drawn) == len(expected) == 4
    for mine, theirs in zip(sorted(drawn), sorted(expected), strict=True):
        assert mine[0] == theirs[0]
        assert mine[1:] == pytest.approx(theirs[1:], abs=0.11)
    assert len(of_class(chart, "dot", "hollow")) == 1  # AMC: 10 of 83
    assert texts(chart).count("not run") == 2


def test_the_other_charts_are_drawn_from_all_samples(page, folders):
    dom = page.read_text(encoding="utf-8")
    curves = charts(dom, "curves")
    assert len(curves) == 2  # AIME24 and AMC; MATH-500 was answered once
    drawn = [points(curve) for curve in of_class(curves[0], "curve")]
    assert [len(curve) for curve in drawn] == [4, 4]  # k = 1, 2, 4, 8 for two models
    for curve in drawn:
        heights = [y for _, y in curve]
        assert heights == sorted(heights, reverse=True)  # pass@k never falls
    assert len(of_class(curves[0], "maj")) == 2

    every = [(folder, key) for folder in folders for key in ResultsFolder.read(folder).lines]
    assert len(charts(dom, "lengths")) == len(every) == 4
    bars, others = (
        sum(size(bar)[1] for bar in of_class(charts(dom, "lengths")[0], "bar", what)) for what in ("correct", "wrong")
    )
    verdicts = Counter(sample["verdict"] for sample in samples(folders[0], "aime24"))
    assert bars / others == pytest.approx(verdicts["correct"] / (240 - verdicts["correct"]), rel=0.01)
    drawn = [chart for kind in ("intervals", "curves", "lengths") for chart in charts(dom, kind)]
    assert "nan" not in "".join(text for chart in drawn for text in numbers(chart))


@pytest.mark.slow
def test_each_filter_shows_such_samples_and_no_others(page, folders, tmp_path):
    note = """const seen = {};
    for (const button of document.querySelectorAll("#filters button")) {
      const key = button.dataset.verdict;
      document.querySelector(`[data-verdict=${key}]`).click();
      const pressed = document.querySelector(`#filters [data-verdict=${key}]`);
      seen[key] = [pressed.getAttribute("aria-pressed"), pressed.textContent, byId("shown").textContent, location.hash,
                   [...document.querySelectorAll("#list li")].map((item) => item.dataset.verdict)];
    }
    document.body.dataset.seen = JSON.stringify(seen);"""
    dom = driven(page, tmp_path, note, "model=0&benchmark=math500")  # all of whose 90 samples are on the page
    others = {
        "all": lambda s: True,
        "ungraded": lambda s: s["verdict"] in UNGRADED,
        "truncated": lambda s: s["finish"] == "length",
        "disagree": disagree,
    }
    seen = noted(dom)
    assert set(seen) == {"correct", "wrong", "no_answer", *others}
    for key, (pressed, name, count, address, verdicts) in seen.items():
        passes = others.get(key, lambda s, key=key: s["verdict"] == key)
        expected = [sample["verdict"] for sample in samples(folders[0], "math500") if passes(sample)]
        assert verdicts == expected
        assert expected
        assert (pressed, name.rpartition(" ")[2]) == ("true", str(len(expected)))
        assert key == "all" or f"{len(expected)} of these pass the filter" in count
        assert f"benchmark=math500&verdict={key}" in address


@pytest.mark.slow
def test_what_a_model_wrote_is_shown_as_it_is_and_never_runs(page, folders, tmp_path):
    written = samples(folders[0], "math500")[:5]  # each of the texts
    note = """document.body.dataset.seen = JSON.stringify(%s.map((sample) => {
      change({ sample });
      const facts = [...byId("facts").children].map((pair) => [...pair.children].map((cell) => cell.textContent));
      return [byId("response").textContent, byId("prompt").textContent, Object.fromEntries(facts)];
    }));"""
    keys = json.dumps([f"{sample['row']}.{sample['sample']}" for sample in written])
    dom = driven(page, tmp_path, note % keys, "benchmark=math500")
    assert "<title>Evaluation: first, second</title>" in dom
    for sample, (response, prompt, facts) in zip(written, noted(dom), strict=True):
        assert (response, prompt) == (well_formed(sample["response"]), sample["prompt"])
        assert facts["seed"] == str(sample["seed"])  # above 2^53
        assert (facts["gold"], facts["id"]) == (sample["gold"], sample["id"])
        assert facts["verdict"] == sample["verdict"].replace("_", " ")
        assert facts["plain math-verify"] == sample["plain"].replace("_", " ")
        assert f"{sample['response_tokens']:,} tokens" in facts["response"]
    assert {"</script>" in s["response"] for s in written} == {True, False}
    assert any("\u2028" in s["response"] for s in written)


def test_the_file_holds_one_script_and_reaches_for_nothing(page):
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]*>", text) == ['<script type="application/json" id="data">', "<script>"]
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert not re.search("[<>&\u2028\u2029]", data)
    assert json.loads(data)[0]["benchmarks"]["aime24"]["total"] == 240
    assert list(json.loads(data)[0]) == ["name", "benchmarks"], "nothing is sorted: the first benchmark is shown first"
    assert not re.search(r'https?://|@import|url\(|\ssrc="(?!data:)', text.replace(data, ""))


def test_a_script_that_got_into_the_page_would_not_run(page, tmp_path):
    """The policy is the second lock: the page's own script runs by its hash, any other does not."""
    copy = tmp_path / "page.html"
    bad = "<script>document.title = 'taken'</script></body>"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", bad), encoding="utf-8")
    dom, console = opened(copy, tmp_path)
    assert "<title>Evaluation: first, second</title>" in dom
    assert len(listed(dom)) == 100
    assert any("Content Security Policy" in line for line in console)


@pytest.mark.slow
def test_keys_buttons_and_search_change_what_is_shown_and_the_address(page, folders, tmp_path):
    press = "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true}));"
    dom = driven(page, tmp_path, press % "ArrowRight" * 3 + press % "ArrowLeft", "benchmark=math500&verdict=wrong")
    wrong = [s for s in samples(folders[0], "math500") if s["verdict"] == "wrong"]
    assert shown(dom, "position") == f"3 of {len(wrong)}"
    assert shown(dom, "response") == well_formed(wrong[2]["response"])

    search = "const q = document.getElementById('query'); q.value = 'ONERROR='; q.dispatchEvent(new Event('input'));"
    dom = driven(page, tmp_path, search, "benchmark=math500")
    assert len(listed(dom)) == sum("onerror=" in s["response"] for s in samples(folders[0], "math500"))
    assert listed(dom)
    assert not listed(driven(page, tmp_path, search.replace("ONERROR", "nowhere"), "benchmark=math500"))


def test_the_disagreements_are_counted_with_a_link_to_the_filter_that_shows_them(page, folders):
    text = page.read_text(encoding="utf-8")
    links = [unescape(link) for link in re.findall(r'href="(#model=[^"]+)"', text)]
    counts = {}
    for i, folder in enumerate(folders):
        for key in ResultsFolder.read(folder).lines:
            ours = [sample["verdict"] == "correct" for sample in samples(folder, key) if disagree(sample)]
            counts |= {f"#model={i}&benchmark={key}&verdict=disagree": ours} if ours else {}
    assert links == list(counts)
    for link, ours in counts.items():
        row = text[text.index(link.replace("&", "&amp;")) :].partition("</tr>")[0]
        assert re.findall(r'num">(\d+)<', row)[1:] == [str(sum(ours)), str(len(ours) - sum(ours))]


def test_what_is_chosen_holds_every_failure_and_is_even_beyond(folders):
    samples = ResultsFolder.read(folders[0]).lines["aime24"]
    must = [line for line in samples if line.disagree or line.verdict in UNGRADED]
    chosen = choose(samples, 100)
    assert len(chosen) == len(set(chosen)) == 100
    assert chosen == choose(samples, 100) == sorted(chosen, key=lambda line: (line.row, line.sample))
    assert set(must) <= set(chosen)
    rest = [line for line in chosen if line not in must]
    kinds = Counter((line.verdict, line.truncated) for line in rest)
    there = Counter((line.verdict, line.truncated) for line in samples if line not in must)
    cut = [kinds[kind] for kind in there if kinds[kind] < there[kind]]
    assert set(kinds) == set(there)
    assert max(cut) - min(cut) <= 1
    assert len({line.row for line in rest if line.verdict == "correct"}) > 5  # not the first questions alone
    assert choose(samples, 10_000) == samples
    few = choose(samples, 5)
    assert len(few) == 5
    assert set(few) <= set(must)
    assert {line.verdict for line in samples} == set(VERDICTS)
    kinds = [("timeout", "timeout")] * 60 + [("correct", "wrong")] * 20 + [("correct", None)] * 220
    every = [Line(i, 0, verdict, plain, False, 10, b"") for i, (verdict, plain) in enumerate(kinds)]
    assert Counter(line.row < 80 for line in choose(every, 90)) == {True: 80, False: 10}, "failures before evenness"


def test_what_cannot_be_reported_is_refused_by_name_and_leaves_the_old_page(folders, tmp_path):
    out = tmp_path / "out.html"
    with pytest.raises(ValueError, match="1 to 8 results folders, not 0"):
        write_report([], out)
    assert not out.exists()
    write_report(folders[:1], out)
    before = out.read_bytes()
    with pytest.raises(ValueError, match=r"nowhere: no results\.json; is this the folder of an evaluation"):
        write_report([*folders, tmp_path / "nowhere"], out)
    copy = shutil.copytree(folders[0], tmp_path / "first")
    write_report([folders[0], copy], tmp_path / "of one name.html")
    text = (tmp_path / "of one name.html").read_text(encoding="utf-8")
    assert f"<title>Evaluation: {folders[0]}, {copy}</title>" in text
    path = copy / "math500" / "samples.jsonl"
    lines = path.read_bytes()
    for damaged, message in [
        (lines[: lines[:-1].rindex(b"\n") + 1], r"holds 89 samples, .* counts 90"),
        (lines[:-20], r"holds 89 samples, .* counts 90"),
        (lines.replace(b'"wrong"', b'"wronk"'), r"verdicts are correct, wrong, .*, not 'wronk'"),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            write_report([copy], out)
    path.unlink()
    with pytest.raises(ValueError, match=r"math500/samples\.jsonl holds 0 samples"):
        write_report([copy], out)
    assert out.read_bytes() == before
    write_report(folders[:1], out)
    assert out.read_bytes() == before, "the same results make the same page"
