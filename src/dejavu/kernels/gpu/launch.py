"""What every part of `TritonOps` needs: launches, memory for results, a stream for work ahead."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from dejavu.kernels.gpu.costs import CostTable
from dejavu.kernels.gpu.tuning import Tuning
from dejavu.kernels.ops import T, at_once
from dejavu.kernels.selection import Selection

MAX_ROWS = 16
ARRIVALS = 1 << 14  # places where programs count themselves


class Launcher:
    """A device, how kernels are cut for it, and the order that launches keep among each other.

    dtype: of norm outputs, see `TritonOps`. costs: of an MLP on this device, as far as measured.
    """

    def __init__(
        self,
        device: str | torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        tuning: Tuning | None = None,
        pdl: bool | None = None,
    ) -> None:
        """pdl: programmatic dependent launch; default: where the device has it (9.0 on)."""
        self.device = torch.device(device)
        self.dtype = dtype
        self.tuning = Tuning.of(self.device) if tuning is None else tuning
        self.costs = CostTable.of(self.device)
        if pdl is None:
            pdl = (
                self.device.type == "cuda"
                and torch.cuda.get_device_capability(self.device) >= (9, 0)
                and os.environ.get("TRITON_INTERPRET") != "1"
            )
        self.pdl = pdl
        # Selections made ahead run on this stream; None (not a GPU): at once.
        self._beside: Any = None
        if self.device.type == "cuda":
            self._beside = torch.cuda.Stream(self.device)
        self._begun = self._joined = 0  # works on that stream, and how many have been waited for
        self._plain = False
        # By their address: lists made since the last norm; and ahead, by the work of which number.
        self._fresh: set[int] = set()
        self._made: dict[int, int] = {}
        self._arrived = torch.zeros(ARRIVALS, dtype=torch.int32, device=self.device)

    def ahead(self, work: Callable[[], T]) -> Callable[[], T]:
        """On a stream of its own. `work` is `linear`, `select` and `tally` only: sums and attention
        share a workspace with the main stream's."""
        if self._beside is None:
            return at_once(work)
        with torch.cuda.device(self.device):
            pending, fresh = self._plain, self._fresh
            self._beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._beside):
                self._plain, self._fresh = True, set()
                result = work()
                done = self._beside.record_event()
            made = self._fresh
            self._plain, self._fresh = pending, fresh
        self._begun += 1
        number = self._begun
        self._made.update(dict.fromkeys(made, number))

        def wait() -> T:
            self._join(number, done)
            return result

        return wait

    def _join(self, number: int | None = None, done: Any = None) -> None:
        """Let the next launch wait for a work on the other stream (default: all), and so for those
        before it."""
        number = self._begun if number is None else number
        if self._joined >= number:
            return
        current = torch.cuda.current_stream(self.device)
        if done is None:
            current.wait_stream(self._beside)
        else:
            current.wait_event(done)
        self._joined = number
        self._plain = True

    def _launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """On the device of the tensors, whichever is current.

        After a wait for another stream a launch is a plain one: what it depends on is then not only
        the kernel before it.
        """
        pdl = self.pdl and not self._plain
        self._plain = False
        if pdl:
            options["launch_pdl"] = True
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            kernel[grid](*arguments, PDL=pdl, **options)

    def _early(self, selection: Selection | None) -> bool:
        """Whether a launch may read a selection, and ask for weights, before the kernel ahead of it
        has ended; see `grid.wait`."""
        if selection is None:
            return True
        made = selection.counts.data_ptr()
        return made not in self._fresh and self._made.get(made, 0) <= self._joined

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)


def padded_rows(rows: int) -> int:
    """Rows that a kernel is compiled for: 1, or as many as one `tl.dot` takes."""
    assert rows <= MAX_ROWS, f"decode steps have up to {MAX_ROWS} rows, not {rows}"
    return 1 if rows == 1 else MAX_ROWS


def lists(selection: Selection | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What kernels read of a selection: indices, counts, mask."""
    if selection is None:
        return None, None, None
    return selection.indices, selection.counts, selection.mask


def tile_of(selection: Selection | None) -> int:
    """Entries a tile."""
    return 1 if selection is None else selection.indices.shape[1]
