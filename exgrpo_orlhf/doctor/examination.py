"""From gin files to findings: this machine first, then the layout on a small model, trained once and resumed once."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import AutoConfig

from ..engines.engine import EngineLost
from ..engines.openrlhf import launch, node
from ..engines.openrlhf.environment import ray_address
from ..experiment import Experiment
from . import machine, memory, tiny
from .finding import BOARD, CLUSTER, Finding, judged

NODES = ("nodes",)
CHECKS = (*machine.NAMES, "model", *NODES, "start", *CLUSTER)

Report = Callable[[Finding], None]


class Case(NamedTuple):
    """What is examined. bound: path or hub id of the bound model; work: a folder where the run would go, with the small
    model in it; environ: the user's variables"""

    files: Sequence[str]
    overrides: Sequence[str]
    bound: str | None
    work: Path
    model: Path
    environ: Mapping[str, str]

    def paths(self) -> list[str]:
        """What every node must see: the folder, the small model, the bound one where it is a path."""
        return [*map(str, (self.work, self.model)), *([self.bound] if self.bound and Path(self.bound).exists() else [])]

    def experiments(self, steps: int) -> tuple[Experiment, Experiment]:
        return tiny.examined(self.files, self.overrides, self.model, self.work, steps)


def examine(
    files: Sequence[str],
    overrides: Sequence[str],
    folder: Path,
    only: Sequence[str],
    report: Report,
    environ: Mapping[str, str],
) -> bool:
    """Makes the checks and reports each as it ends. Returns whether all of them found what they should; where all were
    made, that is remembered.

    folder: where the run would go: whether there is room, and whether all nodes see it
    only: names of CHECKS; none: all of them
    environ: the variables that the user has set; some libraries change their own process's
    Raises ConfigError, and ValueError for an experiment of another engine.
    """
    findings: list[Finding] = []

    def found(finding: Finding) -> None:
        # Without a start or a step nothing is found of what was asked for.
        if not only or finding.check in only or (finding.outcome == "failed" and finding.check in ("start", "step")):
            findings.append(finding)
            report(finding)

    def failed() -> bool:
        return any(finding.outcome == "failed" for finding in findings)

    wanted = set(only or CHECKS)
    with _work_folder(folder) as work:
        bound, trouble = tiny.bound_model(files, overrides)
        case = Case(files, overrides, None if trouble else bound, work, work / "model", environ)
        as_bound, x = case.experiments(steps=2)
        if as_bound.openrlhf is None:
            raise ValueError("the doctor examines layouts of OpenRLHF: add one, --gin gin/engines/openrlhf_….gin")
        flags = as_bound.openrlhf.all_flags()
        parameters = node.parameters_of(AutoConfig.from_pretrained(case.bound)) if case.bound else None
        elsewhere = ray_address(as_bound.openrlhf.ray_address, environ) != "local"
        for finding in machine.examine(wanted, work, flags, parameters, as_bound.settings.keep, elsewhere=elsewhere):
            found(finding)
        if wanted & {"model", "start", *NODES, *CLUSTER} and not failed():
            found(_make_model(bound, trouble, case.model, flags))
            if wanted & set(NODES):
                found(_on_the_nodes(case, x, flags))
        if wanted & {"start", *CLUSTER}:
            if failed():
                found(Finding("start", "skipped", "fix the failed checks above first"))
            else:
                _on_the_layout(case, x, wanted, found)
    if not failed() and not only:
        memory.remember(flags, findings)
    return not failed()


def _make_model(bound: str | None, trouble: str | None, model: Path, flags: dict[str, Any]) -> Finding:
    architecture = tiny.make_model(None if trouble else bound, model, flags.get("vllm.tensor_parallel_size", 1))
    made = f"{architecture} with {tiny.LAYERS} layers"
    if trouble:
        remedy = "PretrainedModel.path is a folder that every node sees, or a hub id that is in every node's cache"
        return Finding("model", "failed", f"{bound} cannot be read: {trouble}; {made} is taken instead", remedy)
    return Finding("model", "ok", f"{made}, " + (f"the architecture of {bound}" if bound else "for no model is bound"))


@ray.remote(num_cpus=0)
def _examine_node(paths: Sequence[str], flags: dict[str, Any]) -> list[str]:
    missing = [f"does not see {path}" for path in paths if not Path(path).exists()]
    found = machine.examine_node(Path(paths[0]), flags) if not missing else ()
    return missing + [f"{f.check}: {f.measured} (remedy: {f.remedy})" for f in found if f.outcome == "failed"]


def _on_the_nodes(case: Case, x: Experiment, flags: dict[str, Any]) -> Finding:
    """Every node of the cluster by itself, before actors are started on it: one that does not see the model's folder
    could not say so later."""
    assert x.openrlhf is not None
    if ray_address(x.openrlhf.ray_address, case.environ) == "local":
        return Finding("nodes", "skipped", "Ray is started for the run, on this machine alone")
    launch.prepare(x.openrlhf)
    from ..engines.openrlhf import driver  # imports OpenRLHF, which can be imported now

    bad, names = [], []
    try:
        with driver.connected(x.openrlhf, 0):
            for one in (one for one in ray.nodes() if one["Alive"] and one["Resources"].get("GPU")):
                where = NodeAffinitySchedulingStrategy(one["NodeID"], soft=False)
                asked = _examine_node.options(scheduling_strategy=where).remote(case.paths(), flags)
                names.append(one["NodeManagerHostname"])
                bad += [f"{names[-1]} {said}" for said in ray.get(asked, timeout=300)]
    except (EngineLost, ray.exceptions.RayError) as error:
        bad.append(str(error))
    remedy = "one shared file system under the same path, and the same environment, on all nodes: docs/cluster.md"
    return judged("nodes", not bad, "; ".join(bad) or f"sound: {', '.join(names)}", remedy)


def _on_the_layout(case: Case, x: Experiment, wanted: set[str], found: Report) -> None:
    """Two runs of OpenRLHF's program: one that is examined and saves a checkpoint, and one that resumes from it."""
    needed = {"resume": "step", "sync": "gradient"}  # a checkpoint; an update
    asked = wanted | {needed[name] for name in wanted & needed.keys()}
    checks = [name for name in CLUSTER[:-1] if name in asked]
    runs = [(x, checks)]
    if "resume" in wanted:
        runs.append((case.experiments(steps=3)[1], ["resume"]))
    for experiment, part in runs:
        with _Reader(found) as reader:
            try:
                launch.launch(
                    experiment,
                    str(case.model),
                    case.work / "run",
                    resume=experiment is not x,
                    tracking_uri="unused",
                    tags={},
                    classes=_Classes(experiment, part, case),
                )
            except (EngineLost, OSError, ArithmeticError, ValueError, RuntimeError) as error:
                reader.stop()
                remedy = "the last log lines say where; docs/cluster.md has how Ray and the layouts are started"
                found(Finding("start", "failed", f"{type(error).__name__}: {error}", remedy))
                return
        if reader.seen.get("step") == "failed" and "resume" in wanted:
            found(Finding("resume", "skipped", "there is nothing to resume"))
            return
        if missing := [name for name in part if name not in reader.seen]:
            found(Finding("start", "failed", f"no result of {', '.join(missing)}", "see the logs of Ray's actors"))
            return
    found(Finding("start", "ok", f"OpenRLHF's program started and ended {len(runs)} times"))


class _Classes(NamedTuple):
    """Our classes for OpenRLHF's program; called where OpenRLHF can be imported."""

    x: Experiment
    checks: Sequence[str]
    case: Case

    def __call__(self, args: Any) -> tuple[type, type]:
        from openrlhf.trainer.ray import vllm_engine

        from . import actors, cluster

        assert self.x.openrlhf is not None
        cpu_bench = self.x.openrlhf.cpu_bench
        args.exgrpo_doctor = cluster.orders(self.checks, self.case.paths(), self.case.environ, cpu_bench)
        vllm_engine.RolloutRayActor = actors.rollout_actor(cpu_bench)
        return actors.DoctorActor, cluster.DoctorTrainer


class _Reader:
    """A thread that receives findings from the trainer's board while this process waits for OpenRLHF's program."""

    def __init__(self, found: Report) -> None:
        self.found = found
        self.seen: dict[str, str] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._read, name="doctor-board", daemon=True)

    def __enter__(self) -> _Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._done.set()
        self._thread.join(10)

    def _read(self) -> None:
        received = 0
        while not self._done.wait(0.2):
            if not ray.is_initialized():
                continue
            try:
                new = ray.get(ray.get_actor(BOARD).after.remote(received), timeout=10)
            except (ValueError, ray.exceptions.RayError):  # not there yet, or gone with Ray
                continue
            received += len(new)
            for finding in new:
                self.seen[finding.check] = finding.outcome
                self.found(finding)


@contextmanager
def _work_folder(folder: Path) -> Iterator[Path]:
    """A new folder in `folder`, removed at the end with what the runs wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="doctor-", dir=folder)).absolute()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
