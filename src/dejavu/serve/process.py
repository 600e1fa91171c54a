"""What a process that serves sets up for itself, alone or as a replica."""

from __future__ import annotations

import gc
import sys

_TURN = 0.5e-3  # seconds after which a thread that waits for Python gets it


def settle() -> None:
    """Make ready for two threads that share Python; once the models are loaded.

    The engine's thread comes back to Python once a step, every few milliseconds; it must not wait
    a standard 5 ms there while the event loop writes answers. And what is there now stays to the
    end: no collection has to look at it again.
    """
    sys.setswitchinterval(_TURN)
    gc.collect()
    gc.freeze()


def unsettle() -> None:
    """Let the collector free the models at the end: the compiled kernels report what is left of
    theirs, tens of lines among the logs."""
    gc.unfreeze()
