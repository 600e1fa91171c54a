"""LayerNorm and RMSNorm, and rotary positions: one program a row."""

from __future__ import annotations

import triton
import triton.language as tl

from dejavu.kernels.gpu.grid import announce, begin, wait


@triton.jit
def norm_kernel(
    x, weight, bias, y, width, eps,
    CENTRED: tl.constexpr, WIDTH: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of fp32 `[programs, width]`, normed in fp32; CENTRED: LayerNorm, else RMSNorm. LATE: the
    next kernel may come when this one has waited; see `grid.wait`."""
    if not LATE:
        announce(PDL)
    row = tl.program_id(0).to(tl.int64) * width
    k = tl.arange(0, WIDTH)
    inside = k < width
    # Before the wait: nobody writes them, and they come from afar.
    if weight is not None:
        factor = tl.load(weight + k, mask=inside, other=0.0)
    if bias is not None:
        shift = tl.load(bias + k, mask=inside, other=0.0)
    wait(PDL)
    if LATE:
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
