"""What several files of this folder share."""

from __future__ import annotations

import pytest

from exgrpo_orlhf.rewards.sandbox import sandbox


@pytest.fixture(scope="session")
def needs_sandbox() -> None:
    """Skips where programs cannot be run."""
    try:
        sandbox.check()
    except sandbox.NoSandbox as error:
        pytest.skip(str(error))
