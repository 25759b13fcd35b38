"""OpenRLHF's tokenizer, read as its file says (written for OpenRLHF 0.11.2, openrlhf/utils/utils.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from openrlhf.utils import utils

from ... import tokenizer_file


def get_tokenizer(*args: Any, **kwargs: Any) -> Any:
    """OpenRLHF's function of that name, which sets padding, with a tokenizer of `tokenizer_file.load`."""
    reader = SimpleNamespace(from_pretrained=lambda path, **_: tokenizer_file.load(path))
    with patch.object(utils, "AutoTokenizer", reader):
        return utils.get_tokenizer(*args, **kwargs)
