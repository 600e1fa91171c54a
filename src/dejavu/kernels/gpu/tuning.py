"""How each kernel is cut: a few numbers by shape, from rules or as measured on the device.

The rules hold for an H200 and are a start elsewhere. `kernels.gpu.tune` measures a model's own
shapes once and keeps the result on disk; a table that comes with the package, or the user's own,
goes before the rules. Nothing is measured when a model is loaded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch


class Config(NamedTuple):
    """block: stored rows (attention: tokens) that a program works on at once; width: elements of a
    row at once (columns for sums); stages: loads in flight; warps: a program's; shares: programs a
    tile (up), shares of the rows (sums), splits of a sequence (attention)."""

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
    """Configurations for one device. processors: its multiprocessors. table: what was measured, by
    the keys that the methods build."""

    processors: int
    table: Mapping[str, Config] = field(default_factory=dict)
    asked: dict[str, Config] = field(default_factory=dict)  # what was asked for, with the answers

    @staticmethod
    def of(device: torch.device) -> Tuning:
        """For a CUDA device, or for Triton's interpreter on CPU tensors."""
        if device.type != "cuda":
            return Tuning(4)
        properties = torch.cuda.get_device_properties(device)
        table = dict(read_table(shipped_path(properties.name)))
        table.update(read_table(user_path(properties.name)))
        return Tuning(properties.multi_processor_count, table)

    def project(self, rows: int, outputs: int, width: int, itemsize: int) -> Config:
        """Dot products with all stored rows of one launch."""

        def rule() -> Config:
            few = outputs < 4 * self.processors  # a predictor's first stage
            if rows > 1:
                return Config(16 if few else 64, 128, 3, 4)
            return Config(1 if few else 4, min(power_of_two(width), 1024), 4 if few else 1, 4)

        return self._choose(f"project/{_rows(rows)}/{outputs}x{width}/{itemsize}", rule)

    def up(self, rows: int, neurons: int, width: int, itemsize: int, listed: bool) -> Config:
        """The first half of the MLP."""

        def rule() -> Config:
            if rows > 1:
                return Config(16, 128, 3, 4, 4)
            return Config(2 if listed else 4, min(power_of_two(width), 1024), 1, 4, 6)

        kind = "listed" if listed else "all"
        return self._choose(f"up-{kind}/{_rows(rows)}/{neurons}x{width}/{itemsize}", rule)

    def sums(self, rows: int, width: int, columns: int, itemsize: int, kind: str) -> Config:
        """Sums of stored rows; kind: all, flat or tiles."""

        def rule() -> Config:
            if rows > 1:
                config = Config(32, 128, 3, 4)
            elif kind == "flat" and columns < 8192:
                config = Config(128, 64, 1, 4)
            else:
                config = Config(16, min(power_of_two(columns), 512), 1 if kind == "flat" else 3, 4)
            blocks = -(-columns // config.width)
            shares = min(4 * self.processors // blocks, -(-width // config.block), 64)
            return config._replace(shares=max(1, shares))

        return self._choose(f"sums-{kind}/{_rows(rows)}/{width}x{columns}/{itemsize}", rule)

    def select(self, rows: int, rank: int) -> Config:
        """A predictor's second stage; a program takes one tile of the selection."""
        return self._choose(
            f"select/{_rows(rows)}/{rank}",
            lambda: Config(0, max(16, min(power_of_two(rank), 64)), 1, 8),
        )

    def lazy(self, rows: int, outputs: int, width: int, itemsize: int) -> Config:
        """Projections of used heads with all they lack; block: rows of one head."""
        return self._choose(
            f"lazy/{_rows(rows)}/{outputs}x{width}/{itemsize}", lambda: Config(32, 128, 3, 4)
        )

    def attention(self, rows: int, kv_heads: int, head_dim: int) -> Config:
        """Tokens at once; shares is the number of splits, a power of two."""

        def rule() -> Config:
            wanted = 4 * self.processors // max(rows * kv_heads, 1)
            splits = max(1, min(8, power_of_two(wanted + 1) // 2))
            return Config(64 if head_dim <= 128 else 32, 0, 1, 4, splits)

        return self._choose(f"attention/{rows * kv_heads}x{head_dim}", rule)

    def _choose(self, key: str, rule: Callable[[], Config]) -> Config:
        found = self.asked.get(key)
        if found is None:
            found = self.asked[key] = self.table.get(key) or rule()
        return found


def shipped_path(device_name: str) -> Path:
    """The table that the package brings for a device; it need not exist."""
    return Path(__file__).with_name("tuned") / f"{_slug(device_name)}.json"


def user_path(device_name: str) -> Path:
    """Where a device's own measurements are kept: `$XDG_CACHE_HOME/dejavu/tuning`."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "dejavu" / "tuning" / f"{_slug(device_name)}.json"


def read_table(path: Path) -> dict[str, Config]:
    """A table as `kernels.gpu.tune` writes it; empty where there is none or it cannot be read (a
    table only makes kernels faster)."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {key: Config(*map(int, numbers)) for key, numbers in stored["table"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _rows(rows: int) -> str:
    return "1" if rows == 1 else "n"
