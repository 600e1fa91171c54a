"""What the MLP benchmark on a GPU works on: layers of random weights, and selections in them.

See `gpu_kernels.py` for what is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from dejavu.bench.kernels import MLPShape
from dejavu.engine.capture import CudaGraphs
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.selection import Selection

_CALLS = 32  # in a graph, at least: what starting it takes does not count then
_SAMPLE = 64  # inputs that thresholds are set on


class Stack:
    """Layers of random weights: up and down `[F, D]`, a predictor, a bias that keeps every
    activation above 0, and an input for every call."""

    def __init__(
        self, shape: MLPShape, layers: int, dtype: torch.dtype, rank: int, device: torch.device
    ) -> None:
        self.hidden, self.neurons, self.rank = shape.hidden_size, shape.intermediate_size, rank
        self.layers, self.device, self.dtype = layers, device, dtype

        def weights() -> list[Matrix]:
            shape = self.neurons, self.hidden
            made = (torch.empty(shape, dtype=dtype, device=device) for _ in range(layers))
            return [Matrix(one.normal_(0.0, 0.02)) for one in made]

        def codes(rows: int, columns: int) -> list[Matrix]:
            scale = torch.full((rows,), columns**-0.5 / 73.3, device=device)
            size = rows, columns
            return [
                Matrix(torch.randint(-127, 128, size, dtype=torch.int8, device=device), scale)
                for _ in range(layers)
            ]

        self.up, self.down = weights(), weights()
        self.first, self.second = codes(rank, self.hidden), codes(self.neurons, rank)
        self.bias = torch.full((self.neurons,), 1e3, device=device)
        self.residual = torch.zeros(1, self.hidden, device=device)
        calls = max(_CALLS, layers)
        self.x = [torch.randn(1, self.hidden, device=device).to(dtype) for _ in range(calls)]
        self._capture = CudaGraphs(device) if device.type == "cuda" else None  # one pool for all

    @property
    def calls(self) -> int:
        return len(self.x)

    @property
    def predictor_bytes(self) -> int:
        """Of one layer, with its biases."""
        return self.first[0].nbytes + self.second[0].nbytes + 4 * self.neurons

    def mlp_bytes(self, neurons: float) -> float:
        """Rows of up, with their biases, and of down."""
        return neurons * (2 * self.hidden * self.dtype.itemsize + 4)

    def timer(self, work: Callable[[], Tensor]) -> Callable[[], float]:
        """Capture some work; what comes back replays it and returns its seconds on the device.

        The GPU sleeps until the host has queued everything, so the host's time does not count. On
        the CPU the work is done anew.
        """
        if self._capture is None:

            def again() -> float:
                started = perf_counter()
                work()
                return perf_counter() - started

            return again
        replay = self._capture(work)

        from dejavu.kernels.gpu.timing import replay_seconds

        return lambda: replay_seconds(replay)


class Draw:
    """The selections of every call at one density: given ones, and where a predictor's are cut."""

    def __init__(self, stack: Stack, density: float) -> None:
        self.density = density
        self._stack = stack
        self.kept = max(1, round(density * stack.neurons))
        shape = stack.calls, self.kept
        self.indices = torch.zeros(shape, dtype=torch.int32, device=stack.device)

        def empty() -> list[Selection]:
            make = Selection.empty
            return [make(stack.neurons, 1, device=stack.device) for _ in range(stack.calls)]

        self.given, self.predicted = empty(), empty()
        self.biases = [self._cut(layer) for layer in range(stack.layers)]
        self.fresh()

    def fresh(self) -> None:
        """Other random neurons and inputs for every call."""
        stack = self._stack
        for call, selection in enumerate(self.given):
            chosen = torch.randperm(stack.neurons, device=stack.device)[: self.kept].sort().values
            self.indices[call] = chosen
            mask = torch.zeros(1, stack.neurons, dtype=torch.bool, device=stack.device)
            mask[0, chosen] = True
            made = Selection.from_mask(mask)
            selection.indices.copy_(made.indices)
            selection.counts.copy_(made.counts)
        for x in stack.x:
            x.normal_()

    def predicted_neurons(self) -> float:
        """That the predictor chose in the last replay, mean of all calls."""
        counts = torch.stack([selection.counts.sum() for selection in self.predicted])
        return float(counts.float().mean())

    def _cut(self, layer: int) -> Tensor:
        """Biases fp32 `[F]` with which a layer's scores are above 0 as often as asked."""
        stack = self._stack
        x = torch.randn(_SAMPLE, stack.hidden, device=stack.device)
        hidden = x @ stack.first[layer].float().t()
        scores = (hidden @ stack.second[layer].float().t()).flatten()
        place = scores.numel() - round(self.density * scores.numel())
        threshold = scores.kthvalue(max(place, 1)).values
        return (-threshold).expand(stack.neurons).contiguous()
