"""What stands beside the trainer (the test bed, studies), and what other distributions bring: entry points by group."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..checks import require

_OURS = {  # one of this checkout's, by group
    "exgrpo_orlhf.gin": "ModularChains",
    "exgrpo_orlhf.graders": "exact",
    "exgrpo_orlhf.test_sets": "suites",
}
_OLDER = "what is installed is older than this checkout: run pip install -e . again"


@cache
def entry_points_of(group: str) -> Mapping[str, EntryPoint]:
    """Those of a group by name. Raises ValueError if what is installed is from before the group."""
    points = {point.name: point for point in entry_points(group=group)}
    require(_OURS[group] in points, _OLDER)
    return points


def loaded(point: EntryPoint) -> Any:
    """Raises ValueError if what is installed names a module or an object that this checkout has no more."""
    try:
        return point.load()
    except (ModuleNotFoundError, AttributeError) as error:
        ours = point.module.split(".")[0] == (__package__ or "").split(".")[0]
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else point.module
        if ours and f"{point.module}.".startswith(f"{missing}."):
            raise ValueError(_OLDER) from error
        raise
