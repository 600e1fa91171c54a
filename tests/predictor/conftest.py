"""A model, its plan and what is needed around them, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from dejavu.load import LoadedModel
from dejavu.predictor.plan import Plan, load_plan

from . import tiny


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def loaded(folder: Path) -> LoadedModel:
    return tiny.load(folder)


@pytest.fixture(scope="session")
def plan_folder(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plans") / "plan"
    tiny.prepared(loaded, out)
    return out


@pytest.fixture
def plan(plan_folder: Path) -> Plan:
    return load_plan(plan_folder)
