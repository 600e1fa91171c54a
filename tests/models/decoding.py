"""A decode loop small enough to be right by sight: prefill each prompt, then step together."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dejavu.kernels.native import NativeOps
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps, activate
from dejavu.kernels.selection import Selection
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.kv_cache import KVCache, blocks_for
from dejavu.sparsity.policy import Points, Selector, Site


class Stepper(Protocol):
    """Runs one decode step of a batch; one stepper serves one model, cache and selector.

    capturable: the selector must work through the ops alone. bitwise: a row has the same bits
    whatever rows stand beside it.
    """

    capturable: bool
    bitwise: bool

    def step(
        self, model: DecoderLM, batch: Batch, cache: KVCache, selector: Selector
    ) -> Tensor: ...


class Eager:
    """Every op at once."""

    capturable = False

    def __init__(self, ops: Ops | None = None) -> None:
        self.ops = ops or TorchOps()
        self.bitwise = ops is not None

    def step(self, model: DecoderLM, batch: Batch, cache: KVCache, selector: Selector) -> Tensor:
        return model.forward(batch, cache, selector, self.ops)


class Recorded:
    """One recording per number of rows, replayed on static inputs."""

    capturable = True
    bitwise = True

    def __init__(self, native: NativeOps) -> None:
        self.native = native
        self.recordings: dict[int, tuple[Batch, NativeOps, Tensor]] = {}

    def step(self, model: DecoderLM, batch: Batch, cache: KVCache, selector: Selector) -> Tensor:
        rows = len(batch.ids)
        if rows not in self.recordings:
            static = Batch(*(t.clone() for t in (batch.ids, batch.positions)), *_tables(batch))
            ops = self.native.recorder()
            self.recordings[rows] = (static, ops, model.forward(static, cache, selector, ops))
        static, ops, logits = self.recordings[rows]
        for name in ("ids", "positions", "block_table", "lengths"):
            getattr(static, name).copy_(getattr(batch, name))
        ops.program.run()
        return logits.clone()


def _tables(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch.block_table.clone(), batch.lengths.clone()


class Everything(Selector):
    """All neurons and heads through explicit selections: the sparse path with nothing left out."""

    def __init__(self, model: DecoderLM) -> None:
        self.neurons = Selection.full(model.config.intermediate_size)
        self.groups = Selection.full(model.config.num_key_value_heads)

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        return self.neurons if site == Site.NEURONS else self.groups


class TrueActive(Selector):
    """Exactly the neurons whose activation is not 0, worked out beforehand, for each row."""

    capturable = False

    def __init__(self, model: DecoderLM) -> None:
        self.model = model
        self.used = 0
        self.seen = 0

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if site == Site.HEADS:
            rows = len(points.source(site, layer))
            groups = self.model.config.num_key_value_heads
            return Selection.from_mask(torch.ones(rows, groups, dtype=torch.bool))
        mlp = self.model.weights.blocks[layer].mlp
        x = points.source(site, layer)
        inner = mlp.up if mlp.gate is None else mlp.gate
        scores = x @ inner.weight.float().T
        if inner.bias is not None:
            scores += inner.bias
        mask = activate(scores, self.model.activation) != 0
        self.used += int(mask.sum())
        self.seen += mask.numel()
        return Selection.from_mask(mask)


class Decoding:
    """Sequences in one cache, decoded together, one row each.

    Blocks are handed out in shuffled order, so that nothing works by lying side by side.
    """

    def __init__(
        self, model: DecoderLM, stepper: Stepper, selector: Selector | None = None, room: int = 128
    ) -> None:
        self.model, self.stepper = model, stepper
        self.selector = selector or Selector()
        self.room = room
        self.cache = model.new_cache(room, sequences=8)
        generator = torch.Generator().manual_seed(7)
        self.free = torch.randperm(self.cache.num_blocks, generator=generator).tolist()
        self.blocks: dict[int, list[int]] = {}
        self.ids: dict[int, list[int]] = {}

    def start(self, row: int, ids: list[int], selector: Selector | None = None) -> Tensor:
        """Prefill a sequence (plain PyTorch); logits `[V]` after its last token."""
        count = blocks_for(self.room)
        self.blocks[row], self.free = self.free[:count], self.free[count:]
        self.ids[row] = list(ids)
        self.model.prepare(len(ids))
        batch = Batch.prefill(ids, self.blocks[row])
        return self.model.forward(batch, self.cache, selector or Selector(), TorchOps())[0]

    def step(self, tokens: dict[int, int]) -> dict[int, Tensor]:
        """Append one token to each of some sequences; logits `[V]` of each."""
        for row, token in tokens.items():
            self.ids[row].append(token)
        lengths = [len(self.ids[row]) for row in tokens]
        self.model.prepare(max(lengths))
        batch = Batch(
            torch.tensor(list(tokens.values())),
            torch.tensor(lengths) - 1,
            torch.tensor([self.blocks[row] for row in tokens], dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
        )
        logits = self.stepper.step(self.model, batch, self.cache, self.selector)
        return dict(zip(tokens, logits, strict=True))


def greedy(
    model: DecoderLM,
    stepper: Stepper,
    prompts: list[list[int]],
    counts: list[int],
    selector: Selector | None = None,
) -> list[tuple[list[int], Tensor]]:
    """Greedy continuations of several prompts decoded together, and their logits `[count, V]`.

    A row leaves the batch when it has its count; the others go on.
    """
    run = Decoding(model, stepper, selector)
    with torch.inference_mode():
        newest = {row: run.start(row, ids) for row, ids in enumerate(prompts)}
        tokens: dict[int, list[int]] = {row: [] for row in newest}
        logits: dict[int, list[Tensor]] = {row: [] for row in newest}
        while newest:
            for row, last in newest.items():
                logits[row].append(last)
                tokens[row].append(int(last.argmax()))
            going = {row: tokens[row][-1] for row in newest if len(tokens[row]) < counts[row]}
            newest = run.step(going) if going else {}
    return [(tokens[row], torch.stack(logits[row])) for row in range(len(prompts))]
