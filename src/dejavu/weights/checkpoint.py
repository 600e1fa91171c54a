"""A model on disk, whatever its format: config, tensor names and shapes, tensors one at a time.

Names are Hugging Face's. What a model needs of them, and what is missing or left over, is for the
loader to say; this layer guarantees that every tensor of the files is offered, exactly once.
"""

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dejavu.embedded import NAME, model_path
from dejavu.errors import BackendError, CheckpointError, InputError
from dejavu.weights.files import sha256_file
from dejavu.weights.hub import is_hub_id, snapshot
from dejavu.weights.identity import identity_of
from dejavu.weights.layout import find_weights, read_json
from dejavu.weights.shards import Shard, TensorInfo, open_shard

__all__ = ["QUANTIZATION_KEY", "QUANTIZATION_VERSION", "Checkpoint", "open_checkpoint"]

QUANTIZATION_KEY = "dejavu_quantization"
QUANTIZATION_VERSION = 1


class Checkpoint:
    """Configuration and weights of one model; weights are read only by :meth:`stream`.

    Attributes:
        path: the model's folder, or its ``.gguf`` file.
        config: content of ``config.json`` (made from the metadata for GGUF).
        generation_config: content of ``generation_config.json``, empty where there is none.
        tokenizer_path: folder of the tokenizer's files, or the ``.gguf`` file that contains it.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        shards: Sequence[Shard],
        *,
        generation_config: dict[str, Any] | None = None,
        tokenizer_path: Path | None = None,
    ) -> None:
        self.path = path
        self.config = config
        self.generation_config = generation_config or {}
        self.tokenizer_path = tokenizer_path or path
        self._shards = shards
        self._quantization = _quantization(path, config)
        self._identity: str | None = self.source_identity
        owner: dict[str, Path] = {}
        for shard in shards:
            for name in shard.tensors:
                if name in owner:
                    raise CheckpointError(
                        f"tensor {name!r} is both in {owner[name]} and in {shard.path}; "
                        "remove the file that does not belong to this model"
                    )
                owner[name] = shard.path

    @property
    def quantization(self) -> str | None:
        """``"int8"`` for a checkpoint written by ``dejavu quantize``, else None."""
        return None if self._quantization is None else "int8"

    @property
    def source_identity(self) -> str | None:
        """Identity of the checkpoint this one was quantised from, None if it is an original."""
        return None if self._quantization is None else str(self._quantization["source_identity"])

    def tensor_names(self) -> list[str]:
        """Names of all tensors, in file order."""
        return [name for shard in self._shards for name in shard.tensors]

    def tensor_infos(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every tensor, in file order; known without reading weights."""
        return {name: info for shard in self._shards for name, info in shard.tensors.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, in file order."""
        return {name: info.shape for name, info in self.tensor_infos().items()}

    def stream(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) on the CPU in file order, all or those in ``names``.

        One shard is open at a time and a tensor may be a view of it: copy, move or convert what
        is to be kept, or the shard's memory stays with it. Never write into a tensor.

        Raises:
            CheckpointError: a name that no file has, or a file that became unreadable.
        """
        wanted = set(self.tensor_names() if names is None else names)
        if missing := wanted.difference(self.tensor_names()):
            raise CheckpointError(f"{self.path} has no tensor {', '.join(sorted(missing)[:5])}")
        return self._stream(wanted)

    def identity(self) -> str:
        """Which model this is: a SHA-256 over names, dtypes, shapes and bytes of its tensors.

        It does not depend on how tensors are spread over files, nor on the config. An original is
        hashed once (this reads every weight); a quantised checkpoint answers with the identity of
        its source, so that a plan made for one fits the other.
        """
        if self._identity is None:
            self._identity = identity_of(
                entry for shard in self._shards for entry in shard.fingerprints()
            )
        return self._identity

    def verify(self) -> list[str]:
        """Read every weight and compare files with their hashes; names of those that have none.

        Hashes are known of what `dejavu quantize` wrote and, in the Hub's cache, of large files.

        Raises:
            CheckpointError: a file has not the content it was written with, or a tensor holds NaN
                or infinity.
        """
        unknown = []
        for shard in self._shards:
            expected = self._recorded_hash(shard.path)
            if expected is None:
                unknown.append(shard.path.name)
            elif (found := sha256_file(shard.path)) != expected:
                raise CheckpointError(
                    f"{shard.path} is damaged: its SHA-256 is {found}, it was written with "
                    f"{expected}; make or download it again"
                )
        for name, tensor in self.stream():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} holds NaN or infinity; the file is damaged"
                )
        return unknown

    def _recorded_hash(self, path: Path) -> str | None:
        hashes = (self._quantization or {}).get("sha256")
        if isinstance(hashes, dict) and path.name in hashes:
            return str(hashes[path.name])
        # The Hub's cache keeps large files under their hash and links to them by their names.
        blob = path.resolve().name
        return blob if re.fullmatch("[0-9a-f]{64}", blob) else None

    def _stream(self, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for shard in self._shards:
            if not wanted.isdisjoint(shard.tensors):
                yield from shard.stream(wanted)


def open_checkpoint(source: str | os.PathLike[str], *, revision: str | None = None) -> Checkpoint:
    """Open a model folder, a ``.gguf`` file (or a folder holding one), or a Hub id ``org/name``.

    Reads the config and the heads of the weight files, no weights. Every file the model's index
    names is there with the tensors the index puts into it once this returns.

    Args:
        source: what exists locally is taken as a path, anything else as a Hub id; the embedded
            model's name is its folder inside the package.
        revision: branch, tag or commit on the Hub.

    Raises:
        InputError: neither a local path nor a possible Hub id, or a file that is not a model.
        CheckpointError: a file or tensor is missing, truncated, unreadable or there twice.
    """
    name = model_path(os.fspath(source))
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _open_folder(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(f"{path} is not a .gguf file; give the model's folder instead")
        return _open_gguf(path)
    if path.suffix == ".gguf" or not is_hub_id(name):
        raise InputError(
            f"model {name!r}: there is no such file or folder, and it cannot be the id of a model "
            "on the Hugging Face Hub, which looks like 'org/name' (inside this package is "
            f"{NAME!r})"
        )
    return _open_folder(snapshot(name, revision))


def _open_folder(folder: Path) -> Checkpoint:
    gguf = sorted(folder.glob("*.gguf"))
    if gguf and not any(folder.glob("*.safetensors*")) and not any(folder.glob("pytorch_model*")):
        if len(gguf) > 1:
            names = ", ".join(path.name for path in gguf)
            raise InputError(f"{folder} holds several models ({names}); give the path of one")
        return _open_gguf(gguf[0])

    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    layout = find_weights(folder)
    if layout.notice is not None:
        warnings.warn(layout.notice, stacklevel=3)
    shards = [open_shard(path) for path in layout.shards]
    by_path = {shard.path: shard for shard in shards}
    for tensor, file in layout.weight_map.items():
        if tensor not in by_path[folder / file].tensors:
            raise CheckpointError(
                f"{folder / file} does not contain tensor {tensor!r}, which {layout.index_file} "
                "promises; download both again"
            )
    return Checkpoint(
        folder,
        config,
        shards,
        generation_config=read_json(generation) if generation.is_file() else None,
    )


def _open_gguf(path: Path) -> Checkpoint:
    try:
        from dejavu.weights.gguf import GgufFile
    except ImportError as error:
        raise BackendError(
            f"reading {path} needs the gguf package: pip install 'dejavu-llm[gguf]'"
        ) from error
    file = GgufFile(path)
    own_tokenizer = (path.parent / "tokenizer.json").is_file()
    return Checkpoint(
        path, file.config, [file], tokenizer_path=path.parent if own_tokenizer else None
    )


def _quantization(path: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    entry = config.get(QUANTIZATION_KEY)
    if entry is None:
        return None
    if (
        not isinstance(entry, dict)
        or entry.get("format") != "int8-row"
        or entry.get("version") != QUANTIZATION_VERSION
        or not isinstance(entry.get("source_identity"), str)
    ):
        raise CheckpointError(
            f"{path / 'config.json'}: {QUANTIZATION_KEY} is {entry!r}, which this version cannot "
            "read; update dejavu or quantise the original again"
        )
    return entry
