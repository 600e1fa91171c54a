"""From the file as from memory, bit for bit."""

import pytest
import torch

from dejavu.errors import CheckpointError
from dejavu.flash.ops import FlashOps, PromptOps
from dejavu.kernels.native import NativeOps
from dejavu.kernels.prompt_rows import PromptRows
from dejavu.kernels.selection import Selection
from dejavu.models.base import Batch
from dejavu.sparsity.policy import Dense, Selector, Site


class Drawn(Selector):
    """Another random choice of neurons at every step; made through `ops.select` a block ahead."""

    def __init__(self, model, rows, ahead):
        generator = torch.Generator().manual_seed(1)
        self.neurons, width = model.config.intermediate_size, model.config.hidden_size
        layers = model.config.num_hidden_layers
        first = model.weights.embed_tokens.__class__.from_float
        self.weights = [
            first(torch.randn(self.neurons, width, generator=generator), "fp32")
            for _ in range(layers)
        ]
        self.bias = torch.full((self.neurons,), -0.5)
        self.buffers = [Selection.empty(self.neurons, rows) for _ in range(layers)]
        self.ahead = ahead

    def select(self, site, layer, points, ops):
        if site is Site.HEADS:
            return None
        last = len(self.buffers) - 1
        for at in (layer, layer + 1) if self.ahead and layer < last else (layer,):
            if at > layer or layer == 0 or not self.ahead:
                x = points.source(Site.NEURONS, layer)
                ops.select(x, self.weights[at], self.bias, out=self.buffers[at])
        return self.buffers[layer]


def decode(model, selector, ops, prompt_ops, rows, recorded):
    """Logits of a prompt and of ten steps."""
    cache = model.new_cache(64, rows)
    model.prepare(64)
    per_row = len(cache.keys[0]) // rows
    blocks = [list(range(r * per_row, (r + 1) * per_row)) for r in range(rows)]
    ids = torch.randint(0, 64, (rows, 20), generator=torch.Generator().manual_seed(2))
    out = [
        model.forward(Batch.prefill(ids[r, :8].tolist(), blocks[r]), cache, Dense(), prompt_ops)
        for r in range(rows)
    ]
    batch = Batch(
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(rows, dtype=torch.int64),
        torch.tensor(blocks, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int32),
    )
    recorder = ops.recorder() if recorded else None
    logits = model.forward(batch, cache, selector, recorder) if recorder else None
    for at in range(8, 18):
        batch.ids[:], batch.positions[:], batch.lengths[:] = ids[:, at], at, at + 1
        if recorder:
            recorder.program.run()
            out.append(logits.clone())
        else:
            out.append(model.forward(batch, cache, selector, ops).clone())
    return out


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", ["int8", "bf16", "fp32"])
@pytest.mark.parametrize("kind", ["opt", "llama"])
@pytest.mark.parametrize("recorded", [False, True])
def test_same_bits(in_file, kind, dtype, rows, recorded):
    neurons = 96 if kind == "opt" else 70
    memory, outside, store = in_file(kind, dtype, 2 * neurons)
    for choose in ("dense", "drawn", "ahead"):
        found = []
        for model, ops, prompts in (
            (memory, NativeOps(1), PromptRows(1)),
            (outside, FlashOps(store, 1), PromptOps(store, 1)),
        ):
            selector = Dense() if choose == "dense" else Drawn(memory, rows, choose == "ahead")
            found.append(decode(model, selector, ops, prompts, rows, recorded))
        assert all(map(torch.equal, *found))
    wanted, missed = store.cache.counters()
    assert 0 < missed < wanted


@pytest.mark.parametrize("recorded", [False, True])
def test_damaged_file_gives_an_error_and_no_text(in_file, recorded):
    _, outside, store = in_file("opt", "fp32", 192)
    path, bundle = store.bundle.path, store.bundle
    reader = FlashOps(store, 1)
    with path.open("r+b") as file:
        file.truncate(int(bundle.offsets(2)[10]))
    with pytest.raises(CheckpointError, match=r"replaced|cut off"):
        decode(outside, Dense(), reader, PromptOps(store, 1), 1, recorded)
