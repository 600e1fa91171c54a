"""Tiny models, built once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers

from dejavu.models.base import DecoderLM

from .tiny import Reference, build

Pair = tuple[DecoderLM, Reference]


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build("opt", tmp_path_factory.mktemp("opt"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build("llama", tmp_path_factory.mktemp("llama"))
