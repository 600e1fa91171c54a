"""Where results go, checked before any work: an hour's run shall not end at a folder that is not
there.

These are callbacks of the options themselves, so no command can forget them. They change nothing:
a folder is made, and a file written, when there is something to put into it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from dejavu.errors import InputError


def file(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Of a file that is written whole; `-` is standard output."""
    if path is None or str(path) == "-":
        return path
    with _checking(option, path) as target:
        if target.is_dir():
            raise InputError("that is a folder; give the name of a file in it")
        if is_device(path):  # by its own name: behind /dev/stdout may lie a pipe, which has none
            _check(path)
        else:
            _check_parent(target)
    return path


def folder(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Of a folder that appears, or replaces an older one, when it is complete."""
    if path is not None:
        with _checking(option, path) as target:
            _check_no_file(target)
            _check_parent(target)
    return path


def plan_folder(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Of a plan: what is replaced must be one."""
    from dejavu.predictor.hub import FILES

    folder(option, path)
    if path is not None:
        with _checking(option, path) as target:
            if target.is_dir() and any(target.iterdir()) and not (target / FILES[0]).is_file():
                raise InputError("that folder holds something else; give a new one or a plan")
    return path


def folder_of_files(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Of a folder that files are put into, made where it is not there."""
    if path is not None:
        with _checking(option, path) as target:
            _check_no_file(target)
            if target.is_dir():
                _check(target)
            else:
                _check_parent(target)
    return path


def is_device(path: Path) -> bool:
    """Whether something stands there that is written into, never replaced: /dev/null, a pipe."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def _checking(option: typer.CallbackParam, path: Path) -> Iterator[Path]:
    """What stands behind a path's links; every complaint names the option and the path."""
    given = f"{option.opts[0]} {path}"
    try:
        yield path.expanduser().resolve()
    except InputError as error:
        raise InputError(f"{given}: {error}") from None
    except (OSError, RuntimeError) as error:  # a folder nobody may look into, links in a circle
        said = error.strerror if isinstance(error, OSError) else None
        raise InputError(f"{given}: {said or error}") from error


def _check_no_file(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise InputError("that is a file; give a folder")


def _check_parent(target: Path) -> None:
    parent = target.parent
    if not parent.exists():
        raise InputError(f"there is no folder {parent}; make it first")
    if not parent.is_dir():
        raise InputError(f"{parent} is a file, not a folder")
    _check(parent)


def _check(place: Path) -> None:
    if not os.access(place, os.W_OK | (os.X_OK if place.is_dir() else 0)):
        raise InputError(f"you may not write to {place}")
