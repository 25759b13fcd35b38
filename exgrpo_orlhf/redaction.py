"""What is never written: values of settings and flags that are keys, tokens or passwords by their name, and user and
password in addresses. Programs take them from the environment (docs/training.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "***"
_SECRET = re.compile(
    r"key|token|.*(api|access|secret|private|auth|session|refresh|bearer|hf|hub|wandb)[_-]?(key|token)"
    r"|.*(password|passwd|passphrase|secret|credentials?|authorization)",
    re.IGNORECASE,
)


def redacted(name: str, value: Any) -> Any:
    """The value of a setting or a flag as it may be written.

    name: such as 'Tracking.uri' or 'logger.wandb.key'; of a dict's values their own names count too
    Returns the value itself where there is nothing to hide.
    """
    if isinstance(value, Mapping):
        return {key: redacted(name if _is_secret(name) else str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redacted(name, inner) for inner in value)
    if _is_secret(name) and value is not None and not isinstance(value, bool):
        return REDACTED
    return without_password(value) if isinstance(value, str) else value


def without_password(text: str) -> str:
    """A text without user and password of the addresses in it, and without the secrets among their parameters."""
    text = re.sub(r"(?<=://)[^/?#\s'\"]+@", "", text)
    hidden = lambda part: f"{part[1]}={REDACTED}" if _is_secret(part[1]) else part[0]
    return re.sub(r"(?<=[?&])([\w.-]+)=[^&#\s'\"]+", hidden, text)


def _is_secret(name: str) -> bool:
    return _SECRET.fullmatch(re.split("[./]", name)[-1]) is not None
