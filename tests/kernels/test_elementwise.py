import pytest
import torch
from truth import EPS, misaligned, random_weight, weight64

from dejavu.errors import InputError

SHAPES = [(1, 1), (1, 7), (2, 31), (3, 64), (16, 65), (5, 300)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("width", [1, 7, 65, 300])
def test_embed(ops, width, dtype):
    table = random_weight(11, width, dtype, torch.Generator().manual_seed(0))
    ids = torch.tensor([10, 0, 3, 3])
    assert torch.equal(ops.embed(ids, table), weight64(table)[ids].float())


@pytest.mark.parametrize("shape", SHAPES)
def test_add(ops, shape):
    x, y = (misaligned(torch.randn(shape)) for _ in range(2))
    assert torch.equal(ops.add(x, y), x + y)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(ops, shape, affine):
    g = torch.Generator().manual_seed(1)
    x = misaligned(torch.randn(shape, generator=g) + 3)
    weight, bias = torch.randn(2, shape[1], generator=g) if affine else (None, None)
    result = ops.layer_norm(x, weight, bias, 1e-5)
    d = x.double()
    centred = d - d.mean(dim=1, keepdim=True)
    deviation = (centred.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
    # The mean is off by (n + 2) eps of its size, which the division by a deviation magnifies.
    error = (shape[1] + 8) * EPS * (d.abs().amax(dim=1, keepdim=True) / deviation + 4)
    expected, bound = centred / deviation, (1 + (centred / deviation).abs()) * error
    if affine:
        expected, bound = expected * weight + bias, bound * weight.abs() + EPS * bias.abs() * 2
    assert ((result.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("shape", [*SHAPES, (2, 3, 31), (16, 4, 64)])
def test_rms_norm(ops, shape):
    g = torch.Generator().manual_seed(2)
    x, weight = misaligned(torch.randn(shape, generator=g)), torch.randn(shape[-1], generator=g)
    result = ops.rms_norm(x, weight, 1e-6)
    d = x.double()
    expected = d / (d.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight
    assert ((result.double() - expected).abs() <= (shape[-1] + 8) * EPS * expected.abs()).all()


def test_norms_keep_outliers_apart(ops):
    """Channels of 1e3 beside channels of 1: sums in fp32, centred before they are squared."""
    x = torch.ones(1, 16384)
    x[0, ::2] = -1
    x[0, 5] = x[0, 700] = 1e3
    d = x.double()
    rms = ops.rms_norm(x, torch.ones(16384), 1e-6).double()
    layer = ops.layer_norm(x, None, None, 1e-6).double()
    for result, expected in (
        (rms, d / d.square().mean().sqrt()),
        (layer, (d - d.mean()) / d.std(correction=0)),
    ):
        assert torch.cosine_similarity(result, expected).item() > 1 - 1e-9


@pytest.mark.parametrize(("head_dim", "half"), [(2, 1), (7, 3), (64, 32), (64, 16), (65, 8)])
def test_rope(ops, head_dim, half):
    g = torch.Generator().manual_seed(3)
    x = misaligned(torch.randn(3, 5, head_dim, generator=g))
    angles = torch.randn(20, half, generator=g)
    positions = torch.tensor([0, 19, 7])
    result = ops.rope(x, positions, angles.cos(), angles.sin())
    d = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    turned = d * torch.polar(torch.ones(3, half).double(), angles[positions].double())[:, None]
    expected = torch.cat((turned.real, turned.imag, x[..., 2 * half :].double()), dim=-1)
    assert (result.double() - expected).abs().max() < 16 * EPS * 4
    assert torch.equal(result[..., 2 * half :], x[..., 2 * half :])


@pytest.mark.parametrize("width", [1, 7, 64, 65, 300, 8192])
def test_argmax_takes_the_lowest_of_equals(ops, width):
    g = torch.Generator().manual_seed(width)
    x = torch.randint(-3, 4, (5, width), generator=g).float()
    x[1] = 2.0
    x[2] = float("-inf")
    x[3, width // 2] = float("inf")
    x[4, width // 3 :] = float("nan")
    expected = [
        max(
            range(width),
            key=lambda i, row=row: (row[i] != row[i], 0 if row[i] != row[i] else row[i]),
        )
        for row in x.tolist()
    ]
    assert ops.argmax(x).tolist() == expected


def test_ids_and_positions_outside_their_table_are_refused(native_ops):
    table = random_weight(11, 8, "fp32", torch.Generator())
    for bad in (11, -1):
        with pytest.raises(InputError, match="token id"):
            native_ops.embed(torch.tensor([0, bad]), table)
        with pytest.raises(InputError, match="position"):
            native_ops.rope(
                torch.ones(1, 1, 4), torch.tensor([bad]), torch.ones(11, 2), torch.ones(11, 2)
            )
    assert native_ops.embed(torch.tensor([1]), table).isfinite().all()  # the fault is forgotten


@pytest.mark.parametrize("entries", [1, 300, 20000])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -float("inf")])
def test_pick_takes_the_lowest_of_equals_and_nothing_broken(triton_ops, entries, bad):
    logits = torch.randn(3, entries, generator=torch.Generator().manual_seed(entries))
    logits[0, 0] = logits[0, -1] = 9.0
    logits[2] = -1e30
    if bad is not None:
        logits[1, entries // 2] = bad
    picked = torch.full((3,), 7)
    triton_ops().pick(logits, picked)
    second = int(logits[1].argmax()) if bad is None else -1
    assert picked.tolist() == [0, second, 0]


@pytest.mark.parametrize(("bucket", "rows"), [(1, 1), (4, 3), (16, 16), (16, 1)])
def test_follow_puts_what_was_picked_where_no_id_is_known(triton_ops, bucket, rows):
    ids = torch.where(torch.arange(bucket) % 3 == 1, torch.arange(bucket) + 40, -1)
    picked = torch.arange(rows) + 7
    picked[rows // 2] = -1  # not finite
    expected = [
        40 + i if i % 3 == 1 else max(0, picked[min(i, rows - 1)].item()) for i in range(bucket)
    ]
    triton_ops().follow(ids, picked)
    assert ids.tolist() == expected
