"""MLflow databases for tests, and no tracking server but the test's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from exgrpo_orlhf.tracking.client import MLFLOW_ENVIRONMENT


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in MLFLOW_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def made_database(tmp_path_factory) -> Path:
    """An empty MLflow database: making one takes seconds."""
    path = tmp_path_factory.mktemp("made") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def fresh_sqlite(tmp_path) -> str:
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def sqlite(tmp_path, made_database, fresh_sqlite) -> str:
    shutil.copy(made_database, tmp_path / "mlflow.db")
    return fresh_sqlite
