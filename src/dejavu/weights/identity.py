"""Which weights are these? A hash over tensors that ignores how they are spread over files.

A sparsity plan is bound to the weights it was calibrated on by this hash, so it must be the same
for one file or many shards, safetensors or pickle, and for any order of the tensors, and must
change with a single bit of any tensor.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import NamedTuple

import torch

__all__ = ["Fingerprint", "fingerprint", "fingerprint_tensor", "identity_of"]


class Fingerprint(NamedTuple):
    """Name of a tensor and the SHA-256 of its name, dtype, shape and bytes."""

    name: str
    digest: str


def fingerprint(name: str, dtype: str, shape: Iterable[int], data: memoryview) -> Fingerprint:
    """Hash one tensor; ``data`` is its content in row-major order as it is stored."""
    header = json.dumps([name, dtype, list(shape)])
    content = hashlib.sha256(header.encode())
    content.update(data)
    return Fingerprint(name, content.hexdigest())


def fingerprint_tensor(name: str, tensor: torch.Tensor) -> Fingerprint:
    """Hash a tensor of any strides; its bytes are taken as if it were contiguous."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    # Flattened first, because a tensor without dimensions cannot change its item size.
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return fingerprint(name, dtype, tensor.shape, data)


def identity_of(fingerprints: Iterable[Fingerprint]) -> str:
    """Combine tensor hashes into 64 hexadecimal digits, independent of their order."""
    total = hashlib.sha256()
    for name, digest in sorted(fingerprints):
        total.update(json.dumps([name, digest]).encode())
    return total.hexdigest()
