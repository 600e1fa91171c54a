import pytest
import torch
from truth import misaligned, whole_weight

from dejavu.kernels.selection import Selection


def check(selection, kept):
    """Lists, counts and mask say what `kept` bool `[rows, entries]` says."""
    listed = []
    for t, count in enumerate(selection.counts.tolist()):
        listed += selection.indices[t, :count].tolist()
    assert listed == kept.any(dim=0).nonzero().flatten().tolist()
    assert torch.equal(selection.to_mask(len(kept)), kept)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("entries", [1, 5, 33, 257, 2100])
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
def test_scores_above_zero(ops, rows, entries, dtype):
    g = torch.Generator().manual_seed(entries)
    hidden = misaligned(torch.randint(-3, 4, (rows, 31), generator=g).float())
    weight = whole_weight(entries, 31, dtype, g)
    bias = torch.randint(-30, 10, (entries,), generator=g).float()
    # Whole numbers: scores are exact, and some are exactly 0, which is not above 0.
    scores = hidden.double() @ (weight.float().double().T) + bias
    selection = ops.select(hidden, weight, bias)
    check(selection, scores > 0)
    out = Selection.empty(entries, rows)
    assert ops.select(hidden, weight, bias - 1000, out=out) is out
    check(out, scores > 1000)
    ops.select(hidden, weight, bias, out=out)
    check(out, scores > 0)


@pytest.mark.parametrize("width", [1, 7, 31, 64, 65, 300])
@pytest.mark.parametrize("rows", [1, 3])
def test_agreeing_signs(ops, rows, width):
    g = torch.Generator().manual_seed(width)
    x = misaligned(torch.randint(-1, 2, (rows, width), generator=g).float())
    x[0, 0] = -0.0  # not below 0
    negative = torch.rand(257, width, generator=g) < 0.5
    signs = torch.zeros(257, -(-width // 64), dtype=torch.int64)
    for i in range(width):
        bit = 1 << i % 64
        signs[:, i // 64] |= torch.where(negative[:, i], bit - 2**64 if bit == 2**63 else bit, 0)
    thresholds = torch.randint(0, width + 1, (257,), generator=g).int()
    agreeing = ((x < 0)[:, None] == negative).sum(dim=2)
    check(ops.select_signs(x, signs, thresholds), agreeing >= thresholds)


@pytest.mark.parametrize("rows", [1, 3])
def test_tally(ops, rows):
    mask = torch.rand(rows, 300, generator=torch.Generator().manual_seed(0)) < 0.2
    counter = torch.tensor([1, 2, 3])
    ops.tally(Selection.from_mask(mask), rows, counter)
    assert counter.tolist() == [1 + int(mask.any(0).sum()), 2 + int(mask.sum()), 3 + rows]
    ops.tally(Selection.full(300), rows, counter)
    assert counter[0] == 301 + int(mask.any(0).sum())
    assert counter[1] == 2 + int(mask.sum()) + 300 * rows
