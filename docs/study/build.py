#!/usr/bin/env python
"""Run the project's study of experience replay, or write its pages again from its figures.

    python docs/study/build.py --jobs 2               # hours; Ctrl-C stops it, the same command continues it
    python docs/study/build.py --only study_weak      # one part of it
    python docs/study/build.py --document             # seconds: the pages from the files in docs/study/

Each part is a suite of docs/study/suites/. scripts/ablate.py runs it, scripts/compare.py reads its runs from MLflow and
writes docs/study/<part>.csv and <part>_curves.csv; some parts also have <part>.png, <part>_quarters.csv or
<part>_forgetting.csv. Rows of variants that a suite had once stay in its files. Parts that compare runs of several
suites are made from those files (combined.py).
The texts of docs/study.md, docs/study/appendix.md and docs/choosing.md are docs/study/*.md.in; their places are filled
with these figures (document.py). docs/paired_seeds.png is drawn from them too, docs/study/pays.png from pays_runs.csv,
the runs of plan_pays.md, and docs/study/controls.png from controls_runs.csv and prefixes_rarer_runs.csv.
Exit status: 0, that of scripts/ablate.py or scripts/compare.py where one of them fails, 2 for a place in the text that
has no figure, 128 + n where signal n stopped it.
"""

from __future__ import annotations

import argparse
import csv
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import combined
import controls
import forgetting
import paired_seeds
import pays
import quarters
from document import Document, DocumentError

from exgrpo_orlhf.io.files import write
from exgrpo_orlhf.show.tables import csv_text

FIGURES = Path(__file__).resolve().parent
ROOT = FIGURES.parent.parent
GREEDY, SAMPLED = "eval/greedy_accuracy", "eval/validation/avg_at_4"
LUCK = ("reward/lucky_guess_rate", "replay/lucky_guess_rate")
SIGNAL = "reward/groups_with_signal"
# Text in docs/study/ -> page in docs/.
PAGES = {"study.md.in": "study.md", "appendix.md.in": "study/appendix.md", "choosing.md.in": "choosing.md"}
PAIRED_SEEDS = ROOT / "docs" / "paired_seeds.png"
# Part -> the metric it is judged by, and other metrics that its CSV file keeps.
PARTS = {
    "study_normal": (GREEDY,),
    "study_weak": (GREEDY,),
    "study_slips": (SAMPLED,),
    "study_cures_weak": (GREEDY, *LUCK),
    "study_normal_k4": (GREEDY, SIGNAL),
    "study_ours": (GREEDY,),
    "study_weak_k4": (GREEDY, SIGNAL),
    "study_slips_k4": (SAMPLED, SIGNAL),
    "study_difficulty": (GREEDY, SIGNAL),
    "study_rates_normal": (GREEDY,),
    "study_rates_weak": (GREEDY,),
    "study_baselines_normal": (GREEDY,),
    "study_ablations_normal": (GREEDY,),
    "study_ablations_weak": (GREEDY,),
    "study_overlong": (GREEDY, LUCK[0], "rollout/response_tokens"),
    "study_rare": (GREEDY, SIGNAL, *LUCK),
    "study_rare_rates": (GREEDY, SIGNAL, LUCK[0]),
    "study_rare_parts": (GREEDY, SIGNAL, *LUCK, "replay/injected"),
    "study_rare_ablations": (GREEDY, SIGNAL, *LUCK),
    "study_rare_others": (GREEDY, SIGNAL, *LUCK, "replay/injected"),
    "study_rare_failures": (GREEDY, SIGNAL, *LUCK),
    "study_weak_tuned": (GREEDY, SIGNAL, *LUCK, "replay/injected"),
    "study_weak_controls": (GREEDY, SIGNAL, LUCK[0]),
    "study_ahead_quickstart": (GREEDY,),
    "study_ahead_rare": (GREEDY,),
}
PICTURES = ("study_weak_tuned",)  # parts whose curves docs/study.md shows, beside combined.PICTURES
QUARTERS = ("study_normal", "study_weak", "study_slips")  # parts with replay metrics for each quarter of the run
# Parts with the shares of forgotten and recovered questions.
FORGETTING = ("study_rare", "study_rare_rates", "study_weak_tuned", "study_weak_controls")
REGIMES = {  # regimes whose lucky guesses are measured
    "normal": ["base.gin"],
    "weak": ["base.gin", "models/chain_weak.gin"],
    "slips": ["base.gin", "models/chain_slips.gin"],
}


def main() -> int:
    arguments = _parser().parse_args()
    parts = arguments.only or list(PARTS)
    if not arguments.document:
        for part in parts:
            if status := _run(part, arguments.jobs):
                return status
        if not arguments.only:
            _luck()

    try:
        combined.make(FIGURES)
    except (KeyError, OSError) as error:
        print(f"error: docs/study/combined.py: {error}", file=sys.stderr)
        return 2
    document, pages = Document(FIGURES), {}
    for text, page in PAGES.items():
        try:
            pages[page] = document.fill((FIGURES / text).read_text(encoding="utf-8"))
        except (DocumentError, OSError) as error:
            print(f"error: docs/study/{text}: {error}", file=sys.stderr)
            return 2
    for page, filled in pages.items():
        write(ROOT / "docs" / page, filled)
        print(f"wrote docs/{page}", file=sys.stderr)
    if (FIGURES / f"{paired_seeds.PART}.csv").exists():
        write(PAIRED_SEEDS, paired_seeds.picture(document))
    write(FIGURES / "pays.png", pays.picture())
    write(FIGURES / "controls.png", controls.picture())
    return 0


def _run(part: str, jobs: int | None) -> int:
    from exgrpo_orlhf import config

    if part == "study_baselines_normal" and (status := _experience(jobs)):
        return status
    if status := _ablate(part, jobs):
        return status
    if part in QUARTERS:
        write(FIGURES / f"{part}_quarters.csv", csv_text(quarters.HEAD, quarters.rows(ROOT / "runs" / part)))
    if part in FORGETTING:
        write(FIGURES / f"{part}_forgetting.csv", csv_text(forgetting.HEAD, forgetting.rows(ROOT / "runs" / part)))
    metric, *others = PARTS[part]
    suite = config.load_suite(f"docs/study/suites/{part}.gin")
    compare = ["compare.py", "--group", part, "--baseline", str(suite.baseline), "--metric", metric]
    more = [word for name in others for word in ("--metric", name)]
    picture = ("--png", str(FIGURES / f"{part}.png")) if part in PICTURES else ()
    files = {"--curves": FIGURES / f"{part}_curves.csv", "--csv": FIGURES / f"{part}.csv"}
    removed = {file: rows_of_removed(file, suite.variants) for file in files.values()}
    status = _script(*compare, "--curves", str(files["--curves"]), *picture)
    if status := status or _script(*compare, *more, "--csv", str(files["--csv"])):
        return status
    for file, rows in removed.items():
        write(file, file.read_text(encoding="utf-8") + "".join(rows))
    return 0


def rows_of_removed(file: Path, variants: Collection[str]) -> list[str]:
    """Lines of the file that are of variants which its suite had once: their settings are gone, and nothing makes them
    again. variants: that it has"""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [line for row, line in zip(csv.DictReader(lines), lines[1:], strict=True) if row["variant"] not in variants]


def _experience(jobs: int | None) -> int:
    """Make what RLEP and LUFFY start from: the buffer of a finished run, and a correct solution of every question."""
    from exgrpo_orlhf import config
    from exgrpo_orlhf.testbed.modular_chains import right_reasoning
    from exgrpo_orlhf.training.initial_buffer import write_experts

    experts = ROOT / "runs" / "study_experience" / "experts.jsonl"
    experts.parent.mkdir(parents=True, exist_ok=True)
    questions = config.load(["base.gin"]).questions.load()
    write_experts(experts, ((question, right_reasoning(question.prompt)) for question in questions))
    return _ablate("study_experience", jobs)


def _ablate(suite: str, jobs: int | None) -> int:
    chosen = [] if jobs is None else ["--jobs", str(jobs)]
    return _script("ablate.py", "--suite", f"docs/study/suites/{suite}.gin", *chosen)


def _script(name: str, *arguments: str) -> int:
    print(f"\n{name} {' '.join(arguments)}", file=sys.stderr, flush=True)
    stopped_by: list[int] = []

    def hand_on(number: int, frame: object) -> None:
        stopped_by.append(number)
        process.send_signal(number)

    # Ctrl-C reaches the script too: it lets its runs finish their step and save.
    before = signal.signal(signal.SIGINT, lambda number, frame: stopped_by.append(number))
    try:
        process = subprocess.Popen([sys.executable, str(ROOT / "scripts" / name), *arguments], cwd=ROOT)
        terminated = signal.signal(signal.SIGTERM, hand_on)
        status = process.wait()
        signal.signal(signal.SIGTERM, terminated)
    finally:
        signal.signal(signal.SIGINT, before)
    if status < 0:  # killed by a signal
        return 128 - status
    # The script may have ended with status 0 in spite of the signal. The next one must not start even then.
    return status or (128 + stopped_by[0] if stopped_by else 0)


def _luck() -> None:
    """Write luck.csv: detectors of lucky guesses, for the initial policy and for the final replay buffers."""
    import luck

    from exgrpo_orlhf import checkpoints, config

    rows = []
    for regime, files in REGIMES.items():
        for what, responses in zip(("sampled", "unmastered"), luck.sampled(config.load(files)), strict=True):
            rows.append({"regime": regime, "what": what, "seed": 0, **responses.row()})
        for variant in ("paper", "ours"):
            for run in sorted((ROOT / "runs" / f"study_{regime}" / variant).glob("seed*")):
                newest = max(checkpoints.find(run).items())[1]
                responses, seed = luck.stored(config.load(files), newest), run.name.removeprefix("seed")
                rows.append({"regime": regime, "what": variant, "seed": seed, **responses.row()})
    write(FIGURES / "luck.csv", csv_text(luck.HEAD, rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, help="runs at a time (default: as scripts/ablate.py)")
    parser.add_argument("--only", action="append", choices=list(PARTS), metavar="PART", help="repeatable")
    parser.add_argument("--document", action="store_true", help="run nothing")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # between two scripts
        sys.exit(128 + signal.SIGINT)
