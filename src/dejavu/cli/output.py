"""What commands print and write: tables and progress on stderr or stdout, JSON on request."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from dejavu.errors import DejavuError


def console(*, stderr: bool = False) -> Console:
    """A rich console; on stderr for everything that is not the result itself."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # Piped output has no width of its own; the 80 columns rich assumes would cut the tables.
    return Console(stderr=stderr, width=None if stream.isatty() else 120)


def fail(error: DejavuError) -> int:
    """Print an error for people and return the exit code."""
    print(f"error: {error}", file=sys.stderr)
    return 1


def quiet(json_file: Path | None) -> bool:
    """Whether standard output belongs to the JSON alone."""
    return json_file is not None and str(json_file) == "-"


def write_json(result: dict[str, Any], path: Path | None) -> None:
    """Write a result to a file, whole or not at all; `-` is standard output."""
    if path is None:
        return
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    if quiet(path):
        sys.stdout.write(text)
        return
    from dejavu.weights.files import atomic_write

    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """Progress of work in stages; yields `update(stage, done, total)`. Where stderr is no terminal,
    one line a stage."""
    with progress("") as bar:
        current = ""

        def update(stage: str, done: int, total: int) -> None:
            nonlocal current
            if stage != current and not sys.stderr.isatty():
                print(stage, file=sys.stderr, flush=True)
            current = stage
            bar(done, total, stage)

        yield update


@contextmanager
def progress(description: str) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr; yields `update(done, total, description)`.

    Silent where stderr is no terminal.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(description, total=None)

        def update(done: int, total: int, stage: str = description) -> None:
            bar.update(task, completed=done, total=total, description=stage)

        yield update
