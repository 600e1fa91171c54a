"""The two files of a batch: lines that ask, and lines that answer, which survive a kill.

Answers are appended to OUT.partial in the order in which they end. The `id` of each tells the
number of the line that it answers, and a hash of that line and of the run's options. So the partial
file itself says what is done, and another input or other options cannot be mixed into it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import IO, Any

from dejavu.errors import DejavuError, InputError
from dejavu.weights.files import atomic_write

LONGEST_LINE = 32_000_000  # bytes; what is longer is skipped over, never held in memory
SYNC_SECONDS = 5.0  # of answers that a power cut may cost
_PREFIX = b'{"id": "batch_req_'
_ID = re.compile(r"batch_req_([0-9a-f]{24})_([0-9]{1,18})")


@dataclass(frozen=True)
class Line:
    """One that is not blank. number: from 1. content: None where it is too long. digest: of the
    line and the options of the run, 24 hexadecimal digits."""

    number: int
    content: bytes | None
    digest: str

    @property
    def id(self) -> str:
        """Of its answer."""
        return f"batch_req_{self.digest}_{self.number}"


def read_lines(path: Path, run: str) -> Iterator[Line]:
    """The lines of a file. run: what else the answers depend on. Raises InputError where it cannot
    be read."""
    try:
        with path.open("rb") as file:
            number = 0
            while content := file.readline(LONGEST_LINE):
                number += 1
                # Without its end: the last line may get one when the file grows.
                digest = hashlib.sha256(run.encode() + b"\n" + content.removesuffix(b"\n"))
                too_long, piece = False, content
                while not piece.endswith(b"\n") and (piece := file.readline(LONGEST_LINE)):
                    too_long = True
                    digest.update(piece.removesuffix(b"\n"))
                if too_long or content.strip():
                    yield Line(number, None if too_long else content, digest.hexdigest()[:24])
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


@dataclass(frozen=True)
class Kept:
    """Where an answer stands in the partial file, in bytes, and whether it is an error."""

    start: int
    end: int
    digest: str
    failed: bool


class Results:
    """Answers as they come; `with` closes the file. `finish` makes OUT of it, in input order."""

    def __init__(self, out: Path) -> None:
        """Takes over what an earlier run left, without a torn last line.

        Raises InputError where the partial file is something else or another process writes it,
        DejavuError where it cannot be written.
        """
        self.out = out
        self.partial = partial_of(out)
        self.kept: dict[int, Kept] = {}
        with self._reported():
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a write that fails is known at once, and never repeated at the close.
            self._file: IO[bytes] = self.partial.open("a+b", buffering=0)
        try:
            self._lock()
            with self._reported():
                self.kept = read_kept(self.partial)
                self._end = max((one.end for one in self.kept.values()), default=0)
                self._file.truncate(self._end)
        except BaseException:
            self._file.close()
            raise
        self._synced = monotonic()

    def add(self, line: Line, answer: Mapping[str, Any], *, failed: bool) -> None:
        """Append the answer to a line. Raises DejavuError where there is no room; what was there
        before is whole."""
        data = _encode({"id": line.id, **answer})
        with self._reported():
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[self._file.write(rest) :]
            except BaseException:
                with contextlib.suppress(OSError):
                    self._file.truncate(self._end)
                raise
            if monotonic() - self._synced > SYNC_SECONDS:
                os.fsync(self._file.fileno())
                self._synced = monotonic()
        start, self._end = self._end, self._end + len(data)
        self.kept[line.number] = Kept(start, self._end, line.digest, failed)

    def finish(self) -> None:
        """Write OUT. The partial file goes when OUT is on the disk."""
        with self._reported():
            os.fsync(self._file.fileno())
        with (
            atomic_write(self.out) as path,
            path.open("wb") as file,
            self.partial.open("rb") as answers,
        ):
            for _, one in sorted(self.kept.items()):
                answers.seek(one.start)
                file.write(answers.read(one.end - one.start))
        self.partial.unlink()

    def __enter__(self) -> Results:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.kept:
            self.partial.unlink(missing_ok=True)
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another process is writing {self.partial}; wait for it or choose another OUT"
            ) from error
        except OSError:  # a network file system without locks
            pass

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DejavuError(
                f"cannot write {self.partial}: {error.strerror or error}. The {len(self.kept)} "
                "answers in it are whole: make room, and the same command goes on from there"
            ) from error


def partial_of(out: Path) -> Path:
    """Where the answers are until all are there."""
    return out.with_name(f"{out.name}.partial")


def read_kept(path: Path) -> dict[int, Kept]:
    """The answers in a file by the number of their line, up to the first line that is damaged.

    Raises InputError for a file that begins with something else.
    """
    kept: dict[int, Kept] = {}
    start = 0
    with path.open("rb") as file:
        for content in file:
            found = _read(content, start)
            if found is None:
                if start == 0 and not _torn(content):
                    raise InputError(
                        f"{path} does not hold answers of a batch; move it away or choose another "
                        "OUT"
                    )
                break
            number, kept[number] = found
            start += len(content)
    return kept


def _read(content: bytes, start: int) -> tuple[int, Kept] | None:
    if not content.endswith(b"\n"):
        return None
    try:
        entry = json.loads(content)
        named = _ID.fullmatch(entry["id"])
        response = entry["response"]
        failed = response is None or response["status_code"] != 200
    except (ValueError, KeyError, TypeError):
        return None
    if named is None:
        return None
    return int(named[2]), Kept(start, start + len(content), named[1], failed)


def _torn(content: bytes) -> bool:
    """Whether the content may be the beginning of an answer."""
    size = min(len(content), len(_PREFIX))
    return not content.endswith(b"\n") and content[:size] == _PREFIX[:size]


def _encode(entry: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can say
        return json.dumps(entry, allow_nan=False).encode() + b"\n"
