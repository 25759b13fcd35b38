"""Responses by vLLM in its own processes: on GPUs, with tensor parallelism and replicas, or on a CPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Collection, Generator, Sequence
from importlib.util import find_spec
from multiprocessing import resource_tracker
from typing import Any

from ... import tokenizer_file
from . import GO_ON, EngineFailure, GenerationRequest, Key, Response
from .stream import Stream

# Set before vLLM is imported, for this process and its own; values that the user has set stay.
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
_CPU = {
    "TORCH_COMPILE_DISABLE": "1",  # 15 s for the sampler alone
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker runs in its engine's process, not in a further one
}
_CPU_CACHE_BYTES = 256 * 2**20  # for keys and values; by default vLLM takes a share of the machine's memory
_ON_A_GPU = (
    "on a GPU the last bits of the logits, and sometimes a token, depend on the other requests in a batch; "
    "VLLM_BATCH_INVARIANT=1 is vLLM's slower mode that avoids this, for compute capability 9.0 and above"
)
_QUEUE = 2  # requests queued for each one that a replica computes, so that it never waits


class VllmEngine:
    """vLLM's asynchronous engine with its data parallelism for replicas.

    Prompts are sent as token ids, so vLLM adds nothing to them, and responses are decoded here. Of the model's
    generation config only the end tokens are used, no sampling setting. In vLLM each request has its own generator,
    made from its seed.
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
        """Start vLLM.

        Args:
            dtype: 'auto' is the checkpoint's.
            gpu_memory: share of each GPU's memory.

        Raises:
            EngineFailure: vLLM is not installed, GPUs are missing, or the model cannot be loaded.
        """
        if find_spec("vllm") is None:
            raise EngineFailure("vLLM is not installed: pip install -e '.[openrlhf]', or --engine transformers")
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        import vllm
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        cpu = current_platform.is_cpu()
        needed = tensor_parallel * replicas
        if not cpu and needed > (gpus := current_platform.device_count()):
            raise EngineFailure(
                f"tensor parallel {tensor_parallel} × replicas {replicas} takes {needed} GPUs; vLLM sees {gpus}"
            )
        settings: dict[str, Any] = {"gpu_memory_utilization": gpu_memory}
        if cpu:
            for name, value in _CPU.items():
                os.environ.setdefault(name, value)
            settings = {
                "kv_cache_memory_bytes": _CPU_CACHE_BYTES,
                "enforce_eager": True,
                # With chunked prefill vLLM 0.29 rewinds a request's generator. On a CPU that kills the engine.
                "enable_chunked_prefill": False,
            }
        # Ctrl-C and SIGHUP must reach this process alone, which ends the others. What is blocked here is blocked in all
        # processes that start meanwhile. Python's resource tracker unblocks it when it starts, so it starts before.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  (its processes print to it for good)
        terminal = os.dup(1), os.dup(2)
        for number in (1, 2) if os.environ["VLLM_LOGGING_LEVEL"] == "ERROR" else ():  # else the user wants to read it
            os.dup2(self._printed.fileno(), number)
        try:
            self._llm = AsyncLLM.from_engine_args(
                vllm.AsyncEngineArgs(
                    model=model_path,
                    dtype=dtype,
                    tensor_parallel_size=tensor_parallel,
                    data_parallel_size=replicas,
                    max_model_len=-1,  # as much of the context as the cache has room for
                    seed=0,  # of everything that has no seed of its own
                    enable_prefix_caching=True,
                    generation_config="vllm",
                    disable_log_stats=True,
                    use_tqdm_on_load=False,
                    **settings,
                ),
                usage_context=UsageContext.LLM_CLASS,  # its batch sizes are meant for throughput
            )
        except (ValueError, RuntimeError, OSError, ImportError) as error:
            reason = first_error(self._printed.fileno()) or error
            raise EngineFailure(f"vLLM cannot start with {model_path}: {reason}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for number, copy in enumerate(terminal, 1):
                os.dup2(copy, number)
                os.close(copy)
        self._config = self._llm.vllm_config
        self._manager = self._llm.engine_core.resources.engine_manager
        self._guard = _kill_after_this_process([process.pid for process in self._manager.processes])
        self._tokenizer = tokenizer_file.load(model_path)
        self._replicas, self._version = replicas, vllm.__version__
        self._device = "cpu" if cpu else current_platform.get_device_name()
        # On a CPU, responses did not depend on other requests: this was measured with 1, 4 and 256 at a time, in
        # several orders, with a cold and a warm prefix cache, in float32 and bfloat16.
        self.reproducible = None if cpu or vllm.envs.VLLM_BATCH_INVARIANT else _ON_A_GPU
        self._stream = Stream()

    def generate(
        self, requests: Sequence[GenerationRequest], done: Collection[Key]
    ) -> Generator[list[Response], None, None]:
        """Portions of the responses that have arrived since the last portion."""
        pending = [request for request in requests if request.key not in done]
        self._check_lengths(pending)
        at_once = _QUEUE * self._replicas * self._config.scheduler_config.max_num_seqs
        yield from self._stream.answers(pending, self._answer, at_once)

    async def _answer(self, request: GenerationRequest) -> Response:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_tokens,
            seed=request.seed,
            stop_token_ids=list(request.stop_ids),
            stop=list(request.stop),
            include_stop_str_in_output=True,
            detokenize=bool(request.stop),  # to see the texts in it, special tokens too
            skip_special_tokens=not request.stop,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids))
        name = "/".join(map(str, request.key))
        try:
            (output,) = [output async for output in self._llm.generate(prompt, params, name)]
        except EngineDeadError as error:
            raise self._death() from error
        except (EngineGenerateError, ValueError) as error:
            raise EngineFailure(f"{name}: vLLM refuses: {error.__cause__ or error}; {GO_ON}") from error
        response = output.outputs[0]
        if response.finish_reason == "abort":  # the other replicas report this when one has died
            raise self._death()
        finish: Any = response.finish_reason
        if finish not in ("stop", "length"):
            raise EngineFailure(f"{name}: vLLM ended the response by {finish!r}; {GO_ON}")
        ids = tuple(response.token_ids)
        return Response(request, self._tokenizer.decode(ids, skip_special_tokens=True), len(ids), finish, token_ids=ids)

    def _death(self) -> EngineFailure:
        reason = first_error(self._printed.fileno()) or "it printed no error"
        return EngineFailure(f"vLLM's {self._manager.failed_proc_name or 'engine process'} died ({reason}); {GO_ON}")

    def _check_lengths(self, requests: Sequence[GenerationRequest]) -> None:
        limit = self._config.model_config.max_model_len
        for request in requests:
            length = len(request.prompt_ids) + request.max_tokens
            if length > limit:
                benchmark, row, _ = request.key
                raise EngineFailure(
                    f"{benchmark}, row {row}: a prompt of {len(request.prompt_ids)} tokens and a response of up to "
                    f"{request.max_tokens} take {length}; vLLM has room for {limit}"
                )

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

        self._stream.close()  # first, or vLLM reports the end of its processes as a failure
        self._llm.shutdown()
        # Their event loop is closed by now, so vLLM leaves its sockets open, and their context would wait for them for
        # ever when it is collected. They are closed as plain sockets, because an asyncio socket needs its loop.
        for part in vars(self._llm.engine_core.resources).values():
            if isinstance(part, zmq.Socket):
                zmq.Socket.close(part, linger=0)
        self._guard.kill()
        self._guard.communicate()


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
