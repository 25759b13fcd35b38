"""Results folders as an evaluation leaves them, made up: for the tests of what is built from them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

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


def estimate(values: list[float]) -> dict:
    """Of one value a question: mean, and an interval from the spread."""
    mean = sum(values) / len(values)
    half = 1.96 * math.sqrt(sum((v - mean) ** 2 for v in values)) / len(values)
    return {"value": mean, "low": max(0.0, mean - half), "high": min(1.0, mean + half)}


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
            tokens = (
                3000
                if finish == "length"
                else min(2999, int(rng.lognormvariate(6.1 + (verdict != "correct") * 0.5, 0.5)))
            )
            other = verdict
            if rng.random() < 0.05:
                other = "wrong" if verdict == "correct" else "correct"
            lines.append(
                {
                    "row": row,
                    "sample": sample,
                    "id": f"{rng.getrandbits(128):032x}",
                    "seed": 2**62 + 1 + row * samples + sample,
                    "question": f"Question {row} of {key}?",
                    "prompt": f"<|im_start|>user\nQuestion {row} of {key}: what is $\\sqrt{{{gold}^2}}$?<|im_end|>\n",
                    "gold": gold,
                    "response": TEXTS[(row * samples + sample) % len(TEXTS)] % gold,
                    "extracted": None if verdict == "no_answer" else gold if verdict == "correct" else gold + "1",
                    "verdict": verdict,
                    "sound": None,
                    "plain": other if plain else None,
                    "prompt_tokens": 40,
                    "response_tokens": tokens,
                    "finish": finish,
                    "group": "Algebra <&>",
                }
            )
    return lines


def summarised(key: str, lines: list[dict], rows: int, official: int | None, samples: int) -> dict:
    by_row: dict[int, list[dict]] = {}
    for line in lines:
        by_row.setdefault(line["row"], []).append(line)
    right = [sum(line["verdict"] == "correct" for line in those) for those in by_row.values()]
    ks = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    solved = lambda k: [1 - math.comb(samples - c, k) / math.comb(samples, k) for c in right]
    share = lambda field, value: sum(line[field] == value for line in lines) / len(lines)
    plain = None
    if lines[0]["plain"] is not None:
        score = [sum(line["plain"] == "correct" for line in those) / samples for those in by_row.values()]
        differ = sum((line["plain"] == "correct") != (line["verdict"] == "correct") for line in lines)
        plain = {**estimate(score), "disagreements": differ}
    tokens = sorted(line["response_tokens"] for line in lines)
    whole = official is None or official == rows
    return {
        "title": TITLES[key],
        "group": next(group for group, keys in GROUPS.items() if key in keys),
        "source": f"data/{key}.jsonl",
        "fingerprint": key.encode().hex()[:16],
        "questions": len(by_row),
        "rows": rows,
        "official_rows": official,
        "samples": samples,
        "verifier": "math",
        "temperature": 0.6,
        "top_p": 1.0,
        "max_tokens": 3000,
        "avg": {"k": samples, **estimate([c / samples for c in right])},
        "pass": {str(k): estimate(solved(k)) for k in ks},
        "maj": {str(k): estimate([float(c > samples / 3) for c in right]) for k in ks if k >= 4},
        "rates": {
            "truncated": share("finish", "length"),
            **{name: share("verdict", name) for name in ("no_answer", "timeout", "error")},
        },
        "lucky_guess_rate": None,
        "by_group": {"Algebra <&>": {"questions": len(by_row), **estimate([c / samples for c in right])}},
        "plain": plain,
        "tokens": {
            "prompt": 40 * len(lines),
            "response": sum(tokens),
            "response_mean": sum(tokens) / len(tokens),
            "response_p95": tokens[int(0.95 * (len(tokens) - 1))],
        },
        "seconds": 12.3,
        "notes": [] if whole else [f"{rows} rows, {official} are official"],
    }


def make_results(
    folder: Path, asked: dict[str, tuple[int, int, int | None, int]], not_run=None, skill=0.5, seed=0, plain=("aime24",)
) -> dict:
    """Write the folder. asked: benchmark -> (questions, rows, official rows, samples); not_run: benchmark -> reason."""
    benchmarks = {}
    for key, (questions, rows, official, samples) in asked.items():
        lines = make_samples(key, questions, samples, skill, key in plain, seed)
        (folder / key).mkdir(parents=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / key / "samples.jsonl").write_text(text, encoding="ascii")
        benchmarks[key] = summarised(key, lines, rows, official, samples)

    def mean(keys: list[str]) -> dict:
        run = [key for key in keys if key in benchmarks]
        if not run:
            return {"value": None, "low": None, "high": None, "benchmarks": []}
        bounds = {b: sum(benchmarks[k]["avg"][b] for k in run) / len(run) for b in ("value", "low", "high")}
        return {**bounds, "benchmarks": run}

    missing = {key: {"title": TITLES[key], "reason": reason} for key, reason in (not_run or {}).items()}
    every = list(asked) + list(missing)
    results = {
        "format": 1,
        "name": folder.name,
        "complete": all(b["questions"] == (b["official_rows"] or b["rows"]) for b in benchmarks.values()),
        "record": {
            "model": {
                "path": f"runs/{folder.name}/checkpoint-120",
                "hash": "5f0c" * 10,
                "revision": None,
                "run": folder.name,
                "step": 120,
                "mlflow_run_id": None,
            },
            "template": {"name": "qwen_math", "system": None, "fingerprint": "a1b2c3d4"},
            "engine": {"name": "transformers", "dtype": "float32", "batch_tokens": 16384, "reproducible": None},
            "seed": seed,
            "versions": {"exgrpo_orlhf": "0.1.0", "torch": "2.13.0", "transformers": "5.15.0", "python": "3.11.9"},
            "hardware": {"cpu": "2 cores", "gpu": None, "memory_gib": 8},
            "git_commit": "9a6dcf7",
            "command": f"evals/run_bench.py --model runs/{folder.name} --out results/{folder.name} --limit <n> & more",
            "started": "2026-03-01T10:00:00+00:00",
            "finished": "2026-03-01T10:21:07+00:00",
        },
        "benchmarks": benchmarks,
        "not_run": missing,
        "means": {
            "macro": mean(every),
            "micro": {**mean(every), "questions": sum(b["questions"] for b in benchmarks.values())},
            "groups": {
                group: {**mean([k for k in keys if k in every]), "of": [k for k in keys if k in every]}
                for group, keys in GROUPS.items()
            },
        },
    }
    (folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    return results
