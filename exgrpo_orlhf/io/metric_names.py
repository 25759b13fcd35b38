"""Names of metrics, params and tags that MLflow takes."""

from __future__ import annotations

import posixpath
import re


def check_name(name: str) -> None:
    """Raises ValueError for a metric, param or tag name that MLflow would refuse, before training and not after it."""
    if re.fullmatch(r"[A-Za-z0-9_\-./ ]{1,250}", name) and name == posixpath.normpath(name) and name[0] not in "/.":
        return
    raise ValueError(
        f"{name!r} cannot name a metric, param or tag: a name has at most 250 letters, digits, '_', '-', '.', '/' and "
        f"spaces, and is a plain relative path; write {allowed_name(name.replace('@', '_at_')) or 'a name'!r}"
    )


def allowed_name(name: str, most: int = 250) -> str:
    """The nearest name of at most so many characters that MLflow takes; '' where nothing is left."""
    path = posixpath.normpath("/" + re.sub(r"[^A-Za-z0-9_\-./ ]", "_", name))
    return path.lstrip("/.")[:most].rstrip("/")
