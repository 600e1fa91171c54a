"""One decoder forward for every architecture: the variants are fields of `ModelConfig`.

The life of a token: embed, then for each block norm -> q/k/v -> attention -> output projection ->
norm -> MLP, then the final norm and the head. Before attention and before the MLP the selector is
asked what this token needs; the answer goes to the ops and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.errors import InputError
from dejavu.kernels.lazy import attend_lazily
from dejavu.kernels.matrix import HALVES, Matrix
from dejavu.kernels.ops import Activation, CacheView, Ops, Projection
from dejavu.kernels.selection import Selection
from dejavu.models.deferred_kv import Deferral
from dejavu.models.kv_cache import BLOCK_SIZE, KVCache, blocks_for
from dejavu.models.rope import RopeTable
from dejavu.models.streaming import Pass, R, StreamedBlocks, together
from dejavu.sparsity.policy import InputReader, Points, Selector, Site, Stage


@dataclass(frozen=True, eq=False)
class Norm:
    """Weight and bias of a LayerNorm or RMSNorm, fp32 `[D]`; None where the model has none."""

    weight: Tensor | None
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Affine:
    """A projection: matrix (in the kernels' orientation) and fp32 bias."""

    weight: Matrix
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Attention:
    """q `[H * d, D]`, k and v `[K * d, D]`, o transposed `[H * d, D]`; q/k norms fp32 `[d]`."""

    q: Affine
    k: Affine
    v: Affine
    o: Affine
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True, eq=False)
class MLP:
    """up and gate `[F, D]`, down transposed `[F, D]`: a neuron is one row of each."""

    up: Affine
    down: Affine
    gate: Affine | None = None


@dataclass(frozen=True, eq=False)
class Block:
    """One transformer block."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: MLP


@dataclass(frozen=True, eq=False)
class Weights:
    """All of a decoder's weights; lm_head is embed_tokens itself where they are tied. blocks: may
    be `streaming.StreamedBlocks`."""

    embed_tokens: Matrix
    blocks: Sequence[Block]
    lm_head: Matrix
    final_norm: Norm | None = None
    embed_positions: Matrix | None = None
    project_in: Matrix | None = None
    project_out: Matrix | None = None


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one step: B single tokens of B sequences, or N tokens of one sequence. (On the
    compiled kernels the B tokens may also be of one sequence: see `engine.prompt_step`.)

    ids, positions: int64 `[N]`; block_table: int32 `[B, max_blocks]`; lengths: int32 `[B]`, tokens
    in the cache after the step. scored: logits of so many of the last rows; None: of all. deferred:
    keys and values of unused heads are left for later (decode; see `kernels.lazy`).
    """

    ids: Tensor
    positions: Tensor
    block_table: Tensor
    lengths: Tensor
    scored: int | None = None
    deferred: Deferral | None = None

    @staticmethod
    def prefill(
        ids: list[int] | Tensor,
        blocks: list[int],
        *,
        start: int = 0,
        last_only: bool = True,
        device: torch.device | None = None,
    ) -> Batch:
        """A sequence's tokens from place `start` on (those before it are in the cache), in the
        given cache blocks. last_only: logits of the last row alone."""
        row = torch.as_tensor(ids, dtype=torch.int64, device=device)
        end = start + len(row)
        assert len(blocks) >= blocks_for(end)
        return Batch(
            row,
            torch.arange(start, end, device=device),
            torch.tensor([blocks], dtype=torch.int32, device=device),
            torch.tensor([end], dtype=torch.int32, device=device),
            1 if last_only else None,
        )


class DecoderLM:
    """A decoder-only language model: weights and one forward. It holds no per-request state.

    device: of all its weights. cache_dtype: of keys and values; default: on a GPU that of
    half-precision weights, on a CPU bf16 where weights are bf16 or int8, else fp32.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, cache_dtype: torch.dtype | None = None
    ) -> None:
        self.config = config
        self.weights = weights
        self.activation = Activation(config.activation, config.activation_threshold)
        self.device = weights.embed_tokens.device
        self.cache_dtype = _cache_dtype(weights) if cache_dtype is None else cache_dtype
        self.rope = None if config.rope is None else RopeTable(config, self.device)

    @property
    def streamed(self) -> bool:
        """Whether blocks are read one by one, for `together`: whole sequences only, no decoding."""
        return isinstance(self.weights.blocks, StreamedBlocks)

    def outline(self) -> DecoderLM:
        """For counting bytes: the model itself, or of a streamed one shapes and dtypes of its
        blocks, for which nothing is read."""
        blocks = self.weights.blocks
        if not isinstance(blocks, StreamedBlocks):
            return self
        weights = replace(self.weights, blocks=blocks.outline)
        return DecoderLM(self.config, weights, self.cache_dtype)

    def new_cache(self, tokens: int, sequences: int = 1) -> KVCache:
        """A cache for so many sequences of up to `tokens` tokens each."""
        blocks = blocks_for(tokens) * sequences
        return KVCache(
            self.config,
            blocks,
            device=self.device,
            dtype=self.cache_dtype,
            shared=self.streamed,
        )

    def forward(self, batch: Batch, cache: KVCache, selector: Selector, ops: Ops) -> Tensor:
        """Logits fp32 `[N, vocab_size]`, or of `batch.scored` rows.

        Writes the rows' keys and values into the cache. For rope models the caller has called
        `prepare(longest length)` before (a recorded step replays the forward without Python).
        Raises InputError for a streamed model, whose cache does not outlive a forward.
        """
        if self.streamed:
            raise InputError(
                f"this model does not fit into the memory of {self.device}, and one that is read "
                "block by block reads whole texts only; take a larger GPU, or run on --device cpu"
            )
        (logits,) = self.together([self._pass(batch, cache, selector, ops)], len(batch.ids))
        return logits

    def _pass(self, batch: Batch, cache: KVCache, selector: Selector, ops: Ops) -> Pass[Tensor]:
        """`forward`, asking for its blocks."""
        hidden = self._embed(batch, ops)
        points = Points(batch.positions, brief=self.streamed)
        depth = self.config.num_hidden_layers
        for layer in range(depth):
            block = yield layer
            selector.observe(Stage.BLOCK_INPUT, layer, hidden)
            hidden = self._attention(layer, block, hidden, points, batch, cache, selector, ops)
            selector.observe(Stage.BLOCK_MIDDLE, layer, hidden)
            hidden = self._mlp(layer, block, hidden, points, selector, ops)
            del block  # the next one may need its room
        yield depth
        selector.observe(Stage.BLOCK_INPUT, depth, hidden)
        if batch.scored == 0:
            return hidden.new_empty(0, self.config.vocab_size)
        logits = self._head(hidden if batch.scored is None else hidden[-batch.scored :], ops)
        selector.observe(Stage.LOGITS, depth, logits)
        return logits

    def logits(
        self, ids: Tensor, cache: KVCache, selector: Selector, ops: Ops, *, last_only: bool = False
    ) -> Tensor:
        """Teacher-forced `forward` of one sequence: ids int64 `[N]` (of any device) -> fp32
        `[N, vocab_size]`.

        cache: any with room for the sequence from its first block on; what it held is overwritten.
        """
        reading = self.reading(ids, cache, selector, ops, last_only=last_only)
        (logits,) = self.together([reading], len(ids))
        return logits

    def reading(
        self, ids: Tensor, cache: KVCache, selector: Selector, ops: Ops, *, last_only: bool = False
    ) -> Pass[Tensor]:
        """`logits`, to be run by `together`, which others may share. Forwards that do may have one
        cache, and need selectors of their own (`Selector.fork`)."""
        self.prepare(len(ids))
        blocks = list(range(blocks_for(len(ids))))
        batch = Batch.prefill(ids, blocks, last_only=last_only, device=self.device)
        inner = self._pass(batch, cache, selector, ops)
        wanted = next(inner)
        while True:
            block = yield wanted
            self.prepare(len(ids))  # another forward may have had another length
            try:
                wanted = inner.send(block)
            except StopIteration as done:
                logits: Tensor = done.value
                return logits
            del block

    def together(self, readings: Iterable[Pass[R]], rows: int) -> Iterator[R]:
        """Results of forwards of up to `rows` rows each, in their order. See `streaming`."""
        states = (1 + Points.REACH) * rows * self.config.hidden_size * 4
        return together(self.weights.blocks, readings, states)

    def prepare(self, length: int) -> None:
        """Bring position tables up to a longest sequence of `length` tokens (in place)."""
        if self.rope is not None:
            self.rope.prepare(length)

    def _embed(self, batch: Batch, ops: Ops) -> Tensor:
        w = self.weights
        hidden = ops.embed(batch.ids, w.embed_tokens)
        if w.project_in is not None:
            (hidden,) = ops.linear(hidden, [Projection(w.project_in)])
        if w.embed_positions is not None:
            hidden = ops.add(hidden, ops.embed(batch.positions, w.embed_positions))
        return hidden

    def _attention(
        self,
        layer: int,
        block: Block,
        hidden: Tensor,
        points: Points,
        batch: Batch,
        cache: KVCache,
        selector: Selector,
        ops: Ops,
    ) -> Tensor:
        c, w = self.config, block.attention
        x = self._norm(hidden, block.attention_norm, ops) if c.pre_norm else hidden
        points.add(x)
        inputs = selector.inputs(layer)
        groups = selector.select(Site.HEADS, layer, points, ops)
        view = cache.view(layer, batch.block_table, batch.lengths)
        scale, window = c.head_dim**-0.5, c.window(layer)
        if batch.deferred is not None and groups is not None:
            heads = attend_lazily(
                ops,
                x,
                Projection(w.q.weight, w.q.bias),
                Projection(w.k.weight, w.k.bias),
                Projection(w.v.weight, w.v.bias),
                view,
                batch.deferred.view(layer),
                scale=scale,
                window=window,
                selection=groups,
            )
        else:
            heads = self._heads(x, w, groups, inputs, points, batch, view, scale, window, ops)
        selector.observe(Stage.HEAD_OUTPUTS, layer, heads)
        flat = heads.flatten(1)
        if inputs is not None:
            hidden = inputs.o(flat, hidden, points, ops)
        else:
            hidden = ops.combine(flat, w.o.weight, w.o.bias, groups, residual=hidden)
        return hidden if c.pre_norm else self._norm(hidden, block.attention_norm, ops)

    def _heads(
        self,
        x: Tensor,
        w: Attention,
        groups: Selection | None,
        inputs: InputReader | None,
        points: Points,
        batch: Batch,
        view: CacheView,
        scale: float,
        window: int | None,
        ops: Ops,
    ) -> Tensor:
        """Outputs of the heads, `[N, H, d]`; keys and values of all enter the cache."""
        c = self.config
        if inputs is not None:
            q, k, v = inputs.qkv(x, points, ops)
        else:
            q, k, v = ops.linear(
                x,
                [
                    Projection(w.q.weight, w.q.bias, groups),
                    Projection(w.k.weight, w.k.bias),
                    Projection(w.v.weight, w.v.bias),
                ],
            )
        q = q.view(-1, c.num_attention_heads, c.head_dim)
        k = k.view(-1, c.num_key_value_heads, c.head_dim)
        v = v.view(-1, c.num_key_value_heads, c.head_dim)
        if w.q_norm is not None and w.k_norm is not None:
            q = ops.rms_norm(q, w.q_norm, c.norm_eps)
            k = ops.rms_norm(k, w.k_norm, c.norm_eps)
        if self.rope is not None:
            q = ops.rope(q, batch.positions, self.rope.cos, self.rope.sin)
            k = ops.rope(k, batch.positions, self.rope.cos, self.rope.sin)
        return ops.attention(q, k, v, view, scale=scale, window=window, selection=groups)

    def _mlp(
        self,
        layer: int,
        block: Block,
        hidden: Tensor,
        points: Points,
        selector: Selector,
        ops: Ops,
    ) -> Tensor:
        c, w = self.config, block.mlp
        x = self._norm(hidden, block.mlp_norm, ops) if c.pre_norm else hidden
        points.add(x)
        inputs = selector.inputs(layer)
        neurons = selector.select(Site.NEURONS, layer, points, ops)
        if inputs is not None:
            hidden = inputs.mlp(x, hidden, points, ops)
        else:
            hidden = ops.mlp(
                x,
                Projection(w.up.weight, w.up.bias),
                None if w.gate is None else Projection(w.gate.weight, w.gate.bias),
                w.down.weight,
                w.down.bias,
                self.activation,
                neurons,
                residual=hidden,
            )
        return hidden if c.pre_norm else self._norm(hidden, block.mlp_norm, ops)

    def _norm(self, hidden: Tensor, norm: Norm, ops: Ops) -> Tensor:
        if self.config.norm == "layer_norm":
            return ops.layer_norm(hidden, norm.weight, norm.bias, self.config.norm_eps)
        assert norm.weight is not None
        return ops.rms_norm(hidden, norm.weight, self.config.norm_eps)

    def _head(self, hidden: Tensor, ops: Ops) -> Tensor:
        w = self.weights
        if w.final_norm is not None:
            hidden = self._norm(hidden, w.final_norm, ops)
        if w.project_out is not None:
            (hidden,) = ops.linear(hidden, [Projection(w.project_out)])
        (logits,) = ops.linear(hidden, [Projection(w.lm_head)])
        return logits


def _cache_dtype(weights: Weights) -> torch.dtype:
    stored = weights.embed_tokens.data.dtype
    if weights.embed_tokens.device.type == "cuda":
        return stored if stored in HALVES else torch.float32
    # The 30M model in int8, 250 tokens in: an fp32 cache is a fourth of a step's bytes.
    return torch.float32 if stored == torch.float32 else torch.bfloat16


__all__ = [
    "BLOCK_SIZE",
    "MLP",
    "Affine",
    "Attention",
    "Batch",
    "Block",
    "DecoderLM",
    "Norm",
    "Weights",
]
