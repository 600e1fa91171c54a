"""The ops over a `FlashStore`: an MLP waits for the neurons that its selection names.

A recorded step is cut where neurons are asked for and where they are needed. A selection that looks
ahead is asked for at once, and its reads go on beside the ops between (LLM in a flash, section 3;
Deja Vu, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dejavu.flash.store import FlashStore
from dejavu.kernels.compiled import Program, extension, selection_handle
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.native import NativeOps
from dejavu.kernels.ops import Activation, Projection
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection

__all__ = ["FlashOps", "FlashProgram", "PromptOps"]


class FlashOps(NativeOps):
    """`NativeOps` for a model of a store; the same bits as with the weights in memory."""

    def __init__(
        self, store: FlashStore, threads: int | None = None, isa: str | None = None
    ) -> None:
        super().__init__(threads, isa)
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


class FlashProgram:
    """Parts of a recorded step with the neurons' coming and going between them."""

    def __init__(self, store: FlashStore) -> None:
        self._store = store
        self.steps: list[Callable[[], None]] = []
        self.layers: list[int] = []

    def run(self) -> None:
        """Run the whole step.

        Raises what `Program.run` raises, CheckpointError for records that cannot be read and
        InputError where the slots do not hold what a layer needs; the cache can be used again.
        """
        try:
            for step in self.steps:
                step()
        except BaseException:
            for layer in self.layers:
                self._store.cache.abandon(layer)
            raise


class FlashRecorder(NativeOps):
    """Records a step part by part."""

    def __init__(self, store: FlashStore, threads: int, isa: str) -> None:
        self.isa, self.threads = isa, threads
        self._store = store
        self._whole = FlashProgram(store)
        self._asked: dict[Selection, int] = {}  # place of the step that may ask for it
        self._cut()

    @property
    def program(self) -> Any:
        return self._whole

    def _cut(self) -> None:
        self._recorder = extension().Recorder(self.threads, self.isa, eager=False)
        self._program = Program(self._recorder)
        self._whole.steps.append(self._program.run)

    def _ask(self, selection: Selection) -> Selection:
        self._asked[selection] = len(self._whole.steps)
        self._whole.steps.append(_nothing)
        self._cut()
        return selection

    def select(
        self, hidden: Tensor, weight: Matrix, bias: Tensor, *, out: Selection | None = None
    ) -> Selection:
        return self._ask(super().select(hidden, weight, bias, out=out))

    def select_nibbles(self, *inputs: Any, out: Selection | None = None) -> Selection:
        return self._ask(super().select_nibbles(*inputs, out=out))

    def select_signs(
        self, x: Tensor, signs: Tensor, thresholds: Tensor, *, out: Selection | None = None
    ) -> Selection:
        return self._ask(super().select_signs(x, signs, thresholds, out=out))

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
        cache, steps = self._store.cache, self._whole.steps
        handle = selection_handle(selection, down.rows, len(x), block=False)

        def begin() -> None:
            cache.begin_handle(layer, handle)

        asked = None if selection is None else self._asked.pop(selection, None)
        if asked is None:
            steps.append(begin)
        else:
            steps[asked] = begin
        steps.append(lambda: cache.finish(layer))
        self._cut()
        out = super().mlp(x, up, gate, down, down_bias, activation, selection, residual)
        steps.append(lambda: cache.release(layer))
        self._cut()
        self._whole.layers.append(layer)
        return out


class PromptOps(TorchOps):
    """`TorchOps` that reads each layer's MLP when it comes to it."""

    def __init__(self, store: FlashStore) -> None:
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


def _nothing() -> None:
    """A place where nothing turned out to be asked for."""
