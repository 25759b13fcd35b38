"""The folder of an evaluation: its files, and the configuration under which all of them were made."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..io.json_lines import JsonLines
from ..tracking.samples import SAMPLES, Line, Sample, SampleFile
from ..tracking.scores import FORMAT, RESULTS

log = logging.getLogger(__name__)
CONFIG, TIMES, SESSIONS = "config.json", "times.jsonl", "sessions.json"
GROWS = ("limit", "samples")  # settings that may be raised later: the responses that exist stay valid
Results = dict[str, Any]  # results.json as read


class FolderError(ValueError):
    """A folder that holds no evaluation, or one with another configuration. The message names the difference."""


def settle(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Compare a configuration with the one in the folder.

    Args:
        config: "common" is what every response depends on, "benchmarks" what those to each depend on, and GROWS.
            "model": where the model is, for the message. "suite": names.

    Returns:
        The configuration to write: with what the folder holds of other benchmarks, and the names of its other suites.

    Raises:
        FolderError: names each difference.
    """
    before: dict[str, dict[str, Any]] = {}
    differences, suite = [], config["suite"]
    if begun := with_samples(folder):  # not an attempt that ended before its first response
        earlier = read_config(folder)
        suite = [*dict.fromkeys([*(earlier.get("suite", _in_mean(folder) if suite else ())), *suite])]
        before = {name: entry for name, entry in earlier["benchmarks"].items() if name in begun}
        if earlier["common"]["model"] == {"path": config["model"]}:  # of a server, of which no more was known
            log.warning(
                "%s: the model's name, %s, is all that is known of the model of its responses; give --out another "
                "folder if the server has another checkpoint now",
                *(folder, config["model"]),
            )
            earlier["common"]["model"] = config["common"]["model"]
        differences = _differences("", earlier["common"], config["common"])
        if earlier["common"]["model"] != config["common"]["model"]:
            differences.insert(0, f"the model: {earlier.get('model', 'unknown')} there, {config['model']} now")
    for name, settings in config["benchmarks"].items():
        earlier_settings = {"timeout": settings["timeout"], **before.get(name, settings)}  # older folders lack it
        differences += _differences(f"{name}.", earlier_settings, settings)
    if differences:
        raise FolderError(
            f"{folder} holds an evaluation with another configuration:\n  " + "\n  ".join(differences) + "\n"
            "Give --out another folder, or the same settings"
        )
    return {**config, "suite": suite, "benchmarks": {**before, **config["benchmarks"]}}


def _in_mean(folder: Path) -> list[str]:
    """The benchmarks that the means were over, of a folder from before its suites were noted."""
    path = folder / RESULTS
    entries = _read(path, "give another folder")["benchmarks"] if path.exists() else {}
    return [name for name, entry in entries.items() if entry.get("in_mean", True)]


def with_samples(folder: Path) -> set[str]:
    """The benchmarks of which there are responses."""
    return {path.parent.name for path in folder.glob(f"*/{SAMPLES}") if path.stat().st_size}


def progress(folder: Path) -> str:
    """How many responses there are of those requested: 'chains 6/200 responses, …'. Raises FolderError."""
    parts = []
    for name, settings in read_config(folder)["benchmarks"].items():
        path, rows = folder / name / SAMPLES, settings["rows"]
        lines = path.read_bytes().count(b"\n") if path.exists() else 0
        parts.append(f"{name} {lines:,}/{settings['samples'] * min(settings['limit'] or rows, rows):,} responses")
    return ", ".join(parts)


def read_config(folder: Path) -> dict[str, Any]:
    """Raises FolderError if there is no configuration, or it cannot be read."""
    path = folder / CONFIG
    config = _read(path, "without it nothing says how the responses were made: give another folder")
    if not isinstance(config, dict) or set(config) - {"model", "suite"} != {"common", "benchmarks"}:
        raise FolderError(f"{path} is not the configuration of an evaluation; give another folder")
    return config


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """The sessions that generated the responses, the last one last. Raises FolderError if they cannot be read."""
    path = folder / SESSIONS
    sessions = _read(path, "without it nothing says what generated the responses: give another folder")
    if not isinstance(sessions, list) or not sessions:
        raise FolderError(f"{path} does not hold the sessions of an evaluation; give another folder")
    return sessions


def read_results(folder: Path) -> Results:
    """results.json of an evaluation that has ended. Raises FolderError if there is none, or it cannot be read."""
    path = folder / RESULTS
    if not path.is_file():
        if (folder / CONFIG).is_file():
            raise FolderError(f"{folder}: not complete: {progress(folder)}; the command that began it continues it")
        raise FolderError(f"{folder}: no {RESULTS}; is this the folder of an evaluation that came to its end?")
    results = _read(path, "remove it, and the evaluation's own command computes it from the samples")
    version = results.get("format") if isinstance(results, dict) else None
    if version != FORMAT:
        raise FolderError(f"{path}: format {version!r}; this version reads format {FORMAT}")
    return dict(results)


def _read(path: Path, fix: str) -> Any:
    """Raises FolderError that names the file. fix: what to do about it"""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FolderError(f"{path} does not exist; {fix}") from None
    except ValueError as error:
        raise FolderError(f"{path} is damaged, it is not JSON ({error}); {fix}") from error


@dataclass(frozen=True)
class ResultsFolder:
    """A finished evaluation. lines: benchmark -> its samples without their texts, by row and sample"""

    path: Path
    results: Results
    files: dict[str, SampleFile]
    lines: dict[str, list[Line]]

    @classmethod
    def read(cls, path: Path, without: Collection[str] = ()) -> ResultsFolder:
        """without: benchmarks whose samples are not read.

        Raises FolderError if there are no results, or not as many samples of each question as they count; ValueError.
        """
        results = read_results(path)
        files = {key: SampleFile(path / key / SAMPLES) for key in results["benchmarks"] if key not in without}
        lines = {key: sorted(file.keys) for key, file in files.items()}
        for key, file in files.items():
            counts, benchmark = Counter(line.row for line in lines[key]), results["benchmarks"][key]
            questions, samples = benchmark["questions"], benchmark["samples"]
            if list(counts.values()) != [samples] * questions:
                raise FolderError(
                    f"{file.path} holds {counts.total():,} samples, {RESULTS} counts {questions * samples:,} "
                    f"({samples} for each of {questions} questions): run the evaluation to its end first"
                )
        return cls(path, results, files, lines)

    def samples(self, benchmark: str, lines: Sequence[Line]) -> list[Sample]:
        """These samples with their texts."""
        places = {(line.row, line.sample) for line in lines}
        samples = (sample for sample in self.files[benchmark].read() if (sample["row"], sample["sample"]) in places)
        return sorted(samples, key=lambda sample: (sample["row"], sample["sample"]))


def total_times(folder: Path) -> dict[str, float]:
    """Seconds by benchmark, of all sessions, killed ones too: times.jsonl has a line for each portion of responses."""
    totals: dict[str, float] = defaultdict(float)
    for row in JsonLines(folder / TIMES).read():
        for benchmark, seconds in row.items():
            totals[benchmark] += seconds
    return totals


def _differences(prefix: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    differences = []
    for key in sorted({*before, *now}):
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            differences += _differences(f"{prefix}{key}.", a, b)
        elif key in GROWS:  # None: no limit
            if (math.inf if b is None else b) < (math.inf if a is None else a):
                differences.append(f"{prefix}{key}: {a} there, {b} now: it can only be raised")
        elif a != b:
            differences.append(f"{prefix}{key}: {a!r} there, {b!r} now")
    return differences
