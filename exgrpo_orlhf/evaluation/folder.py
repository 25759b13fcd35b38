"""The folder of an evaluation, which is never written under two configurations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG, RESULTS, TIMES, SESSIONS = "config.json", "results.json", "times.jsonl", "sessions.json"
SAMPLES = "samples.jsonl"  # in a folder of each benchmark
GROWS = ("limit", "samples")  # may be raised later: the responses that are there stay what they are


class FolderError(ValueError):
    """A folder that holds an evaluation of something else, or none: says of what."""


def settle(
    folder: Path, common: Mapping[str, Any], benchmarks: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Compare with what the folder was begun with. Returns what is to be written as its configuration.

    common: what every response depends on; benchmarks: by name, what the responses to it depend on, and GROWS
    Raises FolderError that names each difference.
    """
    known = read_config(folder) if (folder / CONFIG).exists() else {"benchmarks": {}}
    known["benchmarks"] = {name: each for name, each in known["benchmarks"].items() if has_samples(folder, name)}
    if not known["benchmarks"]:  # an attempt that ended before its first response binds nobody
        known["common"] = dict(common)
    differences = _differences("", known["common"], common)
    for name, wanted in benchmarks.items():
        before = known["benchmarks"].get(name)
        if before is None:
            continue
        fixed = [{key: value for key, value in each.items() if key not in GROWS} for each in (before, wanted)]
        differences += _differences(f"{name}.", *fixed)
        for key in GROWS:
            if _smaller(wanted[key], before[key]):
                differences.append(f"{name}.{key}: {before[key]} there, {wanted[key]} now: it can only be raised")
    if differences:
        raise FolderError(
            f"{folder} holds an evaluation with another configuration:\n  " + "\n  ".join(differences) + "\n"
            "Give --out another folder, or the same settings"
        )
    return {"common": dict(common), "benchmarks": {**known["benchmarks"], **benchmarks}}


def has_samples(folder: Path, benchmark: str) -> bool:
    path = folder / benchmark / SAMPLES
    return path.exists() and path.stat().st_size > 0


def read_config(folder: Path) -> dict[str, Any]:
    """Raises FolderError where there is none, or where it is no configuration."""
    try:
        known = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if set(known) != {"common", "benchmarks"}:
            raise ValueError("not an evaluation's")
    except FileNotFoundError:
        raise FolderError(f"{folder}: there is no {CONFIG}; is it the folder of an evaluation?") from None
    except (ValueError, TypeError) as error:
        raise FolderError(f"{folder / CONFIG} cannot be read ({error}); remove the folder, or give another") from error
    return known


class Times:
    """Wall time by benchmark over all sessions, killed ones too: a line every second or so."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / TIMES
        self._waiting: dict[str, float] = {}

    def add(self, seconds: float, tokens: Mapping[str, int]) -> None:
        """Seconds that went into the responses of these benchmarks; tokens: of each."""
        total = sum(tokens.values())
        for benchmark, count in tokens.items():
            self._waiting[benchmark] = self._waiting.get(benchmark, 0.0) + seconds * count / max(1, total)
        if sum(self._waiting.values()) >= 1:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            line = json.dumps({name: round(seconds, 4) for name, seconds in self._waiting.items()})
            with self._path.open("a", encoding="ascii") as file:
                file.write(line + "\n")
            self._waiting.clear()

    def totals(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for line in self._path.read_text(encoding="ascii").split("\n") if self._path.exists() else ():
            try:
                seconds = json.loads(line)
            except ValueError:
                continue  # torn by a kill: less than two seconds
            for benchmark, value in seconds.items():
                totals[benchmark] = totals.get(benchmark, 0.0) + value
        return totals


def _differences(prefix: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    for key in sorted({*before, *now}):
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(f"{prefix}{key}.", a, b)
        elif a != b:
            found.append(f"{prefix}{key}: {a!r} there, {b!r} now")
    return found


def _smaller(now: int | None, before: int | None) -> bool:
    """None is no limit."""
    return (float("inf") if now is None else now) < (float("inf") if before is None else before)
