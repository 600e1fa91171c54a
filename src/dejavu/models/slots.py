"""Every place of a decoder that a checkpoint tensor goes to, derived from its config.

A slot is named like a path into `Weights` (`layers.3.mlp.up.weight`). An architecture's file only
says which checkpoint name fills which slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.kernels.matrix import Matrix
from dejavu.models.base import MLP, Affine, Attention, Block, Norm, Weights


class Kind(Enum):
    """How a tensor is stored: a matrix by output rows, by input rows, a lookup table, a vector."""

    BY_OUTPUT = "by output"
    BY_INPUT = "by input"
    TABLE = "table"  # learned positions: kept as read, never quantised
    VECTOR = "vector"


@dataclass(frozen=True)
class Slot:
    """shape: as the checkpoint has it (Hugging Face orientation, `[out, in]`)."""

    shape: tuple[int, ...]
    kind: Kind


def slots(config: ModelConfig) -> dict[str, Slot]:
    """All slots of a model; a checkpoint must fill exactly these."""
    c = config
    width = c.embed_dim or c.hidden_size
    found = {"embed_tokens": Slot((c.vocab_size, width), Kind.BY_OUTPUT)}
    if not c.tie_word_embeddings:
        found["lm_head"] = Slot((c.vocab_size, width), Kind.BY_OUTPUT)
    if c.rope is None:
        rows = c.max_position_embeddings + c.position_offset
        found["embed_positions"] = Slot((rows, c.hidden_size), Kind.TABLE)
    if width != c.hidden_size:
        found["project_in"] = Slot((c.hidden_size, width), Kind.BY_OUTPUT)
        found["project_out"] = Slot((width, c.hidden_size), Kind.BY_OUTPUT)
    if c.final_norm:
        _norm(found, "final_norm", c.hidden_size, c)
    for i in range(c.num_hidden_layers):
        _block(found, f"layers.{i}", c)
    return found


def _norm(found: dict[str, Slot], name: str, size: int, c: ModelConfig) -> None:
    if c.norm_affine:
        found[f"{name}.weight"] = Slot((size,), Kind.VECTOR)
        if c.norm == "layer_norm":
            found[f"{name}.bias"] = Slot((size,), Kind.VECTOR)


def _block(found: dict[str, Slot], name: str, c: ModelConfig) -> None:
    queries = c.num_attention_heads * c.head_dim
    keys = c.num_key_value_heads * c.head_dim
    hidden, neurons = c.hidden_size, c.intermediate_size
    projections = {
        "attention.q": (queries, hidden, Kind.BY_OUTPUT, c.attention_bias),
        "attention.k": (keys, hidden, Kind.BY_OUTPUT, c.attention_bias),
        "attention.v": (keys, hidden, Kind.BY_OUTPUT, c.attention_bias),
        "attention.o": (hidden, queries, Kind.BY_INPUT, c.output_bias),
        "mlp.up": (neurons, hidden, Kind.BY_OUTPUT, c.mlp_bias),
        "mlp.down": (hidden, neurons, Kind.BY_INPUT, c.mlp_bias),
    }
    if c.gated_mlp:
        projections["mlp.gate"] = (neurons, hidden, Kind.BY_OUTPUT, c.mlp_bias)
    for part, (outputs, inputs, kind, bias) in projections.items():
        found[f"{name}.{part}.weight"] = Slot((outputs, inputs), kind)
        if bias:
            found[f"{name}.{part}.bias"] = Slot((outputs,), Kind.VECTOR)
    _norm(found, f"{name}.attention_norm", hidden, c)
    _norm(found, f"{name}.mlp_norm", hidden, c)
    if c.qk_norm:
        found[f"{name}.attention.q_norm"] = Slot((c.head_dim,), Kind.VECTOR)
        found[f"{name}.attention.k_norm"] = Slot((c.head_dim,), Kind.VECTOR)


def assemble(
    config: ModelConfig, matrices: Mapping[str, Matrix], vectors: Mapping[str, Tensor]
) -> Weights:
    """`Weights` from filled slots."""
    layers = range(config.num_hidden_layers)
    return assemble_around(
        config, matrices, vectors, tuple(block(config, matrices, vectors, n) for n in layers)
    )


def block(
    config: ModelConfig, matrices: Mapping[str, Matrix], vectors: Mapping[str, Tensor], layer: int
) -> Block:
    """One block from the slots of its layer."""
    name = f"layers.{layer}"

    def affine(part: str) -> Affine:
        return Affine(matrices[f"{name}.{part}.weight"], vectors.get(f"{name}.{part}.bias"))

    attention = Attention(
        q=affine("attention.q"),
        k=affine("attention.k"),
        v=affine("attention.v"),
        o=affine("attention.o"),
        q_norm=vectors.get(f"{name}.attention.q_norm"),
        k_norm=vectors.get(f"{name}.attention.k_norm"),
    )
    gate = affine("mlp.gate") if config.gated_mlp else None
    return Block(
        _filled_norm(vectors, f"{name}.attention_norm"),
        attention,
        _filled_norm(vectors, f"{name}.mlp_norm"),
        MLP(affine("mlp.up"), affine("mlp.down"), gate),
    )


def assemble_around(
    config: ModelConfig,
    matrices: Mapping[str, Matrix],
    vectors: Mapping[str, Tensor],
    blocks: Sequence[Block],
) -> Weights:
    """`Weights` from the filled slots outside of the blocks."""
    return Weights(
        embed_tokens=matrices["embed_tokens"],
        blocks=blocks,
        lm_head=matrices.get("lm_head", matrices["embed_tokens"]),
        final_norm=_filled_norm(vectors, "final_norm") if config.final_norm else None,
        embed_positions=_from_offset(matrices.get("embed_positions"), config.position_offset),
        project_in=matrices.get("project_in"),
        project_out=matrices.get("project_out"),
    )


def _filled_norm(vectors: Mapping[str, Tensor], name: str) -> Norm:
    return Norm(vectors.get(f"{name}.weight"), vectors.get(f"{name}.bias"))


def _from_offset(table: Matrix | None, offset: int) -> Matrix | None:
    """The learned positions without the rows that stand before position 0 (a view)."""
    return None if table is None else Matrix(table.data[offset:])
