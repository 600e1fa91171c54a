"""Triton's attention of decode steps: groups, odd heads, splits, windows, what it never reads."""

import pytest
import torch
from on_device import Cut
from test_attention import make_cache, slot, truth
from truth import EPS, mask_of, selection_of

from dejavu.kernels.ops import CacheView

CUDA = torch.cuda.is_available()
LENGTHS = [1, 31, 32, 33, 100]


def poison_beyond(cache):
    """NaN in every slot that no sequence holds; the step's own slot holds NaN until written."""
    held = torch.zeros(cache.keys.shape[:2], dtype=torch.bool)
    for row, length in enumerate(cache.lengths.tolist()):
        for position in range(length - 1):
            held[slot(cache, row, position)] = True
    for memory in (cache.keys, cache.values):
        memory[~held] = float("nan")


def attend(ops, lengths, heads, groups, head_dim, *, window=None, kind="none", dtype=torch.float32):
    g = torch.Generator().manual_seed(heads * head_dim)
    cache = make_cache(lengths, 32, groups, head_dim, g)
    cache = CacheView(
        cache.keys.to(dtype), cache.values.to(dtype), cache.block_table, cache.lengths
    )
    poison_beyond(cache)
    rows, scale = len(lengths), head_dim**-0.5
    q = torch.randn(rows, heads, head_dim, generator=g)
    k, v = torch.randn(2, rows, groups, head_dim, generator=g)
    used = mask_of(kind, rows, groups, g)
    chosen = selection_of(used)
    result = ops.attention(q, k, v, cache, scale=scale, window=window, selection=chosen)
    for row, length in enumerate(lengths):
        for memory, new in ((cache.keys, k[row]), (cache.values, v[row])):
            written = memory[slot(cache, row, length - 1)]
            # Triton's interpreter cuts bf16 off where a GPU rounds to nearest.
            ulp = torch.finfo(dtype).eps if dtype is torch.bfloat16 and not CUDA else 0.0
            torch.testing.assert_close(written, new.to(dtype), rtol=ulp, atol=0.0)
    filled = CacheView(cache.keys.nan_to_num(), cache.values.nan_to_num(), *cache_place(cache))
    expected, bound = truth(q, k, v, filled, scale, window, used)
    assert result.shape == q.shape
    assert not result.isnan().any()
    assert ((result.double() - expected).abs() <= bound + EPS).all()


def cache_place(cache):
    return cache.block_table, cache.lengths


@pytest.mark.parametrize(
    ("group", "head_dim", "splits"),
    [
        (1, 20, 1),
        (1, 96, 4),
        (1, 128, 8),
        (2, 64, 2),
        (2, 80, 8),
        (4, 80, 1),
        (4, 20, 4),
        (8, 96, 2),
        (8, 64, 8),
    ],
)
def test_groups_and_heads(triton_ops, group, head_dim, splits):
    attend(triton_ops(tuning=Cut(splits=splits)), LENGTHS, 2 * group, 2, head_dim)


@pytest.mark.parametrize("window", [1, 31, 33, 99, 500])
@pytest.mark.parametrize(("splits", "group"), [(1, 4), (8, 1)])
def test_windows(triton_ops, window, splits, group):
    attend(triton_ops(tuning=Cut(splits=splits)), [1, 33, 100], group, 1, 16, window=window)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["empty", "all", "random"])
@pytest.mark.parametrize("splits", [1, 4])
def test_selected_groups(triton_ops, rows, kind, splits):
    lengths = [100, 1, 33][:rows]
    attend(triton_ops(tuning=Cut(splits=splits)), lengths, 10, 5, 24, kind=kind)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 4])
def test_half_precision_caches(triton_ops, dtype, group):
    """Stored keys and values are exact in fp32, so the bounds are those of fp32."""
    attend(triton_ops(), [1, 40, 100], 2 * group, 2, 80, dtype=dtype)


def test_a_padded_row_reaches_no_real_token(triton_ops):
    """A row of length 1 whose block holds NaN, beside a real one: as if the real one were alone."""
    g = torch.Generator().manual_seed(3)
    cache = make_cache([40, 1], 32, 2, 16, g)
    cache.keys[cache.block_table[1, 0].item()] = float("nan")
    q, k, v = torch.randn(3, 2, 2, 16, generator=g)
    alone = CacheView(
        cache.keys.clone(), cache.values.clone(), cache.block_table[:1], cache.lengths[:1]
    )
    ops = triton_ops()
    arguments = {"scale": 0.25, "window": None, "selection": None}
    both = ops.attention(q, k, v, cache, **arguments)
    assert torch.equal(both[:1], ops.attention(q[:1], k[:1], v[:1], alone, **arguments))
    assert torch.equal(both[1], v[1])  # one token sees itself
