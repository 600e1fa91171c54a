"""A `DecoderLM` as a model of transformers, weights included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dejavu.kernels.matrix import WEIGHT_DTYPES, Matrix
from dejavu.load import checkpoint_name
from dejavu.models.base import DecoderLM
from dejavu.models.slots import Kind, Slot, slots
from dejavu.registry import architecture

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_FIELDS = {"layers": "blocks"}  # where a slot's path and `Weights` differ


def hf_model(model: DecoderLM, config: dict[str, Any], dtype: str) -> PreTrainedModel:
    """The model in transformers, eager, ready for inference; it shares no memory with ours.

    config: its `config.json`. dtype: fp32 or bf16; int8 weights are dequantised.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    parsed = AutoConfig.for_model(**shape_config(config))
    parsed.tie_word_embeddings = model.config.tie_word_embeddings
    target = WEIGHT_DTYPES[dtype]
    with torch.device("meta"):  # costs nothing and tells the class
        kind: Any = type(AutoModelForCausalLM.from_config(parsed))  # type: ignore[no-untyped-call]
    with _no_progress_bar():
        made: PreTrainedModel = kind.from_pretrained(
            None, config=parsed, state_dict=state_dict(model, target), dtype=target
        )
    made.eval()  # type: ignore[no-untyped-call]
    return made


def shape_config(config: dict[str, Any]) -> dict[str, Any]:
    """A `config.json` without what is said of the stored weights: ours are converted."""
    stored = ("torch_dtype", "dtype", "dejavu_quantization", "transformers_version")
    return {key: value for key, value in config.items() if key not in stored}


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Without the progress bars of transformers, which are one setting for the whole process."""
    from transformers.utils import logging as untyped

    logging: Any = untyped

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


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
        return value.clone()
    dense = value.float() if value.scale is not None else value.data.clone()
    if slot.kind is Kind.BY_INPUT:
        return dense.t().contiguous()
    missing = slot.shape[0] - len(dense)  # positions before the first one, dropped by the loader
    return torch.cat((dense.new_zeros(missing, dense.shape[1]), dense)) if missing else dense


def _step(node: Any, part: str) -> Any:
    """One part further along a slot's path into `Weights`."""
    return node[int(part)] if part.isdigit() else getattr(node, _FIELDS.get(part, part))
