"""The operations a model's forward is written in: one contract, several backends.

A forward receives an `Ops` object and never calls a kernel or torch itself. `TorchOps`
(`reference.py`) is the plain truth for any number of rows: tests, prefill and teacher-forced
evaluation run on it. `NativeOps` (`native.py`) runs up to 16 rows on the compiled CPU kernels, at
once or recorded into a program that replays a whole decode step in one call.

Shapes: N rows (tokens of a step), D hidden_size, H query heads, K key/value heads, d head_dim,
F neurons. Activations are fp32; weights are `Matrix`. Everywhere `selection=None` means all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from dejavu.kernels.matrix import Matrix
from dejavu.kernels.selection import Selection

T = TypeVar("T")


@dataclass(frozen=True)
class Activation:
    """relu, relu2 (squared), silu, gelu, gelu_tanh or fatrelu (x where x > threshold, else 0)."""

    name: str
    threshold: float = 0.0

    @property
    def is_sparse(self) -> bool:
        """Whether it returns exact zeros for a half-line of inputs."""
        return self.name in ("relu", "relu2", "fatrelu")


class Projection(NamedTuple):
    """One of several projections of the same input.

    weight: `[out, D]`; bias: fp32 `[out]` or None; selection: among `out / block` blocks of rows
    (heads: block = head_dim times the query heads of a group); outputs that a row does not use are
    0 in its result.
    """

    weight: Matrix
    bias: Tensor | None = None
    selection: Selection | None = None


@dataclass(frozen=True, eq=False)
class CacheView:
    """One layer's paged cache and the step's place in it.

    keys, values: fp32 `[blocks, block_size, K, d]`.
    block_table: int32 `[B, max_blocks]`; lengths: int32 `[B]`, tokens held *after* this step.
    Either N == B (decode: row b is the last token of sequence b) or B == 1 (prefill: the rows are
    the last N tokens of the one sequence).
    """

    keys: Tensor
    values: Tensor
    block_table: Tensor
    lengths: Tensor


def at_once(work: Callable[[], T]) -> Callable[[], T]:
    """`Ops.ahead` where nothing runs beside anything."""
    result = work()
    return lambda: result


class Ops(Protocol):
    """See the module docstring for shapes. Inputs are contiguous; results are fresh tensors (in a
    recorded program: static buffers that every replay fills again)."""

    def embed(self, ids: Tensor, table: Matrix) -> Tensor:
        """ids int64 `[N]` -> rows of the table, fp32 `[N, D]`."""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Elementwise sum of two fp32 tensors of one shape."""
        ...

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """LayerNorm over the last dimension of fp32 `[N, D]`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension of fp32 `[..., D]` (any leading shape)."""
        ...

    def linear(self, x: Tensor, projections: Sequence[Projection]) -> list[Tensor]:
        """fp32 `[N, in]` -> `[N, out]` for each projection: dot products with stored rows."""
        ...

    def combine(
        self,
        x: Tensor,
        weight: Matrix,
        bias: Tensor | None,
        selection: Selection | None,
        residual: Tensor | None,
    ) -> Tensor:
        """residual + bias + sum of x[:, i] * weight row i: fp32 `[N, in]` -> `[N, out]`.

        weight is stored transposed, `[in, out]`. A selection has `in / block` entries; entry e
        stands for input channels `[e * block, (e + 1) * block)`.
        """
        ...

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first `2 * cos.shape[1]` channels of each head, halves paired (as Llama).

        x fp32 `[N, heads, d]`; positions int64 `[N]`; cos, sin fp32 `[max_positions, rotary / 2]`.
        """
        ...

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: CacheView,
        *,
        scale: float,
        window: int | None,
        selection: Selection | None,
    ) -> Tensor:
        """Write k, v `[N, K, d]` into the cache, then causal attention of q, `[N, H, d]`.

        window: a token sees itself and the `window - 1` tokens before it. selection has K entries
        (KV groups: a group is one key/value head with its H / K query heads); unused groups give 0
        (keys and values of all groups are written: the dense-kv mode).
        """
        ...

    def mlp(
        self,
        x: Tensor,
        up: Projection,
        gate: Projection | None,
        down: Matrix,
        down_bias: Tensor | None,
        activation: Activation,
        selection: Selection | None,
        residual: Tensor | None,
    ) -> Tensor:
        """residual + down_bias + sum over used neurons j of a_j * down row j -> fp32 `[N, D]`.

        a = activation(up x), or activation(gate x) * (up x) with a gate. up and gate `[F, D]` carry
        no selection of their own; down is stored transposed `[F, D]`. With a selection, down rows
        of neurons whose activation is 0 for every row are not read, and `selection.active` counts
        the others; with None, everything is read (the dense arm must not profit from zeros).
        """
        ...

    def select(
        self, hidden: Tensor, weight: Matrix, bias: Tensor, *, out: Selection | None = None
    ) -> Selection:
        """Entries whose score `weight row . hidden + bias` is above 0, one bias an entry.

        hidden fp32 `[N, r]`, weight `[entries, r]`. The threshold is folded into the bias.
        """
        ...

    def select_signs(
        self, x: Tensor, signs: Tensor, thresholds: Tensor, *, out: Selection | None = None
    ) -> Selection:
        """Entries whose weights agree in sign with x in at least `thresholds` of the D places.

        x fp32 `[N, D]`; signs int64 `[entries, ceil(D / 64)]`, bit i of word w set where weight
        `64 w + i` is negative, tail bits 0; thresholds int32 `[entries]`. A predictor without
        training (SparseInfer, arXiv 2411.12692).
        """
        ...

    def argmax(self, x: Tensor) -> Tensor:
        """int64 `[N]`: the place of the largest value of each row of fp32 `[N, V]`, the lowest of
        equals."""
        ...

    def tally(
        self, selection: Selection, rows: int, counter: Tensor, *, live: Tensor | None = None
    ) -> None:
        """counter int64 `[3]` += (entries read, entries used summed over rows, rows).

        live: int32 `[1]`, only so many rows, the first, count; the others are padding.
        """
        ...

    def ahead(self, work: Callable[[], T]) -> Callable[[], T]:
        """Do work that what follows need not wait for; the returned function waits for its result.

        On a GPU it runs beside the following ops (a branch of the captured graph), elsewhere at
        once. What it reads must live until then, and every result must be waited for in the step.
        """
        ...
