"""LayerNorm and RMSNorm, and rotary positions: one program a row."""

from __future__ import annotations

import triton
import triton.language as tl

from dejavu.kernels.gpu.grid import announce, begin, wait


@triton.jit
def norm_kernel(
    x, weight, bias, y, width, eps,
    CENTRED: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of fp32 `[programs, width]`, normed in fp32; CENTRED: LayerNorm, else RMSNorm."""
    row = tl.program_id(0).to(tl.int64) * width
    k = tl.arange(0, WIDTH)
    inside = k < width
    # Before the wait: nobody writes them, and they come from afar.
    if weight is not None:
        factor = tl.load(weight + k, mask=inside, other=0.0)
    if bias is not None:
        shift = tl.load(bias + k, mask=inside, other=0.0)
    wait(PDL)
    announce(PDL)
    value = tl.load(x + row + k, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value, axis=0) / width, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    if weight is not None:
        value *= factor
    if bias is not None:
        value += shift
    tl.store(y + row + k, value, mask=inside)


@triton.jit
def block_moments(moments, block, row, inside):
    """Leave what `whole_moments` needs of a block of columns; row: fp32 `[COLUMNS]`, that block."""
    count = tl.sum(inside.to(tl.float32), axis=0)
    mean = tl.sum(tl.where(inside, row, 0.0), axis=0) / count
    away = tl.where(inside, row - mean, 0.0)
    tl.store(moments + 2 * block, mean)
    tl.store(moments + 2 * block + 1, tl.sum(away * away, axis=0))


@triton.jit
def whole_moments(
    moments, blocks, span, width, eps, CENTRED: tl.constexpr, MOMENTS: tl.constexpr
):  # fmt: skip
    """What a norm takes off a row (0 unless CENTRED), and what it multiplies the rest with."""
    b = tl.arange(0, MOMENTS)
    inside = b < blocks
    mean = tl.load(moments + 2 * b, mask=inside, other=0.0)
    away = tl.load(moments + 2 * b + 1, mask=inside, other=0.0)
    count = tl.where(inside, tl.minimum(span, width - b * span), 0).to(tl.float32)
    centre = tl.sum(mean * count, axis=0) / width
    if not CENTRED:
        centre *= 0.0
    mean = mean - centre
    square = tl.sum(away + count * mean * mean, axis=0) / width
    return centre, tl.rsqrt(square + eps)


@triton.jit
def normed_value(value, k, width, centre, factor, weight, bias, y):
    """A norm of some of a row's numbers, rounded as `y` stores them, in fp32."""
    value = (value - centre) * factor
    if weight is not None:
        value *= tl.load(weight + k, mask=k < width, other=0.0)
    if bias is not None:
        value += tl.load(bias + k, mask=k < width, other=0.0)
    return value.to(y.dtype.element_ty).to(tl.float32)


@triton.jit
def write_normed(
    x, width, moments, blocks, span, weight, bias, y, eps,
    CENTRED: tl.constexpr, MOMENTS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program of a kernel whose others norm for themselves: the normed row, for later."""
    wait(PDL)
    centre, factor = whole_moments(moments, blocks, span, width, eps, CENTRED, MOMENTS)
    for start in tl.range(0, width, WIDTH):
        k = start + tl.arange(0, WIDTH)
        value = tl.load(x + k, mask=k < width, other=0.0)
        value = normed_value(value, k, width, centre, factor, weight, bias, y)
        tl.store(y + k, value.to(y.dtype.element_ty), mask=k < width)


@triton.jit
def rope_kernel(
    x, positions, cos, sin, y, heads, head_dim, half,
    DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotates a head of a row of `[rows, heads, head_dim]`; what lies beyond 2 * half is copied."""
    begin(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    at = (row * heads + head) * head_dim
    c = tl.arange(0, DIM)
    inside = c < head_dim
    turned = c < 2 * half
    angle = tl.where(c < half, c, c - half)
    table = tl.load(positions + row) * half + angle
    value = tl.load(x + at + c, mask=inside, other=0.0)
    partner = tl.load(x + at + tl.where(c < half, c + half, c - half), mask=turned, other=0.0)
    partner = tl.where(c < half, -partner, partner)
    cosine = tl.load(cos + table, mask=turned, other=1.0)
    sine = tl.load(sin + table, mask=turned, other=0.0)
    tl.store(y + at + c, value * cosine + partner * sine, mask=inside)
