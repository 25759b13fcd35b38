"""A chat template is a program of the model's author: it may run without end, or fill the memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
from pathlib import Path
from typing import Any

_TURNS = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
_SECONDS, _MEMORY, _CHARACTERS = 5, 2**30, 10**6  # of processor time; bytes beside those of the process
_TOO_MUCH = 3  # exit status


def refuse_endless(tokenizer: Any) -> None:
    """Raises ValueError for a chat template that takes too long, or writes too much, for two messages of one word.

    Only the end of its process ends one that does not return, so it is tried in a fork.
    """
    process = multiprocessing.get_context("fork").Process(target=_render, args=(tokenizer,))
    process.start()
    process.join(300)  # against a fork that waits for a lock, which is no fault of the template
    if process.exitcode == _TOO_MUCH:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path} takes more than {_SECONDS} s, or writes more than "
            f"{_CHARACTERS:,} characters, for messages of one word; use Prompts.template = 'plain', or 'simplerl'"
        )
    process.kill()


def _render(tokenizer: Any) -> None:
    gc.disable()  # what belongs to the parent is not finalised here
    signal.signal(signal.SIGXCPU, lambda *_: os._exit(_TOO_MUCH))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY, resource.RLIM_INFINITY))
        for turns in (_TURNS[:1], _TURNS):
            text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=turns != _TURNS))
            if len(text) > _CHARACTERS:
                raise MemoryError
    except MemoryError:
        os._exit(_TOO_MUCH)
    except Exception:  # the parent meets it too
        return
