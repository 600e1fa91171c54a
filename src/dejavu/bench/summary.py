"""From timed steps to a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, median

from dejavu.bench.arms import Arm, ArmInfo, Decoded, EngineArm
from dejavu.bench.forced import Forced
from dejavu.bench.machine import Machine, Origin
from dejavu.bench.options import BenchOptions
from dejavu.bench.result import ArmResult, BenchResult, Conditions, Density, Missing
from dejavu.bench.spread import Spread
from dejavu.bench.subject import RANDOM_NOTICE, Subject
from dejavu.kernels.native import NativeOps
from dejavu.sparsity.accounting import LayerReads, dense_bytes
from dejavu.sparsity.policy import Dense

_BUSY = 0.25  # load average over cores, before the run


def summarize(
    subject: Subject,
    options: BenchOptions,
    arms: Sequence[Arm],
    decoded: Sequence[Sequence[Decoded]],
    missing: list[Missing],
    *,
    ops: NativeOps,
    prompt_tokens: int,
    bandwidth: float,
    machine: Machine,
    started: Origin,
) -> BenchResult:
    """decoded: the turns of each arm; the first arm is the dense one. bandwidth: GB/s."""
    config = subject.loaded.model.config
    total = dense_bytes(subject.loaded.model.weights)
    resident = total < 4 * machine.last_level_cache
    roofline = None if resident else total / bandwidth / 1e6
    spreads = [_spread(turns, options.batch) for turns in decoded]
    fed = subject.random
    results = []
    for arm, turns, spread in zip(arms, decoded, spreads, strict=True):
        info = arm.info
        size = fmean(turn.step_bytes for turn in turns) / options.batch
        rate = size / spread.median / 1e6
        results.append(
            ArmResult(
                name=info.name,
                program=info.program,
                dtype=info.dtype,
                threads=info.threads,
                recorded=info.recorded,
                ms_per_token=spread,
                repeat_medians=[1e3 * median(turn.seconds) / options.batch for turn in turns],
                tokens_per_second=1e3 / spread.median,
                bytes_per_token=size,
                gb_per_second=rate,
                of_bandwidth=None if resident else rate / bandwidth,
                of_roofline=None if roofline is None else roofline / spread.median,
                faster_than={
                    other.info.name: theirs.median / spread.median
                    for other, theirs in zip(arms, spreads, strict=True)
                    if other is not arm
                },
                density=_density(arm, turns, size * options.batch / total),
                agreeing=None if fed else _agreeing(turns[0], decoded[0][0]),
                lopsided=lopsided(info, arms[0].info),
                notes=list(info.notes),
            )
        )
    return BenchResult(
        name=subject.name,
        random_weights=subject.random,
        dense_bytes=total,
        cache_resident=resident,
        read_bandwidth=bandwidth,
        roofline_ms=roofline,
        arms=results,
        missing=missing,
        warnings=_warnings(subject, resident, started, machine),
        conditions=Conditions(
            shape=asdict(config),
            dtype=subject.loaded.dtype,
            threads=ops.threads,
            isa=ops.isa,
            batch=options.batch,
            prompt_tokens=prompt_tokens,
            new_tokens=options.new_tokens,
            skipped=options.skipped,
            repeats=options.repeats,
            sampling="greedy; the tokens read are random" if fed else "greedy",
            seed=options.seed,
        ),
        machine=machine,
        origin=started,
    )


def lopsided(arm: ArmInfo, dense: ArmInfo) -> list[str]:
    """In what, beside the selector or the program, an arm differs from the dense one."""
    found = []
    if arm.dtype != dense.dtype:
        found.append(f"weights in {arm.dtype}, dense arm in {dense.dtype}")
    if arm.threads != dense.threads:
        found.append(f"{arm.threads} threads, dense arm {dense.threads}")
    if None not in (arm.recorded, dense.recorded) and arm.recorded != dense.recorded:
        said = {True: "recorded", False: "not recorded"}
        found.append(f"steps {said[bool(arm.recorded)]}, dense arm's {said[bool(dense.recorded)]}")
    return found


def _spread(turns: Sequence[Decoded], batch: int) -> Spread:
    """ms a token over the steps of all turns."""
    return Spread.of([1e3 * seconds / batch for turn in turns for seconds in turn.seconds])


def _density(arm: Arm, turns: Sequence[Decoded], share: float) -> Density | None:
    """What one of our arms read; share: of the dense model's bytes."""
    if not isinstance(arm, EngineArm):
        return None
    config = arm.model.config
    neurons, groups, layers = (
        config.intermediate_size,
        config.num_key_value_heads,
        config.num_hidden_layers,
    )
    every = LayerReads(neurons, neurons, groups)
    if isinstance(arm.selector, Dense):
        reads = [[every] * layers]
    else:
        reads = [turn.reads for turn in turns if turn.reads is not None]
    if not reads:
        return None
    listed = _shares([[_or(r.neurons, neurons) for r in turn] for turn in reads], neurons)
    active = _shares(
        [[_or(r.active, _or(r.neurons, neurons)) for r in turn] for turn in reads], neurons
    )
    used = _shares([[_or(r.groups, groups) for r in turn] for turn in reads], groups)
    return Density(
        neurons=fmean(listed),
        active=fmean(active),
        groups=fmean(used),
        bytes=share,
        neurons_by_layer=listed,
        asked=arm.selector.density if isinstance(arm.selector, Forced) else None,
    )


def _or(count: float | None, everything: float) -> float:
    return everything if count is None else count


def _shares(counts: list[list[float]], of: int) -> list[float]:
    """Mean over turns of each layer's count, as a share."""
    return [fmean(layer) / of for layer in zip(*counts, strict=True)]


def _agreeing(turn: Decoded, dense: Decoded) -> int:
    """Tokens before the first difference."""
    pairs = zip(turn.token_ids, dense.token_ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(turn.token_ids))


def _warnings(subject: Subject, resident: bool, started: Origin, machine: Machine) -> list[str]:
    found = [RANDOM_NOTICE] if subject.random else []
    if resident:
        found.append("cache-resident: the weights are under 4 times the last-level cache")
    if not machine.caches:
        found.append(
            f"the size of the last-level cache is not known; {machine.last_level_cache >> 20} MiB "
            "are assumed"
        )
    if started.load_average > _BUSY * machine.cores:
        found.append(
            f"the machine was busy (load average {started.load_average:.1f} before the run): "
            "the times are too long"
        )
    return found
