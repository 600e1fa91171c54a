"""Projections of lazy-kv: queries of used heads, and the keys and values that these heads lack.

A column of the product is one place of one row's ring. With few rows most columns are not wanted
and cost nothing but idle lanes of a tensor core: what takes the time is reading the weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dejavu.kernels.gpu.grid import announce, is_listed, multiply, prefetch, wait
from dejavu.kernels.gpu.rows import ride_first


@triton.jit
def _head_rows(
    w, scale, bias, source, wanted, head, part, head_dim, width,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """fp32 `[BLOCK, COLUMNS]`: a part of a head's stored rows times the inputs that start at
    `source`, pointers `[COLUMNS]`."""
    c = part * BLOCK + tl.arange(0, BLOCK)
    valid = c < head_dim
    row = head * head_dim + c
    start_of = w + row.to(tl.int64) * width
    some = tl.max(wanted.to(tl.int32), axis=0)
    if EARLY:
        if PDL:
            prefetch(w, row.to(tl.int64), width, valid & (some > 0), 512)
        wait(PDL)
    result = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for start in tl.range(0, width * some, WIDTH, num_stages=STAGES):
        k = start + tl.arange(0, WIDTH)
        if EVEN:
            held = valid[:, None]
            needed = wanted[None, :]
        else:
            held = valid[:, None] & (k < width)[None, :]
            needed = wanted[None, :] & (k < width)[:, None]
        weight = tl.load(
            start_of[:, None] + k[None, :], mask=held, other=0.0, eviction_policy="evict_first"
        )
        value = tl.load(source[None, :] + k[:, None], mask=needed, other=0.0)
        result = multiply(weight, value, result)
    if scale is not None:
        result *= tl.load(scale + row, mask=valid, other=0.0)[:, None]
    if bias is not None:
        result += tl.load(bias + row, mask=valid, other=0.0)[:, None]
    return result


@triton.jit
def lazy_kernel(
    x, ring, missing, slots, lengths, rows, width,
    wq, scale_q, bias_q, y, wk, scale_k, bias_k, keys, wv, scale_v, bias_v, values,
    table, max_blocks, heads, head_dim, parts, indices, counts, mask,
    first, first_scale, first_y, first_outputs, firsts,
    FIRST_BLOCK: tl.constexpr, FIRST_WIDTH: tl.constexpr, FIRST_EVEN: tl.constexpr,
    COMPLETE: tl.constexpr, RING: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, COPY: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: a part of one head's rows in one of q, k, v; the programs after those copy x into
    the rings, from where others read only older places. The last `firsts` programs are of a first
    stage that rides along.

    y fp32 `[rows, heads, head_dim]`, not written where a head is unused. COLUMNS: rows times RING,
    padded. Which heads lack what is brought up to date by the attention kernel after this one.
    """
    announce(PDL)
    program = tl.program_id(0)
    if not EARLY:
        wait(PDL)
    each = heads * parts
    if program < 3 * each:
        matrix, head, part = program // each, program % each // parts, program % parts
        n = tl.arange(0, COLUMNS)
        owner, place = n // RING, n % RING
        real = owner < rows
        last = tl.load(lengths + owner, mask=real, other=1) - 1
        slot = tl.load(slots + owner, mask=real, other=0)
        now = real & (place == last % RING)
        if mask is None:
            entry = tl.full([1], 0, tl.int32) + head
            listed = is_listed(indices, counts, entry, entry >= 0, TILE)
            used = real & (tl.max(listed.to(tl.int32), axis=0) > 0)
        else:
            used = tl.load(mask + owner * heads + head, mask=real, other=0) != 0
        older = ring + (slot * RING + place).to(tl.int64) * width
        source = tl.where(now, x + owner * width, older)
        c = part * BLOCK + tl.arange(0, BLOCK)
        if matrix == 0:
            wanted = used & now
            result = _head_rows(
                wq, scale_q, bias_q, source, wanted, head, part, head_dim, width, COLUMNS, BLOCK,
                WIDTH, EVEN, STAGES, EARLY, PDL,
            )  # fmt: skip
            query = (owner[None, :] * heads + head) * head_dim + c[:, None]
            tl.store(y + query, result, mask=(c < head_dim)[:, None] & wanted[None, :])
        else:
            bits = tl.load(missing + slot * heads + head, mask=real, other=0)
            owed = now | (((bits >> place) & 1) != 0)
            if COMPLETE:
                wanted = owed & real
            else:
                wanted = owed & used
            position = last - (last - place + RING) % RING
            block = tl.load(
                table + owner * max_blocks + position // BLOCK_TOKENS, mask=wanted, other=0
            ).to(tl.int64)
            token = (block * BLOCK_TOKENS + position % BLOCK_TOKENS) * heads + head
            spot = token[None, :] * head_dim + c[:, None]
            written = (c < head_dim)[:, None] & wanted[None, :]
            if matrix == 1:
                result = _head_rows(
                    wk, scale_k, bias_k, source, wanted, head, part, head_dim, width, COLUMNS,
                    BLOCK, WIDTH, EVEN, STAGES, EARLY, PDL,
                )  # fmt: skip
                tl.store(keys + spot, result.to(keys.dtype.element_ty), mask=written)
            else:
                result = _head_rows(
                    wv, scale_v, bias_v, source, wanted, head, part, head_dim, width, COLUMNS,
                    BLOCK, WIDTH, EVEN, STAGES, EARLY, PDL,
                )  # fmt: skip
                tl.store(values + spot, result.to(values.dtype.element_ty), mask=written)
    elif program < tl.num_programs(0) - firsts:
        if EARLY:
            wait(PDL)
        chunk = program - 3 * each
        chunks = tl.cdiv(width, COPY)
        copied = chunk // chunks
        at = chunk % chunks * COPY + tl.arange(0, COPY)
        to = tl.load(slots + copied) * RING + (tl.load(lengths + copied) - 1) % RING
        value = tl.load(x + copied * width + at, mask=at < width, other=0.0)
        tl.store(
            ring + to.to(tl.int64) * width + at, value.to(ring.dtype.element_ty), mask=at < width
        )
    if first is not None:
        rider = program - tl.num_programs(0) + firsts
        if rider >= 0:
            ride_first(
                x, first, first_scale, first_y, first_outputs, rider, width, FIRST_BLOCK,
                FIRST_WIDTH, FIRST_EVEN, PDL and EARLY,
            )  # fmt: skip
