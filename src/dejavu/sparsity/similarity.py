"""How alike are neighbours: active sets of nearby tokens, the residual stream of nearby layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_TINY = 1e-30  # an all-zero stream has no direction and no size to compare with


class Overlap:
    """Mean Jaccard index (shared / in either) of pairs of active sets, by layer.

    Pairs in which both sets are empty say nothing and are left out.
    """

    def __init__(self, layers: int) -> None:
        self._sums = [0.0] * layers
        self._pairs = [0] * layers

    def add(self, layer: int, first: Tensor, second: Tensor) -> None:
        """Compare row i of one bool `[n, entries]` with row i of the other, up to the shorter."""
        n = min(len(first), len(second))
        shared = (first[:n] & second[:n]).sum(dim=1).double()
        either = (first[:n] | second[:n]).sum(dim=1)
        self._sums[layer] += float((shared / either.clamp(min=1)).sum())
        self._pairs[layer] += int((either > 0).sum())

    def means(self) -> list[float | None]:
        """One figure a layer; None where there was no pair."""
        return [s / n if n else None for s, n in zip(self._sums, self._pairs, strict=True)]


class Change(NamedTuple):
    """What one block does to the residual stream.

    cosine: similarity of its input and output. block, attention: norm of what the block (its
    attention half) adds over the norm of the input; mlp: what the MLP half adds over the norm of
    the stream between the halves.
    """

    cosine: float
    block: float
    attention: float
    mlp: float


class ResidualFlow:
    """How the residual stream changes along the layers, means over tokens.

    Deja Vu, section 3.3 ("slowly changing embeddings across layers"): because a block adds little
    to what it reads, the input of one block predicts what the next one needs.
    """

    def __init__(self, layers: int) -> None:
        self._sums = torch.zeros(layers, len(Change._fields), dtype=torch.float64)
        self._tokens = 0

    def add(self, residuals: Sequence[Tensor]) -> None:
        """The stream of one forward at every half block, `2 * layers + 1` of fp32 `[N, D]`."""
        self._tokens += len(residuals[0])
        for layer, sums in enumerate(self._sums):
            before, middle, after = residuals[2 * layer : 2 * layer + 3]
            changes = (
                F.cosine_similarity(before, after, dim=1),
                _norm(after - before) / _norm(before).clamp_(min=_TINY),
                _norm(middle - before) / _norm(before).clamp_(min=_TINY),
                _norm(after - middle) / _norm(middle).clamp_(min=_TINY),
            )
            sums += torch.stack([values.double().sum() for values in changes]).cpu()

    def means(self) -> list[Change]:
        """One a layer."""
        return [Change(*(float(x) / self._tokens for x in sums)) for sums in self._sums]


def _norm(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=1)
    return norms
