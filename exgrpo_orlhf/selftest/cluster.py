"""The checks that need the running layout: OpenRLHF's program on a small model, with DoctorTrainer as its trainer.

`DoctorTrainer.fit` makes the checks in order. Import this module only where OpenRLHF can be imported: with CUDA, or
after cpu.install().
"""

from __future__ import annotations

import json
import math
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import ray

from ..engines.openrlhf import cpu
from ..engines.openrlhf.trainer import MixedTrainer, StopFile
from ..engines.openrlhf.worker_environment import forwarded, not_forwarded
from ..engines.rows import ForwardRow
from ..io.json_lines import JsonLines
from ..records import MixedBatch
from ..replay import snapshot
from ..sampling import EngineLost
from ..training.preparation import prepare
from . import parity
from .actors import compare_weights
from .finding import FINDINGS, Finding, judged
from .tiny import RESPONSE

# Mean absolute difference of log-probs, nats. On the CPU test layout bfloat16 makes 0.01, another temperature 0.3.
LOGPROB_GAP = 0.05
# Limits on the relative error of the gradient: a multiple of the error that bfloat16 alone causes, and at least this.
GRADIENT_FACTOR, GRADIENT_ERROR = 4.0, 0.02
STATES = "states.json"  # in the run's folder: those after its last step


@dataclass(frozen=True)
class CheckPlan:
    """What the doctor's trainer is to check. It reaches the trainer as `args.exgrpo_doctor`.

    checks: names of the checks to make, in order
    same: variables that must have these values in every actor
    present: variables that must be set in every actor, to whatever is right on its node
    paths: what every rank must see
    """

    checks: Sequence[str]
    same: Mapping[str, str]
    present: Sequence[str]
    paths: Sequence[str]


def check_plan(checks: Sequence[str], paths: Sequence[str], environ: Mapping[str, str], cpu_bench: bool) -> CheckPlan:
    """environ: what the user has set; cpu_bench: whether the CPU test layout sets some of these variables itself"""
    same = forwarded(environ).keys() & environ.keys() - (cpu.environment().keys() if cpu_bench else set())
    of_nodes = [name for name in not_forwarded(environ) if name != "CUDA_VISIBLE_DEVICES"]  # Ray sets it in actors
    return CheckPlan(checks, {name: environ[name] for name in sorted(same)}, of_nodes, paths)


class DoctorTrainer(MixedTrainer):
    """Makes the checks, one of which is a short run; when resumed, the step that continues it."""

    def fit(self) -> None:
        self.plan: CheckPlan = self.args.exgrpo_doctor
        for name in self.plan.checks:
            try:
                self._put(getattr(self, f"check_{name}")())
            except Exception as error:
                line = traceback.extract_tb(error.__traceback__)[-1]
                message = f"{type(error).__name__}: {str(error).strip()[:500]}"
                measured = f"{message} ({Path(line.filename).name}:{line.lineno})"
                self._put(Finding(name, "failed", measured, "see the logs of Ray's actors (ray logs) and doctor.log"))
                if isinstance(error, EngineLost):  # the actor would not answer the next check either
                    raise

    def _put(self, finding: Finding) -> None:
        """For the driver, which is perhaps on another node: every node sees the folder, as the check `nodes` found."""
        JsonLines(self.spec.run.parent / FINDINGS).add(asdict(finding))

    # -- the checks ---------------------------------------------------------------------------------------------------

    def check_ranks(self) -> Finding:
        """The ranks reach one another, and an all-reduce gives the right sum."""
        megabytes = 4 if self.engine.settings.cpu_bench else 256
        sums, speeds = zip(*self.engine.on_ranks("collective", megabytes), strict=True)
        right = all(total == len(sums) for total in sums)
        return judged(
            "ranks",
            right,
            f"{len(sums)} ranks; all-reduce of {megabytes} MB: {min(speeds):.2f} GB/s"
            + ("" if right else f"; sums over the ranks: {list(sums)}"),
            "set NCCL_DEBUG=INFO and read the log; name the network with NCCL_SOCKET_IFNAME before ray start",
        )

    def check_folder(self) -> Finding:
        """Every rank sees a file that this process writes in the run folder, and this process sees theirs. Every rank
        sees the model, if it is a path."""
        marker = self.spec.run / f".marker-{uuid.uuid4().hex}"
        marker.touch()
        missing = self.engine.on_ranks("sees", str(marker), list(self.plan.paths))
        written = {int(path.name.rpartition("-")[2]) for path in marker.parent.glob(f"{marker.name}-*")}
        for path in marker.parent.glob(f"{marker.name}*"):
            path.unlink()
        bad = [f"rank {rank} does not see {', '.join(paths)}" for rank, paths in enumerate(missing) if paths]
        bad += [f"what rank {rank} writes is not seen here" for rank in range(self.engine.ranks) if rank not in written]
        return judged(
            "folder",
            not bad,
            "; ".join(bad) or f"{self.spec.run}: seen and written by all {len(missing)} ranks",
            "one shared file system under the same path on all nodes (--out, PretrainedModel.path): docs/cluster.md",
        )

    def check_environment(self) -> Finding:
        """The driver's variables that matter are set in every actor; those that are passed on have the same value."""
        same, present = self.plan.same, self.plan.present
        lost: dict[str, list[str]] = {}
        for place, found in self.engine.on_ranks("whereabouts", [*same, *present]):
            for name in [*(n for n in same if found.get(n) != same[n]), *(n for n in present if n not in found)]:
                lost.setdefault(name, []).append(place)
        bad = [f"{name} does not arrive at {', '.join(places)}" for name, places in lost.items()]
        names = ", ".join([*same, *present])
        return judged(
            "environment",
            not bad,
            "; ".join(bad) or f"{len(same) + len(present)} variables arrive ({names or 'none is set'})",
            "set it on every node before ray start (docs/cluster.md), or do not set it",
        )

    def check_logprobs(self) -> Finding:
        """The vLLM engines and the trainer agree on the log-probs of sampled tokens before any update."""
        gap = self._gap()
        return judged(
            "logprobs",
            gap <= LOGPROB_GAP,
            f"vLLM and trainer {gap:.4f} nats apart on average (at most {LOGPROB_GAP})",
            "both have the same weights: look for another temperature, a patched sampler, or an attention kernel that "
            "computes otherwise ('ds.attn_implementation', VLLM_ATTENTION_BACKEND)",
        )

    def _gap(self) -> float:
        """Mean absolute difference of the engines' and the trainer's log-probs of sampled tokens, nats."""
        engine = self.engine
        questions = engine.experiment.questions.load()[: 4 * engine.ranks]
        like = replace(engine.request(engine.sampling.temperature), n=2, max_tokens=RESPONSE, logprobs=True)
        requests = [
            replace(like, prompt_ids=engine.prompts.encode(question), seed=i) for i, question in enumerate(questions)
        ]
        rollouts = dict(chain.from_iterable(engine.sampler.sample(requests)))
        pairs = [(request, rollout) for position, request in enumerate(requests) for rollout in rollouts[position]]
        measured = engine.measure([ForwardRow.of(request.prompt_ids, rollout) for request, rollout in pairs])
        gaps = [
            np.abs(of_trainer.logprobs - rollout.sampler_logprobs)
            for of_trainer, (_, rollout) in zip(measured, pairs, strict=True)
            if rollout.sampler_logprobs is not None  # the sampler was asked for them
        ]
        return float(np.concatenate(gaps).mean())

    def check_replay(self) -> Finding:
        """As `gradient`, but fresh rows have advantage 0: what is left is the gradient of the replayed rows, a few per
        cent of the whole. No weight is changed."""
        return self._compared(
            "replay",
            "norm 0: the replayed rows' advantages are lost; cosine −1: their sign; another norm or cosine: their "
            "log-probs, importance weights or masks (docs/dev/reliability.md has the figures of each); compare with "
            "'train.dynamic_batch_enable': False, then 'ds.packing_samples': False",
        )

    def check_gradient(self) -> Finding:
        """The gradient of one batch equals that of the plain computation, apart from bfloat16's rounding."""
        return self._compared(
            "gradient",
            "a norm far from 1 means that micro-batches or ranks are lost or counted twice: compare with "
            "'ds.zero_stage': 3, then 'train.dynamic_batch_enable': False, then 'ds.packing_samples': False",
        )

    def _compared(self, check: Literal["replay", "gradient"], remedy: str) -> Finding:
        """The layout's gradient of a random batch against the plain one. Only `gradient` changes the weights."""
        experiment, frozen = self.engine.experiment, check == "replay"
        questions = experiment.questions.load()[: experiment.settings.questions_per_step]
        batch = parity.random_batch(questions, experiment.settings.group_size, len(self.engine.tokenizer), RESPONSE)
        model, ahead = Path(self.args.actor.model_name_or_path), bool(experiment.settings.generate_ahead)
        if ahead:
            batch = parity.generated_ahead(parity.plain_engine(experiment, model, "float32"), batch)
        if frozen:
            batch, experiment = parity.of_replayed(batch), parity.frozen(experiment)
        gradients = self._gradients(batch, frozen)
        right, rounded = (parity.plain(experiment, model, batch, dtype) for dtype in ("float32", "bfloat16"))
        difference, noise = (parity.Difference.between(gradient, right) for gradient in (gradients, rounded))
        limit = max(GRADIENT_FACTOR * noise.error, GRADIENT_ERROR)
        rows = [row for row in batch.flat_rows() if row.trajectory or not frozen]
        return judged(
            check,
            difference.error <= limit,
            f"{100 * difference.error:.2f} % from the plain one in float32 (bfloat16 alone {100 * noise.error:.2f} %, "
            f"at most {100 * limit:.1f} %); norm {difference.norm:.4f} of the plain one, cosine "
            f"{difference.cosine:.4f}, smallest {difference.worst[1]:.4f} in {difference.worst[0]}; {len(rows)} "
            f"{'replayed ' * frozen}rows{', generated ahead,' * ahead} in {len(gradients)} optimiser steps",
            remedy,
        )

    def _gradients(self, batch: MixedBatch, frozen: bool) -> parity.Gradients:
        """Of each optimiser step of an update. frozen: each is skipped, as one whose gradient is too large"""
        self.engine.on_ranks("start_recording", frozen)
        try:
            stats = self.engine.update(batch, self.engine.experiment.loss)
        finally:
            self.engine.step = 0  # a run counts its own
            recorded = self.engine.on_ranks("recorded_gradients")
        gradients: parity.Gradients = next(part for part in recorded if part)
        if frozen and stats.metrics["policy/skipped_updates"] != len(gradients):
            raise ValueError("an update was made that Optimizer.skip_above_grad_norm should have skipped")
        return gradients

    def check_sync(self) -> Finding:
        """After an update the vLLM engines have the actor's weights, bit for bit, and its log-probs. Weights of engines
        with several GPUs are slices, which are not compared."""
        self.engine.sync()
        actor, bad, compared = self.engine.on_ranks("weights")[0], [], 0
        for i, engine in enumerate(self.vllm_engines if self.args.vllm.tensor_parallel_size == 1 else ()):
            names, compared = compare_weights(ray.get(engine.weights.remote()), actor)
            if names:
                bad.append(f"engine {i} differs in {len(names)} of {compared} weights: {', '.join(names[:3])}")
            if not compared:
                bad.append(f"engine {i} has no weight with a name of the actor's")
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
        """The training states and the engines' weights are the same after sleeping."""
        if not (self.args.ds.enable_sleep or self.args.vllm.enable_sleep):
            return Finding("sleep", "skipped", "nothing sleeps in this layout")
        bad, seconds = [], 0.0
        if self.args.ds.enable_sleep:
            before = self._states()
            begin = time.perf_counter()
            self.engine.on_ranks("reload_states")
            self.engine.on_ranks("offload_states")
            seconds = time.perf_counter() - begin
            bad += _changed(before, self._states())
        compared = self.args.vllm.enable_sleep and self.args.vllm.tensor_parallel_size == 1
        if compared:
            before_sleep, after = self._engine_weights(), self._engine_weights()
            for i, (old, new) in enumerate(zip(before_sleep, after, strict=True)):
                bad += [f"engine {i}: {name}" for name in new if not np.array_equal(old[name], new[name])]
        return judged(
            "sleep",
            not bad,
            f"changed: {', '.join(bad[:3])}"
            if bad
            else f"all states unchanged, offload and reload took {seconds:.1f} s; vLLM's weights "
            f"{'unchanged' if compared else 'not compared'}",
            "train without 'ds.enable_sleep' or 'vllm.enable_sleep', with a smaller 'vllm.gpu_memory_utilization'",
        )

    def _engine_weights(self) -> list[dict[str, np.ndarray]]:
        with self.engine.sampler.awake():
            return [ray.get(engine.weights.remote()) for engine in self.vllm_engines]

    def check_step(self) -> Finding:
        """Two steps of training succeed (three if each batch is generated one step ahead), the last one with replay if
        the experiment has replay, and save a checkpoint."""
        run = prepare(self.spec, lambda checkpoint: self.engine)
        run.run(StopFile(self.spec.run))
        _, *rows = run.metrics.rows()
        last = rows[-1]
        (self.spec.run / STATES).write_text(json.dumps(self._states()))
        bad = [name for name, value in last.items() if isinstance(value, float) and not math.isfinite(value)]
        if not any(row["policy/grad_norm"] for row in rows):
            bad.append("the gradient of any update")
        if self.engine.experiment.mixer.share.rho and not last.get("replay/actual_share"):
            bad.append("replayed questions")
        times = ", ".join(f"{name} {last['time/' + name]:.1f}" for name in ("rollout", "update", "step"))
        done = f"{len(rows)} steps, gradient norm {last['policy/grad_norm']:.3g}, checkpoint-{run.saved_step} saved; "
        done += f"{100 * last.get('replay/actual_share', 0):.0f} % replayed; seconds: {times}"
        return judged(
            "step",
            not bad,
            f"not finite or missing: {', '.join(bad)}" if bad else done,
            "see doctor.log, which has the output of the trainer and its actors",
        )

    def check_resume(self) -> Finding:
        """Weights, optimiser and buffer are loaded as they were saved, and training goes on."""
        run = prepare(self.spec, lambda checkpoint: self.engine)
        bad = _changed(json.loads((self.spec.run / STATES).read_text()), self._states())
        again = self.spec.run / "buffer-again"
        snapshot.save(run.buffer, again, run.fingerprint)
        for table in ("questions.parquet", "trajectories.parquet"):
            saved = self.spec.run / f"checkpoint-{run.steps}" / "replay" / table
            if (again / table).read_bytes() != saved.read_bytes():
                bad.append(table)
        first_step, stored = run.steps, run.buffer.n_trajectories
        run.run(StopFile(self.spec.run))
        same = f"weights, optimiser and {stored} stored trajectories as after step {first_step}; step {run.steps} done"
        return judged(
            "resume",
            not bad and run.steps == first_step + 1,
            f"differ: {', '.join(bad[:3])}" if bad else same,
            "the checkpoint does not hold what was trained: do not resume from this layout's checkpoints",
        )

    def _states(self) -> list[dict[str, float]]:
        """`DoctorActor.states` of every rank. Sleeping states are loaded for it and offloaded again."""
        if not self.args.ds.enable_sleep:
            return self.engine.on_ranks("states")
        self.engine.on_ranks("reload_states")
        states = self.engine.on_ranks("states")
        self.engine.on_ranks("offload_states")
        return states


def _changed(before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]]) -> list[str]:
    """Names of the states that differ, per rank."""
    ranks = enumerate(zip(before, after, strict=True))
    return [f"rank {rank}: {name}" for rank, (old, new) in ranks for name in old if old[name] != new.get(name)]
