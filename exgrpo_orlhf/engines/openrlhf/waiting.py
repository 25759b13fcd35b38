"""Waiting for Ray, with an end to it."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from ..engine import EngineLost


def answer(references: Any, who: str, timeout: float) -> Any:
    """ray.get with a limit in seconds. Raises EngineLost that names who was asked; an error of its own is raised."""
    try:
        return ray.get(references, timeout=timeout)
    except GetTimeoutError:
        raise EngineLost(f"{who}: no answer for {timeout:.0f} s (OpenRLHF.timeout)") from None
    except RayActorError as error:
        raise EngineLost(f"{who} died: {str(error).strip()}") from error
    except RayTaskError as error:
        # As text: Ray makes it one of its cause's class too where it can, and then it has no `traceback_str`.
        raise EngineLost(f"{who} failed: {error.cause}\n{str(error).strip()[-2000:]}") from error
