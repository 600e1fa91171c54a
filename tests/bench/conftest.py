"""A model small enough to be timed in no time, and one benchmark of it for all tests to read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dejavu.bench.decode import bench_subject
from dejavu.bench.options import BenchOptions
from dejavu.bench.peers import PeerArm, open_peer
from dejavu.bench.result import BenchResult
from dejavu.bench.subject import Subject, random_subject

TINY: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 104,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}

GATED: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "hidden_act": "relu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session", autouse=True)
def _brief(brief_bench: None) -> None:
    """All benches here."""


@pytest.fixture(scope="session")
def tiny() -> Subject:
    return random_subject("tiny", TINY, dtype="fp32")


@pytest.fixture(scope="session")
def gated() -> Subject:
    return random_subject("gated", GATED, dtype="int8")


@pytest.fixture(scope="session")
def transformers(tiny: Subject) -> Iterator[PeerArm]:
    with open_peer("transformers", tiny, threads=1) as arm:
        yield arm


@pytest.fixture(scope="session")
def ctranslate2(tiny: Subject) -> Iterator[PeerArm]:
    pytest.importorskip("ctranslate2")
    with open_peer("ctranslate2:fp32", tiny, threads=1) as arm:
        yield arm


@pytest.fixture(scope="session")
def result(tiny: Subject) -> BenchResult:
    pytest.importorskip("ctranslate2")
    options = BenchOptions(
        densities=(0.1, 0.4),
        exact=True,
        peers=("transformers", "ctranslate2:int8"),
        threads=1,
        prompt_tokens=12,
        new_tokens=40,
        skipped=1,
        repeats=2,
        at_once=("forced 0.4",),
    )
    return bench_subject(tiny, {}, options)
