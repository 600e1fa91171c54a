"""A `DecoderLM` as a Hugging Face checkpoint, for programs that read nothing else."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dejavu.kernels.matrix import WEIGHT_DTYPES, Matrix
from dejavu.load import checkpoint_name
from dejavu.models.base import DecoderLM
from dejavu.models.slots import Kind, Slot, slots
from dejavu.registry import architecture

_FIELDS = {"layers": "blocks"}  # where a slot's path and `Weights` differ
_OF_THE_FILE = ("torch_dtype", "dtype", "dejavu_quantization", "transformers_version")


def export(model: DecoderLM, config: dict[str, Any], folder: Path, dtype: str) -> None:
    """Write `config.json` and `model.safetensors` into an existing folder.

    config: the model's `config.json`; what it says of the stored weights is replaced. dtype: fp32
    or bf16; int8 weights are dequantised.
    """
    from safetensors.torch import save_file

    stored = WEIGHT_DTYPES[dtype]
    kept = {key: value for key, value in config.items() if key not in _OF_THE_FILE}
    kept["dtype"] = str(stored).removeprefix("torch.")
    kept["tie_word_embeddings"] = model.config.tie_word_embeddings
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    tensors = state_dict(model, stored)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def state_dict(model: DecoderLM, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights under the names, and in the orientation, of Hugging Face checkpoints."""
    table = architecture(model.config.model_type).CHECKPOINT_NAMES
    found: dict[str, Tensor] = {}
    for name, slot in slots(model.config).items():
        found[checkpoint_name(name, table)] = _tensor(model, name, slot).to(dtype)
    return found


def _tensor(model: DecoderLM, name: str, slot: Slot) -> Tensor:
    """What fills a slot, as a checkpoint stores it."""
    value = reduce(_step, name.split("."), model.weights)
    if not isinstance(value, Matrix):
        assert isinstance(value, Tensor)
        return value
    dense = value.data if value.scale is None else value.float()
    if slot.kind is Kind.BY_INPUT:
        return dense.t().contiguous()
    missing = slot.shape[0] - len(dense)  # positions before the first one, dropped by the loader
    return torch.cat((dense.new_zeros(missing, dense.shape[1]), dense)) if missing else dense


def _step(node: Any, part: str) -> Any:
    """One part further along a slot's path into `Weights`."""
    return node[int(part)] if part.isdigit() else getattr(node, _FIELDS.get(part, part))
