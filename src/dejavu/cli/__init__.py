"""The `dejavu` command."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 an error that says what to do, 2 wrong usage,
    130 interrupted."""
    from dejavu.cli.app import app
    from dejavu.cli.output import fail
    from dejavu.errors import DejavuError

    try:
        app(args=argv, prog_name="dejavu")
    except DejavuError as error:
        sys.exit(fail(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; nobody is left to tell
        sys.exit(0)
