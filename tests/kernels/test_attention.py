import pytest
import torch
from truth import EPS, mask_of, misaligned, selection_of

from dejavu.errors import InputError
from dejavu.kernels.ops import CacheView


def make_cache(lengths, block_size, groups, head_dim, g, spare=3):
    """A cache whose sequences own shuffled blocks; unowned table entries point far outside."""
    needed = [-(-length // block_size) for length in lengths]
    blocks = sum(needed) + spare
    order = torch.randperm(blocks, generator=g).tolist()
    table = torch.full((len(lengths), max([1, *needed]) + 1), 10**6, dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    keys, values = torch.randn(2, blocks, block_size, groups, head_dim, generator=g)
    return CacheView(keys, values, table, torch.tensor(lengths, dtype=torch.int32))


def slot(cache, row, position):
    block_size = cache.keys.shape[1]
    return int(cache.block_table[row, position // block_size]), position % block_size


def truth(q, k, v, cache, scale, window, used):
    """fp64 attention head by head over the cache as it is after the step."""
    keys, values = cache.keys.double(), cache.values.double()
    rows, heads, _ = q.shape
    groups = k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    bound = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(rows):
        length = int(cache.lengths[row])
        first = 0 if window is None else max(0, length - window)
        slots = [slot(cache, row, p) for p in range(first, length)]
        for head in range(heads):
            group = head // (heads // groups)
            if not slots or (used is not None and not used[row, group]):
                continue
            K = torch.stack([keys[b, o, group] for b, o in slots])
            V = torch.stack([values[b, o, group] for b, o in slots])
            scores = K @ q[row, head].double() * scale
            weights = scores.softmax(dim=0)
            out[row, head] = weights @ V
            # A score's rounding shifts its weight by as much, relatively; then the sums round.
            shift = (K.abs() @ q[row, head].double().abs()).max() * scale * (q.shape[2] + 4)
            bound[row, head] = (2 * shift + len(slots) + 20) * EPS * (weights @ V.abs())
    return out, bound


@pytest.mark.parametrize(
    ("lengths", "heads", "groups", "head_dim", "block_size"),
    [
        ([1], 1, 1, 1, 1),
        ([2, 17, 16], 4, 4, 7, 16),
        ([300, 1], 6, 2, 31, 5),
        ([600], 8, 1, 64, 16),
        ([257, 255, 256], 3, 3, 65, 32),
        ([40], 34, 1, 8, 16),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 13, 300])
@pytest.mark.parametrize("kind", ["none", "random", "empty"])
def test_decode(ops, lengths, heads, groups, head_dim, block_size, window, kind):
    g = torch.Generator().manual_seed(sum(lengths) + heads)
    rows = len(lengths)
    cache = make_cache(lengths, block_size, groups, head_dim, g)
    q = misaligned(torch.randn(rows, heads, head_dim, generator=g))
    k, v = torch.randn(2, rows, groups, head_dim, generator=g)
    used = mask_of(kind, rows, groups, g)
    keys, values = cache.keys.clone(), cache.values.clone()
    scale = head_dim**-0.5
    result = ops.attention(q, k, v, cache, scale=scale, window=window, selection=selection_of(used))
    for row, length in enumerate(lengths):
        keys[slot(cache, row, length - 1)] = k[row]
        values[slot(cache, row, length - 1)] = v[row]
    assert torch.equal(cache.keys, keys)
    assert torch.equal(cache.values, values)
    expected, bound = truth(q, k, v, cache, scale, window, used)
    assert not result.isnan().any()
    assert ((result.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("kind", ["none", "random"])
def test_a_cache_in_bf16(native_ops, kind):
    """New keys and values are rounded as torch rounds, and read back as what they were."""
    g = torch.Generator().manual_seed(8)
    lengths, heads, groups, head_dim = [300, 1, 33], 6, 2, 35
    wide = make_cache(lengths, 32, groups, head_dim, g)
    narrow = wide.keys.bfloat16(), wide.values.bfloat16()
    cache = CacheView(*narrow, wide.block_table, wide.lengths)
    q = torch.randn(3, heads, head_dim, generator=g)
    k, v = torch.randn(2, 3, groups, head_dim, generator=g)
    k[0, 0, :3] = torch.tensor([float("nan"), float("inf"), 1 + 3 * 2.0**-8])
    used = mask_of(kind, 3, groups, g)
    if used is not None:
        used[0, 0] = False  # its key is not a number
    keys, values = cache.keys.clone(), cache.values.clone()
    native_ops.attention(q, k, v, cache, scale=0.2, window=None, selection=selection_of(used))
    for row, length in enumerate(lengths):
        keys[slot(cache, row, length - 1)] = k[row].bfloat16()
        values[slot(cache, row, length - 1)] = v[row].bfloat16()
    assert torch.equal(cache.keys.nan_to_num(7.0), keys.nan_to_num(7.0))
    assert torch.equal(cache.values, values)
    k = torch.nan_to_num(k, 0.5, 0.5)
    result = native_ops.attention(
        q, k, v, cache, scale=0.2, window=None, selection=selection_of(used)
    )
    expected, bound = truth(q, k, v, cache, 0.2, None, used)
    assert ((result.double() - expected).abs() <= bound).all()


def test_large_scores_stay_finite(ops):
    g = torch.Generator().manual_seed(5)
    cache = make_cache([300], 16, 2, 8, g)
    q = torch.full((1, 4, 8), 1e3)
    result = ops.attention(
        q, *torch.randn(2, 1, 2, 8), cache, scale=10, window=None, selection=None
    )
    assert result.isfinite().all()


def test_a_padded_row_writes_nowhere(native_ops):
    g = torch.Generator().manual_seed(6)
    cache = make_cache([0, 9], 4, 2, 8, g)
    keys = cache.keys.clone()
    q = torch.randn(2, 2, 8, generator=g)
    k, v = torch.randn(2, 2, 2, 8, generator=g)
    result = native_ops.attention(q, k, v, cache, scale=1, window=None, selection=None)
    assert (result[0] == 0).all()
    keys[slot(cache, 1, 8)] = k[1]
    assert torch.equal(cache.keys, keys)


@pytest.mark.parametrize("what", ["length", "negative", "block"])
def test_a_step_outside_the_cache_is_refused(native_ops, what):
    cache = make_cache([9], 4, 1, 8, torch.Generator().manual_seed(7))
    if what == "block":
        cache.block_table[0, 1] = len(cache.keys)
    else:
        cache.lengths[0] = -1 if what == "negative" else 4 * cache.block_table.shape[1] + 1
    keys = cache.keys.clone()
    q, k, v = torch.randn(3, 1, 1, 8)
    with pytest.raises(InputError, match="block"):
        native_ops.attention(q, k, v, cache, scale=1, window=None, selection=None)
    assert torch.equal(cache.keys, keys)


def test_prefill_is_refused(native_ops):
    cache = make_cache([9], 4, 1, 8, torch.Generator().manual_seed(8))
    q, k, v = torch.randn(3, 2, 1, 8)
    with pytest.raises(InputError, match="prefill"):
        native_ops.attention(q, k, v, cache, scale=1, window=None, selection=None)
