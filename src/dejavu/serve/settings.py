"""All that can be set, from flags, environment or a TOML file; checked once, then frozen."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dejavu.errors import InputError
from dejavu.load import check_dtype

_OF_RAY = ("ray_address", "replicas", "max_replicas", "target_ongoing")


class ModelEntry(BaseModel):
    """A model under a name. source, plan: folder, GGUF file, Hub id or embedded name. level: what
    a request gets that asks for none; default: the plan's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(min_length=1)
    source: str
    plan: str | None = None
    level: str | None = None
    dtype: str = "auto"
    bundle: str | None = None


class Settings(BaseModel):
    """Of a server. Field names are the flags of `dejavu serve` and the keys of its TOML file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    models: tuple[ModelEntry, ...] = Field(min_length=1)
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0: any free one.")
    api_key: str | None = Field(None, min_length=1, repr=False)
    threads: int | None = Field(None, ge=1)
    max_batch: int = Field(16, ge=1, description="Answers decoded together.")
    max_queue: int = Field(128, ge=0, description="Answers that may wait beyond those.")
    max_model_len: int | None = Field(None, ge=2, description="Prompt and answer, in tokens.")
    max_choices: int = Field(16, ge=1, description="Answers of a request: prompts times n.")
    max_body: int = Field(4_000_000, ge=1, description="Bytes of a request.")
    cache_memory: float | None = Field(None, gt=0, description="GB for keys and values.")
    prefill_chunk: int | None = Field(
        None, ge=1, description="Prompt tokens between two decode steps; default: the device's."
    )
    memory_limit: str | None = Field(
        None,
        description="Of the process, e.g. 4GB; with one model that has a bundle.",
    )
    grace: float = Field(30.0, ge=0, description="Seconds that running answers get at shutdown.")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="Of all models.")
    lazy_kv: bool = Field(False, description="On a GPU, of plans: see `Engine`.")
    whole_layers: bool = Field(True, description="On a GPU, of plans: see `Engine`.")

    ray: bool = Field(False, description="Replicas under Ray Serve.")
    ray_address: str | None = Field(
        None, description="Of a running cluster; default: one of this machine alone."
    )
    replicas: int = Field(1, ge=1, description="At least so many.")
    max_replicas: int | None = Field(None, ge=1, description="At most; default: replicas.")
    target_ongoing: float | None = Field(
        None, gt=0, description="Open requests a replica at which more start; default: max_batch."
    )

    @model_validator(mode="after")
    def _replicas(self) -> Settings:
        if not self.ray and any(
            getattr(self, f) != type(self).model_fields[f].default for f in _OF_RAY
        ):
            raise ValueError(f"{', '.join(map(flag, _OF_RAY))} go with --ray")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"--max-replicas {self.max_replicas} is below --replicas {self.replicas}"
            )
        return self

    @model_validator(mode="after")
    def _distinct(self) -> Settings:
        names = [entry.name for entry in self.models]
        if len(names) != len(set(names)):
            raise ValueError(f"two models have the same name: {', '.join(names)}")
        if self.memory_limit is None and any(entry.bundle is not None for entry in self.models):
            raise ValueError("--bundle goes with --memory-limit")
        if self.memory_limit is not None and len(self.models) > 1:
            raise ValueError("--memory-limit goes with one model")
        return self

    @model_validator(mode="after")
    def _devices(self) -> Settings:
        for entry in self.models:
            check_dtype(entry.dtype, torch.device(self.device))
        if self.memory_limit is not None and self.on_gpu:
            raise ValueError("--memory-limit is for the CPU: leave out --device, or the limit")
        if self.lazy_kv and not self.on_gpu:
            raise ValueError("--lazy-kv is for a GPU: give --device cuda too")
        if self.lazy_kv and all(entry.plan is None for entry in self.models):
            raise ValueError("--lazy-kv goes with a plan: dense answers use all heads")
        if self.ray and self.on_gpu and self.device != "cuda":
            raise ValueError(
                f"--device {self.device}: under --ray each replica has a GPU of its own; give "
                "--device cuda"
            )
        return self

    @property
    def on_gpu(self) -> bool:
        """Whether the models are on a GPU."""
        return self.device != "cpu"

    def needs(self, threads: int) -> dict[str, int]:
        """What a replica reserves, by Ray's names: as many cores, and where the models are on a GPU
        one of its own."""
        return {"num_cpus": threads} | ({"num_gpus": 1} if self.on_gpu else {})

    @property
    def cache_bytes(self) -> int | None:
        """`cache_memory` in bytes."""
        return None if self.cache_memory is None else int(self.cache_memory * 1e9)


def flag(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a settings file. Raises InputError for one that cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--config: cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"--config: {path} is not TOML: {error}") from error


def settings(values: dict[str, Any]) -> Settings:
    """Checked. Raises InputError naming the flag, or the key of the TOML file."""
    if not values.get("models"):
        raise InputError("no model: give MODEL, or [[models]] in the file of --config")
    try:
        return Settings(**values)
    except ValidationError as error:
        problem = error.errors()[0]
        where, text = problem["loc"], problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            text = "there is no such key"
        elif where == ("device",):
            text = f"{problem['input']!r} is unknown; what exists is cpu, cuda and cuda:N"
        if len(where) == 1 and where[0] in Settings.model_fields:
            where = (flag(str(where[0])),)
        raise InputError(": ".join([".".join(map(str, where))] * bool(where) + [text])) from error
