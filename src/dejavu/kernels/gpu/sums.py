"""Sums of stored rows: the output projection over heads, the down projection over neurons.

The rows are cut into shares, the columns into blocks: a program adds up its share's piece of a
block in registers, writes that partial sum, and the last program of a column block to arrive adds
the partial sums in their order. So the result does not depend on which program was the last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dejavu.kernels.gpu.grid import announce, listed, multiply, running_counts, wait
from dejavu.kernels.gpu.select import ride_select


@triton.jit
def _share(
    x, rows, width, w, scale, columns, flat, indices, mask, running, total, entries,
    share, shares, column, asked,
    LIST: tl.constexpr, SKIP: tl.constexpr, GUARD: tl.constexpr, SAFE: tl.constexpr,
    CHANNELS: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One share's sums of a block of columns, fp32 `[ROWS, COLUMNS]`; see `sum_rows_kernel`.

    SAFE: a stored number that is not finite makes NaN of the rows that use it, and of no other.
    """
    n = tl.arange(0, ROWS)
    inside = column < columns
    if ROWS == 1:
        sums = tl.zeros([BLOCK, COLUMNS], tl.float32)
    else:
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    tainted = tl.zeros([ROWS, COLUMNS], tl.float32)
    begun = share * BLOCK
    if asked is not None:
        place = begun + tl.arange(0, BLOCK)
        valid = place < total
        i = place
        if LIST == "tiles":
            i = tl.load(indices + place // CHANNELS, mask=valid, other=0) * CHANNELS
            i += place % CHANNELS
        a = tl.load(x + i, mask=valid, other=0.0).to(tl.float32)
        coefficient = a
        if scale is not None:
            coefficient = a * tl.load(scale + i, mask=valid, other=0.0)
        product = coefficient[:, None] * asked.to(tl.float32)
        if GUARD:
            product = tl.where((a != 0)[:, None], product, 0.0)
        sums += product
        begun += shares * BLOCK
    for start in tl.range(begun, total, shares * BLOCK, num_stages=STAGES):
        place = start + tl.arange(0, BLOCK)
        valid = place < total
        if LIST == "flat":
            i = tl.load(flat + place, mask=valid, other=0)
            at = place
        elif LIST == "tiles":
            if TILES == 1:
                entry = tl.load(indices + place // CHANNELS, mask=valid, other=0)
            else:
                entry = listed(indices, running, place // CHANNELS, total // CHANNELS, TILES, TILE)
            i = entry * CHANNELS + place % CHANNELS
            at = i
        else:
            i = place
            at = place
        if ROWS == 1:
            a = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
            if mask is not None:
                used = tl.load(mask + i // CHANNELS, mask=valid, other=0)
                a = tl.where(used != 0, a, 0.0)
            wanted = a != 0
        else:
            held = (n[:, None] < rows) & valid[None, :]
            a = tl.load(x + n[:, None].to(tl.int64) * width + at[None, :], mask=held, other=0.0)
            if mask is not None:
                used = tl.load(
                    mask + n[:, None] * entries + (i // CHANNELS)[None, :], mask=held, other=0
                )
                a = tl.where(used != 0, a, 0.0)
            wanted = tl.max((a != 0).to(tl.int32), axis=0) > 0
        if SKIP:
            read = (valid & wanted)[:, None]
        else:
            read = valid[:, None]
        if not EVEN:
            read = read & inside[None, :]
        weight = tl.load(
            w + i.to(tl.int64)[:, None] * columns + column[None, :],
            mask=read, other=0.0, eviction_policy="evict_first",
        )  # fmt: skip
        coefficient = a
        if scale is not None:
            factor = tl.load(scale + i, mask=valid, other=0.0)
            coefficient = a * factor if ROWS == 1 else a * factor[None, :]
            if GUARD:
                coefficient = tl.where(a != 0, coefficient, 0.0)
        if ROWS == 1:
            product = coefficient[:, None] * weight.to(tl.float32)
            if GUARD and not SKIP:
                product = tl.where(wanted[:, None], product, 0.0)
            sums += product
        elif SAFE:
            broken = (tl.abs(weight.to(tl.float32)) < float("inf")) == 0
            sums = multiply(coefficient, tl.where(broken, 0.0, weight).to(weight.dtype), sums)
            tainted = tl.dot((a != 0).to(tl.float16), broken.to(tl.float16), tainted)
        else:
            sums = multiply(coefficient, weight, sums)
    if ROWS == 1:
        result = tl.sum(sums, axis=0)[None, :]
    elif SAFE:
        result = tl.where(tainted > 0, float("nan"), sums)
    else:
        result = sums
    return result


@triton.jit
def _sum_rows(
    x, rows, width, w, scale, bias, residual, out, columns,
    flat, flat_total, indices, counts, mask, tiles, entries,
    partial, arrived, shares, block, share,
    LIST: tl.constexpr, SKIP: tl.constexpr, GUARD: tl.constexpr, CHANNELS: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, JOIN: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A share's sums of a block of columns, and of the last to arrive the result."""
    running = 0
    EARLIER: tl.constexpr = EARLY and ROWS == 1 and LIST != "flat" and TILES == 1
    if LIST == "flat" and EARLY:
        t = tl.arange(0, TILES)
        total = tl.sum(tl.load(counts + t, mask=t < tiles, other=0), axis=0)
    if not EARLIER:
        wait(PDL)
    if LIST == "flat":
        if not EARLY:
            total = tl.load(flat_total)
    elif LIST == "tiles":
        if TILES == 1:
            total = tl.load(counts) * CHANNELS
        else:
            running = running_counts(counts, tiles, TILES)
            total = tl.max(running, axis=0) * CHANNELS
    else:
        total = width
    n = tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    asked = None
    if EARLIER:
        place = share * BLOCK + tl.arange(0, BLOCK)
        held = (place < total)[:, None] & inside[None, :]
        i = place
        if LIST == "tiles":
            entry = tl.load(indices + place // CHANNELS, mask=place < total, other=0)
            i = entry * CHANNELS + place % CHANNELS
        asked = tl.load(
            w + i.to(tl.int64)[:, None] * columns + column[None, :],
            mask=held, other=0.0, eviction_policy="evict_first",
        )  # fmt: skip
        wait(PDL)
    result = _share(
        x, rows, width, w, scale, columns, flat, indices, mask, running, total, entries,
        share, shares, column, asked, LIST, SKIP, GUARD, False, CHANNELS, TILES, TILE, ROWS, BLOCK,
        COLUMNS, EVEN, STAGES,
    )  # fmt: skip
    if GUARD and ROWS > 1:
        # A matrix product takes 0 * NaN in. That costs nothing to find out afterwards, and what
        # follows is for damaged weights alone.
        finite = (tl.abs(result) < float("inf")).to(tl.int32)
        if tl.min(tl.min(finite, axis=1), axis=0) == 0:
            result = _share(
                x, rows, width, w, scale, columns, flat, indices, mask, running, total, entries,
                share, shares, column, None, LIST, SKIP, GUARD, True, CHANNELS, TILES, TILE, ROWS,
                BLOCK, COLUMNS, EVEN, 1,
            )  # fmt: skip
    spot = n[:, None] * columns + column[None, :]
    held = (n[:, None] < rows) & inside[None, :]
    final = True
    if partial is not None:
        tl.store(partial + share * rows * columns + spot, result, mask=held)
        tl.debug_barrier()
        final = tl.atomic_add(arrived + block, 1, sem="acq_rel", scope="gpu") == shares - 1
        if final:
            tl.store(arrived + block, 0)
            result = tl.zeros([ROWS, COLUMNS], tl.float32)
            j = tl.arange(0, JOIN)[:, None, None]
            for s in tl.range(0, shares, JOIN):
                theirs = tl.load(
                    partial + (s + j) * rows * columns + spot[None, :, :],
                    mask=(s + j < shares) & held[None, :, :], other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                result += tl.sum(theirs, axis=0)
    if final:
        if bias is not None:
            result += tl.load(bias + column, mask=inside, other=0.0)[None, :]
        if residual is not None:
            result += tl.load(residual + spot, mask=held, other=0.0)
        tl.store(out + spot, result, mask=held)


@triton.jit
def sum_rows_kernel(
    x, rows, width, w, scale, bias, residual, out, columns,
    flat, flat_total, indices, counts, mask, tiles, entries,
    partial, arrived, shares,
    hidden, second, second_scale, second_bias, second_indices, second_counts, counter,
    second_entries,
    RANK: tl.constexpr, SECOND_TILE: tl.constexpr, SECOND_WIDTH: tl.constexpr,
    LIST: tl.constexpr, SKIP: tl.constexpr, GUARD: tl.constexpr, CHANNELS: tl.constexpr,
    TILES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, JOIN: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = residual + bias + sum of coefficient * row of w: `[rows, width]` -> `[rows, columns]`.

    LIST: "all" rows, x[:, i] with row i; "flat": x[:, p] with row flat[p] for p < flat_total[0];
    "tiles": blocks of CHANNELS rows that a selection lists, x[:, i] with row i. SKIP: a row of w
    whose coefficients are all 0 is not read. GUARD: where a coefficient is 0, a row of w adds
    nothing, whatever it holds: it was read for another row of x.
    partial: fp32 `[shares, rows, columns]`, None with one share; arrived: int32, 0 a column block,
    left at 0. JOIN: partial sums that are loaded together.

    A share is every shares-th block of rows: its first block is known before the total is. Programs
    of further shares make the tiles of a selection that rides along.
    """
    block, share = tl.program_id(0), tl.program_id(1)
    announce(PDL)
    if share < shares:
        _sum_rows(
            x, rows, width, w, scale, bias, residual, out, columns, flat, flat_total, indices,
            counts, mask, tiles, entries, partial, arrived, shares, block, share, LIST, SKIP, GUARD,
            CHANNELS, TILES, TILE, ROWS, BLOCK, COLUMNS, EVEN, STAGES, JOIN, EARLY, PDL,
        )  # fmt: skip
    if second is not None:
        if share >= shares:
            wait(PDL)
            ride_select(
                hidden, second, second_scale, second_bias, second_indices, second_counts, counter,
                second_entries, (share - shares) * tl.num_programs(0) + block, RANK, SECOND_TILE,
                SECOND_WIDTH,
            )  # fmt: skip
