"""Tiny models, built once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from dejavu.load import LoadedModel, load_model
from dejavu.models.base import DecoderLM

from .tiny import Reference, build, small_tokenizer

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


TEXT = "the old king said that the answer is true or false because a question was asked. " * 3


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny OPT with a tokenizer that knows some words."""
    found = tmp_path_factory.mktemp("with-tokenizer")
    tokenizer = small_tokenizer(TEXT)
    build("opt", found, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1)
    tokenizer.save_pretrained(found)
    return found


@pytest.fixture(scope="session")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)
