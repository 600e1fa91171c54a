"""Bytes of a step, counted by hand."""

import pytest

from dejavu.load import random_model
from dejavu.registry import architecture
from dejavu.sparsity.accounting import (
    LayerReads,
    dense_bytes,
    group_bytes,
    neuron_bytes,
    step_bytes,
)

D, F, V, LAYERS, POSITIONS = 8, 12, 10, 2, 16
WIDTH = {"fp32": 4, "bf16": 2, "int8": 1}


def opt(**fields):
    return {
        "model_type": "opt",
        "vocab_size": V,
        "hidden_size": D,
        "ffn_dim": F,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "word_embed_proj_dim": D,
        **fields,
    }


def llama(**fields):
    return {
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "max_position_embeddings": POSITIONS,
        "hidden_act": "relu",
        "tie_word_embeddings": False,
        **fields,
    }


def weights(config, dtype):
    parsed = architecture(config["model_type"]).config_from_hf(config)
    return random_model(parsed, dtype=dtype).weights


def row(columns, dtype):
    return columns * WIDTH[dtype] + (4 if dtype == "int8" else 0)


@pytest.mark.parametrize("dtype", WIDTH)
def test_dense_opt_by_hand(dtype):
    square = 4 * D * row(D, dtype) + 4 * D * 4  # q, k, v, o and their biases
    mlp = F * row(D, dtype) + F * 4 + F * row(D, dtype) + D * 4  # down is stored by input row
    norms = 2 * 2 * D * 4
    head = V * row(D, dtype)  # tied: once; the rows of both lookup tables never
    expected = LAYERS * (square + mlp + norms) + 2 * D * 4 + head
    assert dense_bytes(weights(opt(), dtype)) == expected


@pytest.mark.parametrize("dtype", WIDTH)
def test_dense_llama_by_hand(dtype):
    attention = (8 + 4 + 4) * row(D, dtype) + 8 * row(D, dtype)
    mlp = 3 * F * row(D, dtype)
    expected = LAYERS * (attention + mlp + 2 * D * 4) + D * 4 + V * row(D, dtype)
    assert dense_bytes(weights(llama(), dtype)) == expected


def test_untied_embedding_does_not_count():
    tied, untied = (weights(llama(tie_word_embeddings=tie), "bf16") for tie in (True, False))
    assert dense_bytes(tied) == dense_bytes(untied)


def test_narrow_embeddings_count_their_projections():
    narrow = weights(opt(word_embed_proj_dim=4), "fp32")
    without = dense_bytes(weights(opt(), "fp32")) - V * D * 4
    assert dense_bytes(narrow) == without + V * 4 * 4 + 2 * 4 * D * 4


@pytest.mark.parametrize("stored", WIDTH)
@pytest.mark.parametrize("counted", WIDTH)
@pytest.mark.parametrize("config", [opt(), llama(), opt(word_embed_proj_dim=4)])
def test_counting_as_another_dtype_is_counting_that_model(config, stored, counted):
    assert dense_bytes(weights(config, stored), counted) == dense_bytes(weights(config, counted))


@pytest.mark.parametrize("dtype", WIDTH)
def test_a_skipped_neuron_saves_its_rows_and_biases(dtype):
    scores, down = neuron_bytes(weights(opt(), dtype).blocks[0].mlp)
    assert (scores, down) == (row(D, dtype) + 4, row(D, dtype))
    scores, down = neuron_bytes(weights(llama(), dtype).blocks[0].mlp)
    assert (scores, down) == (2 * row(D, dtype), row(D, dtype))


@pytest.mark.parametrize("dtype", WIDTH)
def test_a_skipped_group_saves_its_query_and_output_rows(dtype):
    per_group = group_bytes(weights(llama(), dtype).blocks[0].attention, 2)
    assert per_group == 4 * row(D, dtype) + 4 * row(D, dtype)
    per_head = group_bytes(weights(opt(), dtype).blocks[0].attention, 4)
    assert per_head == 2 * (row(D, dtype) + 4) + 2 * row(D, dtype)


def test_step_reads_what_it_lists():
    w = weights(opt(), "int8")
    every = [LayerReads()] * LAYERS
    assert step_bytes(w, every, groups=4) == dense_bytes(w)
    assert step_bytes(w, every, groups=4, predictor_bytes=77) == dense_bytes(w) + 77
    some = [LayerReads(neurons=5, active=3, groups=1), LayerReads(neurons=6.5)]
    up, down, group = (
        row(D, "int8") + 4,
        row(D, "int8"),
        2 * (row(D, "int8") + 4) + 2 * row(D, "int8"),
    )
    skipped = 7 * up + 9 * down + 3 * group + 5.5 * (up + down)
    assert step_bytes(w, some, groups=4) == pytest.approx(dense_bytes(w) - skipped)


def test_layers_must_match():
    with pytest.raises(ValueError, match="shorter"):
        step_bytes(weights(opt(), "int8"), [LayerReads()], groups=4)
