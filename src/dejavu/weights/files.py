"""Writing files so that a failure never costs the old version and never leaves half of a new one.

Data is written under a hidden temporary name beside its destination, flushed to the disk and then
renamed. The temporary is locked while its writer lives, so the next writer of the same destination
can tell a leftover of a killed process from the work of a living one, and removes it.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.errors import DejavuError

if TYPE_CHECKING:
    import torch

__all__ = [
    "atomic_folder",
    "atomic_write",
    "save_safetensors",
    "sha256_file",
    "write_safetensors",
]

_OUT_OF_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write; on a clean exit it becomes ``path``, otherwise it vanishes.

    ``with atomic_write(out) as partial: partial.write_text(...)``. Missing parent folders are
    created, a symbolic link is written through, and an existing ``path`` keeps its content until
    the new one is on the disk.

    Raises:
        DejavuError: the file cannot be written (no room, no permission); names the path and the
            free space. Any other exception of the body passes through unchanged.
    """
    target = _target(path)
    partial = _hidden_name(target, "partial")
    with _reported(target):
        descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    try:
        _lock(descriptor)
        with _reported(target, _OUT_OF_ROOM):
            yield partial
        with _reported(target):
            # The body may have replaced the file instead of writing into it, as safetensors does.
            partial.chmod(os.fstat(descriptor).st_mode)
            _flush(partial)
            partial.replace(target)
            _flush(target.parent)
    finally:
        os.close(descriptor)
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty temporary folder to fill; on a clean exit it becomes ``path``.

    An existing folder at ``path`` is replaced as a whole: moved aside, and deleted only after the
    new one stands in its place. The caller decides whether it may be replaced at all.

    Raises:
        DejavuError: as for :func:`atomic_write`.
    """
    target = _target(path)
    partial = _hidden_name(target, "partial")
    with _reported(target):
        partial.mkdir()
        descriptor = os.open(partial, os.O_RDONLY)
    try:
        _lock(descriptor)
        with _reported(target, _OUT_OF_ROOM):
            yield partial
        with _reported(target):
            for entry in partial.rglob("*"):
                if entry.is_file():  # readable by whom the folder is; safetensors makes it 0600
                    entry.chmod(os.fstat(descriptor).st_mode & 0o666)
                _flush(entry)
            _flush(partial)
            _swap_in(partial, target)
            _flush(target.parent)
    finally:
        os.close(descriptor)
        shutil.rmtree(partial, ignore_errors=True)


def save_safetensors(
    path: str | os.PathLike[str],
    tensors: "Mapping[str, torch.Tensor]",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file atomically, with ``{"format": "pt"}`` added to its metadata.

    Raises:
        DejavuError: as for :func:`atomic_write`.
    """
    with atomic_write(path) as partial:
        write_safetensors(partial, tensors, metadata)


def write_safetensors(
    partial: Path,
    tensors: "Mapping[str, torch.Tensor]",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """The same inside :func:`atomic_write` or :func:`atomic_folder`, which give the atomicity."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), partial, {"format": "pt", **(metadata or {})})
    except SafetensorError as error:
        # The library reports a full disk as its own type, with the reason only in the text.
        raise OSError(errno.EIO, str(error)) from error


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Hexadecimal SHA-256 of a file's content, read in blocks."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _target(path: str | os.PathLike[str]) -> Path:
    target = Path(path).expanduser().resolve()
    with _reported(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _clean_up_after_killed_writers(target)
    return target


def _lock(descriptor: int) -> None:
    # Some network file systems have no locks; there, leftovers stay.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _hidden_name(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.{suffix}")


def _hidden_files(target: Path, suffix: str) -> list[Path]:
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.{suffix}")
    return [entry for entry in target.parent.iterdir() if pattern.fullmatch(entry.name)]


def _clean_up_after_killed_writers(target: Path) -> None:
    for old in _hidden_files(target, "previous"):
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)
    for partial in _hidden_files(target, "partial"):
        with contextlib.suppress(OSError):
            descriptor = os.open(partial, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails: the writer lives
                shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
            finally:
                os.close(descriptor)


def _swap_in(partial: Path, target: Path) -> None:
    """Replace a folder. No portable call exchanges two, so for a moment there is neither."""
    if not target.exists():
        partial.rename(target)
        return
    old = _hidden_name(target, "previous")
    target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _reported(target: Path, only: set[int] | None = None) -> Iterator[None]:
    """Turn an ``OSError`` (with one of the numbers ``only``) into an error a user can act on."""
    try:
        yield
    except OSError as error:
        if only is not None and error.errno not in only:
            raise
        raise DejavuError(
            f"cannot write {target}: {error.strerror or error}. {_free_space(target)}"
            "What stood there before is unchanged."
        ) from error


def _free_space(target: Path) -> str:
    for folder in target.parents:
        with contextlib.suppress(OSError):
            return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB are free on that file system. "
    return ""
