"""Results folders as an evaluation leaves them, with made-up samples."""

from __future__ import annotations

import random
from pathlib import Path

from exgrpo_orlhf.evaluation.benchmarks import Benchmark
from exgrpo_orlhf.evaluation.sets import BenchmarkSet
from exgrpo_orlhf.io.files import write_json
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.tracking.samples import SampleFile
from exgrpo_orlhf.tracking.scores import summarise

TITLES = {
    "aime24": "AIME24",
    "aime25": "AIME25",
    "amc": "AMC",
    "math500": "MATH-500",
    "minerva": "Minerva",
    "olympiad": "OlympiadBench",
    "arc_c": "ARC-c",
    "gpqa": "GPQA-Diamond",
    "mmlu_pro": "MMLU-Pro",
}
GROUPS = {"math": list(TITLES)[:6], "general": list(TITLES)[6:]}
TEXTS = [
    "Let $x = \\frac{1}{2}$ & note that $x^2 < 1$; so \\boxed{%s}",
    "Zeilen\u2028trennen\u2029sich: ½ × ∑ → “%s” 数学 🎲",
    "</script><script>alert(1); document.title = 'taken'</script><!-- \\(%s\\) {{data}}",
    "<img src=x onerror=\"document.title='taken'\"> then $$\\int_0^1 t\\,dt$$ gives %s",
    "half a pair \ud835 and a tab\tbefore \\text{%s}",
]


def line(row: int, sample: int, verdict: str, **fields: object) -> dict:
    """A line of samples.jsonl."""
    texts = {"question": "q", "prompt": "p", "gold": "g", "response": "r", "extracted": None}
    counts = {"prompt_tokens": 5, "response_tokens": 1, "finish": "stop"}
    rest = {"verdict": verdict, "sound": None, "plain": None, "group": None, "seed": 8 * row + sample}
    return {"row": row, "sample": sample, "id": f"{row:032x}", **texts, **counts, **rest, **fields}


def make_samples(key: str, questions: int, samples: int, skill: float, plain: bool, seed: int) -> list[dict]:
    rng = random.Random(f"{key} {seed}")
    lines = []
    for row in range(questions):
        easy = min(0.97, max(0.02, rng.gauss(skill, 0.3)))
        for sample in range(samples):
            chance = rng.random()
            rest = 1 - easy
            bounds = [easy, easy + 0.7 * rest, easy + 0.95 * rest, easy + 0.985 * rest]
            verdict = ("correct", "wrong", "no_answer", "timeout", "error")[sum(chance >= bound for bound in bounds)]
            gold = str(rng.randint(0, 999))
            finish = "length" if verdict == "no_answer" and rng.random() < 0.7 else "stop"
            drawn = 3000 if finish == "length" else rng.lognormvariate(6.1 + (verdict != "correct") * 0.5, 0.5)
            other = verdict
            if rng.random() < 0.05:
                other = "wrong" if verdict == "correct" else "correct"
            fields = {
                "id": f"{rng.getrandbits(128):032x}",
                "seed": 2**62 + 1 + row * samples + sample,
                "prompt": f"<|im_start|>user\nQuestion {row} of {key}: what is $\\sqrt{{{gold}^2}}$?<|im_end|>\n",
                "gold": gold,
                "response": TEXTS[(row * samples + sample) % len(TEXTS)] % gold,
                "extracted": None if verdict == "no_answer" else gold if verdict == "correct" else gold + "1",
                "plain": other if plain else None,
                "response_tokens": int(drawn) if finish == "length" else min(2999, int(drawn)),
                "finish": finish,
                "group": "Algebra <&>",
            }
            lines.append(line(row, sample, verdict, **fields))
    return lines


def make_results(
    folder: Path, sizes: dict[str, tuple[int, int, int | None, int]], not_run=None, skill=0.5, seed=0, plain=("aime24",)
) -> dict:
    """Write the folder. sizes: benchmark -> (questions, rows, official rows, samples); not_run: benchmark -> reason."""
    missing = {key: {"title": TITLES[key], "reason": reason} for key, reason in (not_run or {}).items()}
    every = [*sizes, *missing]
    files, facts = {}, {}
    for key, (questions, rows, official, samples) in sizes.items():
        files[key] = SampleFile(folder / key / "samples.jsonl")
        files[key].write(make_samples(key, questions, samples, skill, key in plain, seed))
        group = next(group for group, keys in GROUPS.items() if key in keys)
        benchmark = Benchmark(key, TITLES[key], "math", samples, 0.6, 1.0, 3000, group=group, rows=official)
        asked = tuple((row, Question.make(key, f"Question {row} of {key}?", "1")) for row in range(questions))
        notes = () if official in (None, rows) else (f"{rows} rows, {official} are official",)
        test_set = BenchmarkSet(benchmark, asked, rows, f"data/{key}.jsonl", notes)
        facts[key] = test_set.facts(None, [each for each in GROUPS[group] if each in every])
    record = {
        "model": {"path": f"runs/{folder.name}/checkpoint-120", "hash": "5f0c" * 10, "run": folder.name, "step": 120},
        "template": {"name": "qwen_math", "system": None, "fingerprint": "a1b2c3d4"},
        "engine": {"name": "transformers", "dtype": "float32", "batch_tokens": 16384, "reproducible": None},
        "seed": seed,
        "versions": {"exgrpo_orlhf": "0.1.0", "torch": "2.13.0", "transformers": "5.15.0", "python": "3.11.9"},
        "hardware": {"cpu": "2 cores", "gpu": None, "memory_gib": 8},
        "git_commit": "9a6dcf7",
        "command": f"evals/run_bench.py --model runs/{folder.name} --out results/{folder.name} --limit <n> & more",
        "started": "2026-03-01T10:00:00+00:00",
        "finished": "2026-03-01T10:21:07+00:00",
    }
    results = summarise(folder.name, record, facts, missing, files, dict.fromkeys(sizes, 12.3))
    write_json(folder / "results.json", results)
    return results
