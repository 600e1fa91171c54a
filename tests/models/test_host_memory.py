"""What the host holds of a checkpoint that is being loaded: two shards at most, none at the end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Container, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dejavu.load import load_model
from dejavu.weights.shards import SafetensorsShard
from pretend_gpu import pretend_gpu

from .tiny import Case, build


class Traced(np.ndarray):
    """Memory of a tensor on the host, which lives as long as anything refers to it."""


class Host:
    """Shards that are in memory as a whole while they are read, as those of a .bin file are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shards: list[int] = []
        self.most = 0
        self._alive: list[tuple[weakref.ref[Traced], int]] = []
        read = SafetensorsShard.stream

        def stream(shard: SafetensorsShard, names: Container[str]) -> Iterator[tuple[str, Tensor]]:
            held = {name: self._traced(tensor) for name, tensor in read(shard, shard.tensors)}
            self.shards.append(sum(tensor.nbytes for tensor in held.values()))
            for name, tensor in held.items():
                self.most = max(self.most, self.alive)
                if name in names:
                    yield name, tensor

        monkeypatch.setattr(SafetensorsShard, "stream", stream)

    @property
    def alive(self) -> int:
        return sum(size for ref, size in self._alive if ref() is not None)

    def _traced(self, tensor: Tensor) -> Tensor:
        memory = tensor.numpy().copy().view(Traced)
        self._alive.append((weakref.ref(memory), tensor.nbytes))
        return torch.from_numpy(memory)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    tiny = build(Case("opt", "opt", {"num_hidden_layers": 8}), folder / "whole")
    tiny.reference.save_pretrained(folder / "parts", max_shard_size=60_000)
    return folder / "parts"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_shards_at_most(
    device: str, dtype: str, sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(monkeypatch)
    if device == "cuda":
        with pretend_gpu():
            loaded = load_model(sharded, dtype=dtype, device=device)
    else:
        loaded = load_model(sharded, dtype=dtype)
    assert len(host.shards) > 4
    assert host.most <= 2 * max(host.shards)
    gc.collect()
    assert host.alive == 0, "the model keeps memory of the file"
    assert loaded.dtype == dtype
