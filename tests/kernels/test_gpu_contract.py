"""What holds for every Triton kernel: any cut of the work, views, repeated calls, fixed bits."""

import pytest
import torch
from on_device import Cut
from truth import EPS, exact, mask_of, masked, product, random_weight, selection_of, weight64

from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Activation, CacheView, Projection
from dejavu.kernels.reference import TorchOps

ROWS, HIDDEN, NEURONS = 3, 40, 150


class Calls:
    """Every op once, on inputs that are made anew for each call."""

    def __init__(self, rows, dtype="fp32"):
        g = torch.Generator().manual_seed(rows)
        weight = lambda out, width: random_weight(out, width, dtype, g)  # noqa: E731
        self.rows, self.generator = rows, g
        self.x, self.residual = torch.randn(2, rows, HIDDEN, generator=g)
        self.wide, self.tall = weight(NEURONS, HIDDEN), weight(HIDDEN, HIDDEN)
        self.bias = torch.randn(NEURONS, generator=g)
        self.used = mask_of("random", rows, NEURONS, g)
        self.heads = mask_of("random", rows, 2, g)
        self.signs = torch.randint(2**40, (NEURONS, 1), generator=g)
        self.thresholds = torch.full((NEURONS,), HIDDEN // 2, dtype=torch.int32)
        self.cache = torch.randn(2, 3 * rows, 16, 2, 10, generator=g)
        self.angles = torch.randn(50, 4, generator=g)

    def everything(self, ops):
        x, up, chosen = self.x, Projection(self.wide, self.bias), selection_of(self.used)
        lengths = torch.arange(33, 33 + self.rows, dtype=torch.int32)
        table = torch.randperm(3 * self.rows, generator=torch.Generator().manual_seed(0))
        cache = CacheView(*self.cache.clone(), table.int().view(self.rows, 3), lengths)
        heads = x.view(self.rows, 4, 10)
        groups = self.residual.view(self.rows, 4, 10)[:, :2].contiguous()
        outputs = {
            "layer_norm": ops.layer_norm(x, self.residual[0], None, 1e-5),
            "rms_norm": ops.rms_norm(x, self.residual[0], 1e-5),
            "linear": ops.linear(x, [up, Projection(self.tall), Projection(self.wide)])[0],
            "selected": ops.linear(x, [Projection(self.wide, self.bias, chosen)])[0],
            "combine": ops.combine(x, self.tall, None, None, self.residual),
            "mlp": ops.mlp(x, up, up, self.wide, None, Activation("silu"), None, self.residual),
            "sparse mlp": ops.mlp(x, up, None, self.wide, None, Activation("relu"), chosen, None),
            "select": ops.select(x, self.wide, self.bias).to_mask(self.rows),
            "signs": ops.select_signs(x, self.signs, self.thresholds).to_mask(self.rows),
            "rope": ops.rope(
                heads, lengths.long(), self.angles.cos(), self.angles.sin()
            ),
            "attention": ops.attention(
                heads, groups, groups, cache, scale=0.3, window=20,
                selection=selection_of(self.heads),
            ),
        }  # fmt: skip
        return outputs | {"keys": cache.keys, "values": cache.values}


def check(name, result, expected):
    """Within the rounding of sums of sums, of the size of the largest result."""
    size = max(1.0, expected.float().abs().max().item())
    allowed = 8 * (HIDDEN + NEURONS) * EPS * size
    torch.testing.assert_close(result, expected, rtol=0.0, atol=allowed, msg=name)


@pytest.mark.parametrize("rows", [1, ROWS, pytest.param(16, marks=pytest.mark.cuda)])
def test_the_first_call_equals_the_second_and_torch(triton_ops, rows):
    """Fresh outputs are poisoned, so nothing is left to what memory held."""
    calls, ops = Calls(rows), triton_ops()
    first, second = calls.everything(ops), calls.everything(ops)
    expected = calls.everything(TorchOps())
    for name, result in first.items():
        assert torch.equal(result, second[name]), name
        check(name, result, expected[name])
    assert (ops.ops._arrived == 0).all()  # as every kernel finds it


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_a_fresh_backend_gives_the_same_bits(triton_ops, dtype):
    calls = Calls(ROWS, dtype)
    first, second = (calls.everything(triton_ops()) for _ in range(2))
    assert all(torch.equal(result, second[name]) for name, result in first.items())


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize(
    ("block", "width", "parts", "shares"),
    [(16, 16, 1, 1), (16, 32, 4, 3), (64, 64, 7, 20)],
)
@pytest.mark.parametrize("kind", ["none", "empty", "random"])
def test_any_cut_of_the_work(triton_ops, rows, block, width, parts, shares, kind):
    """More shares than rows, more parts than a tile has steps, ends inside a step."""
    g = torch.Generator().manual_seed(shares)
    up, down = (random_weight(70, 50, "fp32", g) for _ in range(2))
    x, residual = torch.randn(2, rows, 50, generator=g)
    used = mask_of(kind, rows, 70, g)
    chosen = selection_of(used)
    ops = triton_ops(tuning=Cut(block, width, parts, shares))
    (a,) = ops.linear(x, [Projection(up, None, chosen)])
    linear = product(exact(x), weight64(up).T)
    masked(linear, used).check(a)
    product(masked(exact(a), used), weight64(down)).check(ops.combine(a, down, None, chosen, None))
    relu = linear._replace(value=linear.value.clamp(min=0))
    product(masked(relu, used), weight64(down), None, residual).check(
        ops.mlp(x, Projection(up), None, down, None, Activation("relu"), chosen, residual)
    )


@pytest.mark.parametrize("rows", [1, ROWS])
def test_default_cuts(triton_ops, triton_device, rows):
    """What a device gets that measured nothing."""
    from dejavu.kernels.gpu.tuning import Tuning

    calls = Calls(rows)
    result = calls.everything(triton_ops(tuning=Tuning.of(triton_device)))
    for name, expected in calls.everything(TorchOps()).items():
        check(name, result[name], expected)


def views():
    base = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    return {
        "transposed": base[:16, :8].T,
        "every fourth column": base[:8, ::4],
        "offset": base[1:9, 8:24],
        "expanded": base[:1, 3:19].expand(8, 16),
        "every second row": base[::2, :16],
        "contiguous": base[:8, :16].contiguous(),
    }


@pytest.mark.parametrize("name", views())
def test_views_give_what_their_copies_give(triton_ops, name):
    view = views()[name]
    copy = view.contiguous()
    g = torch.Generator().manual_seed(2)
    weight, square = random_weight(33, 16, "fp32", g), random_weight(16, 16, "fp32", g)
    bias, ops = torch.zeros(33), triton_ops()
    signs, limits = torch.randint(2**16, (33, 1), generator=g), torch.full((33,), 8).int()
    positions = torch.arange(8)
    angles = torch.randn(20, 2, generator=g)
    for op in (
        lambda x: ops.linear(x, [Projection(weight)])[0],
        lambda x: ops.rms_norm(x, weight.data[0], 1e-6),
        lambda x: ops.layer_norm(x, None, None, 1e-6),
        lambda x: ops.add(x, x),
        lambda x: ops.combine(x, square, None, None, x),
        lambda x: ops.mlp(
            x, Projection(weight), None, Matrix(weight.data), None, Activation("relu"), None, x
        ),
        lambda x: ops.select(x, weight, bias).to_mask(8),
        lambda x: ops.select_signs(x, signs, limits).to_mask(8),
        lambda x: ops.rope(x.unflatten(1, (2, 8)), positions, angles.cos(), angles.sin()),
        ops.argmax,
    ):
        assert torch.equal(op(view), op(copy))


def test_views_of_heads(triton_ops):
    """q, k and v as slices of one projection; positions, lengths and tables as slices of a step."""
    g = torch.Generator().manual_seed(3)
    joined = torch.randn(2, 6, 16, generator=g)
    q, k, v = joined[:, :2], joined[:, 2:4], joined[:, 4:]
    memory = torch.randn(2, 4, 32, 2, 16, generator=g)
    step = torch.tensor([[0, 2, 33, 9], [1, 3, 7, 9]], dtype=torch.int32)
    table, lengths = step[:, :2], step[:, 2]
    angles = torch.randn(40, 8, generator=g)
    ops, results = triton_ops(), []
    for as_given in (lambda t: t, torch.Tensor.contiguous):
        cache = CacheView(*memory.clone(), as_given(table), as_given(lengths))
        arguments = {"scale": 0.25, "window": None, "selection": None}
        attended = ops.attention(*map(as_given, (q, k, v)), cache, **arguments)
        positions = step.long()[:, 2]
        turned = ops.rope(as_given(q), as_given(positions), angles.cos(), angles.sin())
        results.append((attended, turned, cache.keys))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_three_projections_with_a_selection_each(triton_ops):
    """Contract: each projection has a selection of its own."""
    g = torch.Generator().manual_seed(7)
    x = torch.randn(2, HIDDEN, generator=g)
    weights = [random_weight(60, HIDDEN, "fp32", g) for _ in range(3)]
    used = [mask_of("random", 2, entries, g) for entries in (60, 6, 6)]
    projections = [Projection(w, None, selection_of(u)) for w, u in zip(weights, used, strict=True)]
    results = triton_ops().linear(x, projections)
    for result, weight, mask in zip(results, weights, used, strict=True):
        masked(product(exact(x), weight64(weight).T), mask).check(result)
