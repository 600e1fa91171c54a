"""One weight file: what is in it, known without reading the weights, and its tensors one by one."""

import contextlib
import json
import pickle
import struct
import zipfile
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from dejavu.errors import CheckpointError
from dejavu.weights.identity import Fingerprint, fingerprint_tensor

__all__ = ["PickleShard", "SafetensorsShard", "Shard", "TensorInfo", "open_shard"]

_SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class TensorInfo(NamedTuple):
    """Shape and dtype a tensor will have when it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Shard(Protocol):
    """A weight file. Its tensors are mapped or loaded only while :meth:`stream` runs."""

    path: Path
    tensors: dict[str, TensorInfo]  # in file order

    def stream(self, names: Container[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors called ``names``, in file order."""

    def fingerprints(self) -> Iterator[Fingerprint]:
        """Hash every tensor as it is stored."""


def open_shard(path: Path) -> "SafetensorsShard | PickleShard":
    """Inspect a weight file: safetensors by its suffix, everything else as a pickle.

    Raises:
        CheckpointError: absent, truncated, unreadable, or a pickle with more than tensors in it.
    """
    return SafetensorsShard(path) if path.suffix == ".safetensors" else PickleShard(path)


class SafetensorsShard:
    """A safetensors file, memory-mapped while it is streamed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        with self._open() as file:
            for name in file.offset_keys():
                entry = file.get_slice(name)
                dtype = _SAFETENSORS_DTYPES.get(entry.get_dtype())
                if dtype is None:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} has the unsupported dtype {entry.get_dtype()}; "
                        "use a checkpoint in float32, float16 or bfloat16"
                    )
                self.tensors[name] = TensorInfo(tuple(entry.get_shape()), dtype)

    def stream(self, names: Container[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors that are views of the mapped file; copy those that must outlive it."""
        with self._open() as file:
            for name in self.tensors:
                if name in names:
                    yield name, file.get_tensor(name)

    def fingerprints(self) -> Iterator[Fingerprint]:
        """Hash every tensor as it is stored."""
        for name, tensor in self.stream(self.tensors):
            yield fingerprint_tensor(name, tensor)

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            context = safe_open(self.path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(self._diagnosis(error)) from error
        with context as file:
            yield file

    def _diagnosis(self, error: Exception) -> str:
        """Say what is wrong with a file the library refused: first of all, is it all there?"""
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                (header,) = struct.unpack("<Q", file.read(8))
                entries: dict[str, Any] = json.loads(file.read(min(header, size)))
            entries.pop("__metadata__", None)
            ends = sorted((8 + header + e["data_offsets"][1], name) for name, e in entries.items())
        except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error):
            return f"{self.path} is not a readable safetensors file: {error}; download it again"
        for end, name in ends:
            if end > size:
                return (
                    f"{self.path} is truncated: {size} of {ends[-1][0]} bytes, tensor {name!r} is "
                    "the first one cut off; download it again"
                )
        return f"{self.path} is not a valid safetensors file: {error}; download it again"


class PickleShard:
    """A ``.bin`` file of ``torch.save``, read with the restricted unpickler: nothing is executed.

    Files in the zip format (torch 1.6 and later) are memory-mapped; older ones are loaded whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = {
            name: TensorInfo(tuple(tensor.shape), tensor.dtype)
            for name, tensor in self._load().items()
        }

    def stream(self, names: Container[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors, which may share storage with each other where they did when saved."""
        for name, tensor in self._load().items():
            if name in names:
                yield name, tensor

    def fingerprints(self) -> Iterator[Fingerprint]:
        """Hash every tensor as it is stored."""
        for name, tensor in self._load().items():
            yield fingerprint_tensor(name, tensor)

    def _load(self) -> dict[str, torch.Tensor]:
        try:
            zipped = zipfile.is_zipfile(self.path)
            with self.path.open("rb") as file:
                if file.read(2) == b"PK" and not zipped:  # the directory of a zip is at its end
                    raise CheckpointError(f"{self.path} is truncated; download it again")
            state = torch.load(self.path, map_location="cpu", weights_only=True, mmap=zipped)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{self.path} was refused: it is damaged or holds something other than tensors, "
                "which could run code when read; nothing in it was run. Use the safetensors "
                "version of this model."
            ) from error
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(
                f"{self.path} is not a readable PyTorch file: {error}; download it again"
            ) from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{self.path} holds a {type(state).__name__}, not a state dict")
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                raise CheckpointError(
                    f"{self.path}: entry {name!r} is not a dense tensor; save a plain state dict"
                )
        return {str(name): tensor.detach() for name, tensor in state.items()}
