"""What an MLP costs by rows and by the share of its neurons that is listed, and read whole.

Measured once on a device (`kernels.gpu.measure_costs`, `dejavu tune`) and kept on disk under the
device's name with the versions that the times hold for; other versions have other times. Nothing
is measured when a model is loaded: a table that comes with the package stands in, or a rough guess.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from dejavu.kernels.gpu.tuning import shipped_path, user_path

BUCKETS = (1, 2, 4, 8, 16)  # rows of a step
_NVIDIA = Path("/proc/driver/nvidia/version")


class MLPCost(NamedTuple):
    """whole: microseconds with everything computed. listed: (share of the neurons, microseconds),
    by rising share. choosing: microseconds that a predictor takes, if nothing hides them."""

    whole: float
    listed: tuple[tuple[float, float], ...]
    choosing: float = 0.0

    def at(self, shares: ArrayLike) -> NDArray[np.float64]:
        """Microseconds with such shares chosen, each between 0 and 1."""
        known, times = np.asarray(self.listed, dtype=np.float64).T
        # Below the smallest share nothing is known but that less is read.
        found: NDArray[np.float64] = np.interp(np.asarray(shares, dtype=np.float64), known, times)
        return found + self.choosing

    @property
    def limit(self) -> float:
        """The share above which reading the whole is cheaper; 1 where it never is."""
        shares = np.linspace(0.0, 1.0, 201)
        dearer = shares[self.at(shares) > self.whole]
        return float(dearer[0]) if len(dearer) else 1.0


class _Rule(NamedTuple):
    """Microseconds: a fixed part, and a megabyte read."""

    fixed: float
    megabyte: float

    def at(self, megabytes: float) -> float:
        return self.fixed + self.megabyte * megabytes


# Lines through what an H200 took for OPT-66B and OPT-6.7B, for one row and for more.
_WHOLE = {True: _Rule(8.0, 0.235), False: _Rule(20.0, 0.235)}
_LISTED = {True: _Rule(12.0, 0.238), False: _Rule(60.0, 0.265)}
_CHOOSING = {True: _Rule(8.0, 0.004), False: _Rule(20.0, 0.004)}  # a megabyte of the MLP
# Of heads: small matrices, one row's beside other work.
_CHOOSING_HEADS = {True: 0.0, False: 12.0}


def _guess(rows: int, size: int) -> MLPCost:
    """Of an MLP of so many bytes."""
    megabytes = size / 1e6
    whole, listed, choosing = (
        rule[rows == 1].at(megabytes) for rule in (_WHOLE, _LISTED, _CHOOSING)
    )
    return MLPCost(whole, ((0.0, _LISTED[rows == 1].fixed), (1.0, listed)), choosing)


@dataclass(frozen=True)
class Platform:
    """What times depend on beside the shape."""

    device_name: str
    driver: str
    torch_version: str
    triton_version: str

    @staticmethod
    def of(device: torch.device) -> Platform:
        """For a CUDA device."""
        import triton

        return Platform(
            torch.cuda.get_device_name(device), _driver(), torch.__version__, triton.__version__
        )


@dataclass(frozen=True)
class CostTable:
    """Costs by shape and rows, see `key`."""

    costs: Mapping[str, MLPCost] = field(default_factory=dict)

    @staticmethod
    def of(device: torch.device) -> CostTable:
        """What the package brings for a CUDA device, and before that what was measured on this one
        under these versions; empty elsewhere."""
        if device.type != "cuda":
            return CostTable()
        platform = Platform.of(device)
        shipped = read_costs(shipped_costs_path(platform.device_name))
        return CostTable({**shipped, **read_costs(costs_path(platform.device_name), platform)})

    def mlp(self, rows: int, neurons: int, width: int, itemsize: int, *, gated: bool) -> MLPCost:
        """Of a step of so many rows; a guess where nothing was measured."""
        found = self.costs.get(key(rows, neurons, width, itemsize, gated=gated))
        size = (3 if gated else 2) * neurons * width * itemsize
        return _guess(rows, size) if found is None else found

    def heads(self, rows: int, size: int) -> MLPCost:
        """Of query and output projections of so many bytes. A head's rows lie together and are
        skipped as they are met, so reading goes by bytes and only choosing has a price."""
        whole = _WHOLE[rows == 1].megabyte * size / 1e6
        return MLPCost(whole, ((0.0, 0.0), (1.0, whole)), _CHOOSING_HEADS[rows == 1])


def key(rows: int, neurons: int, width: int, itemsize: int, *, gated: bool) -> str:
    """itemsize: bytes of a stored weight."""
    return f"{'gated-' if gated else ''}mlp/{rows}/{neurons}x{width}/{itemsize}"


def costs_path(device_name: str) -> Path:
    """Where a device's costs are kept: `$XDG_CACHE_HOME/dejavu/costs`."""
    tuning = user_path(device_name)
    return tuning.parent.with_name("costs") / tuning.name


def shipped_costs_path(device_name: str) -> Path:
    """The costs that the package brings for a device; they need not exist."""
    cuts = shipped_path(device_name)
    return cuts.with_name(f"{cuts.stem}-costs.json")


def read_costs(path: Path, platform: Platform | None = None) -> dict[str, MLPCost]:
    """Costs in a file; empty where it cannot be read, or holds those of another platform than the
    one that is asked for."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if platform is not None and stored["platform"] != asdict(platform):
            return {}
        return dict(_parsed(stored["costs"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write_costs(path: Path, platform: Platform, costs: Mapping[str, MLPCost]) -> None:
    """Add to what a file holds of the same platform; of another one nothing stays."""
    merged = {**read_costs(path, platform), **costs}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "platform": asdict(platform),
        "costs": {name: merged[name]._asdict() for name in sorted(merged)},
    }
    aside = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _parsed(stored: Mapping[str, Any]) -> Iterator[tuple[str, MLPCost]]:
    for name, cost in stored.items():
        pairs: Sequence[Sequence[float]] = cost["listed"]
        listed = tuple((float(share), float(time)) for share, time in pairs)
        if not listed or list(listed) != sorted(listed):
            raise ValueError(name)
        yield name, MLPCost(float(cost["whole"]), listed, float(cost["choosing"]))


def _driver() -> str:
    """Version of the kernel's driver, empty where the system does not tell."""
    try:
        found = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", _NVIDIA.read_text(encoding="utf-8"))
    except OSError:
        return ""
    return found[1] if found else ""
