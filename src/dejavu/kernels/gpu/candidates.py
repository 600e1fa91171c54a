"""Which cuts of each kernel are tried: those that were among the best somewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dejavu.kernels.gpu.tuning import Config


def project(batch: int) -> list[Config]:
    """Of dot products with all stored rows."""
    if batch > 1:
        return [
            Config(block, width, stages, warps)
            for block, width, stages, warps in (
                (64, 128, 3, 4), (32, 128, 4, 4), (64, 64, 4, 4), (128, 64, 4, 4), (16, 128, 4, 4),
                (16, 256, 4, 4), (32, 256, 3, 4), (64, 128, 4, 8), (128, 128, 3, 8),
                (64, 128, 4, 4), (64, 128, 5, 4), (128, 64, 5, 8),
            )
        ]  # fmt: skip
    return [
        Config(block, width, stages, warps)
        for block, width, stages, warps in (
            (4, 1024, 1, 4), (8, 1024, 1, 4), (4, 1024, 4, 4), (8, 1024, 3, 4), (4, 2048, 1, 8),
            (16, 512, 1, 4), (1, 1024, 4, 4), (1, 2048, 3, 4), (1, 4096, 1, 4), (2, 1024, 4, 2),
            (2, 2048, 1, 4), (8, 512, 4, 4),
        )
    ]  # fmt: skip


def select(batch: int) -> list[Config]:
    """Of a predictor's second stage."""
    if batch > 1:
        return [Config(0, 64, 3, 4), Config(0, 64, 3, 8), Config(0, 32, 3, 8)]
    cuts = ((32, 8), (64, 8), (128, 8), (64, 4), (32, 4), (128, 16))
    return [Config(0, width, 1, warps) for width, warps in cuts]


def up(batch: int, listed: bool) -> list[Config]:
    """Of the first half of the MLP."""
    if not listed:
        return [c for c in project(batch) if c.block > 1]
    if batch > 1:
        # Every program reads the inputs of all rows, so few programs with many stored rows each
        # may beat many with few.
        return [
            Config(block, width, stages, warps, parts)
            for block, width, stages, warps in (
                (16, 256, 4, 4), (32, 128, 4, 4), (32, 256, 4, 8), (32, 128, 6, 4), (64, 128, 3, 4),
                (64, 128, 4, 4), (64, 128, 5, 4), (64, 128, 4, 8), (64, 256, 3, 8), (64, 64, 7, 4),
            )
            for parts in (1, 2, 4)
        ]  # fmt: skip
    return [
        Config(block, width, stages, warps, parts)
        for block, width, stages, warps in (
            (1, 1024, 4, 1), (2, 1024, 1, 4), (2, 1024, 4, 2), (4, 512, 4, 4), (4, 1024, 1, 4),
            (1, 2048, 3, 2), (2, 1024, 5, 2), (1, 1024, 1, 4),
        )
        for parts in (3, 4, 6, 8)
    ]  # fmt: skip


def sums(columns: int, batch: int) -> list[Config]:
    """Of sums of stored rows, in shares that fill the current GPU."""
    cuts: Sequence[tuple[int, int, int, int]] = (
        (16, 512, 1, 4), (16, 512, 3, 4), (8, 1024, 3, 4), (16, 1024, 1, 8), (32, 256, 1, 4),
        (128, 64, 1, 4), (64, 128, 1, 4), (16, 256, 1, 2), (32, 128, 1, 2), (32, 128, 3, 2),
    )  # fmt: skip
    if batch > 1:
        # Loads of rows wait for those of their numbers, which takes half of the stages.
        cuts = (
            (32, 128, 3, 4), (32, 256, 3, 4), (64, 64, 3, 4), (64, 128, 3, 4), (64, 64, 5, 4),
            (32, 128, 5, 4), (32, 128, 7, 4), (64, 128, 7, 8), (32, 256, 4, 8), (16, 256, 4, 4),
        )  # fmt: skip
    processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    found = []
    for block, width, stages, warps in cuts:
        blocks = -(-columns // width)
        for programs in (1, 2, 3, 4, 6):
            shares = max(1, min(128, round(programs * processors / blocks)))
            found.append(Config(block, width, stages, warps, shares))
    return list(dict.fromkeys(found))


def attention() -> list[Config]:
    """Of attention, in splits of a sequence."""
    return [
        Config(tokens, 0, stages, warps, splits)
        for tokens, stages, warps in ((32, 1, 4), (64, 1, 4), (32, 3, 4), (32, 1, 2), (32, 3, 2))
        for splits in (1, 2, 4, 8)
    ]


def lazy() -> list[Config]:
    """Of lazy-kv's projections."""
    return [
        Config(block, width, stages, warps)
        for block, width, stages, warps in (
            (32, 128, 3, 4), (32, 128, 5, 4), (16, 256, 3, 4), (16, 256, 4, 4), (16, 512, 3, 4),
            (16, 128, 6, 2), (32, 256, 3, 4), (32, 256, 3, 8), (64, 128, 3, 4), (64, 128, 4, 4),
            (64, 64, 5, 4), (16, 512, 2, 8), (32, 64, 6, 4), (16, 128, 4, 4), (128, 64, 4, 4),
        )
    ]  # fmt: skip
