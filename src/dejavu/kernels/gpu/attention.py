"""Attention of single tokens over the paged cache; the step's keys and values enter it here.

A sequence is cut into splits, so that few heads still fill the chip (flash decoding). The last
split of a group to arrive joins the splits in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dejavu.kernels.gpu.grid import announce, is_listed, prefetch, wait
from dejavu.kernels.gpu.select import ride_select


@triton.jit
def _attend(
    q, k, v, keys, values, table, length, y, scale, window, kv_heads, head_dim, max_blocks,
    used, missing, slots, partial, arrived, row, head, split,
    BLOCK_TOKENS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, RING: tl.constexpr,
    COMPLETE: tl.constexpr,
):  # fmt: skip
    """One split of one key/value head of a row; see `attention_kernel`."""
    g = tl.arange(0, QUERIES)
    c = tl.arange(0, DIM)
    t = tl.arange(0, TOKENS)
    channel = c < head_dim
    if k is not None:
        fresh = (row * kv_heads + head) * head_dim + c
        new_key = tl.load(k + fresh, mask=channel, other=0.0).to(keys.dtype.element_ty)
        new_value = tl.load(v + fresh, mask=channel, other=0.0).to(values.dtype.element_ty)
        if split == 0:
            last = length - 1
            block = tl.load(table + row * max_blocks + last // BLOCK_TOKENS).to(tl.int64)
            slot = ((block * BLOCK_TOKENS + last % BLOCK_TOKENS) * kv_heads + head) * head_dim + c
            tl.store(keys + slot, new_key, mask=channel)
            tl.store(values + slot, new_value, mask=channel)
    spot = ((row * kv_heads + head) * GROUP + g[:, None]) * head_dim + c[None, :]
    real = (g[:, None] < GROUP) & channel[None, :]
    if missing is not None:
        if split == 0:
            debt = missing + tl.load(slots + row) * kv_heads + head
            if COMPLETE:
                tl.store(debt, 0)
            else:
                more = tl.load(debt) | (1 << ((length - 1) % RING))
                tl.store(debt, tl.where(used != 0, 0, more))
    if used == 0:
        if split == 0:
            tl.store(y + spot, tl.zeros([QUERIES, DIM], tl.float32), mask=real)
    else:
        begins = tl.maximum(length - window, 0)
        seen = length - begins
        first = begins + split * seen // SPLITS
        end = begins + (split + 1) * seen // SPLITS
        query = tl.load(q + spot, mask=real, other=0.0).to(tl.float32) * scale
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        weight = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, DIM], tl.float32)
        for start in tl.range(first, end, TOKENS, num_stages=STAGES):
            token = start + t
            inside = token < end
            if k is not None:
                old = inside & (token < length - 1)
            else:
                old = inside
            block = tl.load(table + row * max_blocks + token // BLOCK_TOKENS, mask=old, other=0)
            slot = (block.to(tl.int64) * BLOCK_TOKENS + token % BLOCK_TOKENS) * kv_heads + head
            place = slot[:, None] * head_dim + c[None, :]
            held = old[:, None] & channel[None, :]
            key = tl.load(keys + place, mask=held, other=0.0)
            value = tl.load(values + place, mask=held, other=0.0)
            if k is not None:
                is_new = token == length - 1
                key = tl.where(is_new[:, None], new_key[None, :], key)
                value = tl.where(is_new[:, None], new_value[None, :], value)
            key, value = key.to(tl.float32), value.to(tl.float32)
            if GROUP == 1:
                score = tl.sum(query * key, axis=1)[None, :]
            else:
                score = tl.dot(query, tl.trans(key), input_precision="ieee")
            score = tl.where(inside[None, :], score, float("-inf"))
            peak = tl.maximum(top, tl.max(score, axis=1))
            shrink = tl.exp(top - peak)
            p = tl.exp(score - peak[:, None])
            if GROUP == 1:
                sums = sums * shrink[:, None] + tl.sum(tl.trans(p) * value, axis=0)[None, :]
            else:
                sums = sums * shrink[:, None] + tl.dot(p, value, input_precision="ieee")
            weight = weight * shrink + tl.sum(p, axis=1)
            top = peak
        if SPLITS == 1:
            tl.store(y + spot, sums / weight[:, None], mask=real)
        else:
            group = row * kv_heads + head
            stride = DIM + 2
            base = partial + (group * SPLITS + split) * QUERIES * stride + g * stride
            tl.store(base[:, None] + c[None, :], sums)
            tl.store(base + DIM, top)
            tl.store(base + DIM + 1, weight)
            tl.debug_barrier()
            before = tl.atomic_add(arrived + group, 1, sem="acq_rel", scope="gpu")
            if before == SPLITS - 1:
                tl.store(arrived + group, 0)
                s = tl.arange(0, SPLITS)
                every = partial + ((group * SPLITS + s) * QUERIES * stride)[:, None]
                every += g[None, :] * stride
                tops = tl.load(every + DIM, cache_modifier=".cg")
                weights = tl.load(every + DIM + 1, cache_modifier=".cg")
                parts = tl.load(every[:, :, None] + c[None, None, :], cache_modifier=".cg")
                factor = tl.exp(tops - tl.max(tops, axis=0)[None, :])
                sums = tl.sum(parts * factor[:, :, None], axis=0)
                weight = tl.sum(weights * factor, axis=0)
                tl.store(y + spot, sums / weight[:, None], mask=real)


@triton.jit
def attention_kernel(
    q, k, v, keys, values, table, lengths, y, scale, window, kv_heads, head_dim, max_blocks,
    indices, counts, mask, missing, slots, partial, arrived,
    hidden, second, second_scale, second_bias, second_indices, second_counts, counter, entries,
    RANK: tl.constexpr, SECOND_TILE: tl.constexpr, SECOND_WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, SELECTED: tl.constexpr,
    TILE: tl.constexpr, RING: tl.constexpr, COMPLETE: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: one row, one key/value head with its GROUP query heads, one split.

    q `[N, H, d]`; k, v `[N, K, d]`; y `[N, H, d]`; partial fp32 `[N * K, SPLITS, QUERIES, DIM + 2]`
    (weighted values, then the largest score and the weights' sum); arrived int32 `[N * K]`, left at
    0. QUERIES: GROUP, padded for `tl.dot` where GROUP > 1.

    Lazy-kv (k is None): the cache holds what used heads need of the step's own token too, and
    unused ones note in `missing` that they lack it; see `kernels.lazy`.

    Where a selection rides along there is one row, and the programs of further ones make its tiles.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    announce(PDL)
    rider = row * 0 - 1
    if second is not None:
        if row > 0:
            rider = ((row - 1) * kv_heads + head) * SPLITS + split
        row = row * 0
    if EARLY:  # no kernel of a step writes lengths and tables, and the list is older
        length = tl.load(lengths + row)
        first_token = tl.maximum(length - window, 0)
        first_token += split * (length - first_token) // SPLITS
        near = first_token + tl.arange(0, TOKENS)
        wanted = near < length
        block = tl.load(table + row * max_blocks + near // BLOCK_TOKENS, mask=wanted, other=0)
        near = (block.to(tl.int64) * BLOCK_TOKENS + near % BLOCK_TOKENS) * kv_heads + head
        if PDL:
            SPAN: tl.constexpr = DIM * keys.dtype.element_ty.primitive_bitwidth // 8
            prefetch(keys, near, head_dim, wanted, SPAN)
            prefetch(values, near, head_dim, wanted, SPAN)
    else:
        wait(PDL)
        length = tl.load(lengths + row)
    if SELECTED:
        if mask is None:
            entry = tl.full([1], 0, tl.int32) + head
            used = tl.max(is_listed(indices, counts, entry, entry >= 0, TILE).to(tl.int32), axis=0)
        else:
            used = tl.load(mask + row * kv_heads + head).to(tl.int32)
    else:
        used = 1
    if EARLY:
        wait(PDL)
    if rider < 0:
        _attend(
            q, k, v, keys, values, table, length, y, scale, window, kv_heads, head_dim, max_blocks,
            used, missing, slots, partial, arrived, row, head, split,
            BLOCK_TOKENS, GROUP, QUERIES, DIM, TOKENS, STAGES, SPLITS, RING, COMPLETE,
        )  # fmt: skip
    if second is not None:
        if rider >= 0:
            ride_select(
                hidden, second, second_scale, second_bias, second_indices, second_counts, counter,
                entries, rider, RANK, SECOND_TILE, SECOND_WIDTH,
            )  # fmt: skip
