"""A model whose matrices are fp32, so that no window has to convert them again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from dejavu.kernels.matrix import Matrix
from dejavu.models.base import DecoderLM


def widened(model: DecoderLM) -> DecoderLM:
    """Bit for bit the same model; as it is where the copy would take a quarter of the memory, where
    its blocks are streamed, and on a GPU, which multiplies half-precision matrices as they are."""
    if model.device.type != "cpu" or model.streamed:
        return model
    narrow = {id(m): m for m in _matrices(model.weights) if m.dtype != "fp32"}
    size = sum(4 * m.rows * m.columns for m in narrow.values())
    if not narrow or size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4:
        return model
    wide = {key: Matrix(matrix.float()) for key, matrix in narrow.items()}
    return DecoderLM(model.config, _exchanged(model.weights, wide), model.cache_dtype)


def _matrices(part: Any) -> Iterator[Matrix]:
    if isinstance(part, Matrix):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _matrices(each)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _matrices(getattr(part, field.name))


def _exchanged(part: Any, by_id: dict[int, Matrix]) -> Any:
    if isinstance(part, Matrix):
        return by_id.get(id(part), part)
    if isinstance(part, tuple):
        return tuple(_exchanged(each, by_id) for each in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(
            part, **{f.name: _exchanged(getattr(part, f.name), by_id) for f in fields(part)}
        )
    return part
