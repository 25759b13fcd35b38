"""The runs of a study: named variants of an experiment, and seeds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checks import require
from ..io.redaction import without_password

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*")  # of folders and tags
# A value up to the next comma outside brackets and quotes.
_VALUE = re.compile(r"(?:[^,()\[\]{}'\"]|'[^']*'|\"[^\"]*\"|\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\})+")


@dataclass(frozen=True)
class Suite:
    """The variants and seeds of a study (gin name `Suite`).

    All other bindings and includes of the suite's file hold for every run, unless its variant binds them differently.

    variants: name -> gin files and bindings; () is the suite's file alone
    baseline: the variant with which the others are compared
    seeds: values of train.seed for every variant
    """

    variants: dict[str, tuple[str, ...]]
    baseline: str | None = None
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        require(
            isinstance(self.variants, dict) and bool(self.variants),
            f"Suite.variants must be a dict such as {{'rho_25': ('ablations/rho_25.gin',)}}, got {self.variants!r}",
        )
        for name, parts in self.variants.items():
            check_name(name, "Suite.variants: the name of a variant")
            require(
                isinstance(parts, tuple) and all(isinstance(part, str) for part in parts),
                f"Suite.variants[{name!r}] must be a tuple of gin files and bindings such as ('a.gin',), got {parts!r}",
            )
        require(
            self.baseline is None or self.baseline in self.variants,
            f"Suite.baseline must be one of {', '.join(map(repr, self.variants))}, or None; got {self.baseline!r}",
        )
        require(
            bool(self.seeds) and len({*self.seeds}) == len(self.seeds) and all(type(s) is int for s in self.seeds),
            f"Suite.seeds must be whole numbers, each once, such as (0, 1, 2), got {self.seeds!r}",
        )


@dataclass(frozen=True)
class Variant:
    """One configuration. name: of its folder and MLflow tag; files, bindings: --gin and --set of scripts/train.py"""

    name: str
    files: tuple[str, ...]
    bindings: tuple[str, ...] = ()


def check_name(name: object, what: str) -> None:
    """ConfigError for a name that cannot be that of a folder. what: describes the name"""
    require(
        isinstance(name, str) and _NAME.fullmatch(name) is not None,
        f"{what} must be letters, digits, '_', '.', '+', '=' and '-', as it names a folder; got {name!r}",
    )


def of_suite(suite: Suite, file: str) -> list[Variant]:
    """The variants of a suite. Its file comes first, so a variant's bindings win. A part with a '=' is a binding."""
    return [
        Variant(name, (file, *(p for p in parts if "=" not in p)), tuple(p for p in parts if "=" in p))
        for name, parts in suite.variants.items()
    ]


def of_files(combinations: Sequence[str]) -> list[Variant]:
    """A variant for each text: 'a.gin' is named 'a', 'a.gin+engines/local_gpu.gin' 'a+local_gpu'. Raises ValueError."""
    variants = []
    for combination in combinations:
        files = tuple(combination.split("+"))
        variants.append(Variant("+".join(Path(file).stem for file in files), files))
        check_name(variants[-1].name, f"--gin {combination}: the name of the file")
    return _distinct(variants)


def over_grid(variants: Sequence[Variant], grid: Sequence[str]) -> list[Variant]:
    """Each variant with each combination of values: 'ReplayMixer.rho=0.25,0.5' gives 'base-rho=0.25', 'base-rho=0.5'.

    Raises ValueError.
    """
    axes = []
    for text in grid:
        parameter, _, values = (part.strip() for part in text.partition("="))
        parts = _VALUE.findall(values)
        if not parameter or ",".join(parts) != values or not all(map(str.strip, parts or [""])):
            raise ValueError(f"--grid {text!r} is not a binding with values such as 'ReplayMixer.rho=0.25,0.5,0.75'")
        axes.append([(parameter, part.strip()) for part in parts])
    points = []
    for variant, point in itertools.product(variants, itertools.product(*axes)):
        names = [
            (name.rpartition(".")[2], re.sub(r"[^A-Za-z0-9_.+-]+", "_", without_password(value)).strip("_"))
            for name, value in point
        ]
        bindings = (*variant.bindings, *(f"{parameter} = {value}" for parameter, value in point))
        points.append(
            Variant(variant.name + "".join(f"-{name}={value}" for name, value in names), variant.files, bindings)
        )
    return _distinct(points)


def seeds(text: str) -> tuple[int, ...]:
    """Seeds from '0-7', '0,3,5' or a mixture. Raises ValueError."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{text!r} are no seeds; write 0-7 or 0,3,5")
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len({*numbers}) < len(numbers):
        raise ValueError(f"{text!r} names a seed twice")
    return tuple(numbers)


def _distinct(variants: list[Variant]) -> list[Variant]:
    by_name: dict[str, Variant] = {}
    for variant in variants:
        other = by_name.setdefault(variant.name, variant)
        if other is not variant:
            first, second = (" ".join([*same.files, *same.bindings]) for same in (other, variant))
            raise ValueError(
                f"two variants have the name {variant.name}: {first} and {second}; in a file such as those of "
                "docs/study/suites/ they can have names of their own"
            )
    return variants
