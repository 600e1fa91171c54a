"""Small random models, whole in memory and with their neurons in a file."""

from dataclasses import replace

import pytest
import torch

from dejavu.flash.store import FlashStore, placeholders
from dejavu.load import random_model
from dejavu.models.base import DecoderLM
from dejavu.models.neurons import ModelNeurons
from dejavu.registry import architecture
from dejavu.weights.bundle import open_bundle, write_bundle

SHAPES = {
    "opt": {
        "model_type": "opt",
        "vocab_size": 64,
        "hidden_size": 24,
        "word_embed_proj_dim": 24,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    },
    "llama": {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 24,
        "intermediate_size": 70,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    },
}


@pytest.fixture
def in_file(tmp_path):
    """Make a model of a kind and dtype: (in memory, from the file, its store)."""

    def make(kind: str, dtype: str, slots: int) -> tuple[DecoderLM, DecoderLM, FlashStore]:
        config = architecture(kind).config_from_hf(SHAPES[kind])
        model = random_model(config, dtype=dtype)
        path = tmp_path / f"{kind}-{dtype}.flash"
        write_bundle(path, ModelNeurons(model, name=kind))
        bundle = open_bundle(path)
        matrices = placeholders(bundle)
        blocks = []
        for layer, block in enumerate(model.weights.blocks):
            parts = {
                part: replace(getattr(block.mlp, part), weight=matrices[name])
                for part in bundle.parts
                for name in [f"layers.{layer}.mlp.{part}.weight"]
            }
            blocks.append(replace(block, mlp=replace(block.mlp, **parts)))
        outside = DecoderLM(config, replace(model.weights, blocks=tuple(blocks)))
        return model, outside, FlashStore(bundle, slots, matrices)

    torch.manual_seed(0)
    return make
