"""Blocks from the checkpoint one by one: the same numbers, and never more than one block or two."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dejavu.engine.engine import Engine
from dejavu.errors import InputError
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.load import LoadedModel, load_model
from dejavu.load_blocks import BlockReader, load_to_read
from dejavu.models.base import Batch, Block, DecoderLM
from dejavu.sparsity.accounting import dense_bytes
from dejavu.sparsity.measure import measure
from dejavu.sparsity.measurement import MeasureOptions
from dejavu.sparsity.policy import Dense, Points, Selector, Site

from .tiny import Case, build, prompt

LAYERS = 5


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(model_type: str) -> Path:
        if model_type not in made:
            case = Case(model_type, model_type, {"num_hidden_layers": LAYERS})
            made[model_type] = build(case, tmp_path_factory.mktemp(model_type)).path
        return made[model_type]

    return get


class Watch:
    """Which blocks' matrices are alive, looked at whenever a block has just been read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[int] = []
        self.most = 0
        self._alive: list[weakref.ref[Tensor]] = []
        read = BlockReader.block

        def watched(reader: BlockReader, layer: int) -> Block:
            block = read(reader, layer)
            self._alive.append(weakref.ref(block.mlp.up.weight.data))
            self.reads.append(layer)
            self.most = max(self.most, self.alive)
            return block

        monkeypatch.setattr(BlockReader, "block", watched)

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self._alive)


def memory_for(path: Path, blocks: float, states: float = 0.2) -> int:
    """Bytes with room for so many blocks beside the embeddings, and a share for states."""
    reader = BlockReader(path)
    block = reader._bytes("layers.0.")
    outside = reader.total - LAYERS * block
    return int((outside + blocks * block) / (1 - states))


def streamed(path: Path, blocks: float = 2.1, states: float = 0.2) -> LoadedModel:
    with pytest.warns(UserWarning, match="read one by one"):
        loaded = load_to_read(path, memory=memory_for(path, blocks, states))
    assert loaded.model.streamed
    return loaded


def logits(model: DecoderLM, length: int = 20, selector: Selector | None = None) -> Tensor:
    ids = torch.tensor(prompt(length))
    return model.logits(ids, model.new_cache(64), selector or Dense(), TorchOps())


@pytest.mark.parametrize("model_type", ["opt", "llama", "qwen3"])
@pytest.mark.parametrize(("blocks", "most"), [(1.1, 1), (2.1, 2)], ids=["one", "ahead"])
def test_the_same_logits_with_few_blocks_alive(
    model_type: str,
    blocks: float,
    most: int,
    paths: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = paths(model_type)
    expected = logits(load_model(path).model)
    watch = Watch(monkeypatch)
    model = streamed(path, blocks).model
    assert watch.reads == []  # nothing before it is asked for
    for _ in range(2):
        assert torch.equal(logits(model), expected)
    assert watch.reads == list(range(LAYERS)) * 2
    assert 1 <= watch.most <= most
    assert (model.weights.blocks._reader is not None) == (most == 2)  # type: ignore[attr-defined]
    gc.collect()
    assert watch.alive == 1


@pytest.mark.parametrize("model_type", ["opt", "llama"])
@pytest.mark.parametrize("blocks", [1.1, 2.1], ids=["one", "ahead"])
def test_many_windows_share_each_block(
    model_type: str, blocks: float, paths: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of several lengths; as many at once as hidden states have room for."""
    path = paths(model_type)
    windows = [torch.tensor(prompt(n, seed=n)) for n in (20, 1, 33, 7, 20, 12, 40)]
    resident = load_model(path).model
    cache = resident.new_cache(64)
    expected = [resident.logits(ids, cache, Dense(), TorchOps()) for ids in windows]
    watch = Watch(monkeypatch)
    model = streamed(path, blocks).model
    state = 4 * 40 * model.config.hidden_size * 4  # four tensors of 40 rows
    model.weights.blocks.state_bytes = 3 * state + 1  # type: ignore[attr-defined]
    cache = model.new_cache(64)
    readings = (model.reading(ids, cache, Dense(), TorchOps()) for ids in windows)
    for found, wanted in zip(model.together(readings, 40), expected, strict=True):
        assert torch.equal(found, wanted)
    assert watch.reads == list(range(LAYERS)) * 3  # groups of three, three and one
    assert watch.most <= (2 if blocks > 2 else 1)


def test_a_cache_holds_one_layer(paths: Callable[[str], Path]) -> None:
    cache = streamed(paths("opt")).model.new_cache(64)
    assert len(cache.keys) == LAYERS
    assert len({layer.data_ptr() for layer in cache.keys}) == 1


class LooksAhead(Selector):
    """Neurons chosen from the input a block before."""

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if site is not Site.NEURONS or layer == 0:
            return None
        x = points.source(site, layer, 1.0)
        return Selection.from_mask(x.repeat(1, 2)[:, :53] > 0)


def test_selections_that_look_a_block_ahead(paths: Callable[[str], Path]) -> None:
    path = paths("opt")
    expected = logits(load_model(path).model, selector=LooksAhead())
    assert torch.equal(logits(streamed(path).model, selector=LooksAhead()), expected)


def test_bytes_are_counted_without_reading(
    paths: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = paths("llama")
    watch = Watch(monkeypatch)
    found = dense_bytes(streamed(path).model.outline().weights)
    assert found == dense_bytes(load_model(path).model.weights)
    assert watch.reads == []


def test_a_model_that_fits_is_not_streamed(paths: Callable[[str], Path]) -> None:
    path = paths("opt")
    assert not load_to_read(path).model.streamed
    assert not load_to_read(path, memory=2 * BlockReader(path).total).model.streamed


def test_what_is_missing_for_one_block_is_said(paths: Callable[[str], Path]) -> None:
    path = paths("opt")
    with (
        pytest.warns(UserWarning, match="read one by one"),
        pytest.raises(InputError, match=r"one block of .* GB are missing"),
    ):
        load_to_read(path, memory=memory_for(path, 0.9, states=0.0))


def test_it_does_not_decode(paths: Callable[[str], Path]) -> None:
    loaded = streamed(paths("opt"))
    with pytest.raises(InputError, match="cannot decode"):
        Engine(loaded, max_batch=1)
    with pytest.raises(InputError, match="whole texts only"):
        loaded.model.forward(
            Batch.prefill(prompt(3), [0]), loaded.model.new_cache(3), Dense(), TorchOps()
        )


def test_measured_sparsity_is_the_same(paths: Callable[[str], Path]) -> None:
    path = paths("opt")
    windows = [torch.tensor(prompt(17, seed=n)) for n in range(4)]
    options = MeasureOptions(densities=(0.5,))
    found, expected = (
        measure(model, windows[:2], windows[2:], options).to_json()
        for model in (streamed(path).model, load_model(path).model)
    )
    assert found == expected


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("blocks", [1.1, 2.1], ids=["one", "ahead"])
def test_a_gpu_holds_one_block_or_two(
    blocks: float, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A model of 8 blocks of some MB each: the same logits within its streamed share of memory."""
    fields = {"hidden_size": 512, "ffn_dim": 2048, "num_hidden_layers": 8, "vocab_size": 200}
    path = build(Case("opt", "opt", fields), tmp_path_factory.mktemp("wide")).path
    resident = load_model(path, dtype=dtype, device="cuda").model
    ids = torch.tensor(prompt(100))
    expected = resident.logits(ids, resident.new_cache(128), Dense(), TorchOps()).cpu()
    del resident
    gc.collect()
    torch.cuda.empty_cache()
    reader = BlockReader(path, dtype=dtype, device="cuda")
    block = reader._bytes("layers.0.")
    memory = int((reader.total - 8 * block + blocks * block) / 0.8)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with pytest.warns(UserWarning, match="read one by one"):
        model = load_to_read(path, dtype=dtype, device="cuda", memory=memory).model
    for _ in range(2):
        found = model.logits(ids, model.new_cache(128), Dense(), TorchOps())
        assert torch.equal(found.cpu(), expected)
    held = torch.cuda.max_memory_allocated() - before
    matrix = 512 * 2048 * 4  # one more while it is turned, as the file has it
    assert held < memory + matrix < reader.total
