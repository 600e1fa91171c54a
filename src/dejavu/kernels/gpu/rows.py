"""Dot products with stored rows: projections, and the first half of the MLP.

One row of input: products are kept apart in registers over the whole row and added up at its end,
so that a program's loads follow each other without waiting. Up to 16 rows: one `tl.dot` a step,
which reads each weight once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dejavu.kernels.gpu.activation import activate
from dejavu.kernels.gpu.grid import announce, begin, is_listed, multiply, wait


@triton.jit
def ask(w, row, valid, width, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """The beginnings of stored rows, for `dots`: weights may be asked for before inputs exist."""
    place = tl.arange(0, WIDTH)
    held = valid[:, None]
    if not EVEN:
        held = held & (place < width)[None, :]
    return tl.load(
        w + row[:, None] * width + place[None, :],
        mask=held, other=0.0, eviction_policy="evict_first",
    )  # fmt: skip


@triton.jit
def dots(
    x, w, row, valid, rows, width, asked,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 `[BLOCK, ROWS]`: weight rows `row`, int64 `[BLOCK]`, times inputs `[rows, width]`.

    asked: what `ask` returned for them, or None.
    """
    place = tl.arange(0, WIDTH)
    if ROWS == 1:
        sums = tl.zeros([BLOCK, WIDTH], tl.float32)
        begun = 0
        if asked is not None:
            value = tl.load(x + place, mask=place < width, other=0.0)
            sums += asked.to(tl.float32) * value.to(tl.float32)[None, :]
            begun = WIDTH
        for start in tl.range(begun, width, WIDTH, num_stages=STAGES):
            k = start + place
            if EVEN:
                held = valid[:, None]
                value = tl.load(x + k)
            else:
                held = valid[:, None] & (k < width)[None, :]
                value = tl.load(x + k, mask=k < width, other=0.0)
            weight = tl.load(
                w + row[:, None] * width + k[None, :],
                mask=held, other=0.0, eviction_policy="evict_first",
            )  # fmt: skip
            sums += weight.to(tl.float32) * value.to(tl.float32)[None, :]
        result = tl.sum(sums, axis=1)[:, None]
    else:
        n = tl.arange(0, ROWS)
        result = tl.zeros([BLOCK, ROWS], tl.float32)
        for start in tl.range(0, width, WIDTH, num_stages=STAGES):
            k = start + place
            inside = k < width
            weight = tl.load(
                w + row[:, None] * width + k[None, :],
                mask=valid[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first",
            )  # fmt: skip
            value = tl.load(
                x + n[None, :] * width + k[:, None],
                mask=(n[None, :] < rows) & inside[:, None], other=0.0,
            )  # fmt: skip
            result = multiply(weight, value, result)
    return result


@triton.jit
def ride_first(
    x, w, scale, y, outputs, program, width,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some rows of a predictor's first stage, beside another kernel's work on the same input, for
    which it waits."""
    row = program * BLOCK + tl.arange(0, BLOCK)
    valid = row < outputs
    asked = ask(w, row.to(tl.int64), valid, width, WIDTH, EVEN)
    wait(PDL)
    result = dots(x, w, row.to(tl.int64), valid, 1, width, asked, 1, BLOCK, WIDTH, EVEN, 1)
    result *= tl.load(scale + row, mask=valid, other=0.0)[:, None]
    tl.store(y + row[:, None], result, mask=valid[:, None])


@triton.jit
def _project_block(
    x, w, scale, bias, y, indices, counts, mask, first, outputs, entries, channels, rows, width,
    SELECTED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Outputs `first .. first + BLOCK` of one projection, 0 where a row does not use them. It waits
    for inputs; EARLY: after it has asked for weights."""
    if not EARLY:
        wait(PDL)
    row = first + tl.arange(0, BLOCK)
    valid = row < outputs
    read = valid
    n = tl.arange(0, ROWS)
    if SELECTED:
        entry = row // channels
        if mask is None:
            read = is_listed(indices, counts, entry, valid, TILE)
            used = read[:, None]
        else:
            used = tl.load(
                mask + n[None, :] * entries + entry[:, None],
                mask=valid[:, None] & (n[None, :] < rows), other=0,
            ) != 0  # fmt: skip
            read = tl.max(used.to(tl.int32), axis=1) > 0
        if tl.max(read.to(tl.int32), axis=0) == 0:
            width = width * 0
    asked = None
    if EARLY:
        if ROWS == 1:
            asked = ask(w, row.to(tl.int64), read, width, WIDTH, EVEN)
        wait(PDL)
    result = dots(
        x, w, row.to(tl.int64), read, rows, width, asked, ROWS, BLOCK, WIDTH, EVEN, STAGES
    )
    if scale is not None:
        result *= tl.load(scale + row, mask=valid, other=0.0)[:, None]
    if bias is not None:
        result += tl.load(bias + row, mask=valid, other=0.0)[:, None]
    if SELECTED:
        result = tl.where(used, result, 0.0)
    tl.store(
        y + n[None, :] * outputs + row[:, None], result,
        mask=valid[:, None] & (n[None, :] < rows),
    )  # fmt: skip


@triton.jit
def project_kernel(
    x, rows, width,
    w0, scale0, bias0, y0, outputs0, programs0,
    w1, scale1, bias1, y1, outputs1, programs1,
    w2, scale2, bias2, y2, outputs2,
    indices, counts, mask, entries, channels0, channels1, channels2,
    first, first_scale, first_y, first_outputs, firsts,
    FIRST_BLOCK: tl.constexpr, FIRST_WIDTH: tl.constexpr, FIRST_EVEN: tl.constexpr,
    SELECTED0: tl.constexpr, SELECTED1: tl.constexpr, SELECTED2: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to three projections of the same input `[rows, width]`, side by side in the grid; the last
    `firsts` programs are of a first stage that rides along."""
    program = tl.program_id(0)
    announce(PDL)
    if program < programs0:
        _project_block(
            x, w0, scale0, bias0, y0, indices, counts, mask, program * BLOCK, outputs0, entries,
            channels0, rows, width, SELECTED0, TILE, ROWS, BLOCK, WIDTH, EVEN, STAGES, EARLY, PDL,
        )  # fmt: skip
    if w1 is not None:
        if (program >= programs0) & (program < programs0 + programs1):
            _project_block(
                x, w1, scale1, bias1, y1, indices, counts, mask, (program - programs0) * BLOCK,
                outputs1, entries, channels1, rows, width, SELECTED1, TILE, ROWS, BLOCK, WIDTH,
                EVEN, STAGES, EARLY, PDL,
            )  # fmt: skip
    if first is not None:
        rider = program - tl.num_programs(0) + firsts
        if rider >= 0:
            ride_first(
                x, first, first_scale, first_y, first_outputs, rider, width, FIRST_BLOCK,
                FIRST_WIDTH, FIRST_EVEN, PDL,
            )  # fmt: skip
    if w2 is not None:
        if (program >= programs0 + programs1) & (program < tl.num_programs(0) - firsts):
            _project_block(
                x, w2, scale2, bias2, y2, indices, counts, mask,
                (program - programs0 - programs1) * BLOCK, outputs2, entries, channels2, rows,
                width, SELECTED2, TILE, ROWS, BLOCK, WIDTH, EVEN, STAGES, EARLY, PDL,
            )  # fmt: skip


@triton.jit
def first_kernel(
    x, rows, width, w, scale, y, outputs,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A predictor's first stage for several rows: so few stored rows that programs with a matrix
    product each would leave most of the chip idle."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, ROWS)
    valid = row < outputs
    begin(PDL)
    sums = tl.zeros([BLOCK, ROWS, WIDTH], tl.float32)
    for start in tl.range(0, width, WIDTH, num_stages=STAGES):
        k = start + tl.arange(0, WIDTH)
        held, used = valid[:, None], n[:, None] < rows
        if not EVEN:
            held = held & (k < width)[None, :]
            used = used & (k < width)[None, :]
        weight = tl.load(w + row[:, None] * width + k[None, :], mask=held, other=0.0)
        value = tl.load(x + n[:, None] * width + k[None, :], mask=used, other=0.0)
        sums += weight.to(tl.float32)[:, None, :] * value.to(tl.float32)[None, :, :]
    result = tl.sum(sums, axis=2)
    result *= tl.load(scale + row, mask=valid, other=0.0)[:, None]
    tl.store(
        y + n[None, :] * outputs + row[:, None], result,
        mask=valid[:, None] & (n[None, :] < rows),
    )  # fmt: skip


@triton.jit
def _up(
    x, rows, width, up, up_scale, up_bias, gate, gate_scale, gate_bias, out, flat, total, neurons,
    indices, counts, mask, active, tiles, parts, threshold, program,
    LISTED: tl.constexpr, ACTIVATION: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program's neurons; see `up_kernel`."""
    if not EARLY:
        wait(PDL)
    n = tl.arange(0, ROWS)
    slots = tl.arange(0, BLOCK)
    if LISTED:
        tile, part = program // parts, program % parts
        count = tl.load(counts + tile)
        t = tl.arange(0, TILES)
        others = tl.load(counts + t, mask=t < tiles, other=0)
        rounds = tl.cdiv(count - part, parts * BLOCK)
    else:
        rounds = 1
    asked = None
    if EARLY:
        if ROWS == 1:
            if LISTED:
                slot = part + parts * slots
                begun = slot < count
                soon = tl.load(indices + tile * TILE + slot, mask=begun, other=0)
            else:
                soon = program * BLOCK + slots
                begun = soon < neurons
            asked = ask(up, soon.to(tl.int64), begun, width, WIDTH, EVEN)
        wait(PDL)
    live = tl.zeros([], tl.int32)
    for turn in tl.range(0, rounds):
        if LISTED:
            slot = part + parts * (turn * BLOCK + slots)
            held = slot < count
            neuron = tl.load(indices + tile * TILE + slot, mask=slot < TILE, other=0)
            neuron = tl.where(held, neuron, 0)
        else:
            neuron = program * BLOCK + slots
            held = neuron < neurons
        row = neuron.to(tl.int64)
        written = held[:, None] & (n[None, :] < rows)
        if mask is not None:  # asked for before the long loop, there when it ends
            used = tl.load(
                mask + n[None, :].to(tl.int64) * neurons + neuron[:, None], mask=written, other=0
            )
        a = dots(x, up, row, held, rows, width, asked, ROWS, BLOCK, WIDTH, EVEN, STAGES)
        if up_scale is not None:
            a *= tl.load(up_scale + neuron, mask=held, other=0.0)[:, None]
        if up_bias is not None:
            a += tl.load(up_bias + neuron, mask=held, other=0.0)[:, None]
        if gate is not None:
            g = dots(x, gate, row, held, rows, width, None, ROWS, BLOCK, WIDTH, EVEN, STAGES)
            if gate_scale is not None:
                g *= tl.load(gate_scale + neuron, mask=held, other=0.0)[:, None]
            if gate_bias is not None:
                g += tl.load(gate_bias + neuron, mask=held, other=0.0)[:, None]
            a = activate(g, threshold, ACTIVATION) * a
        else:
            a = activate(a, threshold, ACTIVATION)
        if mask is not None:
            a = tl.where(used != 0, a, 0.0)
        if LISTED:
            place = tl.sum(tl.where(t < tile, others, 0), axis=0) + slot
            tl.store(flat + place, neuron, mask=held)
        else:
            place = neuron
        tl.store(out + n[None, :].to(tl.int64) * neurons + place[:, None], a, mask=written)
        if active is not None:
            live += tl.sum(tl.max((written & (a != 0)).to(tl.int32), axis=1), axis=0)
        if LISTED:
            if asked is not None:  # of the next turn
                slot = part + parts * ((turn + 1) * BLOCK + slots)
                begun = slot < count
                soon = tl.load(indices + tile * TILE + slot, mask=begun, other=0)
                asked = ask(up, soon.to(tl.int64), begun, width, WIDTH, EVEN)
    if LISTED:
        if program == 0:
            tl.store(total, tl.sum(others, axis=0))
    if active is not None:
        tl.atomic_add(active, live.to(tl.int64))


@triton.jit
def up_kernel(
    x, rows, width, up, up_scale, up_bias, gate, gate_scale, gate_bias, out, flat, total, neurons,
    indices, counts, mask, active, tiles, parts, threshold,
    first, first_scale, first_y, first_outputs, firsts,
    FIRST_BLOCK: tl.constexpr, FIRST_WIDTH: tl.constexpr, FIRST_EVEN: tl.constexpr,
    LISTED: tl.constexpr, ACTIVATION: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Activations of all neurons, or of the listed ones: fp32 `[rows, neurons]`, 0 where a row does
    not use one. Listed ones stand side by side in the order of the list, which goes to flat (their
    numbers) and total (how many). active counts the down rows that will be read: of listed neurons
    those that some row activates.

    A tile is shared by `parts` programs, which need no other tile's count before they read weights;
    where its results belong in the common list a program learns meanwhile. The last `firsts`
    programs are of a first stage that rides along. EARLY: the lists are there, and weights are
    asked for, before the kernel ahead has ended.
    """
    program = tl.program_id(0)
    announce(PDL)
    main = tl.num_programs(0) - firsts
    if program < main:
        _up(
            x, rows, width, up, up_scale, up_bias, gate, gate_scale, gate_bias, out, flat, total,
            neurons, indices, counts, mask, active, tiles, parts, threshold, program,
            LISTED, ACTIVATION, TILES, TILE, ROWS, BLOCK, WIDTH, EVEN, STAGES, EARLY, PDL,
        )  # fmt: skip
    if first is not None:
        if program >= main:
            ride_first(
                x, first, first_scale, first_y, first_outputs, program - main, width,
                FIRST_BLOCK, FIRST_WIDTH, FIRST_EVEN, PDL,
            )  # fmt: skip
