"""The driver process: it starts or reaches Ray, runs OpenRLHF's program with our classes, and watches both."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from openrlhf.cli import train_ppo_ray
from ray._private import state as ray_state
from ray._private import worker as ray_worker
from ray.exceptions import RayError, RayTaskError

from ...checkpoints import CheckpointError
from ...io.stopping import StopRequest
from ...sampling import EngineLost
from ...settings import OpenRLHF
from ..engine import RunSpec
from . import cpu, packed_attention, patches
from .actor import MixedPolicyActor
from .output import Output
from .trainer import MixedTrainer, StopFile
from .weight_sync import VllmEngine
from .worker_environment import for_cpu_adam, forwarded, not_forwarded, ray_address, without_job_env

log = logging.getLogger(__name__)
_LOG_LINES = 20
_POLL_SECONDS = 1.0
CLASSES: tuple[type, type, type] = (MixedPolicyActor, MixedTrainer, VllmEngine)
_PATIENCE = 30.0  # seconds to wait for an orderly end
# Begins a connection by gRPC: its preface, and a frame of settings, kind 4, which a server answers by its own.
_HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def drive(
    spec: RunSpec, args: Any, gpus: int, stop: StopRequest, classes: tuple[type, type, type], output: Output | None
) -> None:
    """Trains. Raises EngineLost, or the error that ended the training loop.

    gpus: number that the layout needs; classes: of the policy actors, the trainer and the vLLM engines; output: takes
        what the actors print, which else is printed
    """
    settings = spec.experiment.openrlhf
    assert settings is not None
    StopFile(spec.run).path.unlink(missing_ok=True)
    args.exgrpo, args.exgrpo_spec = spec.experiment, spec
    with connected(settings, gpus) as address:
        if output:
            output.take_lines()
        stop.take_signals()  # Ray has set its own handler for SIGTERM, which ends the program
        watch = _Watch(stop, spec.run, settings.timeout, output)
        try:
            with watch:
                _await_gpus(gpus, 0.0 if address == "local" else settings.timeout, stop)
                threads = for_cpu_adam(os.environ, ray.nodes()) if args.ds.adam_offload else {}
                if threads:
                    log.info("Adam on the CPU: OMP_NUM_THREADS = %s in each policy actor", threads["OMP_NUM_THREADS"])
                runtime_env = {"env_vars": threads} if threads else None  # Ray merges it over the run's
                policy = ray.remote(num_gpus=1, runtime_env=runtime_env)(classes[0])
                patches.program_classes(policy, ray.remote(classes[1]), ray.remote(classes[2]))
                train_ppo_ray.train(args)
        except RayTaskError as error:
            if watch.reason:
                raise EngineLost(watch.reason) from error
            cause = error.cause
            while isinstance(cause, RayTaskError):
                cause = cause.cause
            reason = str(cause) if isinstance(cause, EngineLost) else f"{type(cause).__name__}: {str(cause).strip()}"
            # Ray may learn of a death a moment later than the actors that used the dead one. Other failures, such as a
            # broken connection, are then consequences.
            if dead := _dead_actors(3 * _POLL_SECONDS):
                raise EngineLost(_with_logs(f"{dead[0][0]} (process {dead[0][1]}) died; {reason}", output)) from error
            # RayError: for example a full object store
            if isinstance(cause, RayError | EngineLost) or not isinstance(cause, Exception):
                raise EngineLost(reason) from error
            if not isinstance(cause, CheckpointError | OSError):  # a full disk needs no traceback
                log.error("%s", error)
            raise cause from None
        except RayError as error:
            raise EngineLost(watch.reason or _with_logs(str(error).strip(), output)) from error


@contextlib.contextmanager
def connected(settings: OpenRLHF, gpus: int) -> Iterator[str]:
    """Starts Ray as OpenRLHF would, or connects to it by its address, 'local' for a Ray that is started. At the end it
    is shut down, with all that was started in it. Raises EngineLost if that fails."""
    environment = forwarded(os.environ)
    runtime: dict[str, Any] = {}
    if settings.cpu_bench:
        environment |= cpu.environment()
        runtime["worker_process_setup_hook"] = f"{cpu.__name__}.install"
    elif packed_attention.is_needed():
        runtime["worker_process_setup_hook"] = f"{packed_attention.__name__}.install"
    runtime["env_vars"] = without_job_env(environment, os.environ)
    address = ray_address(settings.ray_address, os.environ)
    started: dict[str, Any] = {"address": address}
    if address == "local":
        started |= {"include_dashboard": False}
        # A vLLM engine's worker is a process of its own, which would outlive an engine that was killed.
        os.environ.setdefault("RAY_process_group_cleanup_enabled", "true")
        if settings.cpu_bench:
            started |= {"num_gpus": gpus, "num_cpus": 4 * gpus + 4, "object_store_memory": 2**28}
    bound_by = "OpenRLHF.ray_address" if address == settings.ray_address else "RAY_ADDRESS"
    if address not in ("local", "auto") and (wrong := _wrong_address(address)):
        raise EngineLost(
            f"no Ray cluster can be reached at {bound_by} = {address!r}: {wrong}; a run takes host:port of its head "
            "node, with the port of ray start (6379), 'auto' on one of its nodes, or 'local' for a Ray of its own"
        )
    # For Ray's processes, as Ray has it for Ctrl-C: a closed terminal signals them too, before the run is saved.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        ray.init(runtime_env=runtime, log_to_driver=True, logging_level=logging.WARNING, **started)
    except Exception as error:  # also a plain one, when a node does not start in time
        if "AF_UNIX path" in str(error):
            name = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
            raise EngineLost(
                f"{name} = {os.environ.get(name)!r} is too long a path for the sockets that Ray and vLLM make there: "
                "set it to a shorter one, such as /tmp"
            ) from None
        raise EngineLost(
            f"Ray could not be {'started' if address == 'local' else 'reached'} (OpenRLHF.ray_address = "
            f"{settings.ray_address!r}, RAY_ADDRESS = {os.environ.get('RAY_ADDRESS')!r}): {error}"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    if address != "local" and (kept_back := not_forwarded(os.environ)):
        log.info("set here and not passed on to Ray's workers, see docs/cluster.md: %s", ", ".join(kept_back))
    try:
        yield address
    except BaseException:
        with contextlib.suppress(Exception):  # the head node may be gone; the first error is the one to report
            _kill_actors()  # or Ray's shutdown would wait for their tasks, which may never end
        raise
    finally:
        _shut_down()


def _wrong_address(address: str) -> str | None:
    """Why no cluster can be at this address, or None. Ray itself would try for twelve minutes."""
    if "://" in address:
        return "that is an address for ray job submit or for Ray's client"
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(_HTTP_2)
            if "RAY_USE_TLS" in os.environ or connection.recv(9)[3:4] == b"\x04":
                return None
            return "what answers there is no head node of Ray"
    except (OSError, ValueError) as error:
        return str(error)


def _await_gpus(gpus: int, patience: float, stop: StopRequest) -> None:
    """Waits while nodes are still joining, for at most `patience` seconds, until `stop`. Then raises EngineLost.
    OpenRLHF asks Ray for a GPU and a CPU of the same node together, and would wait for the CPU for ever."""
    end = time.monotonic() + patience
    while True:
        free = [(node.get("GPU", 0), node.get("CPU", 0)) for node in ray_state.available_resources_per_node().values()]
        if sum(int(min(node)) for node in free) >= gpus:
            return
        lack = (
            f"the layout needs {gpus} GPUs (OpenRLHF.flags: actors, reference model and vLLM engines), each with a CPU "
            f"of its node. Ray has {sum(gpu for gpu, _ in free):.0f} GPUs free, {sum(int(min(node)) for node in free)} "
            "of them with a CPU; its nodes have what ray start --num-gpus and --num-cpus say"
        )
        if stop.signal or time.monotonic() > end:
            raise EngineLost(lack)
        log.info("waiting: %s", lack)
        time.sleep(5)


def _shut_down() -> None:
    """Shuts Ray down. This can hang after an interrupted wait: then Ray's processes are killed."""
    shutdown = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
    shutdown.start()
    shutdown.join(_PATIENCE)
    if shutdown.is_alive() and (node := ray_worker._global_node):
        node.kill_all_processes(check_alive=False, allow_graceful=False)


def _kill_actors() -> None:
    for actor in _actors():
        if actor["State"] != "DEAD":
            ray_worker.global_worker.core_worker.kill_actor(ray.ActorID.from_hex(actor["ActorID"]), True)


class _Watch:
    """A thread beside the program: it passes a signal on to the trainer, and ends the wait for a dead actor, which has
    no time limit in OpenRLHF: it kills all actors, so that whatever the program waits for fails. So it ends a start,
    too, of which nothing is to be saved: the program's error is then left out. reason: the cause"""

    def __init__(self, stop: StopRequest, run: Path, timeout: float, output: Output | None) -> None:
        self.stop, self.run, self.timeout, self.output = stop, run, timeout, output
        self.reason: str | None = None
        self._config = run / "config.gin"  # written when the training loop begins
        self._before = self._config.stat().st_mtime_ns if self._config.exists() else None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        self._done.set()
        if self.reason is None:
            self._thread.join(_PATIENCE)
        return self._ends_start() and isinstance(error, RayError | EngineLost)

    def _ends_start(self) -> bool:
        begun = self._config.exists() and self._config.stat().st_mtime_ns != self._before
        return self.stop.signal is not None and not begun

    def _end_without_head(self) -> None:
        """Ends this program if Ray's head node cannot be reached. Ray would do so after 60 s, without a word, and a
        process of vLLM would be left."""
        node, end = ray_worker._global_node, time.monotonic() + _PATIENCE
        while wrong := _wrong_address(node.gcs_address):
            if self._done.wait(_POLL_SECONDS):
                return
            if time.monotonic() > end:
                log.error("error: Ray's head node %s cannot be reached: %s", node.gcs_address, wrong)
                for process in psutil.Process().children(recursive=True):
                    process.kill()
                os._exit(1)  # nothing else would end the program's wait

    def _watch(self) -> None:
        passed_on = False
        begin, metrics = time.time(), self.run / "metrics.jsonl"
        while not self._done.wait(_POLL_SECONDS):
            if self.stop.signal and not passed_on:
                StopFile(self.run).path.write_text(self.stop.signal.name, encoding="ascii")
                passed_on = True
            self._end_without_head()
            dead = _dead_actors()
            last = max(begin, metrics.stat().st_mtime if metrics.exists() else 0.0)
            reason = None
            if dead and not self._done.wait(5 * _POLL_SECONDS):  # the program may fail with a better message
                reason = _with_logs(f"{dead[0][0]} (process {dead[0][1]}) died", self.output)
            elif self._ends_start():
                reason = "the start was ended"
            elif not dead and time.time() - last > 2 * self.timeout:
                reason = f"no step was completed for {2 * self.timeout:.0f} s (twice OpenRLHF.timeout)"
            if reason and not self._done.is_set():
                self.reason = reason
                _kill_actors()
                if not self._done.wait(_PATIENCE):
                    log.error("error: %s", reason)
                    # Checkpoints are complete, and nothing else would end the wait.
                    os._exit(128 + self.stop.signal if self.stop.signal and self._ends_start() else 1)
                return


def _dead_actors(patience: float = 0.0) -> list[tuple[str, int]]:
    """Names and process ids of this job's dead actors, in the order of their deaths. patience: seconds to wait for the
    first one"""
    end = time.monotonic() + patience
    while not (dead := [actor for actor in _actors() if actor["State"] == "DEAD"]) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS / 10)
    return [(actor["ActorClassName"], actor["Pid"]) for actor in sorted(dead, key=lambda actor: actor["EndTime"])]


def _actors() -> list[dict[str, Any]]:
    """This job's actors, including dead ones."""
    job = ray.get_runtime_context().get_job_id()
    return [actor for actor in ray_state.actors().values() if actor["JobID"] == job]


def _with_logs(message: str, output: Output | None) -> str:
    """The message with the last log lines of the dead actors. Ray's files have them only on the actor's machine."""
    parts = [message]
    folder = Path(ray_worker._global_node.get_logs_dir_path()) if ray_worker._global_node else None
    for name, pid in _dead_actors():
        lines: list[str] = []
        for path in sorted(folder.glob(f"worker-*-{pid}.*")) if folder and pid else []:
            lines += path.read_text(errors="replace").splitlines()
        lines = lines or (output.last_lines(pid, _LOG_LINES) if output else [])
        parts.append(f"--- last log lines of {name} (process {pid}):\n" + "\n".join(lines[-_LOG_LINES:]))
    return "\n".join(parts)
