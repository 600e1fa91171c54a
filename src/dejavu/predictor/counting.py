"""What predictors would read of a model that nobody has here: bytes by counting, from shapes alone.

The rules are those of `sparsity.accounting`, for matrices that do not exist yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from dejavu.config import ModelConfig
from dejavu.kernels.matrix import WEIGHT_DTYPES
from dejavu.models.slots import Kind, Slot, slots
from dejavu.predictor.options import PrepareOptions

_STEP = 4  # bytes of a scale, a step or a bias


@dataclass(frozen=True)
class PredictorShare:
    """ranks: those that `prepare` would try. predictor_bytes: of all layers at the largest of them.
    dense_bytes: what a dense step reads."""

    ranks: tuple[int, ...]
    predictor_bytes: int
    dense_bytes: int

    @property
    def share(self) -> float:
        """Predictors over the dense step."""
        return self.predictor_bytes / self.dense_bytes


def predictor_share(config: ModelConfig, options: PrepareOptions, dtype: str) -> PredictorShare:
    """Predictors of the neurons of every layer, at the largest rank that would be tried.

    dtype: of the model's weights, fp32, bf16, fp16 or int8.
    """
    ranks = options.neuron_ranks(config)
    one = predictor_bytes(config.hidden_size, config.intermediate_size, ranks[-1], options.bits)
    return PredictorShare(ranks, one * config.num_hidden_layers, dense_step_bytes(config, dtype))


def predictor_bytes(width: int, neurons: int, rank: int, bits: int) -> int:
    """What `Predictor.nbytes` of that shape is."""
    if bits == 4:
        first = rank * (-(-width // 2) + _STEP)
        return first + neurons * (-(-rank // 2) + _STEP)
    return rank * (width + _STEP) + neurons * (rank + _STEP + _STEP)


def dense_step_bytes(config: ModelConfig, dtype: str) -> int:
    """What `accounting.dense_bytes` of such a model is."""
    found = slots(config)
    if not config.tie_word_embeddings:
        found.pop("embed_tokens")  # a table then: rows are looked up
    return sum(_slot_bytes(slot, dtype) for slot in found.values())


def _slot_bytes(slot: Slot, dtype: str) -> int:
    if slot.kind == Kind.TABLE:
        return 0
    if slot.kind == Kind.VECTOR:
        return prod(slot.shape) * _STEP
    rows = slot.shape[0] if slot.kind == Kind.BY_OUTPUT else slot.shape[1]
    scales = rows * _STEP if dtype == "int8" else 0
    return prod(slot.shape) * WEIGHT_DTYPES[dtype].itemsize + scales
