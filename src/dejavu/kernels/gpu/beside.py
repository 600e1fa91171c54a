"""Work ahead that rides along: extra programs of launches that come anyway, in place of a branch.

A predictor's first stage reads the input that the next projection reads too, and its second stage
is small enough to hide beside attention, or beside a sum of rows. So neither takes a launch, and
nothing has to wait for another stream. Steps of one row only: for more a selection is real work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dejavu.kernels.gpu.launch import Launcher
from dejavu.kernels.gpu.tuning import power_of_two
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Projection, T
from dejavu.kernels.selection import Selection

_FIRST_BLOCK, _FIRST_WIDTH = 4, 1024  # stored rows of a program, elements at once
# OPT-66B's second stages of rank 256 slow what carries them: attention, and a sum of rows, too
# (a token 14.55 ms for 14.50, with lazy-kv 10.68 for 10.30).
_MOST_RANK = 128
_SECOND_WIDTH = 32


class ApartError(Exception):
    """This work cannot ride along; nothing of it has been launched."""


@dataclass(eq=False)
class Rider:
    """A selection under way: what to launch for it, until it has been."""

    x: Tensor
    first: Matrix
    hidden: Tensor
    started: bool = False
    second: Matrix | None = None
    bias: Tensor | None = None
    out: Selection | None = None
    counter: Tensor | None = None
    done: bool = False


class Riding(Launcher):
    """fuse: whether work ahead rides along where it can; else all of it is a branch."""

    fuse = True

    def __init__(self, device: str | torch.device, *arguments: Any, **options: Any) -> None:
        """As `Launcher`."""
        super().__init__(device, *arguments, **options)
        self._collecting = False
        self._rider: Rider | None = None

    def ahead(self, work: Callable[[], T]) -> Callable[[], T]:
        """See `Launcher.ahead`."""
        if not self.fuse:
            return super().ahead(work)
        self._collecting = True
        try:
            result = work()
        except ApartError:
            self._collecting = False
            return super().ahead(work)
        finally:
            self._collecting = False
        rider = self._rider

        def wait() -> T:
            if rider is not None and result is rider.out:
                self._launch_rider(rider)
            return result

        return wait

    def _collect_first(self, x: Tensor, projections: list[Projection]) -> list[Tensor]:
        one = projections[0]
        alone = len(projections) == 1 and one.bias is None and one.selection is None
        small = one.weight.rows <= _MOST_RANK and one.weight.scale is not None
        if not alone or len(x) != 1 or not small:
            raise ApartError
        if self._rider is not None:
            self._collecting = False
            self._launch_rider(self._rider)
            self._collecting = True
        self._rider = Rider(x, one.weight, self._empty(1, one.weight.rows))
        return [self._rider.hidden]

    def _collect_second(
        self, hidden: Tensor, weight: Matrix, bias: Tensor, out: Selection | None
    ) -> Selection:
        rider = self._rider
        if rider is None or hidden is not rider.hidden:
            raise ApartError
        assert out is not None
        assert weight.scale is not None
        rider.second, rider.bias, rider.out = weight, bias, out
        return out

    def _collect_count(self, selection: Selection, counter: Tensor) -> None:
        rider = self._rider
        if rider is None or rider.done or rider.out is not selection:
            raise ApartError
        rider.counter = counter

    def _ride_first(self, x: Tensor) -> tuple[list[Any], dict[str, int], int]:
        """Arguments of a launch that reads x, its constants, and how many programs to add."""
        rider = self._rider
        fits = rider is not None and not rider.started and rider.x.data_ptr() == x.data_ptr()
        if rider is None or not fits or self._collecting:
            constants = {"FIRST_BLOCK": 1, "FIRST_WIDTH": 1, "FIRST_EVEN": True}
            return [None, None, None, 0, 0], constants, 0
        rider.started = True
        rows, width = rider.first.rows, rider.first.columns
        programs = -(-rows // _FIRST_BLOCK)
        step = min(_FIRST_WIDTH, power_of_two(width))
        arguments = [rider.first.data, rider.first.scale, rider.hidden, rows, programs]
        constants = {
            "FIRST_BLOCK": _FIRST_BLOCK,
            "FIRST_WIDTH": step,
            "FIRST_EVEN": width % step == 0,
        }
        return arguments, constants, programs

    def _ride_second(self, most: int) -> tuple[list[Any], dict[str, int], int]:
        """The same for a launch that may do a selection of up to `most` tiles; its programs come in
        the launch's own way."""
        rider = self._rider
        tiles = 0
        if rider is not None and rider.out is not None and rider.started and not rider.done:
            tiles = rider.out.indices.shape[0]
        if rider is None or rider.out is None or rider.second is None or not 0 < tiles <= most:
            return [None] * 7 + [0], {"RANK": 1, "SECOND_TILE": 1, "SECOND_WIDTH": 1}, 0
        rider.done = True
        self._fresh.add(rider.out.counts.data_ptr())
        out, second = rider.out, rider.second
        arguments = [
            rider.hidden, second.data, second.scale, rider.bias, out.indices, out.counts,
            rider.counter, second.rows,
        ]  # fmt: skip
        rank = second.columns
        width = min(_SECOND_WIDTH, power_of_two(rank))
        tile = out.indices.shape[1]
        constants = {"RANK": rank, "SECOND_TILE": tile, "SECOND_WIDTH": width}
        return arguments, constants, tiles

    def _launch_rider(self, rider: Rider) -> None:
        """In line, what nothing has taken along."""
        raise NotImplementedError
