"""How each kernel is cut: a few numbers by shape, measured on an H200 and kept as rules.

`Tuning.overrides` takes what a device measured for itself (`dejavu bench --kernels --tune`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Config(NamedTuple):
    """block: stored rows a program works on at once; width: elements of a row at once (columns for
    sums); stages: loads in flight; warps a program; shares: programs a tile (up) or shares of the
    rows (sums)."""

    block: int
    width: int
    stages: int
    warps: int
    shares: int = 1


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n (n >= 1)."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass
class Tuning:
    """Configurations for one device. processors: its multiprocessors."""

    processors: int
    interpreted: bool = False
    overrides: dict[str, Config] = field(default_factory=dict)

    @staticmethod
    def of(device: torch.device) -> Tuning:
        """For a CUDA device, or for Triton's interpreter on CPU tensors."""
        if device.type != "cuda":
            return Tuning(4, interpreted=True)
        return Tuning(torch.cuda.get_device_properties(device).multi_processor_count)

    def project(self, rows: int, outputs: int, width: int, itemsize: int) -> Config:
        """Dot products with all stored rows."""
        found = self.overrides.get(f"project/{_rows(rows)}/{outputs}/{width}/{itemsize}")
        if found is not None:
            return found
        if rows > 1:
            return Config(16 if outputs <= 64 * self.processors else 64, 128, 3, 4)
        few = outputs < 4 * self.processors  # a predictor's first stage
        return Config(1 if few else 4, min(power_of_two(width), 1024), 4 if few else 1, 4)

    def up(self, rows: int, neurons: int, width: int, itemsize: int, listed: bool) -> Config:
        """The first half of the MLP."""
        kind = "listed" if listed else "all"
        found = self.overrides.get(f"up-{kind}/{_rows(rows)}/{neurons}/{width}/{itemsize}")
        if found is not None:
            return found
        if rows > 1:
            return Config(16, 128, 3, 4, 4)
        return Config(2 if listed else 4, min(power_of_two(width), 1024), 1, 4, 6)

    def sums(self, rows: int, width: int, columns: int, itemsize: int, kind: str) -> Config:
        """Sums of stored rows; kind: all, flat or tiles."""
        found = self.overrides.get(f"sums-{kind}/{_rows(rows)}/{width}/{columns}/{itemsize}")
        if found is not None:
            return found
        if rows > 1:
            config = Config(32, 128, 3, 4)
        else:
            config = Config(16, min(power_of_two(columns), 512), 1 if kind == "flat" else 3, 4)
            if kind == "flat" and columns < 8192:
                config = Config(128, 64, 1, 4)
        blocks = -(-columns // config.width)
        shares = max(1, min(4 * self.processors // blocks, -(-width // config.block), 64))
        return config._replace(shares=shares)

    def select(self, rows: int, rank: int) -> Config:
        """A predictor's second stage; block is the selection's tile."""
        found = self.overrides.get(f"select/{_rows(rows)}/{rank}")
        if found is not None:
            return found
        return Config(0, max(16, min(power_of_two(rank), 64)), 1, 8)

    def splits(self, rows: int, kv_heads: int) -> int:
        """Pieces of a sequence in attention, a power of two."""
        wanted = 4 * self.processors // max(rows * kv_heads, 1)
        return max(1, min(8, power_of_two(wanted + 1) // 2))


def _rows(rows: int) -> str:
    return "1" if rows == 1 else "n"
