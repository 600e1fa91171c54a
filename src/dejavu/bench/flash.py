"""Decoding with neurons from a file against what else could be done with the same memory.

Every arm replays the same tokens, one a step: real text with a trained model and its plan, or, for
a shape with random weights, a recorded trace of selections (`bench.trace`). Arms: everything in
memory; from the file; every token reading all of the MLPs with direct reads; all of it in a mapped
file. The first two compute the same selections and must agree in every bit, and so must the last
two, which are dense, with the dense model in memory.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from dejavu.bench.disk import DiskRate, measure_disk, measure_random, measure_reader
from dejavu.bench.mapped import MappedNeurons
from dejavu.bench.spread import Spread
from dejavu.bench.trace import Replayed, record_trace
from dejavu.errors import DejavuError
from dejavu.flash.ops import FlashOps, WholeOps
from dejavu.flash.store import FlashStore
from dejavu.kernels.native import NativeOps
from dejavu.kernels.ops import Ops
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.kv_cache import blocks_for
from dejavu.sparsity.policy import Dense, Selector
from dejavu.weights.bundle import Bundle

__all__ = ["FlashArm", "bench_flash", "true_sets"]


@dataclass(frozen=True)
class FlashArm:
    """One way to decode. Bytes are means over the timed tokens.

    ms_per_token: mean; p10, median, p90 over tokens beside it. wanted_bytes: of the neurons that
    the step named. fresh_bytes: of those, the ones that had to be read. read_bytes: what the device
    read for them. fresh: fresh_bytes over the MLP's bytes. hit_rate: of the neurons named.
    reads: of the device. depth: of them outstanding, mean while any were. busy_ms: some were
    outstanding. wait_ms: the step stood still for them. gigabytes_per_second: while reads were
    outstanding. logits: SHA-256 over those of all timed tokens; tokens: the likeliest of each.
    """

    name: str
    ms_per_token: float
    spread: Spread
    logits: str
    tokens: list[int]
    wanted_bytes: float = 0.0
    fresh_bytes: float = 0.0
    read_bytes: float = 0.0
    fresh: float = 0.0
    hit_rate: float = 1.0
    reads: float = 0.0
    depth: float | None = None
    busy_ms: float = 0.0
    wait_ms: float = 0.0
    gigabytes_per_second: float | None = None
    notes: str = ""


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
    seconds: float = 1.0,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Replay tokens in every arm.

    memory, outside: the same model with its MLPs in memory and in `store`. selector: a fresh one
    for every arm. ids: at most the context. warm: tokens before the clock and the counters start.
    naive: tokens that the arms which read everything get, after one to warm up. seconds: of each
    measurement of the disk. tell: gets the name of what runs next.

    Raises DejavuError where two arms that compute the same differ in a bit.
    """
    bundle = store.bundle
    timed = len(ids) - warm
    tell("in memory")
    in_memory = _replay("memory", memory, selector(), NativeOps(threads), ids, warm)
    tell("from flash")
    flash = _counted(store, outside, selector(), FlashOps(store, threads), ids, warm, "flash")
    tell("the device and the reader")
    limit = store.reader.queue_depth
    random, sequential = measure_disk(bundle, depth=limit, seconds=seconds)
    # A layer asks for its neurons at once and waits: on average fewer reads are outstanding.
    held, _ = measure_disk(bundle, depth=max(1, round(flash.depth or limit)), seconds=seconds)
    beside, loaded = _beside(memory, selector(), bundle, ids, warm, threads, held.depth, seconds)
    reader = measure_reader(bundle, depth=limit, seconds=seconds)
    few = ids[: naive + 1]
    tell("read in full")
    everything = _counted(store, outside, Dense(), WholeOps(store, threads), few, 1, "read in full")
    tell("mapped")
    mapped = _mapped(outside, store, few, threads)
    dense = _replay("dense in memory", memory, Dense(), NativeOps(threads), few, 1)
    for one, other in ((in_memory, flash), (dense, everything), (dense, mapped)):
        if one.logits != other.logits:
            raise DejavuError(f"arm {other.name!r} gives other logits than arm {one.name!r}")
    whole_ms = 1e3 * bundle.mlp_bytes / (sequential.gigabytes_per_second * 1e9)
    arms = (in_memory, flash, everything, mapped, dense)
    return {
        "arms": [asdict(arm) for arm in arms],
        "tokens": timed,
        "warm": warm,
        "neurons_in_memory": store.cache.slots,
        "neurons": sum(bundle.neurons),
        "mlp_bytes": bundle.mlp_bytes,
        "record_bytes": bundle.record_bytes,
        "direct": store.reader.direct,
        "backend": store.reader.backend,
        "depth": store.reader.queue_depth,
        "device": [asdict(rate) for rate in (random, held, sequential)],
        "device_beside_the_model": asdict(loaded),
        "reader": asdict(reader),
        "reader_over_device": reader.reads_per_second / random.reads_per_second,
        "same_bits": {"flash = memory": True, "read in full = mapped = dense in memory": True},
        "bound": _bound(in_memory, flash, held),
        "bound_at_the_most_outstanding": _bound(in_memory, flash, random),
        "bound_beside_each_other": _bound(beside, flash, loaded),
        "times_as_fast_as": {
            "read in full": everything.ms_per_token / flash.ms_per_token,
            "all MLP bytes at the device's sequential rate": whole_ms / flash.ms_per_token,
            "mapped": mapped.ms_per_token / flash.ms_per_token,
        },
    }


def _beside(
    model: DecoderLM,
    selector: Selector,
    bundle: Bundle,
    ids: list[int],
    warm: int,
    threads: int | None,
    depth: int,
    seconds: float,
) -> tuple[FlashArm, DiskRate]:
    """The model in memory and the disk's random reads at the same time: what both come to when
    neither waits for the other, but they share cores, memory and what carries the disk's data.
    The disk reads all the time, perhaps more for a token than the token would need."""
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(measure_random, bundle, depth=depth, seconds=seconds)
        arms = []
        while not reading.done():
            arms.append(
                _replay("memory", model, selector, NativeOps(threads), ids, warm, stop=reading.done)
            )
    tokens = sum(len(arm.tokens) for arm in arms)
    mean = sum(arm.ms_per_token * len(arm.tokens) for arm in arms) / tokens
    return replace(arms[0], ms_per_token=mean), reading.result()


def true_sets(
    memory: DecoderLM,
    outside: DecoderLM,
    store: FlashStore,
    windows: list[list[int]],
    *,
    warm: int = 256,
    threads: int | None = None,
) -> dict[str, Any]:
    """What the cache makes of the neurons that are not zero on a text, all of them and no others.

    The sets of each window of token ids are recorded in a dense run and replayed through the file
    and through memory. Means over the tokens after the first `warm` of each window.

    Raises DejavuError where both differ in a bit.
    """
    arms, density = [], 0.0
    for ids in windows:
        trace = record_trace(memory, ids, memory.config, len(ids))
        density += trace.density / len(windows)
        made = partial(Replayed, memory.config, trace, look_ahead=0.0)
        flash = _counted(store, outside, made(), FlashOps(store, threads), ids, warm, "flash")
        if flash.logits != _replay("memory", memory, made(), NativeOps(threads), ids, warm).logits:
            raise DejavuError("true active sets give other logits from the file than from memory")
        arms.append(flash)

    def mean(field: str) -> float:
        values: list[float] = [getattr(arm, field) for arm in arms]
        return sum(values) / len(values)

    return {
        "tokens": sum(len(ids) - warm for ids in windows),
        "density": density,
        "same_bits": True,
        **{field: mean(field) for field in ("fresh", "fresh_bytes", "read_bytes", "hit_rate")},
    }


def _bound(in_memory: FlashArm, flash: FlashArm, device: DiskRate) -> dict[str, float]:
    """What no overlap can beat: computing in memory, or the reads alone, whichever is longer.

    By number of reads, not by bytes: neighbours that became one count as one of the smallest size.
    """
    read_ms = 1e3 * flash.reads / device.reads_per_second
    return {
        "memory_ms": in_memory.ms_per_token,
        "read_ms": read_ms,
        "depth": device.depth,
        "flash_over_larger": flash.ms_per_token / max(in_memory.ms_per_token, read_ms),
        "median_over_larger": flash.spread.median / max(in_memory.spread.median, read_ms),
    }


def _counted(
    store: FlashStore,
    model: DecoderLM,
    selector: Selector,
    ops: Ops,
    ids: list[int],
    warm: int,
    name: str,
) -> FlashArm:
    """`_replay` with what was wanted and read for the timed tokens."""

    def reset() -> None:
        store.cache.reset_counters()
        store.reader.reset_counters()

    arm = _replay(name, model, selector, ops, ids, warm, start=reset)
    tokens, record = len(ids) - warm, store.bundle.record_bytes
    wanted, missed = store.cache.counters()
    if isinstance(ops, WholeOps):  # past the cache
        wanted = missed = tokens * sum(store.bundle.neurons)
    reads = store.reader.counters()
    return replace(
        arm,
        wanted_bytes=wanted * record / tokens,
        fresh_bytes=missed * record / tokens,
        read_bytes=reads.bytes_read / tokens,
        fresh=missed * record / tokens / store.bundle.mlp_bytes,
        hit_rate=1 - missed / max(wanted, 1),
        reads=reads.reads / tokens,
        depth=reads.depth,
        busy_ms=1e3 * reads.busy_seconds / tokens,
        wait_ms=1e3 * reads.wait_seconds / tokens,
        gigabytes_per_second=reads.gigabytes_per_second,
    )


def _mapped(model: DecoderLM, store: FlashStore, ids: list[int], threads: int | None) -> FlashArm:
    """Dense, from a mapping of which no more stays in memory than the store may keep."""
    bundle = store.bundle
    with MappedNeurons(bundle, store.cache.slots * bundle.record_bytes) as mapped:
        blocks = []
        for layer, block in enumerate(model.weights.blocks):
            parts = {
                part: replace(getattr(block.mlp, part), weight=mapped.matrices[name])
                for part in bundle.parts
                for name in [f"layers.{layer}.mlp.{part}.weight"]
            }
            blocks.append(replace(block, mlp=replace(block.mlp, **parts)))
        over = DecoderLM(
            model.config, replace(model.weights, blocks=tuple(blocks)), model.cache_dtype
        )
        ops = NativeOps(threads)
        arm = _replay("mapped", over, Dense(), ops, ids, 1, between=mapped.drop)
        mapped.drop()
        kept = mapped.residency()
    dropped = bundle.mlp_bytes - kept.locked
    notes = (
        f"no control group: {kept.locked / 1e6:.0f} MB of the mapping stay locked in memory, the "
        f"rest is dropped from it and from the page cache before every token "
        f"({kept.after_dropping / 1e6:.0f} MB were resident after that)"
    )
    return replace(
        arm,
        wanted_bytes=float(bundle.mlp_bytes),
        read_bytes=float(dropped),
        fresh_bytes=float(dropped),
        fresh=dropped / bundle.mlp_bytes,
        hit_rate=kept.locked / bundle.mlp_bytes,
        notes=notes,
    )


def _replay(
    name: str,
    model: DecoderLM,
    selector: Selector,
    ops: Ops,
    ids: list[int],
    warm: int,
    *,
    start: Callable[[], None] = lambda: None,
    between: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] | None = None,
) -> FlashArm:
    """Time the tokens after the first `warm`, step by step. start: called before the first of them.
    between: before each step, untimed. stop: whether to end early; those before `warm` are left
    out then, as nobody looks at the logits."""
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
    if isinstance(ops, NativeOps) and not isinstance(ops, WholeOps) and selector.capturable:
        recorder = ops.recorder()
        logits = model.forward(batch, cache, selector, recorder)
        program = recorder.program
    seconds: list[float] = []
    tokens: list[int] = []
    digest = hashlib.sha256()
    for place, token in enumerate(ids):
        if stop is not None and (place < warm or (seconds and stop())):
            continue
        if place == warm:
            start()
        batch.ids[0], batch.positions[0], batch.lengths[0] = token, place, place + 1
        if isinstance(selector, Replayed):
            selector.turn_to(place)
        between()
        began = time.perf_counter()
        if program is None:
            logits = model.forward(batch, cache, selector, ops)
        else:
            program.run()
        took = time.perf_counter() - began
        if place >= warm:
            seconds.append(1e3 * took)
            tokens.append(int(logits.argmax()))
            digest.update(logits.numpy().data)
    return FlashArm(
        name, sum(seconds) / len(seconds), Spread.of(seconds), digest.hexdigest(), tokens
    )
