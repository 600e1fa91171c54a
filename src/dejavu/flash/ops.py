"""The ops over a `FlashStore`: an MLP waits for the neurons that its selection names.

Neurons are asked for where they are selected and waited for where they are needed. A selection that
looks ahead is asked for at once, and its reads go on beside the ops between (LLM in a flash,
section 3; Deja Vu, section 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dejavu.flash.store import FlashStore
from dejavu.kernels.compiled import Program, extension, raise_fault
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.native import NativeOps
from dejavu.kernels.neuron_cache import FAULT
from dejavu.kernels.nibbles import Nibbles
from dejavu.kernels.ops import Activation, Projection
from dejavu.kernels.prompt_rows import PromptRows
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection

__all__ = ["FlashOps", "FlashProgram", "PromptOps", "WholeOps", "WindowOps"]


class FlashOps(NativeOps):
    """`NativeOps` for a model of a store; the same bits as with the weights in memory."""

    def __init__(self, store: FlashStore, threads: int | None = None) -> None:
        super().__init__(threads)
        self._store = store

    def recorder(self) -> FlashRecorder:
        return FlashRecorder(self._store, self.threads, self.isa)

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
        layer = self._store.layer_of(down)
        if layer is None:
            return super().mlp(x, up, gate, down, down_bias, activation, selection, residual)
        cache = self._store.cache
        cache.begin(layer, selection, len(x))
        try:
            cache.finish(layer)
            return super().mlp(x, up, gate, down, down_bias, activation, selection, residual)
        finally:
            cache.release(layer)


class FlashProgram(Program):
    """A recorded step with the neurons' coming and going between its ops."""

    def __init__(self, recorder: Any, store: FlashStore) -> None:
        super().__init__(recorder)
        self._store = store
        self.layers: list[int] = []

    def run(self) -> None:
        """Run the whole step.

        Raises what `Program.run` raises, CheckpointError for records that cannot be read and
        InputError where the slots do not hold what a layer needs; the cache can be used again.
        """
        fault = self._recorder.run()
        if fault == 0:
            return
        cache = self._store.cache
        error = cache.failure() if fault == FAULT else None
        for layer in self.layers:
            cache.abandon(layer)
        if error is not None:
            raise error
        raise_fault(fault)


class FlashRecorder(NativeOps):
    """Records a step. Where a selection is made its neurons are asked for, and where its MLP begins
    they are waited for; a selection that looks ahead is read beside the ops between."""

    def __init__(self, store: FlashStore, threads: int, isa: str) -> None:
        self.isa, self.threads = isa, threads
        self._store = store
        self._recorder = extension().Recorder(threads, isa, eager=False)
        self._whole = self._program = FlashProgram(self._recorder, store)
        self._asked: dict[Selection, Tensor] = {}  # the layer that asks for it, once it is known

    def _ask(self, selection: Selection, rows: int) -> Selection:
        layer = self._asked[selection] = torch.full((1,), -1)
        self._step("begin", layer, selection, rows)
        return selection

    def _step(self, step: str, layer: Tensor, selection: Selection | None, rows: int) -> None:
        cache = self._store.cache
        self._whole.keep(cache.add_to(self._recorder, step, layer, selection, rows))

    def select(
        self, hidden: Tensor, weight: Matrix, bias: Tensor, *, out: Selection | None = None
    ) -> Selection:
        return self._ask(super().select(hidden, weight, bias, out=out), len(hidden))

    def select_nibbles(
        self,
        x: Tensor,
        first: Nibbles,
        second: Nibbles,
        limits: Tensor,
        *,
        out: Selection | None = None,
    ) -> Selection:
        return self._ask(super().select_nibbles(x, first, second, limits, out=out), len(x))

    def select_signs(
        self, x: Tensor, signs: Tensor, thresholds: Tensor, *, out: Selection | None = None
    ) -> Selection:
        return self._ask(super().select_signs(x, signs, thresholds, out=out), len(x))

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
        number = self._store.layer_of(down)
        if number is None:
            return super().mlp(x, up, gate, down, down_bias, activation, selection, residual)
        asked = None if selection is None else self._asked.pop(selection, None)
        layer = torch.tensor([number]) if asked is None else asked.fill_(number)
        if asked is None:
            self._step("begin", layer, selection, len(x))
        self._step("finish", layer, None, len(x))
        # A thread starts the reads that had to wait for this layer's; the others begin the MLP.
        self._step("start", layer, None, len(x))
        out = super().mlp(x, up, gate, down, down_bias, activation, selection, residual)
        self._step("release", layer, None, len(x))
        self._whole.layers.append(number)
        return out


class _Streaming(TorchOps):
    """Ops that read each layer's MLP when they come to it, and drop it behind them."""

    _store: FlashStore
    _kept: tuple[int, dict[str, Matrix]] | None = None

    def linear(self, x: Tensor, projections: Sequence[Projection]) -> list[Tensor]:
        return super().linear(x, [p._replace(weight=self._read(p.weight)) for p in projections])

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
        up = up._replace(weight=self._read(up.weight))
        gate = None if gate is None else gate._replace(weight=self._read(gate.weight))
        down = self._read(down)
        self._kept = None
        return super().mlp(x, up, gate, down, down_bias, activation, selection, residual)

    def _read(self, matrix: Matrix) -> Matrix:
        """A matrix with its weights, which are in memory by now. Who looks at activations before
        the MLP (to count them, or an oracle) has read the layer already."""
        found = self._store.part_of(matrix)
        if found is None:
            return matrix
        layer, part = found
        if self._kept is None or self._kept[0] != layer:
            self._kept = None  # before the next one takes as much again
            self._kept = layer, self._store.read_layer(layer)
        return self._kept[1][part]


class PromptOps(_Streaming, PromptRows):
    """`PromptRows` for a model of a store; the same bits as with the weights in memory."""

    def __init__(self, store: FlashStore, threads: int | None = None) -> None:
        super().__init__(threads)
        self._store = store


class WholeOps(NativeOps):
    """`NativeOps` that read every layer's MLP in full when they come to it, and keep nothing.

    The same bits as with the weights in memory: for prompts that are read there on these kernels.
    """

    def __init__(self, store: FlashStore, threads: int | None = None) -> None:
        super().__init__(threads)
        self._store = store

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
        up, gate, down = self._store.read_mlp(up, gate, down)
        return super().mlp(x, up, gate, down, down_bias, activation, selection, residual)


class WindowOps(_Streaming):
    """`TorchOps` for a model of a store, as windows of text are scored with."""

    def __init__(self, store: FlashStore) -> None:
        self._store = store
