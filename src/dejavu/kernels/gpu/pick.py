"""The likeliest token of each row, and whether its logits can be believed, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from dejavu.kernels.gpu.grid import begin


@triton.jit
def pick_kernel(logits, picked, entries, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """picked[row] = the place of the largest of `entries` logits, the lowest of equals; -1 where
    one of them is not finite. A program a row."""
    row = tl.program_id(0)
    begin(PDL)
    k = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, entries, BLOCK):
        place = start + k
        inside = place < entries
        value = tl.load(logits + row.to(tl.int64) * entries + place, mask=inside, other=0.0)
        broken = tl.where(inside & ((tl.abs(value) < float("inf")) == 0), 1, broken)
        better = inside & (value > best)
        best = tl.where(better, value, best)
        at = tl.where(better, place, at)
    first = tl.min(tl.where(best == tl.max(best, axis=0), at, entries), axis=0)
    picked_here = tl.where(tl.max(broken, axis=0) > 0, -1, first)
    tl.store(picked + row, picked_here.to(tl.int64))


@triton.jit
def follow_kernel(ids, picked, rows, bucket, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """See `TritonOps.follow`; one program."""
    begin(PDL)
    row = tl.arange(0, BLOCK)
    inside = row < bucket
    known = tl.load(ids + row, mask=inside, other=0)
    token = tl.load(picked + tl.minimum(row, rows - 1), mask=inside, other=0)
    tl.store(ids + row, tl.where(known < 0, tl.maximum(token, 0), known), mask=inside)
