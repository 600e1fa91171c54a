"""What sparsity needs to see of a model, so that it need not import one.

`models.base.DecoderLM` fits; so does anything else that computes in the same steps.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Activation, Ops
from dejavu.sparsity.policy import Selector

Cache = TypeVar("Cache")


class AffineView(Protocol):
    """A projection."""

    @property
    def weight(self) -> Matrix:
        """The matrix, in the kernels' orientation."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """fp32 `[out]`."""
        ...


class MLPView(Protocol):
    """The MLP of a block: a neuron is one row of each matrix."""

    @property
    def up(self) -> AffineView:
        """`[F, D]`."""
        ...

    @property
    def gate(self) -> AffineView | None:
        """`[F, D]`."""
        ...

    @property
    def down(self) -> AffineView:
        """Transposed, `[F, D]`."""
        ...


class AttentionView(Protocol):
    """The attention of a block."""

    @property
    def q(self) -> AffineView:
        """`[H * d, D]`."""
        ...

    @property
    def k(self) -> AffineView:
        """`[K * d, D]`."""
        ...

    @property
    def v(self) -> AffineView:
        """`[K * d, D]`."""
        ...

    @property
    def o(self) -> AffineView:
        """Transposed, `[H * d, D]`."""
        ...


class BlockView(Protocol):
    """One transformer block."""

    @property
    def attention(self) -> AttentionView:
        """First half."""
        ...

    @property
    def mlp(self) -> MLPView:
        """Second half."""
        ...


class WeightsView(Protocol):
    """The weights of a model."""

    @property
    def blocks(self) -> Sequence[BlockView]:
        """From the first to the last."""
        ...


class ModelView(Protocol[Cache]):
    """A decoder that can be run over a whole sequence at once."""

    @property
    def config(self) -> ModelConfig:
        """Its shape."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its weights lie, and what it computes."""
        ...

    @property
    def weights(self) -> WeightsView:
        """What a recorder computes activations from."""
        ...

    @property
    def activation(self) -> Activation:
        """Of its MLPs."""
        ...

    def new_cache(self, tokens: int) -> Cache:
        """A cache for one sequence of up to `tokens` tokens."""
        ...

    def logits(self, ids: Tensor, cache: Cache, selector: Selector, ops: Ops) -> Tensor:
        """ids int64 `[N]` of one sequence from its first token -> logits fp32 `[N, V]`."""
        ...

    def reading(
        self, ids: Tensor, cache: Cache, selector: Selector, ops: Ops
    ) -> Generator[int, Any, Tensor]:
        """`logits`, for `together`."""
        ...

    def together(
        self, readings: Iterable[Generator[int, Any, Tensor]], rows: int
    ) -> Iterator[Tensor]:
        """Logits of readings of up to `rows` tokens, in their order. A model that is larger than
        its device reads a block once for as many as fit."""
        ...
