"""One decode step of B sequences on a GPU: a captured graph over fixed buffers for every bucket.

What changes from step to step (ids, positions, lengths, block tables) lies in one piece of memory
that every graph reads in place. A step of B rows runs the smallest graph with at least B; the rows
beyond are padding: the last row again, which selects what is selected and writes what is written.
The graph ends with each row's likeliest id, so a greedy step fetches 8 bytes a row and waits once.
With them come the numbers of neurons that each layer listed, by which `WholeLayers` chooses the
graph of a later step: there is one for each set of layers that are computed whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dejavu.engine.capture import Capture, Replay, capture_for
from dejavu.engine.lazy_rows import KeyValues, LazyRows
from dejavu.engine.next_step import PICKED, Begun, Variant, following, may_follow
from dejavu.engine.picked_ids import PickedIds
from dejavu.engine.sampling import Picked, Sampler, pick
from dejavu.engine.scheduler import Request
from dejavu.engine.staging import Staging
from dejavu.engine.whole_layers import Layers, WholeLayers
from dejavu.kernels.device import on
from dejavu.kernels.ops import Ops
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.kv_cache import KVCache, blocks_for
from dejavu.predictor.selector import PlanSelector
from dejavu.sparsity.meter import MeteredSelector
from dejavu.sparsity.policy import Selector, Site

BUCKETS = (1, 2, 4, 8, 16)


class GraphStep:
    """Feeds the last token of every running request through the model and picks the next ones.

    overlapped: whether a step may begin before the host knows what the one before has picked, see
    `engine.next_step`. One that nobody wants has still been counted by the selector's meter.
    """

    overlapped = True

    def __init__(
        self,
        model: DecoderLM,
        cache: KVCache,
        selector: Selector,
        ops: Ops,
        *,
        max_rows: int,
        max_length: int,
        vocab_size: int | None = None,
        capture: Capture | None = None,
        lazy_kv: bool = False,
        whole_layers: WholeLayers | None = None,
        whole_heads: WholeLayers | None = None,
    ) -> None:
        """Steps of up to `max_rows` sequences of up to `max_length` tokens.

        vocab_size: ids lie below it; default: the model's. capture: default, `capture_for` the ops.
        A selector that cannot be captured runs at every step, on just the rows there are.
        lazy_kv: keys and values of unused heads wait until they are needed, see `LazyRows`; the
        model must have no `deferred_kv.obstacle`. whole_layers, whole_heads: of which layers a
        plan's steps compute all neurons, or all heads; default: of none.
        """
        self._model, self._cache, self._selector, self._ops = model, cache, selector, ops
        self._vocab = model.config.vocab_size if vocab_size is None else vocab_size
        if capture is None:
            capture = capture_for(ops, model.device)
        self._capture = capture if selector.capturable else None
        self._buckets = [b for b in BUCKETS if b < max_rows]
        self._buckets.append(BUCKETS[len(self._buckets)])
        most = self._buckets[-1]
        self._inputs = Staging(
            model.device,
            {
                "ids": ((most,), torch.int64),
                "positions": ((most,), torch.int64),
                "lengths": ((most,), torch.int32),
                "block_table": ((most, blocks_for(max_length)), torch.int32),
                "slots": ((most,), torch.int32),
                "live": ((1,), torch.int32),
            },
        )
        self._lazy = LazyRows(model, most) if lazy_kv else None
        self._picked = PickedIds(most, ops, model.device)
        self._whole = whole_layers if isinstance(selector, PlanSelector) else None
        self._whole_heads = whole_heads if isinstance(selector, PlanSelector) else None
        shape = 2, model.config.num_hidden_layers  # neurons, heads
        self._listed = torch.zeros(shape, dtype=torch.int32, device=model.device)
        self._fetched_listed = torch.zeros(
            shape, dtype=torch.int32, pin_memory=model.device.type == "cuda"
        )
        self._logits = torch.empty(0)
        self._running: Begun | None = None
        self._begun: Begun | None = None
        self._ready: Any = None
        if model.device.type == "cuda":
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._seats: tuple[list[Request], int] = [], 0
        self._graphs: dict[Variant, Replay] = {}

    def run(self, requests: Sequence[Request]) -> Tensor:
        """Start a step: logits fp32 `[B, V]` after each request's latest token, on the device.

        Nothing waits for the device here. The result holds until `pick`.
        """
        begun, self._begun = self._begun, None
        if begun is None or not begun.serves(requests):
            begun = self._begin(requests, [r.token_ids[-1] for r in requests], 0)
            assert begun is not None
        self._running = begun
        rows = len(requests)
        self._tell(begun.variant)  # the forward that was begun last may have been another's
        if isinstance(self._selector, MeteredSelector):
            c = self._model.config
            variant = begun.variant
            whole = {(Site.NEURONS, layer): c.intermediate_size for layer in variant.whole}
            whole |= {(Site.HEADS, layer): c.num_key_value_heads for layer in variant.whole_heads}
            self._selector.meter.stepped(rows, lazy=variant.kind == "used", whole=whole)
        self._logits = begun.logits[:rows]
        return self._logits

    def pick(self, samplers: Sequence[Sampler | None]) -> list[Picked]:
        """The next id of each row of the step that `run` began; this waits for it.

        None: its logits are not finite, or it has no sampler. Rows with penalties or biases, which
        depend on their history, are fetched and sampled on the host. Where every row goes on with
        what the device has picked, the next step has begun when this returns.
        """
        rows = len(samplers)
        running = self._running
        assert running is not None
        assert rows == len(running.requests)
        with on(self._model.device):
            self._picked.draw(self._logits, samplers)
            self._picked.send()
            if self._counts_listed:
                self._fetched_listed.copy_(self._listed, non_blocking=True)
            if self._ready is not None:
                self._ready.record()
            if self.overlapped and may_follow(running.requests, samplers):
                self._begun = self._begin(running.requests, following(running.requests), 1)
            if self._ready is not None:
                self._ready.synchronize()
        self._note(running.variant)
        found: list[Picked] = []
        for row, (sampler, token) in enumerate(
            zip(samplers, self._picked.arrived(rows), strict=True)
        ):
            if sampler is None or token is None:
                found.append(None)
            else:
                found.append(token if sampler.plain else pick(sampler, self.row(row)))
        if self._begun is not None:
            self._begun.learn(found)
        return found

    def row(self, row: int) -> NDArray[np.float32]:
        """Logits fp32 `[vocab_size]` of one row of the latest step, on the host."""
        logits: NDArray[np.float32] = self._logits[row].cpu().numpy()
        return logits

    def width(self, rows: int) -> int:
        """Rows of the step that so many requests take, padding included."""
        return rows if self._capture is None else next(b for b in self._buckets if b >= rows)

    def _begin(self, requests: Sequence[Request], ids: list[int], more: int) -> Begun | None:
        """Send off a step of requests that are `more` tokens longer by then. ids: that it reads;
        `PICKED`: what the step before picks for the row. None where that one has no graph yet."""
        rows = len(requests)
        lengths = [r.length + more for r in requests]
        variant = self._variant(requests)
        if more and variant not in self._graphs:
            return None
        bucket = variant.rows
        with on(self._model.device):
            self._write(requests, bucket, ids, lengths)
            if self._lazy is not None:
                slots = self._inputs.host()["slots"]
                slots[:rows] = self._lazy.seat(requests)
                slots[rows:bucket] = slots[rows - 1]
                self._lazy.stepped(requests, variant.kind)
            self._inputs.send()
            if PICKED in ids:
                self._picked.follow(self._inputs.device["ids"][:bucket], rows)
            self._model.prepare(max(lengths))
            if self._capture is None:
                logits = self._forward(variant)
            else:
                if variant not in self._graphs:
                    self._graphs[variant] = self._captured(self._capture, variant)
                logits = self._graphs[variant]()
        return Begun(list(requests), lengths, ids, variant, logits)

    def _variant(self, requests: Sequence[Request]) -> Variant:
        """What the next step of these requests computes."""
        bucket = self.width(len(requests))
        kind: KeyValues = "all" if self._lazy is None else self._lazy.kind(requests)
        whole = whole_heads = Layers()
        if self._whole is not None:
            whole = self._whole.of(bucket)
        if self._whole_heads is not None and kind == "all":  # else keys are owed
            whole_heads = self._whole_heads.of(bucket)
        return Variant(bucket, kind, whole, whole_heads)

    def _note(self, variant: Variant) -> None:
        """Let later steps be chosen by what one has listed, which is on the host by now."""
        neurons, heads = self._fetched_listed.numpy()
        if self._whole is not None:
            self._whole.note(variant.rows, neurons, variant.whole)
        if self._whole_heads is not None and variant.kind == "all":
            self._whole_heads.note(variant.rows, heads, variant.whole_heads)

    def _tell(self, variant: Variant) -> None:
        """Let the selector know what is computed without asking it."""
        if isinstance(self._selector, PlanSelector):
            self._selector.whole, self._selector.whole_heads = variant.whole, variant.whole_heads

    def _write(
        self, requests: Sequence[Request], bucket: int, ids: list[int], lengths: list[int]
    ) -> None:
        """A step's inputs into the staging memory."""
        rows = len(requests)
        host = self._inputs.host()
        host["ids"][:rows] = ids
        host["lengths"][:rows] = lengths
        host["positions"][:rows] = [length - 1 for length in lengths]
        if self._seats != (list(requests), bucket):
            # Blocks are given for life, so the table changes only when rows change hands.
            table = host["block_table"]
            table[:bucket] = self._cache.scratch
            for row, request in enumerate(requests):
                table[row, : len(request.blocks)] = request.blocks
            table[rows:bucket] = table[rows - 1]
            host["live"][0] = rows
            self._seats = list(requests), bucket
        for name in ("ids", "positions", "lengths"):
            host[name][rows:bucket] = host[name][rows - 1]

    def _captured(self, capture: Capture, variant: Variant) -> Replay:
        """Capture the forward; what its trial run counts is taken back."""
        meter = self._selector.meter if isinstance(self._selector, MeteredSelector) else None
        before = None if meter is None else meter.snapshot()
        replay = capture(lambda: self._forward(variant))
        if meter is not None and before is not None:
            meter.restore(before)
        return replay

    @property
    def _counts_listed(self) -> bool:
        return self._whole is not None or self._whole_heads is not None

    def _forward(self, variant: Variant) -> Tensor:
        """Logits fp32 `[rows, vocab_size]`; each row's likeliest id goes to `_picked`."""
        self._tell(variant)
        rows, device = variant.rows, self._inputs.device
        if isinstance(self._selector, MeteredSelector):
            self._selector.meter.live = device["live"]
        deferred = None
        if self._lazy is not None:
            deferred = self._lazy.deferral(variant.kind, device["slots"][:rows])
        batch = Batch(
            device["ids"][:rows],
            device["positions"][:rows],
            device["block_table"][:rows],
            device["lengths"][:rows],
            deferred=deferred,
        )
        logits = self._model.forward(batch, self._cache, self._selector, self._ops)
        if self._counts_listed and isinstance(self._selector, PlanSelector):
            self._selector.count_listed(rows, out=self._listed)
        logits = logits[:, : self._vocab].contiguous()
        self._picked.take_likeliest(logits)
        return logits
