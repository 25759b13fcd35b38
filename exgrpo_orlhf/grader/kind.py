"""A kind of verifier: an entry point of the group `exgrpo_orlhf.graders`, under the name that `Verifier.kind` has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .answer import Answer
from .grade import Grade


@dataclass(frozen=True)
class Kind:
    """How a kind grades. One of `here` and `loads` is set, but for reward servers.

    here: of a question and a response, the grade, in the run's own process; ValueError if the question is not its own
    loads: 'module:function', which each grading process calls with the settings; it returns a `Grader` or a `Grading`
    settings: those of `Verifier` that it is given besides the kind and the memory (MiB)
    once: whether the same answer to the same gold is graded once, tried again where that failed, and each gold checked
        before a run: a grade follows from gold, response and `meta`
    meta: the fields of a question's meta on which a grade depends
    as_text: whether numbers among the golds are graded as text
    takes_list: whether a question may have several golds
    any_reward: whether its reward is any number, of which success_at makes a success
    whole: whether it gets the response as it is, with its thought, and what else is known of it: a user's own grader
    visible: what of a response, behind its thought, is graded
    readable: a response that any readable gold can be graded against
    check: raises ValueError for a question without what is needed to grade it (tests)
    tries_loading: whether it is loaded before a run, to see that a file, a sandbox or a server is there
    same: questions for which it is equal are checked by the first of them
    grace: seconds beyond `timeout` that a grading process is given; workers: processes, 0: as many as cores
    """

    here: Callable[[Any, str], Grade] | None = None
    loads: str | None = None
    settings: tuple[str, ...] = ()
    once: bool = False
    meta: tuple[str, ...] = ()
    as_text: bool = False
    takes_list: bool = False
    any_reward: bool = False
    whole: bool = False
    visible: Callable[[str], str] = str
    readable: str = "\\boxed{0}"
    check: Callable[[Answer], object] | None = None
    tries_loading: bool = False
    same: Callable[[Mapping[str, Any]], str | None] = lambda meta: None
    grace: float = 0.0
    workers: int = 0
