"""What several files of this folder share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def function(request, tmp_path_factory) -> str:
    """The path of a file with the module's FUNCTION, as a user writes it."""
    path = tmp_path_factory.mktemp("functions") / "reward.py"
    path.write_text(request.module.FUNCTION)
    return str(path)
