import errno
import hashlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dejavu.errors import DejavuError
from dejavu.weights.files import (
    atomic_folder,
    atomic_write,
    save_safetensors,
    sha256_file,
    write_safetensors,
)

from .folders import contents, names

WRITE = "(partial / 'new' if partial.is_dir() else partial).write_bytes"


def run(code: str, *args: object) -> int:
    """Run code with WRITE and imports in a process of its own; returns the exit status."""
    prelude = (
        "import os, resource, signal, sys\n"
        "from dejavu.errors import DejavuError\n"
        "from dejavu.weights.files import *\n"
        "def write(partial, data):\n"
        f"    {WRITE}(data)\n"
    )
    command = [sys.executable, "-c", prelude + code, *map(str, args)]
    return subprocess.run(command, check=False, timeout=60).returncode


def old_file(path: Path) -> None:
    path.write_bytes(b"old")


def old_folder(path: Path) -> None:
    path.mkdir()
    (path / "old").write_bytes(b"old")


BOTH = pytest.mark.parametrize(
    ("writer", "make_old"), [(atomic_write, old_file), (atomic_folder, old_folder)]
)
Writer = Callable[[Path], AbstractContextManager[Path]]


def write(partial: Path, data: bytes) -> None:
    (partial / "new" if partial.is_dir() else partial).write_bytes(data)


def write_half(writer: Writer, target: Path, error: BaseException) -> None:
    with writer(target) as partial:
        write(partial, b"half")
        raise error


@BOTH
def test_new_replaces_old_only_at_the_end(
    tmp_path: Path, writer: Writer, make_old: Callable[[Path], None]
) -> None:
    target = tmp_path / "target"
    make_old(target)
    before = contents(tmp_path)
    with writer(target) as partial:
        write(partial, b"new")
        assert partial.parent == tmp_path
        assert before.items() <= contents(tmp_path).items()
    assert list(contents(tmp_path).values()) == [b"new"]
    assert names(tmp_path) == ["target"]


@BOTH
@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt(), FileNotFoundError(2, "x")])
def test_exception_of_the_body_passes_and_leaves_no_trace(
    tmp_path: Path,
    writer: Writer,
    make_old: Callable[[Path], None],
    exists: bool,
    error: BaseException,
) -> None:
    target = tmp_path / "target"
    if exists:
        make_old(target)
    before = contents(tmp_path)
    with pytest.raises(type(error)) as raised:
        write_half(writer, target, error)
    assert raised.value is error
    assert contents(tmp_path) == before
    assert names(tmp_path) == ["target"] * exists


@BOTH
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_full_disk_is_reported_with_path_and_space(
    tmp_path: Path, writer: Writer, make_old: Callable[[Path], None], number: int
) -> None:
    target = tmp_path / "target"
    make_old(target)
    before = contents(tmp_path)
    with pytest.raises(DejavuError, match=r"MB are free.*unchanged") as raised:
        write_half(writer, target, OSError(number, os.strerror(number)))
    assert str(target) in str(raised.value)
    assert os.strerror(number) in str(raised.value)
    assert contents(tmp_path) == before


@BOTH
def test_file_size_limit(tmp_path: Path, writer: Writer, make_old: Callable[[Path], None]) -> None:
    target = tmp_path / "target"
    make_old(target)
    before = contents(tmp_path)
    code = (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        f"    with {writer.__name__}(sys.argv[1]) as partial:\n"
        "        write(partial, b'x' * 5000)\n"
        "except DejavuError as error:\n"
        "    sys.exit(7 if 'File too large' in str(error) and sys.argv[1] in str(error) else 8)\n"
    )
    assert run(code, target) == 7
    assert contents(tmp_path) == before
    assert names(tmp_path) == ["target"]


@BOTH
def test_kill_keeps_the_old_and_the_next_writer_cleans_up(
    tmp_path: Path, writer: Writer, make_old: Callable[[Path], None]
) -> None:
    target = tmp_path / "target"
    make_old(target)
    before = contents(tmp_path)
    code = (
        f"with {writer.__name__}(sys.argv[1]) as partial:\n"
        "    write(partial, b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run(code, target) == -signal.SIGKILL
    assert before.items() < contents(tmp_path).items()
    with writer(target) as partial:
        write(partial, b"new")
    assert list(contents(tmp_path).values()) == [b"new"]
    assert names(tmp_path) == ["target"]


@BOTH
def test_living_writer_is_left_alone(
    tmp_path: Path, writer: Writer, make_old: Callable[[Path], None]
) -> None:
    target = tmp_path / "target"
    with writer(target) as slow:
        write(slow, b"slow")
        with writer(target) as fast:
            write(fast, b"fast")
        assert slow.exists()
    assert list(contents(tmp_path).values()) == [b"slow"]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    others = [".target.partial", ".target.0123456.partial", ".other.01234567.partial", ".target.gz"]
    for name in others:
        (tmp_path / name).touch()
    with atomic_write(tmp_path / "target") as partial:
        partial.touch()
    assert names(tmp_path) == sorted([*others, "target"])


def test_kill_between_the_two_renames_of_a_folder(tmp_path: Path) -> None:
    old_folder(tmp_path / ".target.01234567.previous")
    (tmp_path / ".target.89abcdef.partial").mkdir()
    with pytest.raises(KeyError), atomic_folder(tmp_path / "target"):
        raise KeyError
    assert contents(tmp_path) == {"target/old": b"old"}


def test_folder_that_cannot_take_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_folder(tmp_path / "target")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, "broken")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(DejavuError, match="broken"), atomic_folder(tmp_path / "target") as partial:
        write(partial, b"new")
    assert contents(tmp_path) == {"target/old": b"old"}


def test_parents_are_made_and_links_written_through(tmp_path: Path) -> None:
    real = tmp_path / "a" / "b" / "real"
    with atomic_write(real) as partial:
        partial.write_text("1")
    link = tmp_path / "link"
    link.symlink_to(real)
    with atomic_write(link) as partial:
        partial.write_text("2")
    assert link.is_symlink()
    assert real.read_text() == "2"


def test_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DejavuError, match=r"cannot write .*target"):
        write_half(atomic_write, tmp_path / "file" / "target", KeyError())


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        save_safetensors(tmp_path / "a", {"x": torch.ones(2)})
        with atomic_folder(tmp_path / "b") as partial:
            write_safetensors(partial / "c", {"x": torch.ones(2)})
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "b" / "c").stat().st_mode & 0o777 == 0o640


def test_safetensors(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_safetensors(file, {"x": torch.arange(3), "empty": torch.zeros(0, 2)}, {"k": "v"})
    assert torch.equal(load_file(file)["x"], torch.arange(3))
    before = contents(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(DejavuError, match="File too large"):
            save_safetensors(file, {"x": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == before


def test_sha256(tmp_path: Path) -> None:
    data = os.urandom(300_000)
    (tmp_path / "a").write_bytes(data)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(data).hexdigest()
