"""A row's bits depend on nothing but the row: not on threads, neighbours, lists or replay."""

import pytest
import torch
from truth import mask_of, random_weight, selection_of

from dejavu.kernels.matrix import Matrix
from dejavu.kernels.native import NativeOps
from dejavu.kernels.ops import Activation, CacheView, Projection
from dejavu.kernels.selection import Selection

HIDDEN, HEADS, GROUPS, DIM, NEURONS, VOCABULARY = 72, 6, 3, 12, 260, 101


class Block:
    """One decoder block with everything in it, over inputs that a test changes in place."""

    def __init__(self, rows, dtype, activation="silu"):
        g = torch.Generator().manual_seed(0)
        self.activation = Activation(activation)
        weight = lambda out, width: random_weight(out, width, dtype, g)  # noqa: E731
        self.table = weight(VOCABULARY, HIDDEN)
        self.q, self.k, self.v = (weight(n * DIM, HIDDEN) for n in (HEADS, GROUPS, GROUPS))
        self.o = weight(HEADS * DIM, HIDDEN)
        self.up, self.gate, self.down = (weight(NEURONS, HIDDEN) for _ in range(3))
        self.norm, self.bias = torch.randn(2, HIDDEN, generator=g)
        self.first, self.second = weight(16, HIDDEN), weight(NEURONS, 16)
        self.threshold = torch.randn(NEURONS, generator=g)
        angles = torch.randn(64, DIM // 2, generator=g)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.ids = torch.randint(VOCABULARY, (rows,), generator=g)
        self.positions = torch.arange(5, 5 + rows)
        keys, values = torch.randn(2, 5 * rows, 8, GROUPS, DIM, generator=g)
        table = torch.arange(5 * rows, dtype=torch.int32).view(rows, 5)
        self.cache = CacheView(keys, values, table, self.positions.int() + 1)
        self.heads = selection_of(mask_of("random", rows, GROUPS, g))
        self.rows = rows

    def forward(self, ops):
        rows = self.rows
        x = ops.embed(self.ids, self.table)
        h = ops.layer_norm(x, self.norm, self.bias, 1e-5)
        q, k, v = ops.linear(
            h, [Projection(self.q, selection=self.heads), Projection(self.k), Projection(self.v)]
        )
        q = ops.rope(q.view(rows, HEADS, DIM), self.positions, self.cos, self.sin)
        k = ops.rope(k.view(rows, GROUPS, DIM), self.positions, self.cos, self.sin)
        y = ops.attention(
            q,
            k,
            v.view(rows, GROUPS, DIM),
            self.cache,
            scale=DIM**-0.5,
            window=None,
            selection=self.heads,
        )
        x = ops.combine(y.view(rows, -1), self.o, None, self.heads, x)
        h = ops.rms_norm(x, self.norm, 1e-6)
        (scores,) = ops.linear(h, [Projection(self.first)])
        chosen = ops.select(scores, self.second, self.threshold)
        x = ops.mlp(
            h, Projection(self.up), Projection(self.gate), self.down, self.bias, self.activation,
            chosen, x,
        )  # fmt: skip
        (logits,) = ops.linear(x, [Projection(self.table)])
        return logits, ops.argmax(logits)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("rows", [1, 3, 5, 16])
def test_threads_do_not_matter(isa, rows, dtype):
    results = [Block(rows, dtype).forward(NativeOps(t, isa))[0] for t in (1, 2, 3)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("activation", ["silu", "relu", "gelu"])
def test_replay_equals_eager_while_inputs_change(isa, activation):
    eager, recorder = NativeOps(2, isa), NativeOps(2, isa).recorder()
    live, replayed = Block(3, "int8", activation), Block(3, "int8", activation)
    logits, best = replayed.forward(recorder)
    g = torch.Generator().manual_seed(9)
    for _ in range(12):
        replayed.ids.copy_(torch.randint(VOCABULARY, (3,), generator=g))
        replayed.positions.add_(1)
        replayed.cache.lengths.add_(1)
        replayed.heads.mask.copy_(torch.rand(3, GROUPS, generator=g) < 0.5)
        listed = Selection.from_mask(replayed.heads.mask)
        replayed.heads.indices.copy_(listed.indices)
        replayed.heads.counts.copy_(listed.counts)
        for name in ("ids", "positions"):
            getattr(live, name).copy_(getattr(replayed, name))
        live.cache.lengths.copy_(replayed.cache.lengths)
        for name in ("mask", "indices", "counts"):
            getattr(live.heads, name).copy_(getattr(replayed.heads, name))
        recorder.program.run()
        expected, expected_best = live.forward(eager)
        assert torch.equal(logits, expected)
        assert torch.equal(best, expected_best)
        assert torch.equal(live.cache.keys, replayed.cache.keys)
    assert [name for name, _ in recorder.program.profile()][:3] == ["embed", "layer_norm", "linear"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("width", [31, 64, 300])
def test_a_row_alone_equals_the_row_in_a_batch(native_ops, width, dtype):
    g = torch.Generator().manual_seed(width)
    up, gate, down = (random_weight(700, width, dtype, g) for _ in range(3))
    x, residual = torch.randn(2, 16, width, generator=g)
    bias = torch.randn(width, generator=g)
    projections = [Projection(up), Projection(gate)]
    arguments = Projection(up), Projection(gate), down, bias, Activation("relu")

    def results(rows, used):
        chosen = selection_of(used)
        outputs = native_ops.linear(x[rows], projections)
        summed = native_ops.combine(outputs[0], down, bias, chosen, None)
        return *outputs, summed, native_ops.mlp(x[rows], *arguments, chosen, residual[rows])

    for rows, kind in ((2, "none"), (3, "random"), (7, "all"), (16, "none"), (16, "random")):
        used = mask_of(kind, rows, 700, g)
        together = results(slice(0, rows), used)
        for r in range(rows):
            one = slice(r, r + 1)
            alone = results(one, None if used is None else used[one])
            assert all(torch.equal(a[0], b[r]) for a, b in zip(alone, together, strict=True))


def test_attention_of_a_row_alone(native_ops):
    g = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 150, 8, 2, 20, generator=g)
    table = torch.arange(150, dtype=torch.int32).view(3, 50)
    lengths = torch.tensor([400, 3, 257], dtype=torch.int32)
    q = torch.randn(3, 10, 20, generator=g)
    k, v = torch.randn(2, 3, 2, 20, generator=g)

    def attend(rows, blocks):
        view = CacheView(keys.clone(), values.clone(), blocks.contiguous(), lengths[rows])
        return native_ops.attention(
            q[rows], k[rows], v[rows], view, scale=0.3, window=300, selection=None
        )

    together = attend(slice(0, 3), table)
    for r in range(3):
        assert torch.equal(attend(slice(r, r + 1), table[r : r + 1])[0], together[r])
    # Other blocks, a wider table: where a token lies does not matter either.
    wider = torch.cat((table, table[:, :7]), dim=1)
    assert torch.equal(attend(slice(0, 3), wider), together)


@pytest.mark.parametrize("dim", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_alone_equals_the_head_in_a_group(isa, dim, dtype):
    """Short heads with one query have a loop of their own."""
    g = torch.Generator().manual_seed(dim)
    keys, values = torch.randn(2, 24, 8, 2, dim, generator=g).to(dtype)
    table = torch.arange(24, dtype=torch.int32).view(2, 12)
    lengths = torch.tensor([90, 7], dtype=torch.int32)
    q, k, v = torch.randn(3, 2, 2, dim, generator=g)

    def attend(queries):
        view = CacheView(keys.clone(), values.clone(), table, lengths)
        heads = q.repeat_interleave(queries, dim=1)
        return NativeOps(2, isa).attention(
            heads, k, v, view, scale=dim**-0.5, window=None, selection=None
        )

    assert torch.equal(attend(3)[:, ::3], attend(1))


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.9])
def test_scattered_choices_of_many_rows(isa, rows, share):
    """Lists that reach over many entries, and rows that use nothing of a list."""
    g = torch.Generator().manual_seed(rows)
    neurons, width = 4100, 64
    up, down = (random_weight(neurons, width, "int8", g) for _ in range(2))
    x = torch.randn(rows, width, generator=g)
    used = torch.rand(rows, neurons, generator=g) < share
    used[1] = False
    used[:, 700:2100] = False
    ops, one = NativeOps(2, isa), NativeOps(1, isa)

    def mlp(ops, x, used):
        chosen = selection_of(used)
        rest = None, down, None, Activation("relu"), chosen, None
        return ops.mlp(x, Projection(up), *rest), ops.linear(x, [Projection(up, None, chosen)])[0]

    together = mlp(ops, x, used)
    for r in range(rows):
        alone = mlp(one, x[r : r + 1], used[r : r + 1])
        assert all(torch.equal(a[0], b[r]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("block", [1, 5, 80])
def test_a_full_list_equals_none(native_ops, rows, block):
    g = torch.Generator().manual_seed(block)
    entries = 40
    weight = random_weight(entries * block, 65, "int8", g)
    x = torch.randn(rows, entries * block, generator=g)
    none = native_ops.combine(x, weight, None, None, None)
    everything = torch.ones(rows, entries, dtype=torch.bool)
    for full in (Selection.full(entries), selection_of(everything)):
        assert torch.equal(native_ops.combine(x, weight, None, full, None), none)

    wide = Matrix.from_float(torch.randn(entries * block, 65, generator=g), "bf16")
    h = torch.randn(rows, 65, generator=g)
    for name in ("relu", "silu"):
        results = [
            native_ops.mlp(h, Projection(wide), None, weight, None, Activation(name), s, None)
            for s in (None, Selection.full(entries * block))
        ]
        assert torch.equal(*results)
    (none,) = native_ops.linear(h, [Projection(wide)])
    (full,) = native_ops.linear(h, [Projection(wide, None, Selection.full(entries))])
    assert torch.equal(none, full)
