"""Fixtures for every test."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of models and texts beside the project, which not every machine has."""
    folder = Path(__file__).resolve().parents[1].parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the folder ../shared with models and texts, which is not here")
    return folder
