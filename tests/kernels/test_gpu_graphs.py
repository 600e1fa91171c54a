"""A decode step of Triton kernels captured once and replayed while everything in it changes.

Without a GPU a replay is the same forward called again on the same tensors.
"""

import pytest
import torch
from on_device import Cut
from truth import random_weight

from dejavu.kernels.gpu.ops import TritonOps
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Activation, CacheView, Projection
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection

CUDA = torch.cuda.is_available()
HIDDEN, HEADS, GROUPS, DIM, NEURONS, BLOCKS = 64, 4, 2, 16, 300, 3
KINDS = ["none", "all", "random", "none", "one", "all"]


def captured(forward):
    """What replays the forward: its outputs stay where the first run put them."""
    if not CUDA:
        return forward
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()  # compiles the kernels, which capture does not allow
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = forward()

    def replay():
        graph.replay()
        return outputs

    return replay


class Block:
    """One decoder block on a device; a test changes ids of its step and its selections in place."""

    def __init__(self, rows, dtype, device):
        g = torch.Generator().manual_seed(0)

        def weight(out, width):
            return random_weight(out, width, dtype, g).to(device)

        self.rows, self.device = rows, device
        self.qkv = [weight(n * DIM, HIDDEN) for n in (HEADS, GROUPS, GROUPS)]
        self.o = weight(HEADS * DIM, HIDDEN)
        self.up, self.down = weight(NEURONS, HIDDEN), weight(NEURONS, HIDDEN)
        self.first, self.second = weight(16, HIDDEN), weight(NEURONS, 16)
        self.norm = torch.ones(HIDDEN, device=device)
        self.x = torch.randn(rows, HIDDEN, generator=g).to(device)
        self.threshold = torch.zeros(NEURONS, device=device)
        self.heads = Selection.empty(GROUPS, rows, device=device)
        self.neurons = Selection.empty(NEURONS, rows, device=device)
        self.counter = torch.zeros(3, dtype=torch.int64, device=device)
        keys, values = torch.randn(2, BLOCKS * rows, 32, GROUPS, DIM, generator=g).to(device)
        table = torch.randperm(BLOCKS * rows, generator=g).int().view(rows, BLOCKS)
        lengths = torch.full((rows,), 30, dtype=torch.int32, device=device)
        self.cache = CacheView(keys, values, table.to(device), lengths)
        angles = torch.randn(BLOCKS * 32, DIM // 2, generator=g)
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)

    def forward(self, ops):
        rows = self.rows
        h = ops.rms_norm(self.x, self.norm, 1e-6)
        q, k, v = ops.linear(
            h, [Projection(w, None, self.heads if i == 0 else None) for i, w in enumerate(self.qkv)]
        )
        q = ops.rope(q.view(rows, HEADS, DIM), self.positions, self.cos, self.sin)
        k = ops.rope(k.view(rows, GROUPS, DIM), self.positions, self.cos, self.sin)
        v = v.view(rows, GROUPS, DIM)
        y = ops.attention(
            q, k, v, self.cache, scale=DIM**-0.5, window=None, selection=self.heads
        )  # fmt: skip
        x = ops.combine(y.view(rows, -1), self.o, None, self.heads, self.x)
        h = ops.rms_norm(x, self.norm, 1e-6)
        (scores,) = ops.linear(h, [Projection(self.first)])
        ops.select(scores, self.second, self.threshold, out=self.neurons)
        ops.tally(self.neurons, rows, self.counter)
        return ops.mlp(
            h, Projection(self.up), None, self.down, None, Activation("relu"), self.neurons, x
        )

    def change(self, step, kind):
        """Inputs, lengths, heads and how many neurons pass: in place, as a step's staging does."""
        g = torch.Generator().manual_seed(step)
        self.x.copy_(torch.randn(self.rows, HIDDEN, generator=g))
        lengths = torch.randint(1, BLOCKS * 32 + 1, (self.rows,), generator=g)
        self.cache.lengths.copy_(lengths.int())
        self.positions.copy_(lengths - 1)
        bias = {"none": -1e9, "all": 1e9, "random": 0.0, "one": -1e9}[kind]
        threshold = torch.full((NEURONS,), bias)
        if kind == "one":
            threshold[NEURONS - 1] = 1e9
        self.threshold.copy_(threshold)
        used = torch.rand(self.rows, GROUPS, generator=g) < 0.5
        if kind in ("none", "all"):
            used[:] = kind == "all"
        chosen = Selection.from_mask(used.to(self.device))
        self.heads.indices.copy_(chosen.indices)
        self.heads.counts.copy_(chosen.counts)
        if self.heads.mask is not None:
            self.heads.mask.copy_(chosen.mask)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(1, "int8"), (3, "fp32"), pytest.param(16, "int8", marks=pytest.mark.cuda)],
)
def test_a_selection_swings_from_none_to_all(triton_device, rows, dtype):
    """KN-05 and KN-04: one capture, then other lengths, heads and counts of neurons every step."""
    ops = TritonOps(triton_device, tuning=None if CUDA else Cut())
    replayed, eager, plain = (Block(rows, dtype, triton_device) for _ in range(3))
    replay = captured(lambda: replayed.forward(ops))
    replayed.counter.zero_()
    for step, kind in enumerate(KINDS if CUDA else KINDS[:3]):
        for block in (replayed, eager, plain):
            block.change(step, kind)
        for name in ("keys", "values"):  # capture has written a step of its own
            getattr(replayed.cache, name).copy_(getattr(eager.cache, name))
        result, expected = replay(), eager.forward(ops)
        assert torch.equal(result, expected)
        assert torch.equal(replayed.cache.keys, eager.cache.keys)
        assert torch.equal(replayed.counter, eager.counter)
        truth = plain.forward(TorchOps())  # always: its cache needs this step's keys and values
        if kind != "random":  # a score next to 0 may fall on either side
            size = truth.abs().max().item()
            torch.testing.assert_close(result, truth, rtol=0.0, atol=1e-4 * size)
        assert int(replayed.neurons.counts.sum()) in {
            "none": [0], "one": [1], "all": [NEURONS], "random": range(1, NEURONS + 1),
        }[kind]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_elements_beyond_two_to_the_31(dtype):
    """The last rows of a matrix of 2.3e9 elements, as products, sums and predictor scores."""
    rows, width = 70_000, 32_768
    data = torch.zeros(rows, width, dtype=torch.float16 if dtype == "fp16" else torch.int8)
    data[-3:] = torch.randint(-2, 3, (3, width), generator=torch.Generator().manual_seed(0))
    scale = torch.ones(rows) if dtype == "int8" else None
    matrix = Matrix(data, scale).to(torch.device("cuda"))
    ops = TritonOps("cuda")
    tail = data[-3:].float().cuda()
    for n in (1, 2):
        x = torch.randint(-2, 3, (n, width)).float().cuda()
        (y,) = ops.linear(x, [Projection(matrix)])
        assert torch.equal(y[:, -3:], x @ tail.T)
        assert (y[:, :-3] == 0).all()
        a = torch.ones(n, rows, device="cuda")
        mask = torch.zeros(n, rows, dtype=torch.bool, device="cuda")
        mask[:, -3:] = True
        for chosen in (None, Selection.from_mask(mask)):
            summed = ops.combine(a, matrix, None, chosen, None)
            assert torch.equal(summed, tail.sum(dim=0).expand(n, -1))
        activation = Activation("relu")
        for chosen in (None, Selection.from_mask(mask)):
            result = ops.mlp(x, Projection(matrix), None, matrix, None, activation, chosen, None)
            assert torch.equal(result, (x @ tail.T).relu() @ tail)
        chosen = ops.select(x, matrix, torch.zeros(rows, device="cuda"))
        assert torch.equal(chosen.to_mask(n)[:, -3:], x @ tail.T > 0)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_where_their_tensors_lie():
    """KN-11: cuda:1 while cuda:0 is the current device."""
    results = []
    for index in range(2):
        device = torch.device("cuda", index)
        block = Block(3, "fp32", device)
        block.change(0, "random")
        with torch.cuda.device(0):
            results.append(block.forward(TritonOps(device)))
        assert results[-1].device == device
    assert torch.equal(*(result.cpu() for result in results))
