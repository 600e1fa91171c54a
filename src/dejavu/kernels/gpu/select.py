"""A predictor's second stage: score every entry, list those above 0, count what was chosen."""

from __future__ import annotations

import triton
import triton.language as tl

from dejavu.kernels.gpu.grid import begin, multiply
from dejavu.kernels.gpu.rows import dots


@triton.jit
def _list(used, entry, valid, n, rows, indices, counts, mask, entries, tile, TILE: tl.constexpr):
    """Write one tile's list, count (returned) and mask from `used`, bool `[TILE, ROWS]`."""
    used = used & valid[:, None] & (n[None, :] < rows)
    chosen = tl.max(used.to(tl.int32), axis=1)
    place = tl.cumsum(chosen, axis=0) - chosen
    count = tl.sum(chosen, axis=0)
    tl.store(indices + tile * TILE + place, entry, mask=chosen > 0)
    tl.store(counts + tile, count)
    if mask is not None:
        tl.store(
            mask + n[None, :] * entries + entry[:, None], used.to(tl.uint8),
            mask=valid[:, None] & (n[None, :] < rows),
        )  # fmt: skip
    return count


@triton.jit
def select_tile(
    hidden, rows, weight, scale, bias, indices, counts, mask, entries, tile,
    RANK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Lists of a tile what scores `weight . hidden + bias > 0` in some row."""
    entry = tile * TILE + tl.arange(0, TILE)
    valid = entry < entries
    n = tl.arange(0, ROWS)
    row = entry.to(tl.int64)
    if ROWS == 1 and RANK <= 16 * WIDTH:
        # Unrolled, so that all of a tile's loads are on their way before the first is used. A rank
        # of 32,768 unrolled compiles for minutes.
        sums = tl.zeros([TILE, WIDTH], tl.float32)
        for start in tl.static_range(0, RANK, WIDTH):
            k = start + tl.arange(0, WIDTH)
            held = valid[:, None] & (k < RANK)[None, :]
            part = tl.load(weight + row[:, None] * RANK + k[None, :], mask=held, other=0.0)
            value = tl.load(hidden + k, mask=k < RANK, other=0.0)
            sums += part.to(tl.float32) * value[None, :]
        score = tl.sum(sums, axis=1)[:, None]
    elif ROWS > 1 and RANK <= 16 * WIDTH:
        score = tl.zeros([TILE, ROWS], tl.float32)
        for start in tl.static_range(0, RANK, WIDTH):
            k = start + tl.arange(0, WIDTH)
            held = valid[:, None] & (k < RANK)[None, :]
            part = tl.load(weight + row[:, None] * RANK + k[None, :], mask=held, other=0.0)
            value = tl.load(
                hidden + n[None, :] * RANK + k[:, None],
                mask=(n[None, :] < rows) & (k < RANK)[:, None], other=0.0,
            )  # fmt: skip
            score = multiply(part, value, score)
    else:
        score = dots(hidden, weight, row, valid, rows, RANK, None, ROWS, TILE, WIDTH, EVEN, STAGES)
    if scale is not None:
        score *= tl.load(scale + entry, mask=valid, other=0.0)[:, None]
    score += tl.load(bias + entry, mask=valid, other=0.0)[:, None]
    _list(score > 0, entry, valid, n, rows, indices, counts, mask, entries, tile, TILE)


@triton.jit
def select_kernel(
    hidden, rows, weight, scale, bias, indices, counts, mask, entries,
    RANK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile a program."""
    begin(PDL)
    select_tile(
        hidden, rows, weight, scale, bias, indices, counts, mask, entries, tl.program_id(0),
        RANK, TILE, ROWS, WIDTH, EVEN, STAGES,
    )  # fmt: skip


@triton.jit
def ride_select(
    hidden, weight, scale, bias, indices, counts, counter, entries, tile,
    RANK: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile of one row's selection, beside another kernel's work; see `beside.py`. counter: as of
    `Ops.tally`, or None."""
    if tile * TILE < entries:
        entry = tile * TILE + tl.arange(0, TILE)
        valid = entry < entries
        row = entry.to(tl.int64)
        sums = tl.zeros([TILE, WIDTH], tl.float32)
        # Two loads at a time: with all at once registers would leave the kernel's own work too
        # few programs on the chip.
        for start in tl.range(0, RANK, 2 * WIDTH):
            for half in tl.static_range(2):
                k = start + half * WIDTH + tl.arange(0, WIDTH)
                held = valid[:, None] & (k < RANK)[None, :]
                part = tl.load(weight + row[:, None] * RANK + k[None, :], mask=held, other=0.0)
                value = tl.load(hidden + k, mask=k < RANK, other=0.0)
                sums += part.to(tl.float32) * value[None, :]
        score = tl.sum(sums, axis=1)[:, None]
        score *= tl.load(scale + entry, mask=valid, other=0.0)[:, None]
        score += tl.load(bias + entry, mask=valid, other=0.0)[:, None]
        n = tl.arange(0, 1)
        count = _list(score > 0, entry, valid, n, 1, indices, counts, None, entries, tile, TILE)
        if counter is not None:
            count = count.to(tl.int64)
            tl.atomic_add(counter, count)
            tl.atomic_add(counter + 1, count)
            if tile == 0:
                tl.atomic_add(counter + 2, count * 0 + 1)


@triton.jit
def _ones(word):
    """Bits set in each int64."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (word * 0x0101010101010101) >> 56 & 0xFF


@triton.jit
def sign_kernel(
    x, rows, width, signs, words, thresholds, indices, counts, mask, entries,
    TILE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile a program: listed is what agrees in sign with x in enough places."""
    begin(PDL)
    tile = tl.program_id(0)
    entry = tile * TILE + tl.arange(0, TILE)
    valid = entry < entries
    n = tl.arange(0, ROWS)
    bit = tl.arange(0, 64)
    agreeing = tl.zeros([TILE, ROWS], tl.int32)
    for word in tl.range(0, words):
        stored = tl.load(signs + entry.to(tl.int64) * words + word, mask=valid, other=0)
        k = word * 64 + bit
        value = tl.load(
            x + n[:, None] * width + k[None, :],
            mask=(n[:, None] < rows) & (k[None, :] < width), other=0.0,
        ).to(tl.float32)  # fmt: skip
        mine = tl.sum((value < 0).to(tl.int64) << bit.to(tl.int64)[None, :], axis=1)
        differing = _ones(stored[:, None] ^ mine[None, :]).to(tl.int32)
        agreeing += tl.minimum(width - word * 64, 64) - differing
    limit = tl.load(thresholds + entry, mask=valid, other=0)
    _list(
        agreeing >= limit[:, None], entry, valid, n, rows, indices, counts, mask, entries, tile,
        TILE,
    )  # fmt: skip


@triton.jit
def tally_kernel(
    counts, mask, counter, live, tiles, rows, entries,
    TILES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counter += (entries read, entries used summed over rows, rows), of the first live[0] rows.

    Programs share the mask among them: for one
    alone 16 rows would take longer than a small model's MLP.
    """
    begin(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    if live is not None:
        counted = tl.load(live)
    else:
        counted = rows
    t = tl.arange(0, TILES)
    listed = tl.sum(tl.load(counts + t, mask=t < tiles, other=0), axis=0).to(tl.int64)
    if mask is None:
        used = listed * counted
    else:
        found = tl.zeros([WIDTH], tl.int32)
        held = counted * entries
        for start in tl.range(program * WIDTH, held, programs * WIDTH):
            place = start + tl.arange(0, WIDTH)
            found += tl.load(mask + place, mask=place < held, other=0).to(tl.int32)
        used = tl.sum(found, axis=0).to(tl.int64)
    if program == 0:
        tl.store(counter, tl.load(counter) + listed)
        tl.store(counter + 2, tl.load(counter + 2) + counted)
    tl.atomic_add(counter + 1, used)
