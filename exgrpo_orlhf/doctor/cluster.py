"""The checks that need the layout at work: OpenRLHF's program on a small model, with this trainer in it.

`DoctorTrainer.fit` has the checks in order. Imported where OpenRLHF can be: with CUDA, or after cpu.install().
"""

from __future__ import annotations

import json
import math
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from ..engines.engine import Engine, EngineLost
from ..engines.openrlhf import cpu
from ..engines.openrlhf.environment import forwarded, not_forwarded
from ..engines.openrlhf.samples import Request, Sampler
from ..engines.openrlhf.trainer import MixedTrainer, StopFile
from ..engines.rows import ForwardRow
from ..replay import snapshot
from ..training import TrainingRun
from . import parity
from .actors import different
from .finding import BOARD, CLUSTER, Finding, judged
from .tiny import RESPONSE

# Mean absolute difference of log-probs, nats. bfloat16's own on the CPU bench is 0.01, another temperature's 0.3.
LOGPROB_GAP = 0.05
# Relative error of the gradient, as a multiple of what bfloat16 alone does to the plain computation, and at least.
GRADIENT_FACTOR, GRADIENT_ERROR = 4.0, 0.02


@dataclass(frozen=True)
class Orders:
    """What the doctor's driver asks of its trainer; travels as `args.exgrpo_doctor`.

    checks: to be made; same: variables that must have these values in every actor; present: names of variables that
    must be set there, to whatever is right on its node; paths: that every rank must see
    """

    checks: Sequence[str]
    same: Mapping[str, str]
    present: Sequence[str]
    paths: Sequence[str]


def orders(checks: Sequence[str], paths: Sequence[str], environ: Mapping[str, str], cpu_bench: bool) -> Orders:
    """environ: what the user has set; cpu_bench: sets some variables itself"""
    handed_on = forwarded(environ).keys() & environ.keys() - (cpu.environment().keys() if cpu_bench else set())
    of_nodes = [name for name, _ in not_forwarded(environ) if name != "CUDA_VISIBLE_DEVICES"]  # Ray's own in an actor
    return Orders(checks, {name: environ[name] for name in sorted(handed_on)}, of_nodes, paths)


@ray.remote(num_cpus=0)
class Board:
    """Findings on their way from the trainer to the driver, wherever both are."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.received = 0  # by the driver

    def put(self, finding: Finding) -> None:
        self.findings.append(finding)

    def after(self, received: int) -> list[Finding]:
        """The findings after the first `received`, which the driver has."""
        self.received = received
        return self.findings[received:]

    def all_received(self) -> bool:
        return self.received == len(self.findings)


class DoctorTrainer(MixedTrainer):
    """The trainer of a run of two steps, or of the third one that continues it, and before it the checks."""

    def fit(self) -> None:
        self.orders: Orders = self.args.exgrpo_doctor
        self.board = Board.options(name=BOARD).remote()  # type: ignore[attr-defined]
        if self.args.ckpt.load_enable:
            self._make("resume")
        else:
            for name in CLUSTER[:-1]:
                self._make(name)
        self._wait_for_the_reader()

    def _wait_for_the_reader(self) -> None:
        """The board ends with this run, so the driver must have received all findings before."""
        end = time.monotonic() + 30
        while not ray.get(self.board.all_received.remote()) and time.monotonic() < end:
            time.sleep(0.1)

    def _make(self, name: str) -> None:
        if name not in self.orders.checks:
            return
        try:
            finding = getattr(self, f"check_{name}")()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {str(error).strip()[:500]} ({Path(where.filename).name}:{where.lineno})"
            finding = Finding(name, "failed", said, "see the logs of Ray's actors (ray logs) and doctor.log")
            if isinstance(error, EngineLost):  # an actor that does not answer would not answer the next check either
                ray.get(self.board.put.remote(finding))
                self._wait_for_the_reader()
                raise
        ray.get(self.board.put.remote(finding))

    def _ranks(self, method: str, *args: Any) -> list[Any]:
        return list(self._answer(self.actor_model_group.async_run_method(method, *args)))

    # -- what is checked ----------------------------------------------------------------------------------------------

    def check_ranks(self) -> Finding:
        """The ranks reach one another, and their sums are right."""
        megabytes = 4 if self.settings.cpu_bench else 256
        sums = self._ranks("collective", megabytes)
        slowest = min(speed for _, speed in sums)
        right = all(total == len(sums) for total, _ in sums)
        wrong = "" if right else f"; sums over the ranks: {[total for total, _ in sums]}"
        return judged(
            "ranks",
            right,
            f"{len(sums)} ranks; all-reduce of {megabytes} MB: {slowest:.2f} GB/s{wrong}",
            "set NCCL_DEBUG=INFO and read the log; name the network with NCCL_SOCKET_IFNAME before ray start",
        )

    def check_folder(self) -> Finding:
        """A file that this process writes in the run folder is seen by every rank, and what they write here; the model
        too, where it is a path."""
        marker = self.job.run / f".marker-{uuid.uuid4().hex}"
        marker.touch()
        missing = self._ranks("sees", str(marker), list(self.orders.paths))
        written = {int(path.name.rpartition("-")[2]) for path in marker.parent.glob(f"{marker.name}-*")}
        for path in marker.parent.glob(f"{marker.name}*"):
            path.unlink()
        bad = [f"rank {rank} does not see {', '.join(paths)}" for rank, paths in enumerate(missing) if paths]
        bad += [f"what rank {rank} writes is not seen here" for rank in range(self.ranks) if rank not in written]
        return judged(
            "folder",
            not bad,
            "; ".join(bad) or f"{self.job.run}: seen and written by all {len(missing)} ranks",
            "one shared file system under the same path on all nodes (--out, PretrainedModel.path): docs/cluster.md",
        )

    def check_environment(self) -> Finding:
        """The driver's variables that matter are set in every actor, those that are handed on to the same value."""
        same, present = self.orders.same, self.orders.present
        lost: dict[str, list[str]] = {}
        for place in self._ranks("whereabouts", [*same, *present]):
            there = place["environment"]
            for name in [*(n for n in same if there.get(n) != same[n]), *(n for n in present if n not in there)]:
                lost.setdefault(name, []).append(place["who"])
        bad = [f"{name} does not arrive at {', '.join(who)}" for name, who in lost.items()]
        names = ", ".join([*same, *present])
        return judged(
            "environment",
            not bad,
            "; ".join(bad) or f"{len(same) + len(present)} variables arrive ({names or 'none is set'})",
            "set it on every node before ray start (docs/cluster.md), or do not set it",
        )

    def check_logprobs(self) -> Finding:
        """The vLLM engines and the trainer agree on how likely a sampled token is, before any update."""
        gap = self._gap()
        return judged(
            "logprobs",
            gap <= LOGPROB_GAP,
            f"vLLM and trainer {gap:.4f} nats apart on average (at most {LOGPROB_GAP})",
            "both have the same weights: look for another temperature, a patched sampler, or an attention kernel that "
            "computes otherwise ('ds.attn_implementation', VLLM_ATTENTION_BACKEND)",
        )

    def _gap(self) -> float:
        questions = self.x.questions.load()[: 4 * self.ranks]
        sampler = Sampler(self.vllm_engines, RESPONSE, True, self.settings.timeout, self.prompts.turn_ends())
        requests = [
            Request(self.prompts.encode(question), 2, self.x.sampling.temperature, i)
            for i, question in enumerate(questions)
        ]
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "wake_up")
        rollouts = dict(sampler(requests))  # all of them, before the engines sleep
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "sleep")
        pairs = [(request, one) for position, request in enumerate(requests) for one in rollouts[position]]
        measured = self._measure([ForwardRow(request.prompt, one.token_ids) for request, one in pairs])
        apart = [np.abs(ours - one.sampler_logprobs) for (ours, _), (_, one) in zip(measured, pairs, strict=True)]
        return float(np.concatenate(apart).mean())

    def check_gradient(self) -> Finding:
        """The gradient of one batch is that of the plain computation, but for bfloat16's rounding."""
        model = Path(self.args.actor.model_name_or_path)
        questions = self.x.questions.load()[: self.x.settings.questions_per_step]
        batch = parity.random_batch(questions, self.x.settings.group_size, len(self.tokenizer), RESPONSE)
        self._ranks("start_recording")
        self.step = 1
        self.update(batch, self.x.loss)
        found = next(part for part in self._ranks("recorded_gradients") if part)
        right, rounded = (parity.plain(self.x, model, batch, dtype) for dtype in ("float32", "bfloat16"))
        difference, own = (parity.Difference.between(one, right) for one in (found, rounded))
        limit = max(GRADIENT_FACTOR * own.error, GRADIENT_ERROR)
        return judged(
            "gradient",
            difference.error <= limit,
            f"{100 * difference.error:.2f} % from the plain one in float32 (bfloat16 alone {100 * own.error:.2f} %, at "
            f"most {100 * limit:.1f} %); norm {difference.norm:.4f} of the plain one; smallest cosine "
            f"{difference.worst[1]:.4f} in {difference.worst[0]}; "
            f"{len(batch.flat_rows())} rows in {len(found)} optimiser steps",
            "a norm far from 1 means that micro-batches or ranks are lost or counted twice: compare with "
            "'ds.zero_stage': 3, then 'train.dynamic_batch_enable': False, then 'ds.packing_samples': False",
        )

    def check_sync(self) -> Finding:
        """After an update the vLLM engines have the actor's weights, bit for bit, and its log-probs. Engines of several
        GPUs hold slices, which are not compared."""
        self.broadcast_to_vllm()
        whole = self.args.vllm.tensor_parallel_size == 1
        actor, bad, compared = self._ranks("weights")[0], [], 0
        for i, engine in enumerate(self.vllm_engines if whole else ()):
            names, compared = different(ray.get(engine.weights.remote()), actor)
            more = f" and {len(names) - 3} more" if names[3:] else ""
            bad += [f"engine {i} differs in {', '.join(names[:3])}{more}"] * bool(names)
            bad += [f"none of engine {i}'s weights has a name of the actor's"] * (not compared)
        gap = self._gap()
        if gap > LOGPROB_GAP:
            bad.append(f"log-probs {gap:.4f} nats apart")
        return judged(
            "sync",
            not bad,
            "; ".join(bad)
            or f"{compared} weights equal in each of {len(self.vllm_engines)} engines; log-probs {gap:.4f} nats apart",
            "rollouts would come from another policy: try 'vllm.sync_with_ray': True, another 'vllm.sync_backend', or "
            "'train.colocate_all': False",
        )

    def check_sleep(self) -> Finding:
        """What is sent to sleep wakes up unchanged."""
        if not (self.args.ds.enable_sleep or self.args.vllm.enable_sleep):
            return Finding("sleep", "skipped", "the layout lets nothing sleep")
        bad, seconds = [], 0.0
        if self.args.ds.enable_sleep:
            self._ranks("reload_states")
            before = self._ranks("states")
            begin = time.perf_counter()
            self._ranks("offload_states")
            self._ranks("reload_states")
            seconds = time.perf_counter() - begin
            after = self._ranks("states")
            self._ranks("offload_states")  # as it was found
            for rank, (one, other) in enumerate(zip(before, after, strict=True)):
                bad += [f"rank {rank}: {name}" for name in one if one[name] != other.get(name)]
        compared = self.args.vllm.tensor_parallel_size == 1
        if self.args.vllm.enable_sleep and compared:
            batch_vllm_engine_call(self.vllm_engines, "wake_up")
            asleep = [ray.get(engine.weights.remote()) for engine in self.vllm_engines]
            batch_vllm_engine_call(self.vllm_engines, "sleep")
            batch_vllm_engine_call(self.vllm_engines, "wake_up")
            for i, (engine, before_sleep) in enumerate(zip(self.vllm_engines, asleep, strict=True)):
                awake = ray.get(engine.weights.remote())
                bad += [f"engine {i}: {name}" for name in awake if not np.array_equal(awake[name], before_sleep[name])]
            batch_vllm_engine_call(self.vllm_engines, "sleep")
        engines = "unchanged" if self.args.vllm.enable_sleep and compared else "not compared"
        return judged(
            "sleep",
            not bad,
            f"changed: {', '.join(bad[:3])}"
            if bad
            else f"all states unchanged, offload and reload took {seconds:.1f} s; vLLM's weights {engines}",
            "train without 'ds.enable_sleep' or 'vllm.enable_sleep', with a smaller 'vllm.gpu_memory_utilization'",
        )

    def check_step(self) -> Finding:
        """Two steps of training, the second with replay where the layout replays, and a checkpoint."""
        run = self._run()
        run.go(StopFile(self.job.run))
        rows = [json.loads(line) for line in (self.job.run / "metrics.jsonl").read_text().split("\n") if line][1:]
        last = rows[-1]
        self._saved_state().write_text(json.dumps(self._states()))
        bad = [name for name, value in last.items() if isinstance(value, float) and not math.isfinite(value)]
        bad += ["no update has a gradient"] * (not any(row["policy/grad_norm"] for row in rows))
        bad += ["nothing is replayed"] * bool(self.x.mixer.rho and not last["replay/actual_share"])
        times = ", ".join(f"{name} {last['time/' + name]:.1f}" for name in ("rollout", "update", "step"))
        done = f"{len(rows)} steps, gradient norm {last['policy/grad_norm']:.3g}, checkpoint-{run.saved_step} saved; "
        done += f"{100 * last['replay/actual_share']:.0f} % replayed; seconds: {times}"
        return judged(
            "step",
            not bad,
            f"not finite or missing: {', '.join(bad)}" if bad else done,
            "see the metrics of the run in the doctor's folder",
        )

    def check_resume(self) -> Finding:
        """Weights, optimiser and buffer come back as they were saved, and training goes on."""
        run = self._run()
        saved, states = json.loads(self._saved_state().read_text()), self._states()
        bad = [
            f"rank {i}: {n}" for i, (a, b) in enumerate(zip(saved, states, strict=True)) for n in a if a[n] != b.get(n)
        ]
        again = self.job.run / "buffer-again"
        snapshot.save(run.buffer, again, run.fingerprint)
        for table in ("questions.parquet", "trajectories.parquet"):
            if (again / table).read_bytes() != (
                self.job.run / f"checkpoint-{run.step}" / "replay" / table
            ).read_bytes():
                bad.append(table)
        begun, stored = run.step, run.buffer.n_trajectories
        run.go(StopFile(self.job.run))
        same = f"weights, optimiser and {stored} stored trajectories as after step {begun}; step {run.step} done"
        return judged(
            "resume",
            not bad and run.step == begun + 1,
            f"differ: {', '.join(bad[:3])}" if bad else same,
            "the checkpoint does not hold what was trained: do not resume from this layout's checkpoints",
        )

    def _run(self) -> TrainingRun:
        def engine(checkpoint: Path | None) -> Engine:
            return self

        return TrainingRun(self.x, engine, self.job.run, self.job.tracking_uri, self.job.tags)

    def _saved_state(self) -> Path:
        return self.job.run / "states.json"

    def _states(self) -> list[dict[str, float]]:
        if not self.args.ds.enable_sleep:
            return self._ranks("states")
        self._ranks("reload_states")
        states = self._ranks("states")
        self._ranks("offload_states")
        return states
