"""How much memory a process has, and how much of a limit is left for neurons."""

from __future__ import annotations

import ctypes
import gc
import re
from dataclasses import dataclass
from pathlib import Path

from dejavu.errors import InputError

__all__ = ["Need", "parse_size", "resident_bytes"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}
_SLACK = 48 << 20  # what Python, torch and the allocator take for themselves in the course of a run


def parse_size(value: str | int) -> int:
    """`4GB`, `512MiB`, `2e9` or bytes as bytes. Raises InputError naming the option."""
    match = re.fullmatch(
        r"([0-9]+\.?[0-9]*(?:e[0-9]+)?)\s*([KMG]?I?)B?",
        str(value).strip().upper().replace("E", "e"),
    )
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise InputError(f"--memory-limit: {value!r} is not a size like 4GB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def resident_bytes() -> int:
    """Of this process now, after giving back what nobody uses (Linux; elsewhere the peak)."""
    gc.collect()
    status = Path("/proc/self/status")
    if not status.exists():
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)
    found = re.search(r"VmRSS:\s*(\d+) kB", status.read_text())
    assert found is not None
    return int(found[1]) * 1024


@dataclass(frozen=True)
class Need:
    """What a model needs beside its neurons, in bytes.

    resident: the process with model and plan loaded. keys: cache of keys and values. prompt: a
    layer while a prompt passes it. buffers: of the reader.
    """

    resident: int
    keys: int
    prompt: int
    buffers: int

    @property
    def total(self) -> int:
        """With a margin for what the libraries take."""
        return self.resident + self.keys + self.prompt + self.buffers + _SLACK

    def fits(self, limit: int, record: int, least: int) -> bool:
        """Whether a limit leaves room for `least` neurons of `record` bytes."""
        return (limit - self.total) // record >= least

    def slots(self, limit: int, record: int, least: int) -> int:
        """Neurons of `record` bytes that a limit leaves room for.

        Raises InputError naming the least limit where that is under `least`.
        """
        slots = (limit - self.total) // record
        if slots < least:
            needed = self.total + least * record
            raise InputError(
                f"--memory-limit {limit / 1e6:.0f}MB is too small for this model: "
                f"{-(-needed // 10**6)}MB is the least that would do (loaded "
                f"{self.resident / 1e6:.0f}, keys and values {self.keys / 1e6:.0f}, a prompt "
                f"{self.prompt / 1e6:.0f}, neurons {least * record / 1e6:.0f})"
            )
        return slots
