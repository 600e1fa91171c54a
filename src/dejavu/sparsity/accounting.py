"""Weight bytes that a decode step reads, by the project's rules.

Every matrix of the step counts in its stored dtype with its scales, biases and norms; a tied
lm_head counts once; predictors count in full. The KV cache and the looked-up embedding and position
rows do not. Only a row that is really not read counts as skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Protocol

from torch import Tensor

from dejavu.kernels.matrix import WEIGHT_DTYPES, Matrix
from dejavu.sparsity.model_view import AffineView, AttentionView, BlockView, MLPView, WeightsView


class DecoderWeights(WeightsView, Protocol):
    """What is counted: `models.base.Weights` fits."""

    @property
    def embed_tokens(self) -> Matrix:
        """A lookup table, unless it is the head as well."""
        ...

    @property
    def embed_positions(self) -> Matrix | None:
        """A lookup table."""
        ...

    @property
    def lm_head(self) -> Matrix:
        """`embed_tokens` itself where they are tied."""
        ...


@dataclass(frozen=True)
class LayerReads:
    """Rows that a step read in one layer, as a mean over steps; None: all.

    neurons: rows of up (and gate). active: rows of down, where zero activations are skipped; None:
    as many as `neurons`. groups: KV groups whose q and o rows were read. lazy: share of
    the steps that read k and v rows of these groups only. inputs: channels read at
    each input site by name (`qkv`, `o`, `gate_up`, `down`), where input sparsity skips some; then
    the other figures are those of what is computed, and do not count.
    """

    neurons: float | None = None
    active: float | None = None
    groups: float | None = None
    lazy: float = 0.0
    inputs: Mapping[str, float] | None = None


def stored_bytes(part: object, dtype: str | None = None) -> int:
    """Bytes of all matrices and vectors in a matrix, a tensor or a dataclass of them.

    dtype: count the matrices as if stored as fp32, bf16 or int8 (with a scale a row).
    """
    if isinstance(part, Matrix):
        if dtype is None:
            return part.nbytes
        scale = 4 * part.rows if dtype == "int8" else 0
        return part.rows * part.columns * WEIGHT_DTYPES[dtype].itemsize + scale
    if isinstance(part, Tensor):
        return part.nbytes
    if is_dataclass(part):
        return sum(stored_bytes(getattr(part, f.name), dtype) for f in fields(part))
    if isinstance(part, tuple | list):
        return sum(stored_bytes(each, dtype) for each in part)
    return 0


def dense_bytes(weights: DecoderWeights, dtype: str | None = None) -> int:
    """Bytes of a step that reads everything; dtype as in `stored_bytes`."""
    total = stored_bytes(weights, dtype)
    # Where they are tied, the walk has met the one matrix twice and the step reads it once.
    total -= stored_bytes(weights.embed_tokens, dtype)
    return total - stored_bytes(weights.embed_positions, dtype)


def neuron_bytes(mlp: MLPView) -> tuple[float, float]:
    """Bytes of one neuron: of its rows and biases in up and gate, and of its row of down."""
    scores = _row(mlp.up) + (0.0 if mlp.gate is None else _row(mlp.gate))
    return scores, mlp.down.weight.nbytes / mlp.down.weight.rows


def group_bytes(attention: AttentionView, groups: int) -> float:
    """Bytes that leaving out one of `groups` KV groups saves: its rows of q and o."""
    q, o = attention.q, attention.o.weight
    return (q.weight.rows * _row(q) + o.nbytes) / groups


def step_bytes(
    weights: DecoderWeights,
    reads: Sequence[LayerReads],
    *,
    groups: int,
    predictor_bytes: float = 0,
) -> float:
    """Bytes of a step that reads so many rows in each layer, and all predictors.

    groups: KV groups of a layer.
    """
    total = float(dense_bytes(weights) + predictor_bytes)
    for block, read in zip(weights.blocks, reads, strict=True):
        if read.inputs is not None:
            total -= _skipped_inputs(block, read.inputs)
            continue
        neurons = block.mlp.down.weight.rows
        listed = neurons if read.neurons is None else read.neurons
        active = listed if read.active is None else read.active
        used = groups if read.groups is None else read.groups
        scores, down = neuron_bytes(block.mlp)
        total -= (neurons - listed) * scores + (neurons - active) * down
        k, v = block.attention.k, block.attention.v
        later = read.lazy * (k.weight.rows * _row(k) + v.weight.rows * _row(v)) / groups
        total -= (groups - used) * (group_bytes(block.attention, groups) + later)
    return total


def input_parts(block: BlockView) -> dict[str, tuple[int, int]]:
    """Channels of each input site, and bytes of all matrices that read it."""
    a, mlp = block.attention, block.mlp
    gate_up = mlp.up.weight.nbytes + (0 if mlp.gate is None else mlp.gate.weight.nbytes)
    return {
        "qkv": (a.q.weight.columns, sum(p.weight.nbytes for p in (a.q, a.k, a.v))),
        "o": (a.o.weight.rows, a.o.weight.nbytes),
        "gate_up": (mlp.up.weight.columns, gate_up),
        "down": (mlp.down.weight.rows, mlp.down.weight.nbytes),
    }


def _skipped_inputs(block: BlockView, read: Mapping[str, float]) -> float:
    return sum(
        (1 - read[site] / channels) * size
        for site, (channels, size) in input_parts(block).items()
        if site in read
    )


def _row(affine: AffineView) -> float:
    """Bytes of one stored row and its bias."""
    weight = affine.weight
    return weight.nbytes / weight.rows + (0 if affine.bias is None else affine.bias.itemsize)
