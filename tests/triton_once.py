"""Triton's interpreter patches its language anew in every call of a device function, which takes
longer than most of them run; once for a launch is enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def patched_once() -> Iterator[None]:
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        langs = [m for m in fn.__globals__.values() if m is tl or m is tl.core]
        return patch(fn) if any(tl.core.is_builtin(m.load) for m in langs) else None

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_lang", patch_once)
        yield
