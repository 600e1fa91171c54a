"""One decode step of B sequences on a GPU: a captured graph over fixed buffers for every bucket.

What changes from step to step (ids, positions, lengths, block tables) lies in one piece of memory
that every graph reads in place. A step of B rows runs the smallest graph with at least B; the rows
beyond are padding: the last row again, which selects what is selected and writes what is written.
The graph ends with each row's likeliest id, so a greedy step fetches 8 bytes a row and waits once.
With them come the numbers of neurons that each layer listed, by which `WholeLayers` chooses the
graph of a later step: there is one for each set of layers that are computed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dejavu.engine.device_sampling import draw_rows
from dejavu.engine.lazy_rows import KeyValues, LazyRows
from dejavu.engine.next_step import PICKED, Begun, following, may_follow
from dejavu.engine.sampling import Picked, Sampler, pick
from dejavu.engine.scheduler import Request
from dejavu.engine.staging import Staging
from dejavu.engine.whole_layers import Layers, WholeLayers
from dejavu.kernels.device import on
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.kv_cache import KVCache, blocks_for
from dejavu.predictor.selector import PlanSelector
from dejavu.sparsity.meter import MeteredSelector
from dejavu.sparsity.policy import Selector, Site

BUCKETS = (1, 2, 4, 8, 16)
_NOT_FINITE = -1  # in place of the id of a row whose logits are not

Replay = Callable[[], Tensor]
Capture = Callable[[Replay], Replay]
"""From a forward to what repeats it: reads the same inputs, returns logits fp32 `[bucket, V]`."""


@runtime_checkable
class Picking(Protocol):
    """Ops with a kernel for the end of a step."""

    def pick(self, logits: Tensor, out: Tensor) -> None:
        """out int64 `[N]` = each row's likeliest id of fp32 `[N, V]`; `_NOT_FINITE` where one of
        its logits is not."""
        ...

    def follow(self, ids: Tensor, picked: Tensor) -> None:
        """Where ids, int64 `[B]`, are below 0: those picked, int64 `[N]`, row for row and from N on
        the last one's; 0 where that is below 0, too."""
        ...


class CudaGraphs:
    """Captures forwards into CUDA graphs that share one pool of memory.

    They may: no replay leaves anything behind but the results, which stay referenced, and replays
    run one after the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, forward: Replay) -> Replay:
        with on(self._device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            # Once outside of the capture: kernels are compiled and tuned, workspaces made.
            side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                forward()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads (a server loads, or answers on another GPU) may go on meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
            ):
                logits = forward()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def capture_for(ops: Ops, device: torch.device) -> Capture | None:
    """How steps of these ops are captured; None: they are not (plain PyTorch waits for the device).

    Without a GPU a forward stands for its graph: it runs again, over the same padded rows.
    """
    if isinstance(ops, TorchOps):
        return None
    return CudaGraphs(device) if device.type == "cuda" else lambda forward: forward


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
        self._draws = Staging(
            model.device,
            {
                "uniform": ((most,), torch.float64),
                "top_k": ((most,), torch.int64),
                "temperature": ((most,), torch.float32),
                "top_p": ((most,), torch.float32),
                "min_p": ((most,), torch.float32),
            },
        )
        self._picked = torch.zeros(most, dtype=torch.int64, device=model.device)
        self._fetched = torch.zeros(most, dtype=torch.int64, pin_memory=model.device.type == "cuda")
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
        self._graphs: dict[tuple[int, KeyValues, Layers, Layers], Replay] = {}

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
        if isinstance(self._selector, PlanSelector):  # the step before may have had others
            self._selector.whole, self._selector.whole_heads = begun.whole, begun.whole_heads
        if isinstance(self._selector, MeteredSelector):
            c = self._model.config
            whole = {(Site.NEURONS, layer): c.intermediate_size for layer in begun.whole}
            whole |= {(Site.HEADS, layer): c.num_key_value_heads for layer in begun.whole_heads}
            self._selector.meter.stepped(rows, lazy=begun.kind == "used", whole=whole)
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
            self._draw(samplers)
            self._fetched.copy_(self._picked, non_blocking=True)
            if self._counts_listed:
                self._fetched_listed.copy_(self._listed, non_blocking=True)
            if self._ready is not None:
                self._ready.record()
            if self.overlapped and may_follow(running.requests, samplers):
                self._begun = self._begin(running.requests, following(running.requests), 1)
            if self._ready is not None:
                self._ready.synchronize()
        neurons, heads = self._fetched_listed.numpy()
        if self._whole is not None:
            self._whole.note(running.bucket, neurons, running.whole)
        if self._whole_heads is not None and running.kind == "all":
            self._whole_heads.note(running.bucket, heads, running.whole_heads)
        found: list[Picked] = []
        for row, (sampler, token) in enumerate(
            zip(samplers, self._fetched[:rows].tolist(), strict=True)
        ):
            if sampler is None or token == _NOT_FINITE:
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

    def _draw(self, samplers: Sequence[Sampler | None]) -> None:
        """Replace the likeliest ids by drawn ones where a sampler wants that."""
        rows = len(samplers)
        drawing = [
            (row, s)
            for row, s in enumerate(samplers)
            if s is not None and s.plain and not s.params.greedy
        ]
        if not drawing:
            return
        host, device = self._draws.host(), self._draws.device
        host["temperature"][:rows] = 0.0
        for row, sampler in drawing:
            p = sampler.params
            host["uniform"][row] = sampler.uniform()
            host["temperature"][row], host["top_k"][row] = p.temperature, p.top_k or self._vocab
            host["top_p"][row], host["min_p"][row] = p.top_p, p.min_p
        self._draws.send()
        names = ("temperature", "top_k", "top_p", "min_p", "uniform")
        ids = draw_rows(self._logits, *(device[name][:rows] for name in names))
        picked = self._picked[:rows]
        drawn = (device["temperature"][:rows] > 0) & (picked != _NOT_FINITE)
        picked.copy_(torch.where(drawn, ids, picked))

    def _begin(self, requests: Sequence[Request], ids: list[int], more: int) -> Begun | None:
        """Send off a step of requests that are `more` tokens longer by then. ids: that it reads;
        `PICKED`: what the step before picks for the row. None where that one has no graph yet."""
        rows = len(requests)
        lengths = [r.length + more for r in requests]
        with on(self._model.device):
            bucket = self.width(rows)
            kind: KeyValues = "all"
            if self._lazy is not None:
                kind = self._lazy.kind(requests)
            whole = Layers() if self._whole is None else self._whole.of(bucket)
            whole_heads = Layers()
            if self._whole_heads is not None and kind == "all":  # else keys are owed
                whole_heads = self._whole_heads.of(bucket)
            key = bucket, kind, whole, whole_heads
            if more and key not in self._graphs:
                return None
            self._write(requests, bucket, ids, lengths)
            if self._lazy is not None:
                slots = self._inputs.host()["slots"]
                slots[:rows] = self._lazy.seat(requests)
                slots[rows:bucket] = slots[rows - 1]
                self._lazy.stepped(requests, kind)
            self._inputs.send()
            if PICKED in ids:
                self._follow(bucket, rows)
            self._model.prepare(max(lengths))
            if self._capture is None:
                logits = self._forward(*key)
            else:
                graph = self._graphs.get(key)
                if graph is None:
                    graph = self._graphs[key] = self._captured(*key)
                logits = graph()
        return Begun(list(requests), lengths, ids, *key, logits)

    def _follow(self, bucket: int, rows: int) -> None:
        """Put what was picked where ids are `PICKED`."""
        ids, picked = self._inputs.device["ids"][:bucket], self._picked[:rows]
        if isinstance(self._ops, Picking):
            self._ops.follow(ids, picked)
        else:
            padded = torch.cat([picked, picked[-1:].expand(bucket - rows)]).clamp_min(0)
            ids.copy_(torch.where(ids < 0, padded, ids))

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

    def _captured(self, rows: int, kind: KeyValues, whole: Layers, whole_heads: Layers) -> Replay:
        """Capture the forward; what its trial run counts is taken back."""
        assert self._capture is not None
        meter = self._selector.meter if isinstance(self._selector, MeteredSelector) else None
        before = None if meter is None else meter.snapshot()
        replay = self._capture(lambda: self._forward(rows, kind, whole, whole_heads))
        if meter is not None and before is not None:
            meter.restore(before)
        return replay

    @property
    def _counts_listed(self) -> bool:
        return self._whole is not None or self._whole_heads is not None

    def _forward(self, rows: int, kind: KeyValues, whole: Layers, whole_heads: Layers) -> Tensor:
        """Logits fp32 `[rows, vocab_size]`; each row's likeliest id goes to `_picked`."""
        if isinstance(self._selector, PlanSelector):
            self._selector.whole, self._selector.whole_heads = whole, whole_heads
        device = self._inputs.device
        if isinstance(self._selector, MeteredSelector):
            self._selector.meter.live = device["live"]
        batch = Batch(
            device["ids"][:rows],
            device["positions"][:rows],
            device["block_table"][:rows],
            device["lengths"][:rows],
            deferred=None
            if self._lazy is None
            else self._lazy.deferral(kind, device["slots"][:rows]),
        )
        logits = self._model.forward(batch, self._cache, self._selector, self._ops)
        if self._counts_listed and isinstance(self._selector, PlanSelector):
            self._selector.count_listed(rows, out=self._listed)
        logits = logits[:, : self._vocab].contiguous()
        if isinstance(self._ops, Picking):
            self._ops.pick(logits, self._picked[:rows])
            return logits
        lowest, highest = logits.aminmax(dim=1)
        # Infinite or NaN where any logit is: one comparison tells.
        broken = (highest - lowest < torch.inf).logical_not_()
        # Not torch.where, which may copy its scalar to the device: no graph can hold that.
        self._picked[:rows] = self._ops.argmax(logits).masked_fill(broken, _NOT_FINITE)
        return logits
