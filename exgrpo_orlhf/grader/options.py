"""The options of a multiple-choice question, by label."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# The label that an option's text begins with: A) 125; (a) 125; 1. cat; but not 1.5.
_OWN_LABEL = re.compile(r"^\s*[(\[]?(?:([A-Za-z])(?:\s?[)\].:]|\s[-–—]\s)|(\d{1,2})(?:[)\]]|[.:](?=\s)))\s*")


def options_of(listed: Any) -> dict[str, str]:
    """The options' texts by label, without the labels that they begin with. {} for what is no list and no mapping."""
    if isinstance(listed, list | tuple):
        listed = {chr(ord("A") + i): text for i, text in enumerate(listed[:26])}
    if not isinstance(listed, Mapping):
        return {}
    options = {str(label).strip().upper(): str(text) for label, text in listed.items() if text is not None}
    own = [(match[1] or match[2]).upper() for match in map(_OWN_LABEL.match, options.values()) if match]
    if own not in ([*options], [str(i + 1) for i in range(len(options))]):
        return options
    return dict(zip(own, (_OWN_LABEL.sub("", text) for text in options.values()), strict=True))
