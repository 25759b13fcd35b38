"""What tests of studies start from: curves of runs that never were, and the scripts in this process."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
from run_builders import ROOT

from exgrpo_orlhf.study.curve import Curve, TrackedRun

ACCURACY = "eval/greedy_accuracy"


def made(
    variant: str, seed: int, values, steps=None, engine="local", tokens=100.0, seconds=2.0, metric=ACCURACY, **params
) -> Curve:
    """A curve with a value every 10 steps; tokens, seconds: of a step, NaN without a record"""
    steps = np.arange(0.0, 10 * len(values), 10) if steps is None else np.array(steps, float)
    name = f"{variant}-{seed}"
    run = TrackedRun(name, name, variant, seed, engine, params=params)
    return Curve(run, steps, np.array(values, float), steps * tokens, steps * seconds, metric)


def script(name: str, *arguments: object, **environment: str) -> int:
    """Exit status of scripts/<name>.py, run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        patch.syspath_prepend(ROOT / "scripts")
        for variable, value in environment.items():
            patch.setenv(variable, value)
        return importlib.import_module(name).main()


def ablate(store: str, *arguments: object) -> int:
    """The runs are processes all the same."""
    return script("ablate", *arguments, MLFLOW_TRACKING_URI=store)
