"""The command line, in process."""

from __future__ import annotations

import pytest

from dejavu.cli import main


def run(*argv: object) -> int:
    """The exit status of `dejavu ARGV`."""
    with pytest.raises(SystemExit) as stop:
        main([str(part) for part in argv])
    code = stop.value.code
    return code if isinstance(code, int) else 0 if code is None else 1
