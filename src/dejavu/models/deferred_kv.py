"""Keys and values that heads still owe the cache (lazy-kv), of all layers and sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.kernels.lazy import RING, DeferredView


def obstacle(config: ModelConfig) -> str | None:
    """Why keys and values of this model cannot be computed later from a kept input; None: they can.

    Under GQA a key serves several query heads, few groups go unused, and k and v are small.
    """
    if config.num_key_value_heads != config.num_attention_heads:
        return "its query heads share keys and values (GQA)"
    if config.rope is not None:
        return "its keys are rotated by their positions"
    if config.qk_norm:
        return "its keys are normalised"
    if not config.pre_norm:
        return "its attention reads what no norm has made"
    return None


class DeferredKV:
    """Rings of inputs and what is missing, for as many sequences as there are slots.

    inputs: `[layers, slots, RING, D]`; missing: int32 `[layers, slots, H]`, see `DeferredView`.
    """

    def __init__(
        self, config: ModelConfig, slots: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """dtype: of the inputs of attention."""
        depth = config.num_hidden_layers
        rings, debts = (slots, RING, config.hidden_size), (slots, config.num_attention_heads)
        self.inputs = torch.zeros(depth, *rings, dtype=dtype, device=device)
        self.missing = torch.zeros(depth, *debts, dtype=torch.int32, device=device)

    def clear(self, slot: int) -> None:
        """A slot gets a new sequence, whose cache is complete (in the order of the stream)."""
        self.missing[:, slot].zero_()


@dataclass(frozen=True, eq=False)
class Deferral:
    """How a step uses it. slots: int32 `[B]`; complete: see `DeferredView`."""

    kv: DeferredKV
    slots: Tensor
    complete: bool

    def view(self, layer: int) -> DeferredView:
        """What attention of one layer sees."""
        return DeferredView(
            self.kv.inputs[layer], self.kv.missing[layer], self.slots, self.complete
        )
