"""From gin files to findings: first this machine, then the layout with a small model, which is trained and resumed."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..engines.engine import RunSpec
from ..engines.openrlhf import launch
from ..engines.openrlhf.worker_environment import ray_address
from ..experiment import Experiment
from ..io.json_lines import JsonLines
from ..sampling import EngineLost
from ..settings import OpenRLHF
from ..training.preparation import prepare_and_run
from . import machine, tiny
from .finding import CLUSTER, FINDINGS, Finding, judged

CHECKS = (*machine.NAMES, "model", "nodes", "start", *CLUSTER)

Report = Callable[[Finding], None]


def examine(
    files: Sequence[str],
    overrides: Sequence[str],
    folder: Path,
    only: Sequence[str],
    report: Report,
    environ: Mapping[str, str],
) -> bool:
    """Makes the checks and reports each result at once. Returns whether none failed.

    Args:
        folder: where the run would go; it must have room, and all nodes must see it
        only: names of CHECKS; empty: all of them
        environ: the variables that the user has set, before libraries changed this process's

    Raises ConfigError, ValueError for an experiment of another engine, and OSError or ValueError for a bound model that
    cannot be used.
    """
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        # A failed start or step is reported even if it was not asked for, because no later check can be made.
        if not only or finding.check in only or (finding.outcome == "failed" and finding.check in ("start", "step")):
            findings.append(finding)
            report(finding)

    def failed() -> bool:
        return any(finding.outcome == "failed" for finding in findings)

    checks = set(only or CHECKS)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="doctor-", dir=folder, ignore_cleanup_errors=True) as temporary:
        work, model = Path(temporary).absolute(), Path(temporary).absolute() / "model"
        bound = tiny.bound_model(files, overrides)
        as_bound, experiment = tiny.doctor_experiments(files, overrides, model)
        settings = experiment.openrlhf
        assert as_bound.openrlhf is not None
        assert settings is not None
        flags = as_bound.openrlhf.all_flags()
        bound_model, full_size = bound or (None, as_bound)
        elsewhere = ray_address(settings.ray_address, environ) != "local"
        for finding in machine.examine(checks, work, full_size, bound_model, elsewhere=elsewhere):
            add(finding)
        # What every node must see: the folder, the small model, and the bound model if it is a path.
        paths = [str(work), str(model), *([bound_model] if bound_model and Path(bound_model).exists() else [])]
        if checks & {"model", "start", "nodes", *CLUSTER} and not failed():
            architecture = tiny.make_model(bound_model, model, flags.get("vllm.tensor_parallel_size", 1))
            why = f"the architecture of {bound_model}" if bound_model else "because no model is bound"
            add(Finding("model", "ok", f"{architecture} with {tiny.LAYERS} layers, {why}"))
            if "nodes" in checks:
                skipped = Finding("nodes", "skipped", "Ray is started for the run, on this machine only")
                add(_on_the_nodes(settings, paths) if elsewhere else skipped)
        if checks & {"start", *CLUSTER}:
            if failed():
                add(Finding("start", "skipped", "fix the failed checks above first"))
            else:
                _on_the_layout(experiment, settings, paths, environ, checks, add)
    return not failed()


def _examine_node(paths: Sequence[str]) -> list[str]:
    missing = [f"does not see {path}" for path in paths if not Path(path).exists()]
    findings = machine.examine_node(Path(paths[0])) if not missing else ()
    return missing + [f"{f.check}: {f.measured} (remedy: {f.remedy})" for f in findings if f.outcome == "failed"]


def _on_the_nodes(settings: OpenRLHF, paths: Sequence[str]) -> Finding:
    """Checks every node of the cluster by itself, before actors are started there: an actor that does not see the
    model's folder could not report it."""
    launch.prepare(settings)
    from ..engines.openrlhf import driver  # after launch.prepare, which makes OpenRLHF importable

    bad, names = [], []
    try:
        with driver.connected(settings, 0):
            for gpu_node in (node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")):
                where = NodeAffinitySchedulingStrategy(gpu_node["NodeID"], soft=False)
                task = ray.remote(num_cpus=0)(_examine_node).options(scheduling_strategy=where)
                names.append(gpu_node["NodeManagerHostname"])
                bad += [f"{names[-1]} {problem}" for problem in ray.get(task.remote(paths), timeout=300)]
    except (EngineLost, ray.exceptions.RayError) as error:
        bad.append(str(error))
    remedy = "one shared file system under the same path, and the same environment, on all nodes: docs/cluster.md"
    return judged("nodes", not bad, "; ".join(bad) or f"all well: {', '.join(names)}", remedy)


def _on_the_layout(
    experiment: Experiment,
    settings: OpenRLHF,
    paths: Sequence[str],
    environ: Mapping[str, str],
    checks: set[str],
    report: Report,
) -> None:
    """Runs OpenRLHF's program twice: first with the checks and a checkpoint, then resumed from that checkpoint."""

    def classes(args: Any) -> tuple[type, type, type]:
        """The doctor's policy actor, trainer and vLLM engine. Called when OpenRLHF can be imported."""
        from . import actors, cluster

        args.exgrpo_doctor = cluster.check_plan(part, paths, environ, settings.cpu_bench)
        return actors.DoctorActor, cluster.DoctorTrainer, actors.DoctorEngine

    needed = {"resume": "step", "sync": "gradient"}  # a checkpoint; an update
    first = checks | {needed[name] for name in checks & needed.keys()}
    runs = [(experiment, [name for name in CLUSTER[:-1] if name in first])]
    if "resume" in checks:
        longer = replace(experiment.settings, steps=experiment.settings.steps + 1)
        runs.append((replace(experiment, settings=longer), ["resume"]))
    for run_experiment, part in runs:
        try:
            with _findings_of(Path(paths[0]) / FINDINGS, report) as outcomes:
                spec = RunSpec(run_experiment, Path(paths[0]) / "run", "unused", {}, prepare_and_run)
                launch.launch(spec, paths[1], resume=run_experiment is not experiment, classes=classes)
        except (EngineLost, OSError, ArithmeticError, ValueError, RuntimeError) as error:
            remedy = "see the last log lines; docs/cluster.md describes how Ray and the layouts are started"
            report(Finding("start", "failed", f"{type(error).__name__}: {error}", remedy))
            return
        if outcomes.get("step") == "failed" and "resume" in checks:
            report(Finding("resume", "skipped", "there is nothing to resume"))
            return
        if missing := [name for name in part if name not in outcomes]:
            report(Finding("start", "failed", f"no result of {', '.join(missing)}", "see the logs of Ray's actors"))
            return
    report(Finding("start", "ok", f"OpenRLHF's program started and ended {len(runs)} times"))


@contextmanager
def _findings_of(path: Path, report: Report) -> Iterator[dict[str, str]]:
    """Reports what the trainer appends to a file, while this process waits for OpenRLHF's program. Yields the outcomes
    by check, which are complete when the context has ended."""
    outcomes: dict[str, str] = {}
    end, before = threading.Event(), len(JsonLines(path).keys)

    def read() -> None:
        count, last = before, False
        while not last:
            last = end.wait(0.2)
            for row in JsonLines(path).read(count):
                count, finding = count + 1, Finding(**row)
                outcomes[finding.check] = finding.outcome
                report(finding)

    thread = threading.Thread(target=read, name="doctor-findings", daemon=True)
    thread.start()
    try:
        yield outcomes
    finally:
        end.set()
        thread.join(10)
