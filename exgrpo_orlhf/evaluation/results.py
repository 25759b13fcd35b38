"""Compute results.json from graded samples, and metrics from results.json."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..questions.text import normalised_answer
from .folder import FORMAT
from .samples import Sample, SampleFile
from .statistics import avg_at_k, interval, intervals, macro_mean, maj_at_k, micro_mean, pass_at_k

_MAJORITY_FROM = 4  # samples
_MOST_GROUPS = 64  # with more, the column tells questions apart rather than groups
Array = npt.NDArray[np.float64]


def summarise(
    name: str,
    record: Mapping[str, Any],
    facts: Mapping[str, Mapping[str, Any]],
    not_run: Mapping[str, Mapping[str, str]],
    files: Mapping[str, SampleFile],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """The content of results.json.

    A response that could not be graded counts as not solved, and its rate stands beside the score. A mean names the
    benchmarks in it; what was not run is in none.

    Args:
        record: what was evaluated, and with what.
        facts: benchmark -> what its entry says besides what is measured here.
        not_run: benchmark -> title, group and reason.
        files: benchmark -> its samples.
        seconds: benchmark -> wall time of its responses.
    """
    measured = {benchmark: _Measured.of(files[benchmark]) for benchmark in facts}
    benchmarks = {
        benchmark: {
            **facts[benchmark],
            **each.summary(_rng(benchmark)),
            "seconds": round(seconds.get(benchmark, 0.0), 1),
        }
        for benchmark, each in measured.items()
    }
    groups = {known["group"]: known["of_group"] for known in facts.values()}
    scores = {benchmark: each.score for benchmark, each in measured.items()}
    return {
        "format": FORMAT,
        "name": name,
        "complete": not not_run and all(known["whole"] for known in facts.values()),
        "record": dict(record),
        "benchmarks": benchmarks,
        "not_run": dict(not_run),
        "means": {
            "macro": _mean(scores, list(scores), "macro"),
            "micro": {**_mean(scores, list(scores), "micro"), "questions": sum(map(len, scores.values()))},
            "groups": {
                group: {**_mean(scores, [b for b in of if b in scores], "macro"), "of": list(of)}
                for group, of in groups.items()
            },
        },
    }


def metrics(results: Mapping[str, Any], means: bool = True) -> dict[str, float]:
    """Metrics by their MLflow names: eval/<benchmark>/avg_at_32, pass_at_8, maj_at_32, rates; eval/avg: macro mean.

    A mean is left out unless every benchmark that its name stands for was run whole.
    """
    found: dict[str, float] = {}
    for benchmark, known in results["benchmarks"].items():
        prefix = f"eval/{benchmark}"
        average = f"{prefix}/avg_at_{known['avg']['k']}"
        found |= {average: known["avg"]["value"], f"{average}_low": known["avg"]["low"]}
        found[f"{average}_high"] = known["avg"]["high"]
        for kind in ("pass", "maj"):
            found |= {f"{prefix}/{kind}_at_{k}": each["value"] for k, each in known[kind].items() if k != "1"}
        found |= {f"{prefix}/{rate}_rate": value for rate, value in known["rates"].items()}
        found[f"{prefix}/response_tokens"] = known["tokens"]["response_mean"]
        if known["plain"]:
            found[f"{prefix}/plain_avg_at_{known['avg']['k']}"] = known["plain"]["value"]
    if not means:
        return found
    whole = {benchmark for benchmark, known in results["benchmarks"].items() if known["whole"]}
    if results["complete"]:
        found["eval/avg"] = results["means"]["macro"]["value"]
        found["eval/micro_avg"] = results["means"]["micro"]["value"]
    for group, mean in results["means"]["groups"].items():
        if set(mean["of"]) <= whole:
            found[f"eval/avg_{group}"] = mean["value"]
    return found


@dataclass
class _Measured:
    """The samples of a benchmark: arrays (Q, n), questions in the order of the set.

    keys: the answers as majority voting compares them, None for no answer
    """

    correct: Array
    plain: Array | None
    keys: list[list[str | None]]
    groups: list[str | None]
    verdicts: list[str]
    finishes: list[str]
    sound: list[bool]
    prompt_tokens: int
    response_tokens: list[int]

    @classmethod
    def of(cls, file: SampleFile) -> _Measured:
        by_row: dict[int, list[Sample]] = defaultdict(list)
        verdicts, finishes, sound, response_tokens, prompt_tokens = [], [], [], [], 0
        for sample in file.read():
            slim = {**sample, "question": "", "prompt": "", "response": ""}  # the texts may be gigabytes
            by_row[sample["row"]].append(slim)  # type: ignore[arg-type]
            verdicts.append(sample["verdict"])
            finishes.append(sample["finish"])
            response_tokens.append(sample["response_tokens"])
            prompt_tokens += sample["prompt_tokens"]
            if sample["verdict"] == "correct" and sample["sound"] is not None:
                sound.append(sample["sound"])
        rows = [sorted(by_row[row], key=lambda sample: sample["sample"]) for row in sorted(by_row)]
        asked = all(sample["plain"] is not None for row in rows for sample in row)
        return cls(
            np.array([[sample["verdict"] == "correct" for sample in row] for row in rows], float),
            np.array([[sample["plain"] == "correct" for sample in row] for row in rows], float) if asked else None,
            [[_key(sample) for sample in row] for row in rows],
            [row[0]["group"] for row in rows],
            verdicts,
            finishes,
            sound,
            prompt_tokens,
            response_tokens,
        )

    @property
    def score(self) -> Array:
        """The share of correct samples of each question, (Q,)."""
        return avg_at_k(self.correct)

    def summary(self, rng: np.random.Generator) -> dict[str, Any]:
        n, total = self.correct.shape[1], len(self.verdicts)
        counts = self.correct.sum(1)
        truncated = [finish == "length" for finish in self.finishes]
        correct = [verdict == "correct" for verdict in self.verdicts]
        answered = any(key is not None for keys in self.keys for key in keys)
        ks = _powers(n)
        voting = [k for k in ks if k >= _MAJORITY_FROM] if answered else []
        rows = [self.score, *(pass_at_k(counts, n, k) for k in ks)]
        rows += [maj_at_k(self.keys, self.correct, k) for k in voting]
        if self.plain is not None:
            rows.append(avg_at_k(self.plain))
        estimates = [asdict(each) for each in intervals(np.array(rows), rng)]
        average, passed, voted = estimates[0], estimates[1 : 1 + len(ks)], estimates[1 + len(ks) :]
        plain = None
        if self.plain is not None:
            plain = {**estimates[-1], "disagreements": int((self.plain != self.correct).sum())}
        return {
            "avg": {"k": n, **average},
            "pass": dict(zip(map(str, ks), passed, strict=True)),
            "maj": dict(zip(map(str, voting), voted, strict=False)),
            "rates": {
                "truncated": truncated.count(True) / total,
                "correct_truncated": sum(right and cut for right, cut in zip(correct, truncated, strict=True)) / total,
                **{verdict: self.verdicts.count(verdict) / total for verdict in ("no_answer", "timeout", "error")},
            },
            "lucky_guess_rate": self.sound.count(False) / len(self.sound) if self.sound else None,
            "by_group": self._by_group(rng),
            "plain": plain,
            "tokens": {
                "prompt": self.prompt_tokens,
                "response": sum(self.response_tokens),
                "response_mean": float(np.mean(self.response_tokens)),
                "response_p95": float(np.percentile(self.response_tokens, 95)),
            },
        }

    def _by_group(self, rng: np.random.Generator) -> dict[str, dict[str, Any]]:
        names = sorted({group for group in self.groups if group is not None})
        if not names or len(names) > _MOST_GROUPS:
            return {}
        members = {name: np.array([group == name for group in self.groups]) for name in names}
        return {
            name: {"questions": int(mine.sum()), **asdict(interval(self.score[mine], rng))}
            for name, mine in members.items()
        }


def _mean(scores: Mapping[str, Array], of: Sequence[str], kind: str) -> dict[str, Any]:
    mean = micro_mean if kind == "micro" else macro_mean
    return {**asdict(mean([scores[benchmark] for benchmark in of], _rng(kind))), "benchmarks": list(of)}


def _key(sample: Sample) -> str | None:
    return None if sample["extracted"] is None else normalised_answer(sample["extracted"])


def _powers(n: int) -> list[int]:
    """1, 2, 4 … up to n, and n itself."""
    return sorted({*(1 << i for i in range(n.bit_length())), n})


def _rng(name: str) -> np.random.Generator:
    """A generator by name: the same samples have the same intervals, whatever other benchmarks there are."""
    return np.random.default_rng(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big"))
