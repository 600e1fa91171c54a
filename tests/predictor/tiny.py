"""Small checkpoints whose neurons are rare and easy to foresee, and a tokenizer of characters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from dejavu.load import LoadedModel, load_model
from dejavu.predictor.levels import Progress
from dejavu.predictor.options import PrepareOptions
from dejavu.predictor.plan import Plan
from dejavu.predictor.prepare import prepare

VOCAB, WIDTH, NEURONS, LAYERS, HEADS = 64, 32, 128, 2, 4
OPT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "word_embed_proj_dim": WIDTH,
    "ffn_dim": NEURONS,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": NEURONS,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


OPTIONS = PrepareOptions(
    tokens=4096,
    held_out=1024,
    window=32,
    epochs=4.0,
    ranks=(4, 8),
    heads=False,
    lookahead=(0.0,),
    measure_cost=False,
)


class Characters:
    """One token a character."""

    eos_token_id: int | None = 1

    def encode(self, text: str, **options: Any) -> list[int]:
        assert options.get("add_special_tokens") is False
        return [2 + ord(c) % (VOCAB - 2) for c in text]


def text(characters: int = 20_000, seed: int = 0) -> str:
    """Words over few letters: a text that the first token of says little about the next."""
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(0, 26, (characters,), generator=generator).tolist()
    return "".join(" " if n % 7 == 0 else chr(97 + n) for n in letters)


def save(
    folder: Path,
    seed: int = 0,
    *,
    rank: int = 4,
    offset: float = -1.2,
    dead_layer: int | None = None,
    idle_heads: bool = False,
) -> Path:
    """An OPT whose first MLP matrices have `rank` directions and biases around `offset`.

    dead_layer: biases of this layer are so low that no neuron is ever active. idle_heads: all heads
    but the first hardly add anything.
    """
    config = transformers.OPTConfig(**OPT)
    model = transformers.OPTForCausalLM(config).float()
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    with torch.no_grad():
        for _name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.copy_(0.25 * normal(*parameter.shape))
        for number, layer in enumerate(model.model.decoder.layers):
            layer.fc1.weight.copy_(
                normal(NEURONS, rank) @ normal(rank, WIDTH) / (rank * WIDTH) ** 0.5
            )
            layer.fc1.bias.copy_(offset + 0.2 * normal(NEURONS))
            layer.fc2.weight.copy_(0.3 * normal(WIDTH, NEURONS))
            if idle_heads:
                layer.self_attn.out_proj.weight[:, WIDTH // HEADS :] *= 1e-3
            if number == dead_layer:
                layer.fc1.bias.fill_(-1e4)
    model.save_pretrained(folder)
    return folder


def save_llama(folder: Path, seed: int = 0) -> Path:
    """A SiLU model: nothing is exactly zero."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**LLAMA, initializer_range=0.3)
    transformers.LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def load(folder: Path, dtype: str = "auto") -> LoadedModel:
    return load_model(folder, dtype=dtype)


def prepared(
    loaded: LoadedModel,
    out: Path,
    *,
    words: str | None = None,
    progress: Progress | None = None,
    options: PrepareOptions = OPTIONS,
    **fields: Any,
) -> Plan:
    """What `prepare` makes of a model and a text (default: `text()`). fields: of the options."""
    return prepare(
        loaded,
        [text() if words is None else words],
        out,
        tokenizer=Characters(),
        options=replace(options, **fields),
        name="tiny",
        progress=progress,
    )


def windows(count: int) -> torch.Tensor:
    """int64 `[count, 33]` of a text that no plan was made on."""
    ids = torch.tensor(Characters().encode(text(33 * count, 9), add_special_tokens=False))
    return ids[: 33 * count].view(count, 33)
