"""Tiny models with random biases."""

from collections.abc import Iterator

import pytest
import torch
import transformers

from .references import HEADS, LAYERS, NEURONS, VOCAB, Pair, pair

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 40,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    config = transformers.OPTConfig(**SHAPE, word_embed_proj_dim=24, ffn_dim=NEURONS, dropout=0.0)
    return pair(tmp_path_factory.mktemp("opt"), config)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    config = transformers.LlamaConfig(**SHAPE, intermediate_size=NEURONS, num_key_value_heads=2)
    return pair(tmp_path_factory.mktemp("llama"), config)
