"""Where and with what a speed was measured: without it the number says nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dejavu.errors import BackendError
from dejavu.kernels.device import CPU

_CPU = Path("/sys/devices/system/cpu/cpu0")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_GUESSED_CACHE = 32 << 20
_PACKAGES = ("dejavu-llm", "torch", "triton", "transformers", "ctranslate2", "numpy")
_ENVIRONMENT = ("OMP_", "GOMP_", "KMP_", "MKL_", "CT2_", "DNNL_", "CUDA_", "PYTORCH_", "TRITON_")


@dataclass(frozen=True)
class GPU:
    """A CUDA device. processors: multiprocessors. capability: `sm_90`. cuda: that PyTorch was built
    for. driver: its version, None where `nvidia-smi` does not tell."""

    name: str
    memory_bytes: int
    l2_bytes: int
    processors: int
    capability: str
    cuda: str | None
    driver: str | None


@dataclass(frozen=True)
class Machine:
    """cores: this process may use. caches: bytes by level, each as one core sees it; the last one
    is what a model has to exceed, where there is no `gpu` that decodes. isas: instruction sets of
    the compiled kernels, the best last. gpu: what the arms ran on, None for the CPU."""

    cpu: str
    architecture: str
    system: str
    cores: int
    memory_bytes: int
    caches: dict[str, int]
    isas: list[str]
    gpu: GPU | None = None

    @property
    def last_level_cache(self) -> int:
        """Bytes, of the device that decodes; 32 MiB where the system does not tell."""
        if self.gpu is not None and self.gpu.l2_bytes:
            return self.gpu.l2_bytes
        return max(self.caches.values(), default=_GUESSED_CACHE)

    def to_json(self) -> dict[str, Any]:
        """All fields and `last_level_cache`."""
        return {**asdict(self), "last_level_cache": self.last_level_cache}


def this_machine(device: torch.device = CPU) -> Machine:
    """Describe the machine. device: what decodes. Raises BackendError where that is the CPU and the
    compiled kernels are missing."""
    from dejavu.kernels.compiled import available_isas, default_threads

    try:
        isas = available_isas()
    except BackendError:
        if device.type == "cpu":
            raise
        isas = []
    return Machine(
        cpu=_cpu_name(),
        architecture=platform.machine(),
        system=platform.platform(),
        cores=default_threads(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        caches=_caches(_CPU / "cache"),
        isas=isas,
        gpu=_gpu(device) if device.type == "cuda" else None,
    )


@dataclass(frozen=True)
class Origin:
    """When, from which source and with which libraries a result was made.

    revision: `git describe` of the source tree, None outside of one. load_average: processes that
    wanted a core in the minute before; well above 0, and the numbers are too slow.
    """

    date: str
    revision: str | None
    versions: dict[str, str]
    environment: dict[str, str]
    load_average: float

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def origin() -> Origin:
    """Origin of a result that is being made now."""
    return Origin(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        revision=_revision(Path(__file__).parent),
        versions={"python": platform.python_version(), **_versions(_PACKAGES)},
        environment={k: v for k, v in sorted(os.environ.items()) if k.startswith(_ENVIRONMENT)},
        load_average=os.getloadavg()[0],
    )


def _gpu(device: torch.device) -> GPU:
    found = torch.cuda.get_device_properties(device)
    return GPU(
        name=found.name,
        memory_bytes=found.total_memory,
        l2_bytes=found.L2_cache_size,
        processors=found.multi_processor_count,
        capability=f"sm_{found.major}{found.minor}",
        cuda=torch.version.cuda,
        driver=_said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
    )


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _caches(folder: Path) -> dict[str, int]:
    """`{"L1d": bytes, "L2": ..., "L3": ...}` without instruction caches; empty where not told."""
    found: dict[str, int] = {}
    for index in sorted(folder.glob("index*")):
        kind = (index / "type").read_text().strip()
        size = (index / "size").read_text().strip()
        if kind != "Instruction":
            name = f"L{(index / 'level').read_text().strip()}" + ("d" if kind == "Data" else "")
            scale = _UNITS.get(size[-1:], 0)
            found[name] = int(size[:-1]) * scale if scale else int(size)
    return found


def _revision(folder: Path) -> str | None:
    return _said(["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"])


def _said(command: list[str]) -> str | None:
    """The first line of a command's output; None where it fails or says nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split("\n")), "").strip() or None


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
