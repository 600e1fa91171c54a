"""The `dejavu` command."""

from __future__ import annotations

import os
import sys

_SIGPIPE = 128 + 13  # the status that shells give a program whose reader has gone


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 an error that says what to do, 2 wrong usage,
    130 interrupted, 141 nobody reads the output any more."""
    from dejavu.cli.app import app
    from dejavu.cli.output import fail
    from dejavu.errors import DejavuError

    try:
        try:
            app(args=argv, prog_name="dejavu")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, not when Python ends: a full disk is an error too
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(_unheard())
    except (DejavuError, OSError) as error:
        _drop_output()
        sys.exit(fail(error))
    except SystemExit as stop:
        # Typer's and rich's own answers to a reader that has gone: they exit with 1.
        if isinstance(stop.__context__, BrokenPipeError):
            sys.exit(_unheard())
        raise


def _unheard() -> int:
    _drop_output()
    return _SIGPIPE


def _drop_output() -> None:
    """Let what Python still holds and cannot write go nowhere: it would complain when it ends."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
