"""Results as they come, one JSON object a line, so that an interrupted run goes on where it was.

The first line says what is being measured; a journal of something else is refused, never mixed. A
last line that a killed process left half written is cut off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from dejavu.errors import DejavuError, InputError


class Journal:
    """Records by the name of their item; `with` closes the file. Without a path, in memory only."""

    def __init__(self, path: Path | None, setting: Mapping[str, Any]) -> None:
        """setting: plain values that say what is measured.

        Raises InputError for a journal of another setting (naming what differs) or another file,
        DejavuError where nothing can be written.
        """
        self.records: dict[str, dict[str, Any]] = {}
        self._path = path
        self._file = None
        if path is None:
            return
        header = json.loads(json.dumps({"setting": setting}))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            keep = self._read(path, header) if path.exists() else 0
            # Appending is what makes an interruption cost one item; the rest of the package writes
            # files whole.
            self._file = path.open("r+b" if path.exists() else "w+b")
            self._file.truncate(keep)
            self._file.seek(keep)
        except OSError as error:
            raise DejavuError(f"cannot write {path}: {error.strerror or error}") from error
        if keep == 0:
            self._write(header)

    def add(self, name: str, record: Mapping[str, Any]) -> None:
        """Keep a record (as JSON gives it back); it is in the file when this returns."""
        entry = json.loads(json.dumps({"item": name, **record}))
        self.records[name] = entry
        if self._file is not None:
            self._write(entry)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, entry: Mapping[str, Any]) -> None:
        assert self._file is not None
        try:
            self._file.write(
                json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n"
            )
            self._file.flush()
        except OSError as error:
            raise DejavuError(f"cannot write {self._path}: {error.strerror or error}") from error

    def _read(self, path: Path, header: dict[str, Any]) -> int:
        """Take over the records; how many bytes of the file are whole lines."""
        content = path.read_bytes()
        keep = content.rfind(b"\n") + 1
        lines = content[:keep].splitlines()
        if not lines:
            if content and not _begins(content, header):
                raise InputError(f"{path} is no journal of an evaluation; choose another folder")
            return 0
        try:
            found, *entries = [json.loads(line) for line in lines]
            theirs = dict(found["setting"])
            self.records = {str(entry["item"]): entry for entry in entries}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} is no journal of an evaluation ({error!r}); choose another folder"
            ) from error
        ours = header["setting"]
        changed = sorted(
            key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)
        )
        if changed:
            shown = "; ".join(
                f"{key}: {theirs.get(key)!r}, now {ours.get(key)!r}" for key in changed
            )
            raise InputError(
                f"{path} is of another run ({shown}); repeat that one, or choose another folder"
            )
        return keep


def _begins(content: bytes, header: Mapping[str, Any]) -> bool:
    """Whether the content is the beginning of this header's line."""
    return json.dumps(header, ensure_ascii=False).encode().startswith(content)
