"""What is measured: a checkpoint, or a named shape filled with random weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dejavu.bench.shapes import SHAPES, hf_config
from dejavu.errors import InputError
from dejavu.kernels.device import resolve_device
from dejavu.load import LoadedModel, load_model, random_model
from dejavu.registry import architecture
from dejavu.weights.checkpoint import Checkpoint

_ACTIVE = 2.0  # standard deviations: 98 % of normal numbers lie above minus this
_SPREAD = 0.02  # of the matrices that `random_model` makes
RANDOM_NOTICE = "random weights: speed only"


@dataclass(frozen=True, eq=False)
class Subject:
    """A model to measure. random: nobody trained it, so only its speed means anything."""

    name: str
    loaded: LoadedModel
    random: bool

    @property
    def hf_config(self) -> dict[str, Any]:
        """Its `config.json`."""
        return self.loaded.checkpoint.config


def is_shape(source: str | os.PathLike[str] | LoadedModel) -> bool:
    """Whether a source names a shape of `SHAPES`; a folder of that name goes first."""
    return not isinstance(source, LoadedModel) and source in SHAPES and not Path(source).exists()


def shape_dtype(dtype: str, device: torch.device) -> str:
    """The dtype of a shape's weights: what was asked for, else bf16 on the CPU, fp16 on a GPU."""
    if dtype != "auto":
        return dtype
    return "bf16" if device.type == "cpu" else "fp16"


def open_subject(
    source: str | os.PathLike[str] | LoadedModel,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Subject:
    """The model of a name in `SHAPES`, of a checkpoint, or an already loaded one (which stays on
    its device).

    Raises what `load_model` raises.
    """
    if isinstance(source, LoadedModel):
        if dtype not in ("auto", source.dtype):
            raise InputError(f"dtype {dtype!r}: the model is loaded already, as {source.dtype}")
        return Subject(str(source.checkpoint.path), source, random=False)
    target = resolve_device(device)
    name = os.fspath(source)
    if not is_shape(source):
        return Subject(name, load_model(source, dtype=dtype, device=target), random=False)
    dtype = shape_dtype(dtype, target)
    return random_subject(name, hf_config(name), dtype=dtype, device=target, seed=seed)


def random_subject(
    name: str,
    config: dict[str, Any],
    *,
    dtype: str,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Subject:
    """A model with the shape of a `config.json` and random weights.

    Where its MLPs have biases they are so high that nearly every neuron is active: a density then
    tells what share of up *and* down rows is read, as with the predicted neurons of a trained one.
    """
    parsed = architecture(config.get("model_type")).config_from_hf(config)
    model = random_model(parsed, dtype=dtype, device=device, seed=seed)
    for block in model.weights.blocks:
        bias = block.mlp.up.bias
        if bias is not None and block.mlp.gate is None:
            bias.fill_(_ACTIVE * _SPREAD * parsed.hidden_size**0.5)
    return Subject(name, LoadedModel(model, Checkpoint(Path(name), config, []), dtype), random=True)


def weights_notice(subject: Subject) -> str:
    """Where a subject's weights come from."""
    if not subject.random:
        return "trained"
    mlp = subject.loaded.model.weights.blocks[0].mlp
    if mlp.up.bias is None or mlp.gate is not None:
        return "random"
    return (
        f"random; biases of {_ACTIVE:g} standard deviations make nearly every selected neuron "
        "active, so that its down row is read; what was read is counted"
    )


def make_prompts(
    subject: Subject, count: int, length: int, *, text: Path | None = None, seed: int = 0
) -> list[list[int]]:
    """`count` prompts of `length` token ids each.

    Of a text where the model has a tokenizer (what a model computes depends on what it reads),
    random ids where its weights are random. Raises InputError for a text that is too short.
    """
    if subject.random or text is None:
        return random_ids(subject.loaded.model.config.vocab_size, count, length, seed=seed)
    return text_ids(subject.loaded.checkpoint, text, count, length)


def random_ids(vocab_size: int, count: int, length: int, *, seed: int = 0) -> list[list[int]]:
    """`count` lists of `length` token ids each."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(vocab_size, (count, length), generator=generator).tolist()
    return ids


def text_ids(checkpoint: Checkpoint, text: Path, count: int, length: int) -> list[list[int]]:
    """The first `count` pieces of a text, `length` token ids each. Raises InputError for a text
    that is too short."""
    from dejavu.weights.tokenizer import load_tokenizer

    # Eight bytes a token are ample: the rest of a long text need not be tokenised.
    start = text.read_text(encoding="utf-8")[: 8 * count * length + 4096]
    tokens: Sequence[int] = load_tokenizer(checkpoint)(
        start, add_special_tokens=False, verbose=False
    )["input_ids"]
    if len(tokens) < count * length:
        raise InputError(
            f"{text} has {len(tokens)} tokens; {count} prompts of {length} tokens need more: "
            "give a longer text, a shorter prompt or fewer repeats"
        )
    return [list(tokens[i * length : (i + 1) * length]) for i in range(count)]
