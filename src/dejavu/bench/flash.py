"""Decoding with neurons from a file against everything in memory and against reading it all.

Every arm replays the same real text, one token a step, so that neighbouring selections overlap as
they do on text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dejavu.bench.disk import measure_disk
from dejavu.errors import DejavuError
from dejavu.flash.ops import FlashOps
from dejavu.flash.store import FlashStore
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.native import NativeOps
from dejavu.kernels.ops import Activation, Ops, Projection
from dejavu.kernels.selection import Selection
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.kv_cache import blocks_for
from dejavu.sparsity.policy import Dense, Selector

__all__ = ["FlashArm", "NaiveOps", "bench_flash"]


@dataclass(frozen=True)
class FlashArm:
    """One way to decode. Bytes are means over the timed tokens.

    wanted_bytes: of the neurons that the step named. fresh_bytes: of those, the ones that had to be
    read. read_bytes: what the device read for them. fresh: fresh_bytes over the MLP's bytes.
    hit_rate: of the neurons named. gigabytes_per_second: while reads were outstanding.
    """

    name: str
    ms_per_token: float
    wanted_bytes: float = 0.0
    fresh_bytes: float = 0.0
    read_bytes: float = 0.0
    fresh: float = 0.0
    hit_rate: float = 1.0
    gigabytes_per_second: float | None = None


class NaiveOps(NativeOps):
    """Reads every layer's MLP in full, with direct reads, for every token; nothing is kept."""

    def __init__(self, store: FlashStore, threads: int | None = None) -> None:
        super().__init__(threads)
        self._store = store

    def mlp(
        self,
        x: Tensor,
        up: Projection,
        gate: Projection | None,
        down: Matrix,
        down_bias: Tensor | None,
        activation: Activation,
        selection: Selection | None,
        residual: Tensor | None,
    ) -> Tensor:
        up, gate, down = self._store.read_mlp(up, gate, down)
        return super().mlp(x, up, gate, down, down_bias, activation, selection, residual)


def bench_flash(
    memory: DecoderLM,
    outside: DecoderLM,
    store: FlashStore,
    selector: Callable[[], Selector],
    ids: list[int],
    *,
    warm: int = 256,
    naive: int = 8,
    threads: int | None = None,
) -> dict[str, Any]:
    """Replay a text: in memory, from the file, and (its first `naive` tokens) read in full.

    memory, outside: the same model with its MLPs in memory and in `store`. selector: a fresh one
    for every arm. ids: at most the context. warm: tokens before the clock and the counters start.

    Raises DejavuError where the logits of the first two arms differ in a bit.
    """
    bundle = store.bundle
    seconds, truth = _replay(memory, selector(), NativeOps(threads), ids, warm, lambda: None)

    def reset() -> None:
        store.cache.reset_counters()
        store.reader.reset_counters()

    taken, found = _replay(outside, selector(), FlashOps(store, threads), ids, warm, reset)
    if not torch.equal(truth, found):
        raise DejavuError("neurons from the file give other logits than from memory")
    tokens = len(ids) - warm
    wanted, missed = store.cache.counters()
    reads = store.reader.counters()
    record = bundle.record_bytes
    flash = FlashArm(
        "flash",
        1e3 * taken / tokens,
        wanted * record / tokens,
        missed * record / tokens,
        reads.bytes_read / tokens,
        missed * record / tokens / bundle.mlp_bytes,
        1 - missed / max(wanted, 1),
        reads.gigabytes_per_second,
    )
    store.reader.reset_counters()
    spent, _ = _replay(outside, Dense(), NaiveOps(store, threads), ids[: naive + 1], 1, reset)
    reads = store.reader.counters()
    everything = FlashArm(
        "read in full",
        1e3 * spent / naive,
        bundle.mlp_bytes,
        bundle.mlp_bytes,
        reads.bytes_read / naive,
        1.0,
        0.0,
        reads.gigabytes_per_second,
    )
    arms = [FlashArm("memory", 1e3 * seconds / tokens), flash, everything]
    return {
        "arms": [asdict(arm) for arm in arms],
        "tokens": tokens,
        "neurons_in_memory": store.cache.slots,
        "neurons": sum(bundle.neurons),
        "direct": store.reader.direct,
        "backend": store.reader.backend,
        "device": [asdict(rate) for rate in measure_disk(bundle)],
    }


def _replay(
    model: DecoderLM,
    selector: Selector,
    ops: Ops,
    ids: list[int],
    warm: int,
    start: Callable[[], None],
) -> tuple[float, Tensor]:
    """Seconds of the tokens after the first `warm`, and the last token's logits."""
    cache = model.new_cache(len(ids))
    model.prepare(len(ids))
    blocks = torch.arange(blocks_for(len(ids)), dtype=torch.int32)[None]
    batch = Batch(
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        blocks,
        torch.zeros(1, dtype=torch.int32),
    )
    program = None
    if isinstance(ops, NativeOps) and not isinstance(ops, NaiveOps) and selector.capturable:
        recorder = ops.recorder()
        logits = model.forward(batch, cache, selector, recorder)
        program = recorder.program
    began = time.perf_counter()
    for place, token in enumerate(ids):
        if place == warm:
            start()
            began = time.perf_counter()
        batch.ids[0], batch.positions[0], batch.lengths[0] = token, place, place + 1
        if program is None:
            logits = model.forward(batch, cache, selector, ops)
        else:
            program.run()
    return time.perf_counter() - began, logits.clone()
