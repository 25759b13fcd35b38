"""MLflow databases for tests, and no tracking server but the test's own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _environment(no_tracking_server) -> None:
    pass


@pytest.fixture
def fresh_sqlite(tmp_path) -> str:
    return f"sqlite:///{tmp_path}/mlflow.db"
