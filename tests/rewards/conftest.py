"""What several files of this folder share."""

from __future__ import annotations

import pytest

from exgrpo_orlhf.rewards.sandbox import sandbox


@pytest.fixture(scope="module")
def function(request, tmp_path_factory) -> str:
    """The path of a file with the module's FUNCTION, as a user writes it."""
    path = tmp_path_factory.mktemp("functions") / "reward.py"
    path.write_text(request.module.FUNCTION)
    return str(path)


@pytest.fixture(scope="session")
def needs_sandbox() -> None:
    """Skips where programs cannot be run."""
    try:
        sandbox.check_available()
    except sandbox.NoSandbox as error:
        pytest.skip(str(error))
