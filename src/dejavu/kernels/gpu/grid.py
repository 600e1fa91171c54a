"""What all kernels share: when a program may read, and which entries a selection lists.

Programmatic dependent launch (PDL, compute capability 9.0): a kernel's programs are on the chip
before the kernel ahead of them has ended, and `begin` lets them go on when its results are visible.
Every program of every kernel waits, also those that have nothing to do: a kernel that ended early
would release its successor before its predecessor has written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def announce(pdl: tl.constexpr):
    """Let the next kernel's programs come; the first thing that a kernel does."""
    if pdl:
        gdc_launch_dependents()


@triton.jit
def wait(pdl: tl.constexpr):
    """Wait for the results of the kernel before.

    Ahead of this a program may read what no kernel of a step writes, and lists that were there
    before the last norm: where one has been made since the norm before, a norm announces the kernel
    after it only when it has waited itself.
    """
    if pdl:
        gdc_wait()


@triton.jit
def begin(pdl: tl.constexpr):
    """Both at once."""
    announce(pdl)
    wait(pdl)


@triton.jit
def prefetch(first, rows, stride, wanted, SPAN: tl.constexpr):
    """Ask for the first SPAN bytes of some stored rows, so that they lie in the last-level cache
    when the kernel before has ended.

    first: pointer to row 0. rows: int64 `[R]`. stride: elements of a row. wanted: bool `[R]`.
    SPAN: a power of two.
    """
    LINE: tl.constexpr = 128  # bytes
    LINES: tl.constexpr = (SPAN + LINE - 1) // LINE
    line = tl.arange(0, LINES).to(tl.int64) * LINE
    start = (first + rows * stride).to(tl.int64)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [start[:, None] + line[None, :], wanted.to(tl.int32)[:, None]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def running_counts(counts, tiles, TILES: tl.constexpr):
    """Entries listed in the tiles up to and with each: int32 `[TILES]` (TILES >= tiles)."""
    t = tl.arange(0, TILES)
    return tl.cumsum(tl.load(counts + t, mask=t < tiles, other=0), axis=0)


@triton.jit
def listed(indices, running, place, total, TILES: tl.constexpr, TILE: tl.constexpr):
    """The entries at places `[P]` of the list of all tiles, one after the other; 0 beyond it.

    Tiles hold their own counts, so no pass over the whole selection makes one list of them: every
    program finds its share here, which costs less than another launch.
    """
    before = running[None, :] <= place[:, None]
    tile = tl.sum(before.to(tl.int32), axis=1)
    start = tl.max(tl.where(before, running[None, :], 0), axis=1)
    inside = place < total
    return tl.load(indices + tile * TILE + (place - start), mask=inside, other=0)


@triton.jit
def is_listed(indices, counts, entry, inside, TILE: tl.constexpr):
    """Whether entries `[P]` are listed."""
    tile = entry // TILE
    slot = tl.arange(0, TILE)
    count = tl.load(counts + tile, mask=inside, other=0)
    held = tl.load(
        indices + tile[:, None] * TILE + slot[None, :],
        mask=inside[:, None] & (slot[None, :] < count[:, None]),
        other=-1,
    )
    return tl.max((held == entry[:, None]).to(tl.int32), axis=1) > 0


@triton.jit
def multiply(a, b, sums):
    """sums + a @ b with fp32 sums; one of the two are stored weights.

    fp32 weights: IEEE. Inputs in the weights' half precision: plain tensor core products. fp32
    inputs and fp16 weights: the inputs are split into two halves, which is about as exact as fp32.
    Other pairs go by way of tf32, which holds bf16 and int8 exactly (and Triton's interpreter,
    where CPU tests run, cannot multiply bf16).
    """
    if (a.dtype == tl.float32) & (b.dtype == tl.float32):
        sums = tl.dot(a, b, sums, input_precision="ieee")
    elif (a.dtype == tl.float16) & (b.dtype == tl.float16):
        sums = tl.dot(a, b, sums)
    elif (a.dtype == tl.float32) & (b.dtype == tl.float16):
        upper = a.to(tl.float16)
        lower = (a - upper.to(tl.float32)).to(tl.float16)
        sums = tl.dot(lower, b, tl.dot(upper, b, sums))
    elif (a.dtype == tl.float16) & (b.dtype == tl.float32):
        upper = b.to(tl.float16)
        lower = (b - upper.to(tl.float32)).to(tl.float16)
        sums = tl.dot(a, lower, tl.dot(a, upper, sums))
    elif (a.dtype == tl.float32) | (b.dtype == tl.float32):
        sums = tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="tf32x3")
    elif (a.dtype == tl.float16) | (b.dtype == tl.float16):
        sums = tl.dot(a.to(tl.float16), b.to(tl.float16), sums)
    else:
        sums = tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="tf32")
    return sums
