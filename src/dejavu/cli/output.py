"""What commands print and write: tables and progress on stderr or stdout, JSON on request."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from dejavu.errors import DejavuError

if TYPE_CHECKING:
    from rich.console import Console

    from dejavu.engine.output import Completion

_UNCUT = 10_000  # columns; no table of ours needs them
_EVERY = 30.0  # seconds between two lines of progress


def console(*, stderr: bool = False) -> Console:
    """A rich console; on stderr for everything that is not the result itself."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # Piped output has no width of its own; the 80 columns rich assumes would cut the tables.
    return Console(stderr=stderr, width=None if stream.isatty() else _UNCUT)


def fail(error: Exception) -> int:
    """Print an error for people and return the exit code."""
    if isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f"{error.filename}: "
        error = DejavuError(f"{where}{error.strerror}")
    print(f"error: {error}", file=sys.stderr)
    return 1


def note_full_context(
    completions: Sequence[Completion], max_tokens: int | None, context: int
) -> None:
    """Say on stderr which answers the context ended before `max_tokens` did."""
    for number, completion in enumerate(completions, 1):
        made = completion.completion_tokens
        if completion.finish_reason == "length" and made != max_tokens:
            which = f"answer {number}" if len(completions) > 1 else "the answer"
            wanted = "" if max_tokens is None else f" of {max_tokens}"
            print(
                f"note: {which} stops after {made}{wanted} tokens (finish reason length): with the "
                f"prompt's {completion.prompt_tokens} it fills the context of {context}",
                file=sys.stderr,
            )


def quiet(json_file: Path | None) -> bool:
    """Whether standard output belongs to the JSON alone."""
    return json_file is not None and str(json_file) == "-"


def write_json(result: dict[str, Any], path: Path | None) -> None:
    """Write a result to a file, whole or not at all; `-` is standard output.

    Raises DejavuError naming a file that cannot be written.
    """
    if path is None:
        return
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    if quiet(path):
        sys.stdout.write(text)
        return
    from dejavu.cli.destination import is_device
    from dejavu.weights.files import atomic_write

    try:
        if is_device(path):
            path.write_text(text, encoding="utf-8")
            return
        with atomic_write(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DejavuError(f"cannot write {path}: {error.strerror or error}") from error
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

    Where stderr is no terminal, a line now and then of what takes long.
    """
    if not sys.stderr.isatty():
        yield _lines(description)
        return
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
    )
    with bar:
        task = bar.add_task(description, total=None)

        def update(done: int, total: int, stage: str = description) -> None:
            bar.update(task, completed=done, total=total, description=stage)

        yield update


def _lines(description: str) -> Callable[..., None]:
    last = monotonic()

    def update(done: int, total: int, stage: str = description) -> None:
        nonlocal last
        if monotonic() - last >= _EVERY:
            last = monotonic()
            print(f"{stage}: {done} of {total}", file=sys.stderr, flush=True)

    return update
