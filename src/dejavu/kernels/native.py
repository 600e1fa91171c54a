"""The ops on the compiled CPU kernels, at once or recorded into a program that replays a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dejavu.kernels.compiled import (
    Program,
    available_isas,
    default_threads,
    extension,
    matrix_handle,
    measure_read_bandwidth,
    require,
    selection_handle,
)
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.native_calls import MAX_ROWS
from dejavu.kernels.native_select import NativeSelections
from dejavu.kernels.ops import Activation, CacheView, Projection, T, at_once
from dejavu.kernels.selection import Selection, tile_size

__all__ = [
    "MAX_ROWS",
    "NativeOps",
    "Program",
    "available_isas",
    "default_threads",
    "measure_read_bandwidth",
]

CACHE_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class NativeOps(NativeSelections):
    """`Ops` for 1 to 16 rows on the compiled kernels; contract in `ops.py`.

    threads: default `default_threads()`. isa: "portable", "avx2" or "avx512"; default the best this
    machine has. On one instruction set a row's result has the same bits for any number of threads,
    any other rows beside it, at once or replayed. Rounding and denormal modes are left as they are.
    Attention takes one new token a sequence; a row of length 0 writes nothing and gets 0.

    Raises BackendError where the extension or the instruction set is missing, InputError for
    tensors of the wrong dtype, shape or device, and for more than 16 rows.
    """

    def recorder(self) -> NativeOps:
        """Ops whose calls are only recorded; `.program` then replays them.

        Results are static buffers, undefined until the first `program.run()`. Inputs are read where
        they lie at every run, so they must be contiguous.
        """
        ops = NativeOps.__new__(NativeOps)
        ops.isa, ops.threads = self.isa, self.threads
        ops._recorder = extension().Recorder(self.threads, self.isa, eager=False)
        ops._program = Program(ops._recorder)
        return ops

    def embed(self, ids: Tensor, table: Matrix) -> Tensor:
        rows = self._rows("ids", ids)
        ids = self._input("ids", ids, rows, dtype=torch.int64)
        out = self._output(rows, table.columns)
        handle = matrix_handle(table)
        fault = self._recorder.embed(ids.data_ptr(), rows, handle, out.data_ptr())
        self._done(fault, handle, table)
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self._input("x", x, *x.shape), self._input("y", y, *x.shape)
        out = self._output(*x.shape)
        self._done(self._recorder.add(x.data_ptr(), y.data_ptr(), x.numel(), out.data_ptr()))
        return out

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        width = x.shape[-1]
        x = self._input("x", x, *x.shape)
        weight = self._optional("weight", weight, width)
        bias = self._optional("bias", bias, width)
        out = self._output(*x.shape)
        rows = x.numel() // width
        fault = self._recorder.layer_norm(
            x.data_ptr(), _address(weight), _address(bias), eps, rows, width, out.data_ptr()
        )
        self._done(fault)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        x, weight = self._input("x", x, *x.shape), self._input("weight", weight, width)
        out = self._output(*x.shape)
        rows = x.numel() // width
        fault = self._recorder.rms_norm(
            x.data_ptr(), weight.data_ptr(), eps, rows, width, out.data_ptr()
        )
        self._done(fault)
        return out

    def linear(self, x: Tensor, projections: Sequence[Projection]) -> list[Tensor]:
        rows, width = self._rows("x", x), x.shape[-1]
        x = self._input("x", x, rows, width)
        outputs, parts = [], []
        for weight, bias, selection in projections:
            require(weight.columns == width, f"x is {width} wide, a weight {weight.columns}")
            bias = self._optional("bias", bias, weight.rows)
            chosen = selection_handle(selection, weight.rows, rows, block=True)
            outputs.append(self._output(rows, weight.rows))
            parts.append((matrix_handle(weight), _address(bias), chosen, outputs[-1].data_ptr()))
        fault = self._recorder.linear(x.data_ptr(), rows, width, parts)
        self._done(fault, parts, list(projections))
        return outputs

    def combine(
        self,
        x: Tensor,
        weight: Matrix,
        bias: Tensor | None,
        selection: Selection | None,
        residual: Tensor | None,
    ) -> Tensor:
        rows = self._rows("x", x)
        x = self._input("x", x, rows, weight.rows)
        bias = self._optional("bias", bias, weight.columns)
        residual = self._optional("residual", residual, rows, weight.columns)
        handle, chosen = (
            matrix_handle(weight),
            selection_handle(selection, weight.rows, rows, block=True),
        )
        out = self._output(rows, weight.columns)
        fault = self._recorder.combine(
            x.data_ptr(),
            rows,
            handle,
            _address(bias),
            _address(residual),
            chosen,
            tile_size(weight.rows),
            out.data_ptr(),
        )
        self._done(fault, handle, chosen, weight, selection)
        return out

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, head_dim = x.shape
        x = self._input("x", x, rows, heads, head_dim)
        positions = self._input("positions", positions, rows, dtype=torch.int64)
        cos = self._input("cos", cos, -1, -1)
        sin = self._input("sin", sin, *cos.shape)
        limit, half = cos.shape
        require(2 * half <= head_dim, f"cos has {half} columns, a head only {head_dim} channels")
        out = self._output(rows, heads, head_dim)
        fault = self._recorder.rope(
            x.data_ptr(),
            positions.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            rows,
            heads,
            head_dim,
            half,
            limit,
            out.data_ptr(),
        )
        self._done(fault)
        return out

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
        rows = self._rows("q", q)
        require(
            rows == len(cache.lengths),
            f"attention takes one new token a sequence, got {rows} for {len(cache.lengths)}; "
            "prefill runs on TorchOps",
        )
        _, heads, head_dim = q.shape
        blocks, block_size, groups, _ = cache.keys.shape
        require(heads % groups == 0, f"{heads} query heads do not share {groups} groups evenly")
        require(window is None or window > 0, f"window must be positive, got {window}")
        for name in ("keys", "values", "block_table", "lengths"):
            # Written or watched in place: a copy would be of no use.
            require(getattr(cache, name).is_contiguous(), f"cache.{name} must be contiguous")
        q = self._input("q", q, rows, heads, head_dim)
        k = self._input("k", k, rows, groups, head_dim)
        v = self._input("v", v, rows, groups, head_dim)
        dtype = cache.keys.dtype
        require(dtype in CACHE_DTYPES, f"the cache must be fp32 or bf16, not {dtype}")
        keys = self._input("cache.keys", cache.keys, -1, -1, groups, head_dim, dtype=dtype)
        values = self._input("cache.values", cache.values, *keys.shape, dtype=dtype)
        table = self._input("block_table", cache.block_table, rows, -1, dtype=torch.int32)
        lengths = self._input("lengths", cache.lengths, rows, dtype=torch.int32)
        chosen = selection_handle(selection, groups, rows, block=False)
        out = self._output(rows, heads, head_dim)
        fault = self._recorder.attention(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            rows,
            heads,
            groups,
            head_dim,
            keys.data_ptr(),
            values.data_ptr(),
            getattr(extension().Dtype, CACHE_DTYPES[dtype]),
            blocks,
            block_size,
            table.data_ptr(),
            lengths.data_ptr(),
            table.shape[1],
            scale,
            window or 0,
            chosen,
            out.data_ptr(),
        )
        self._done(fault, chosen, selection)
        return out

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
        rows, width = self._rows("x", x), x.shape[-1]
        neurons = down.rows
        for name, part in (("up", up), ("gate", gate)):
            if part is not None:
                shape = (part.weight.rows, part.weight.columns)
                require(shape == (neurons, width), f"{name} must be {(neurons, width)}, is {shape}")
                require(part.selection is None, f"{name} carries a selection of its own")
        kind = getattr(extension().Activation, activation.name, None)
        require(kind is not None, f"unknown activation {activation.name!r}")
        x = self._input("x", x, rows, width)
        up_bias = self._optional("up.bias", up.bias, neurons)
        gate_bias = None if gate is None else self._optional("gate.bias", gate.bias, neurons)
        down_bias = self._optional("down_bias", down_bias, down.columns)
        residual = self._optional("residual", residual, rows, down.columns)
        chosen = selection_handle(selection, neurons, rows, block=False)
        handles = (
            matrix_handle(up.weight),
            None if gate is None else matrix_handle(gate.weight),
            matrix_handle(down),
        )
        out = self._output(rows, down.columns)
        fault = self._recorder.mlp(
            x.data_ptr(),
            rows,
            *handles,
            _address(up_bias),
            _address(gate_bias),
            _address(down_bias),
            _address(residual),
            kind,
            activation.threshold,
            chosen,
            tile_size(neurons),
            out.data_ptr(),
        )
        self._done(fault, handles, chosen, up, gate, down, selection)
        return out

    def ahead(self, work: Callable[[], T]) -> Callable[[], T]:
        return at_once(work)

    def argmax(self, x: Tensor) -> Tensor:
        rows, width = self._rows("x", x), x.shape[-1]
        x = self._input("x", x, rows, width)
        out = self._output(rows, dtype=torch.int64)
        self._done(self._recorder.argmax(x.data_ptr(), rows, width, out.data_ptr()))
        return out
