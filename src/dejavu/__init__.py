"""dejavu: decode with only the heads and neurons that a token needs.

    from dejavu import LLM, SamplingParams

    llm = LLM("relu-30m")  # the model inside the package; or a folder, a GGUF file, a Hub id
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=40)).text)

Importing this package imports nothing heavy: names are looked up when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dejavu.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    DejavuError,
    InputError,
    PlanError,
)

if TYPE_CHECKING:
    from dejavu.engine.llm import LLM
    from dejavu.engine.output import Chunk, Completion
    from dejavu.engine.params import SamplingParams
    from dejavu.load import LoadedModel, load_model

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BackendError",
    "CheckpointError",
    "Chunk",
    "Completion",
    "ConfigError",
    "DejavuError",
    "InputError",
    "LoadedModel",
    "PlanError",
    "SamplingParams",
    "__version__",
    "load_model",
]

_HOMES = {
    "LLM": "dejavu.engine.llm",
    "Chunk": "dejavu.engine.output",
    "Completion": "dejavu.engine.output",
    "LoadedModel": "dejavu.load",
    "SamplingParams": "dejavu.engine.params",
    "load_model": "dejavu.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dejavu' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
