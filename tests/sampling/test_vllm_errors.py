"""The reason that the user is told is the first error among what vLLM's processes have printed."""

from __future__ import annotations

import tempfile

import pytest

from exgrpo_orlhf.sampling.vllm_processes import first_error

AT = "(EngineCore pid=24276) ERROR 11-25 00:33:32 [core.py:1374] "
PRINTED = f"""\
(EngineCore pid=24276) Process EngineCore:
{AT}EngineCore failed to start.
{AT}Traceback (most recent call last):
{AT}    raise RuntimeError("a line of code")
{AT}safetensors._safetensors_rust.SafetensorError: incomplete metadata, file not fully covered
{AT}During handling of the above exception, another exception occurred:
{AT}RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("printed", "error"),
    [
        (PRINTED, "safetensors._safetensors_rust.SafetensorError: incomplete metadata, file not fully covered"),
        ("torch.OutOfMemoryError: CUDA out of memory.\n", "torch.OutOfMemoryError: CUDA out of memory."),
        ("INFO: no Error here\n", ""),
        ("", ""),
    ],
)
def test_the_first_error_is_that_of_the_first_traceback(printed, error):
    with tempfile.TemporaryFile() as file:
        file.write(printed.encode())
        file.flush()
        assert first_error(file.fileno()) == error
