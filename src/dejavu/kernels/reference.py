"""Every op in plain PyTorch, fp32: the truth that kernels are tested against, and the path of
prefill and teacher-forced evaluation, where the rows are many and torch's GEMM is the best tool.

On a GPU half-precision matrices are multiplied as they are: inputs are rounded to the weights'
dtype, sums and results stay fp32. A decode step of fp16 or bf16 kernels rounds at the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dejavu.kernels.matrix import HALVES, Matrix
from dejavu.kernels.nibbles import Nibbles, sums
from dejavu.kernels.ops import Activation, CacheView, Projection, T, at_once
from dejavu.kernels.selection import Selection


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The activation, elementwise."""
    match activation.name:
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "fatrelu":
            return torch.where(x > activation.threshold, x, 0.0)
    raise AssertionError(f"unchecked activation {activation.name!r}")


def in_halves(tensor: Tensor) -> bool:
    """Whether products with it round their inputs to its dtype: half precision on a GPU."""
    return tensor.dtype in HALVES and tensor.is_cuda


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """fp32 `[N, in]` times half `[in, out]`: fp32, without an fp32 copy of the matrix."""
    x = x.to(matrix.dtype)
    if not matrix.is_cuda:  # torch has mixed products on a GPU only; tests come by here
        return x.float() @ matrix.float()
    return torch.mm(x, matrix, out_dtype=torch.float32)


def _linear(x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
    """Dot products with stored rows, fp32."""
    if not in_halves(weight.data):
        return F.linear(x, weight.float(), bias)
    y = _product(x, weight.data.t())
    return y if bias is None else y.add_(bias)


def _used(selection: Selection, rows: int, channels: int) -> Tensor:
    """bool `[rows, channels]`: the selection with every entry repeated over its block."""
    return selection.to_mask(rows).repeat_interleave(channels // selection.entries, dim=1)


def _store(selection: Selection, out: Selection | None) -> Selection:
    """The selection itself, or `out` filled with it."""
    if out is None:
        return selection
    out.indices.copy_(selection.indices)
    out.counts.copy_(selection.counts)
    if out.mask is not None:
        out.mask.copy_(selection.to_mask(len(out.mask)))
    return out


class TorchOps:
    """`Ops` for any number of rows; see `ops.py` for the contract."""

    def embed(self, ids: Tensor, table: Matrix) -> Tensor:
        return table.gather(ids)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight

    def linear(self, x: Tensor, projections: Sequence[Projection]) -> list[Tensor]:
        outputs = []
        for weight, bias, selection in projections:
            y = _linear(x, weight, bias)
            if selection is not None:
                y.masked_fill_(~_used(selection, len(x), weight.rows), 0.0)
            outputs.append(y)
        return outputs

    def combine(
        self,
        x: Tensor,
        weight: Matrix,
        bias: Tensor | None,
        selection: Selection | None,
        residual: Tensor | None,
    ) -> Tensor:
        if selection is not None:
            x = x.masked_fill(~_used(selection, len(x), weight.rows), 0.0)
        y = _product(x, weight.data) if in_halves(weight.data) else x @ weight.float()
        if bias is not None:
            y += bias
        return y if residual is None else y + residual

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[1]
        c, s = cos[positions][:, None], sin[positions][:, None]  # [N, 1, rotary / 2]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * c - b * s, b * c + a * s, rest), dim=-1)

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
        rows, block_size = len(q), cache.keys.shape[1]
        sequences = len(cache.lengths)
        span = rows // sequences  # new tokens of each sequence
        assert rows == sequences or sequences == 1
        outputs = []
        for b in range(sequences):
            end = int(cache.lengths[b])
            new = slice(b * span, (b + 1) * span)
            blocks = cache.block_table[b, : -(-end // block_size)].long()
            at = torch.arange(end - span, end, device=q.device)
            slots = blocks[at // block_size], at % block_size
            cache.keys[slots] = k[new].to(cache.keys.dtype)
            cache.values[slots] = v[new].to(cache.values.dtype)
            # On a CPU in fp32, whatever the cache is held in: as exact as the decode kernel.
            dtype = cache.keys.dtype if q.is_cuda else torch.float32
            keys = cache.keys[blocks].flatten(0, 1)[:end].transpose(0, 1).to(dtype)  # [K, end, d]
            values = cache.values[blocks].flatten(0, 1)[:end].transpose(0, 1).to(dtype)
            visible = None
            if span < end or window is not None:
                seen = torch.arange(end, device=q.device)
                visible = seen <= at[:, None]
                if window is not None:
                    visible &= seen > at[:, None] - window
            heads = F.scaled_dot_product_attention(
                q[new].transpose(0, 1)[None].to(dtype),
                keys[None],
                values[None],
                attn_mask=visible,
                is_causal=visible is None,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            outputs.append(heads[0].transpose(0, 1).float())
        y = torch.cat(outputs)
        if selection is not None:
            y = y.masked_fill(~_used(selection, rows, q.shape[1])[..., None], 0.0)
        return y.contiguous()

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
        a = _linear(x, up.weight, up.bias)
        if gate is None:
            a = activate(a, activation)
        else:
            a = activate(_linear(x, gate.weight, gate.bias), activation) * a
        if selection is not None and selection.active is not None:
            selection.active.add_(((a != 0) & selection.to_mask(len(x))).any(dim=0).sum())
        return self.combine(a, down, down_bias, selection, residual)

    def select(
        self, hidden: Tensor, weight: Matrix, bias: Tensor, *, out: Selection | None = None
    ) -> Selection:
        return _store(Selection.from_mask(_linear(hidden, weight, bias) > 0), out)

    def select_signs(
        self, x: Tensor, signs: Tensor, thresholds: Tensor, *, out: Selection | None = None
    ) -> Selection:
        width = x.shape[1]
        places = torch.arange(64, device=x.device)
        negative = (signs[..., None] >> places & 1).flatten(1)[:, :width].bool()
        agreeing = (negative == (x < 0)[:, None]).sum(dim=-1)  # [N, entries]
        return _store(Selection.from_mask(agreeing >= thresholds), out)

    def select_nibbles(
        self,
        x: Tensor,
        first: Nibbles,
        second: Nibbles,
        limits: Tensor,
        *,
        out: Selection | None = None,
    ) -> Selection:
        found, unit = sums(x, first.int8(), second.int8())
        return _store(Selection.from_mask(found * unit > limits), out)

    def argmax(self, x: Tensor) -> Tensor:
        return x.argmax(dim=-1)

    def tally(
        self, selection: Selection, rows: int, counter: Tensor, *, live: Tensor | None = None
    ) -> None:
        read = selection.counts.sum()
        counted = read.new_tensor(rows) if live is None else live[0].to(read.dtype)
        used = read * counted if selection.mask is None else selection.mask[: int(counted)].sum()
        counter += torch.stack((read, used, counted)).to(counter.dtype)

    def ahead(self, work: Callable[[], T]) -> Callable[[], T]:
        return at_once(work)
