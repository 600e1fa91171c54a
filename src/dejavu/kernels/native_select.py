"""Selections made and counted by the compiled kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dejavu.kernels.compiled import matrix_handle, require, selection_handle
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.native_calls import NativeCalls
from dejavu.kernels.nibbles import Nibbles, blocks, half_steps
from dejavu.kernels.selection import Selection


class NativeSelections(NativeCalls):
    """The part of `NativeOps` that lists entries and counts lists."""

    def _chosen(self, entries: int, rows: int, out: Selection | None) -> tuple[Selection, Any]:
        if out is None:
            out = Selection.empty(entries, rows)
        require(rows == 1 or out.mask is not None, "a selection for several rows needs a mask")
        handle = selection_handle(out, entries, rows, block=False)
        return out, handle

    def select(
        self, hidden: Tensor, weight: Matrix, bias: Tensor, *, out: Selection | None = None
    ) -> Selection:
        rows = self._rows("hidden", hidden)
        hidden = self._input("hidden", hidden, rows, weight.columns)
        bias = self._input("bias", bias, weight.rows)
        out, chosen = self._chosen(weight.rows, rows, out)
        handle = matrix_handle(weight)
        fault = self._recorder.select(hidden.data_ptr(), rows, handle, bias.data_ptr(), chosen)
        self._done(fault, handle, chosen, weight, out)
        return out

    def select_signs(
        self, x: Tensor, signs: Tensor, thresholds: Tensor, *, out: Selection | None = None
    ) -> Selection:
        rows, width, entries = self._rows("x", x), x.shape[-1], len(thresholds)
        x = self._input("x", x, rows, width)
        signs = self._input("signs", signs, entries, -(-width // 64), dtype=torch.int64)
        thresholds = self._input("thresholds", thresholds, entries, dtype=torch.int32)
        out, chosen = self._chosen(entries, rows, out)
        fault = self._recorder.select_signs(
            x.data_ptr(), rows, width, signs.data_ptr(), thresholds.data_ptr(), chosen
        )
        self._done(fault, chosen, out)
        return out

    def select_nibbles(
        self,
        x: Tensor,
        first: Nibbles,
        second: Nibbles,
        limits: Tensor,
        *,
        out: Selection | None = None,
    ) -> Selection:
        rows, rank = self._rows("x", x), first.rows
        x = self._input("x", x, rows, first.columns)
        require(second.columns == rank, f"the stages have ranks {rank} and {second.columns}")
        limits = self._input("limits", limits, second.rows)
        out, chosen = self._chosen(second.rows, rows, out)
        stages = blocks(first), blocks(second)
        scales = self._input("scales", half_steps(first), rank)
        fault = self._recorder.select_nibbles(
            x.data_ptr(),
            rows,
            first.columns,
            rank,
            *(stage.data_ptr() for stage in stages),
            scales.data_ptr(),
            limits.data_ptr(),
            chosen,
        )
        self._done(fault, chosen, stages, out)
        return out

    def tally(
        self, selection: Selection, rows: int, counter: Tensor, *, live: Tensor | None = None
    ) -> None:
        assert live is None, "steps on the CPU have no padded rows"
        require(counter.is_contiguous(), "counter must be contiguous: it is added to in place")
        counter = self._input("counter", counter, 3, dtype=torch.int64)
        chosen = selection_handle(selection, selection.entries, rows, block=False)
        self._done(self._recorder.tally(chosen, rows, counter.data_ptr()), chosen, selection)
