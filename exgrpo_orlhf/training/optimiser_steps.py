"""The optimiser steps of supervised training: gradient, clipping, update, schedule, and a line in the terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..io.lazy import torch
from ..io.progress import duration

PRINT_EVERY = 5.0  # seconds


def optimiser_steps(
    gradient: Callable[[int], float],
    optimiser: torch.optim.Optimizer,
    schedule: Any,
    *,
    last: int,
    max_grad_norm: float,
    what: str,
) -> Iterator[tuple[int, dict[str, float]]]:
    """Take the optimiser steps 1 … last. Yields each when it is done, with its loss (before it),
    learning_rate and grad_norm (before clipping).

    Args:
        gradient: adds the gradient of a step to the parameters' and returns the loss
        schedule: of torch.optim.lr_scheduler, one step for each of the optimiser's
        what: is trained, for the line that is printed to stderr every few seconds

    Raises ArithmeticError for a loss or a gradient that is not finite. The weights are then as they were before.
    """
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    began = printed = time.monotonic()
    for number in range(1, last + 1):
        optimiser.zero_grad()
        loss = gradient(number)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise ArithmeticError(
                f"{what}: step {number} is not finite (loss {loss}, gradient norm {norm}); lower its learning rate"
            )
        rate = float(schedule.get_last_lr()[0])
        optimiser.step()
        schedule.step()
        now = time.monotonic()
        if now - printed > PRINT_EVERY:
            seconds = (now - began) / number * (last - number)
            print(f"{what}: step {number} of {last}, loss {loss:.3f}, {duration(seconds)} left", file=sys.stderr)
            printed = now
        yield number, {"loss": loss, "learning_rate": rate, "grad_norm": norm}
