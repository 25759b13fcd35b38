"""What the doctor measures of faults that are planted in replay and in the sync of weights.

    python benchmarks/planted_faults.py                                             # the CPU test layout
    python benchmarks/planted_faults.py --gin gin/engines/openrlhf_1gpu.gin         # on a GPU

The layout is started once. In it the doctor makes its check `replay` of each fault, then `sync` without and with a
sync, and each time without a fault. The last column has deviation and limit of the whole batch's gradient under the
same fault, which is all that the check `gradient` sees.

Goal: each fault deviates by more than twice the limit of its check, and nothing fails without one.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from command_line import finish, make_parser

from exgrpo_orlhf.engines.openrlhf import cpu

ENVIRONMENT = dict(os.environ)  # before any library changes it
if torch.version.cuda is None:  # an actor without a GPU sees no CUDA in a build for CUDA either
    cpu.install()

from exgrpo_orlhf.engines.openrlhf import openrlhf_engine  # noqa: E402
from exgrpo_orlhf.selftest import actors, cluster, parity  # noqa: E402  (after install)
from exgrpo_orlhf.selftest.examination import examine  # noqa: E402
from exgrpo_orlhf.selftest.finding import Finding  # noqa: E402

MARGIN = 2.0  # how many times its check's limit a fault must deviate by
UNSYNCED = "weights not synced"
Experiences = Sequence[Any]  # of the replayed rows, each of one row; tensors are (1, S − 1)


def weight_dropped(stored: Experiences, policy: Sequence[torch.Tensor]) -> None:
    """policy: log-probs of each row's response by the policy that is trained, so that w = 1"""
    for row, logprobs in zip(stored, policy, strict=True):
        row.action_log_probs[row.action_mask.bool()] = logprobs


def scaled(factor: float) -> Callable[..., None]:
    def scale(stored: Experiences, policy: object) -> None:
        for row in stored:
            row.advantages *= factor

    return scale


def other_row(stored: Experiences, policy: object) -> None:
    """Each row has the log-probs of the next, repeated or cut to its length."""
    logprobs = [row.action_log_probs[row.action_mask.bool()] for row in stored]
    for row, others in zip(stored, logprobs[1:] + logprobs[:1], strict=True):
        count = int(row.action_mask.sum())
        row.action_log_probs[row.action_mask.bool()] = others.repeat(-(-count // len(others)))[:count]


def mask_shifted(stored: Experiences, policy: object) -> None:
    for row in stored:
        row.action_mask = row.action_mask.roll(-1, dims=1)


def as_fresh(stored: Experiences, policy: object) -> None:
    for row in stored:
        row.info["replayed"] = torch.zeros_like(row.info["replayed"])


FAULTS: dict[str, Callable[[Experiences, Sequence[torch.Tensor]], None]] = {
    "importance weight dropped (w = 1)": weight_dropped,
    "advantage 0": scaled(0.0),
    "sign of the advantage": scaled(-1.0),
    "another row's log-probs": other_row,
    "mask shifted by a token": mask_shifted,
    "trained as a fresh row": as_fresh,
}


@contextmanager
def planted(fault: str, doctor: cluster.DoctorTrainer) -> Iterator[None]:
    """Plants a fault of FAULTS where the engine turns its batch into OpenRLHF's rows."""

    def as_experience(batch: Any, rows: Any, *more: Any) -> Any:
        experiences = right(batch, rows, *more)
        stored = [one for one in experiences if one.info["replayed"]]
        measured = doctor.engine.measure([rows[int(one.labels[0])] for one in stored])
        FAULTS[fault](stored, [torch.from_numpy(one.logprobs) for one in measured])
        return experiences

    right = openrlhf_engine.as_experience
    with patch.object(openrlhf_engine, "as_experience", as_experience):
        yield


def of_each_fault(doctor: cluster.DoctorTrainer, check: Callable[[], Finding]) -> Iterator[Finding]:
    """The finding of `check`, which is DoctorTrainer's check_replay, for each fault, and without one. Its name is the
    fault's, and `whole: ` before it where the batch is the whole one."""
    for fault in (*FAULTS, ""):
        for whole in (True, False):
            batch = patch.object(parity, "of_replayed", lambda batch: batch) if whole else nullcontext()
            with batch, planted(fault, doctor) if fault else nullcontext():
                yield replace(check(), check=f"{'whole: ' * whole}{fault}")


class FaultyActor(actors.DoctorActor):
    synced = True

    def set_synced(self, synced: bool) -> None:
        self.synced = synced

    def broadcast_to_vllm(self) -> None:
        if self.synced:
            super().broadcast_to_vllm()


class FaultyTrainer(cluster.DoctorTrainer):
    def check_replay(self) -> Finding:
        *findings, healthy = of_each_fault(self, super().check_replay)
        for finding in findings:
            self._put(finding)
        return replace(healthy, check="replay")

    def check_gradient(self) -> Finding:
        self.engine.on_ranks("set_synced", False)
        return super().check_gradient()

    def check_sync(self) -> Finding:
        self._put(replace(super().check_sync(), check=UNSYNCED))
        self.engine.on_ranks("set_synced", True)
        return super().check_sync()


FIGURES = re.compile(r"([\d.]+) % from the plain .*at most ([\d.]+) %\); norm ([\d.]+) .*?, cosine (-?[\d.]+),")
HEALTHY = "none"


def figures_of(finding: Finding) -> dict[str, float]:
    """Deviation and limit, both in per cent; norm, as a multiple of the plain one; cosine."""
    match = FIGURES.search(finding.measured)
    if match is None:
        raise ValueError(f"no figures in: {finding}")
    return dict(zip(("deviation", "limit", "norm", "cosine"), map(float, match.groups()), strict=True))


def weights_of(finding: Finding) -> tuple[int, int]:
    """How many weights of the first engine differ, and how many were compared."""
    if match := re.search(r"differs in (\d+) of (\d+) weights", finding.measured):
        return int(match[1]), int(match[2])
    return 0, int(finding.measured.split()[0])


@contextmanager
def output_in(log: Path) -> Iterator[None]:
    """The output of this process, and what Ray prints for its actors, goes to a file."""
    sys.stdout.flush()
    screen = [os.dup(number) for number in (1, 2)]
    with log.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, before in zip((1, 2), screen, strict=True):
            os.dup2(before, number)
            os.close(before)


def examined(files: Sequence[str], overrides: Sequence[str]) -> dict[str, Finding]:
    """The findings of the layout, by check or fault."""
    findings: dict[str, Finding] = {}

    def report(finding: Finding) -> None:
        findings[finding.check] = finding

    import planted_faults  # by its name: Ray would ship the classes of __main__ by value, bases and globals included

    actors.DoctorActor, cluster.DoctorTrainer = planted_faults.FaultyActor, planted_faults.FaultyTrainer  # type: ignore[misc]
    names = [*FAULTS, *(f"whole: {fault}" for fault in (*FAULTS, "")), UNSYNCED, "replay", "gradient", "sync"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "doctor.log")
        with output_in(log):
            examine(files, overrides, Path(folder, "runs"), names, report, ENVIRONMENT)
        if missing := [name for name in names if name not in findings]:
            print(log.read_text(errors="replace")[-5000:], *findings.values(), sep="\n")
            sys.exit(f"error: no result of {', '.join(missing)}")
    return findings


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--gin", action="append", metavar="FILE", help="instead of toy.gin and openrlhf_cpu.gin")
    parser.add_argument("--set", action="append", default=[], metavar="BINDING", help="one more binding")
    arguments = parser.parse_args()
    findings = examined(arguments.gin or ["toy.gin", "engines/openrlhf_cpu.gin"], arguments.set)

    table: dict[str, dict[str, float]] = {}
    print("| planted in the replayed rows | check | deviation | limit | norm | cosine | whole gradient |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for fault in (*FAULTS, HEALTHY):
        own, whole = findings[fault.replace(HEALTHY, "replay")], findings[f"whole: {fault.replace(HEALTHY, '')}"]
        table[fault] = figures_of(own) | {f"gradient, {name}": value for name, value in figures_of(whole).items()}
        deviation, limit, norm, cosine, without, without_limit, *_ = table[fault].values()
        print(
            f"| {fault} | `replay` | {deviation:.1f} % | {limit:.1f} % | {norm:.2f} | {cosine:.2f} | "
            f"{without:.1f} %, {without_limit:.1f} % |"
        )
    for fault, name in ((UNSYNCED, UNSYNCED), (HEALTHY, "sync")):
        differ, compared = weights_of(findings[name])
        table[f"{fault}, sync"] = {"differ": differ, "compared": compared}
        print(f"| {fault} | `sync` | {differ} of {compared} weights | 0 | | | |")
    smallest = min(table[fault]["deviation"] / table[fault]["limit"] for fault in FAULTS)
    healthy = [findings[name].outcome for name in ("replay", "gradient", "sync")] == ["ok"] * 3
    met = smallest > MARGIN and healthy and findings[UNSYNCED].outcome == "failed"
    summary = f"the smallest deviation is {smallest:.1f} times its limit; nothing fails without a fault: {healthy}"
    return finish(arguments, {"faults": table, "smallest": smallest, "met": met}, summary)


if __name__ == "__main__":
    sys.exit(main())
