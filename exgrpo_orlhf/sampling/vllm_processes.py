"""The sampler with vLLM in its own processes: on GPUs, with tensor parallelism and replicas, or on a CPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker
from typing import Any

from ..records import Rollout
from .queued import StreamSampler
from .request import EngineLost, Request
from .vllm_requests import rollouts_of, sampling_params, settings

_ON_A_GPU = (
    "on a GPU the last bits of the logits, and sometimes a token, depend on the other requests in a batch; "
    "VLLM_BATCH_INVARIANT=1 is vLLM's slower mode that avoids this, for compute capability 9.0 and above"
)
_QUEUE = 2  # requests queued for each one that a replica computes, so that it never waits


class VllmProcesses(StreamSampler):
    """vLLM's asynchronous engine with its data parallelism for replicas.

    Prompts are sent as token ids, so vLLM adds nothing to them.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: Any = "auto",
        tensor_parallel: int = 1,
        replicas: int = 1,
        gpu_memory: float = 0.9,
    ) -> None:
        """Start vLLM. dtype: 'auto' is the checkpoint's; gpu_memory: share of each GPU's memory. Raises EngineLost if
        vLLM is not installed, GPUs are missing, or the model cannot be loaded."""
        arguments = settings(gpu_memory, "--engine transformers")
        import vllm
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        cpu = current_platform.is_cpu()
        needed = tensor_parallel * replicas
        if not cpu and needed > (gpus := current_platform.device_count()):
            raise EngineLost(
                f"tensor parallel {tensor_parallel} × replicas {replicas} takes {needed} GPUs; vLLM sees {gpus}"
            )
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  (its processes print to it for good)
        try:
            with _children_apart(self._printed.fileno()):
                self._llm = AsyncLLM.from_engine_args(
                    vllm.AsyncEngineArgs(
                        model=model_path,
                        dtype=dtype,
                        tensor_parallel_size=tensor_parallel,
                        data_parallel_size=replicas,
                        max_model_len=-1,  # as much of the context as the cache has room for
                        **arguments,
                    ),
                    usage_context=UsageContext.LLM_CLASS,  # its batch sizes are meant for throughput
                )
        except (ValueError, RuntimeError, OSError, ImportError) as error:
            reason = first_error(self._printed.fileno()) or error
            raise EngineLost(f"vLLM cannot start with {model_path}: {reason}") from error
        self._config = self._llm.vllm_config
        self._manager = self._llm.engine_core.resources.engine_manager
        self._guard = _kill_after_this_process([process.pid for process in self._manager.processes])
        self._replicas, self._version = replicas, vllm.__version__
        self._device = "cpu" if cpu else current_platform.get_device_name()
        # On a CPU, responses did not depend on other requests: this was measured with 1, 4 and 256 at a time, in
        # several orders, with a cold and a warm prefix cache, in float32 and bfloat16.
        self.reproducible = None if cpu or vllm.envs.VLLM_BATCH_INVARIANT else _ON_A_GPU
        self.at_once = _QUEUE * replicas * self._config.scheduler_config.max_num_seqs
        super().__init__()

    def _send(self, request: Request, seed: int) -> Any:
        """As StreamSampler does. Raises EngineLost if there is no room for a response."""
        limit, length = self._config.model_config.max_model_len, len(request.prompt_ids) + request.max_tokens
        if length > limit:
            raise EngineLost(
                f"{request.name}: a prompt of {len(request.prompt_ids)} tokens and a response of up to "
                f"{request.max_tokens} take {length}; vLLM has room for {limit}"
            )
        return super()._send(request, seed)

    async def _answer(self, request: Request, seed: int) -> Rollout:
        from vllm import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        request, prompt = replace(request, n=1), TokensPrompt(prompt_token_ids=[*request.prompt_ids])
        params = sampling_params(request, seed)
        try:
            (output,) = [output async for output in self._llm.generate(prompt, params, f"{request.name} {seed}")]
        except EngineDeadError as error:
            raise self._death() from error
        except (EngineGenerateError, ValueError) as error:
            raise EngineLost(f"{request.name}: vLLM refuses: {error.__cause__ or error}") from error
        if output.outputs[0].finish_reason == "abort":  # the other replicas report this when one has died
            raise self._death()
        return rollouts_of(request, output, "vLLM")[0]

    def _death(self) -> EngineLost:
        reason = first_error(self._printed.fileno()) or "it printed no error"
        return EngineLost(f"vLLM's {self._manager.failed_proc_name or 'engine process'} died ({reason})")

    def describe(self) -> dict[str, Any]:
        model, scheduler = self._config.model_config, self._config.scheduler_config
        return {
            "name": "vllm",
            "version": self._version,
            "device": self._device,
            "dtype": str(model.dtype).removeprefix("torch."),
            "tensor_parallel": self._config.parallel_config.tensor_parallel_size,
            "replicas": self._replicas,
            "cache_tokens": self._config.cache_config.kv_cache_size_tokens,
            **{name: getattr(model, name) for name in ("max_model_len", "enforce_eager", "seed")},
            **{name: getattr(scheduler, name) for name in ("max_num_seqs", "max_num_batched_tokens")},
        }

    def close(self) -> None:
        import zmq  # comes with vLLM

        super().close()  # first, or vLLM reports the end of its processes as a failure
        self._llm.shutdown()
        # Their event loop is closed by now, so vLLM leaves its sockets open, and their context would wait for them for
        # ever when it is collected. They are closed as plain sockets, because an asyncio socket needs its loop.
        for part in vars(self._llm.engine_core.resources).values():
            if isinstance(part, zmq.Socket):
                zmq.Socket.close(part, linger=0)
        self._guard.kill()
        self._guard.communicate()


@contextmanager
def _children_apart(output: int) -> Iterator[None]:
    """Processes that start in this context print to a file (`output`, its descriptor) unless the user wants to read
    them, and get no Ctrl-C and SIGHUP: those must reach this process alone, which ends the others.

    What is blocked here is blocked in them. Python's resource tracker unblocks it when it starts, so it starts before.
    """
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    terminal = os.dup(1), os.dup(2)
    for number in (1, 2) if os.environ["VLLM_LOGGING_LEVEL"] == "ERROR" else ():
        os.dup2(output, number)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, copy in enumerate(terminal, 1):
            os.dup2(copy, number)
            os.close(copy)


def first_error(file: int) -> str:
    """The first error among what vLLM's processes have printed to a file; '' if there is none."""
    text = os.pread(file, 2**20, 0).decode(errors="replace")
    error = re.search(r"(?m)(?:^|[])] )([a-zA-Z_][\w.]*(?:Error|Exception): .*)", text)
    return error[1] if error else ""


def _kill_after_this_process(pids: Sequence[int]) -> subprocess.Popen[bytes]:
    """A shell that kills these processes when this one ends and so closes the shell's standard input: after kill -9
    they would run for ever and keep the GPU's memory."""
    command = ["sh", "-c", 'cat > /dev/null; kill -9 "$@"', "sh", *map(str, pids)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
