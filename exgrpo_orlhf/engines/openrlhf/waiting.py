"""Waiting for results of Ray with a time limit."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from ..engine import EngineLost


def answer(references: Any, who: str, timeout: float) -> Any:
    """The results of these references.

    Args:
        who: names the actor in error messages
        timeout: seconds

    Raises EngineLost if the actor does not answer in time, died or failed.
    """
    try:
        return ray.get(references, timeout=timeout)
    except GetTimeoutError:
        raise EngineLost(f"{who}: no answer for {timeout:.0f} s (OpenRLHF.timeout)") from None
    except RayActorError as error:
        raise EngineLost(f"{who} died: {str(error).strip()}") from error
    except RayTaskError as error:
        # str(error), because Ray may give the error its cause's class too, and then it has no `traceback_str`.
        raise EngineLost(f"{who} failed: {error.cause}\n{str(error).strip()[-2000:]}") from error
