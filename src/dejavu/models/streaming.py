"""Forwards that share blocks: a model larger than its device is read one block at a time.

A forward is a generator that asks for each block by its number. Where all blocks are at hand, one
forward after the other runs to its end. Where they are not, a block is fetched once and serves many
forwards, whose hidden states wait on the device for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import is_dataclass
from itertools import islice
from typing import Any, Generic, TypeVar, cast, overload

import torch

from dejavu.kernels.matrix import Matrix

B = TypeVar("B")
R = TypeVar("R")
Pass = Generator[int, Any, R]
"""Yields the number of the block it needs and is sent it; yields the number of blocks before its
last part, which needs none, and is sent None."""


class StreamedBlocks(Sequence[B], Generic[B]):
    """Blocks that are read when they are asked for; the latest stays, and one more with `ahead`.

    An item stands for its block and reads it whenever a part of it is looked at. `fetch` is for
    those who want the block itself, and must let go of it before they ask for another.
    """

    def __init__(
        self,
        count: int,
        read: Callable[[int], B],
        *,
        device: torch.device,
        state_bytes: int,
        outline: Sequence[B] = (),
        ahead: bool = False,
    ) -> None:
        """read: a block, with its tensors on the device. state_bytes: that hidden states of
        forwards which share a block may take. outline: all blocks without their numbers, for those
        who count bytes. ahead: read the next block in the meantime."""
        self._count, self._read, self._device = count, read, device
        self.state_bytes, self.outline = state_bytes, outline
        self._reader = ThreadPoolExecutor(1, "blocks") if ahead else None
        self._held: tuple[int, B] | None = None
        self._coming: tuple[int, Future[B]] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> B: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[B]: ...
    def __getitem__(self, index: int | slice) -> B | Sequence[B]:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        layer = index % self._count
        return cast(B, _Standing(lambda: self.fetch(layer)))

    def fetch(self, layer: int) -> B:
        """The block itself."""
        if self._held is not None and self._held[0] == layer:
            return self._held[1]
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # nothing reads the old one now
        self._held = None
        block = self._arrived(layer)
        self._held = layer, block
        if self._reader is not None and layer + 1 < self._count:
            self._coming = layer + 1, self._reader.submit(self._read, layer + 1)
        return block

    def _arrived(self, layer: int) -> B:
        coming, self._coming = self._coming, None
        if coming is not None:
            block = coming[1].result()
            if coming[0] == layer:
                return block
            del block
        return self._read(layer)


class _Standing:
    """Stands for a part of a block: reads the block when something below it is looked at."""

    def __init__(self, part: Callable[[], Any]) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part(), name)
        if is_dataclass(found) and not isinstance(found, Matrix):
            return _Standing(lambda: getattr(self._part(), name))
        return found


def together(blocks: Sequence[Any], passes: Iterable[Pass[R]], pass_bytes: int) -> Iterator[R]:
    """The results of some forwards in their order. pass_bytes: that one keeps between two blocks.

    Of streamed blocks, as many forwards as fit go through each together.
    """
    if not isinstance(blocks, StreamedBlocks):
        for each in passes:
            yield _alone(each, blocks)
        return
    waiting = iter(passes)
    size = max(1, blocks.state_bytes // max(pass_bytes, 1))
    while group := list(islice(waiting, size)):
        yield from _group(group, blocks)


def _alone(each: Pass[R], blocks: Sequence[Any]) -> R:
    try:
        layer = next(each)
        while True:
            layer = each.send(blocks[layer] if layer < len(blocks) else None)
    except StopIteration as done:
        result: R = done.value
        return result


def _group(group: list[Pass[R]], blocks: StreamedBlocks[Any]) -> Iterator[R]:
    """All of them block by block, and then the last part of each in turn."""
    ended: dict[int, R] = {}
    for number, each in enumerate(group):
        _step(each, number, None, ended)
    for layer in range(len(blocks)):
        if len(ended) == len(group):
            break
        block = blocks.fetch(layer)
        for number, each in enumerate(group):
            if number not in ended:
                _step(each, number, block, ended)
        del block
    for number, each in enumerate(group):
        if number not in ended:
            _step(each, number, None, ended)
        assert number in ended, "a forward asks for each block once, in their order"
        yield ended.pop(number)


def _step(each: Pass[R], number: int, block: Any, ended: dict[int, R]) -> None:
    try:
        each.send(block)
    except StopIteration as done:
        ended[number] = done.value
