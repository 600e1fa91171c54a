"""From timed steps to a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median

from dejavu.bench.arms import ArmInfo, Decoded
from dejavu.bench.backend import Backend
from dejavu.bench.forced import Forced, default_rank
from dejavu.bench.machine import Machine, Origin
from dejavu.bench.options import BenchOptions
from dejavu.bench.result import ArmResult, BenchResult, Conditions, Density, Missing
from dejavu.bench.spread import Spread
from dejavu.bench.subject import RANDOM_NOTICE, Subject, weights_notice
from dejavu.config import ModelConfig
from dejavu.sparsity.accounting import LayerReads, dense_bytes
from dejavu.sparsity.policy import Dense, Selector

_BUSY = 0.25  # load average over cores, before the run


def summarize(
    subject: Subject,
    options: BenchOptions,
    arms: Sequence[ArmInfo],
    decoded: Sequence[Sequence[Decoded]],
    missing: list[Missing],
    *,
    selectors: Mapping[str, Selector],
    backend: Backend,
    prompt_tokens: int,
    bandwidth: float,
    started: Origin,
) -> BenchResult:
    """decoded: the turns of each arm; the first arm is the dense one. selectors: of our arms, by
    name. bandwidth: GB/s."""
    machine = backend.machine
    config = subject.loaded.model.config
    total = dense_bytes(subject.loaded.model.weights)
    resident = total < 4 * machine.last_level_cache
    roofline = None if resident else total / bandwidth / 1e6
    spreads = [Spread.of(milliseconds(turns, options.batch)) for turns in decoded]
    fed = subject.random
    results = []
    for info, turns, spread in zip(arms, decoded, spreads, strict=True):
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
                of_bandwidth_then=None if resident else _of_bandwidth_then(turns),
                of_roofline=None if roofline is None else roofline / spread.median,
                faster_than={
                    other.name: theirs.median / spread.median
                    for other, theirs in zip(arms, spreads, strict=True)
                    if other is not info
                },
                density=_density(
                    selectors.get(info.name), config, turns, size * options.batch / total
                ),
                agreeing=None if fed else _agreeing(turns[0], decoded[0][0]),
                lopsided=lopsided(info, arms[0]),
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
            weights=weights_notice(subject),
            dtype=subject.loaded.dtype,
            device=str(backend.device),
            threads=backend.threads,
            isa=backend.isa,
            batch=options.batch,
            prompt_tokens=prompt_tokens,
            new_tokens=options.new_tokens,
            skipped=options.skipped,
            repeats=options.repeats,
            sampling="greedy; the tokens read are random" if fed else "greedy",
            rank=default_rank(config, backend.device) if options.rank is None else options.rank,
            head_rank=options.head_rank,
            look_ahead=options.look_ahead,
            cuts=backend.cuts,
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


def milliseconds(turns: Sequence[Decoded], batch: int) -> list[float]:
    """ms a token of every timed step of the turns."""
    return [1e3 * seconds / batch for turn in turns for seconds in turn.seconds]


def _of_bandwidth_then(turns: Sequence[Decoded]) -> float | None:
    shares = [
        turn.step_bytes / median(turn.seconds) / 1e9 / turn.bandwidth
        for turn in turns
        if turn.bandwidth is not None
    ]
    return median(shares) if shares else None


def _density(
    selector: Selector | None, config: ModelConfig, turns: Sequence[Decoded], share: float
) -> Density | None:
    """What one of our arms read; share: of the dense model's bytes. None where nobody counted."""
    neurons, groups, layers = (
        config.intermediate_size,
        config.num_key_value_heads,
        config.num_hidden_layers,
    )
    if isinstance(selector, Dense):
        reads = [[LayerReads(neurons, neurons, groups)] * layers]
    else:
        reads = [turn.reads for turn in turns if turn.reads is not None]
    if not reads:
        return None
    listed = _shares([[_or(r.neurons, neurons) for r in turn] for turn in reads], neurons)
    active = _shares(
        [[_or(r.active, _or(r.neurons, neurons)) for r in turn] for turn in reads], neurons
    )
    used = _shares([[_or(r.groups, groups) for r in turn] for turn in reads], groups)
    by_row = [
        [
            count if read.neurons is not None else neurons
            for count, read in zip(turn.used, turn.reads, strict=True)
        ]
        for turn in turns
        if turn.used is not None and turn.reads is not None
    ]
    target = selector.target if isinstance(selector, Forced) else None
    return Density(
        neurons=fmean(listed),
        active=fmean(active),
        groups=fmean(used),
        bytes=share,
        neurons_by_layer=listed,
        neurons_of_a_row=fmean(_shares(by_row, neurons)) if by_row else 1.0,
        asked=None if target is None else target.neurons,
        asked_groups=None if target is None else target.heads,
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
    if not machine.caches and machine.gpu is None:
        found.append(
            f"the size of the last-level cache is not known; {machine.last_level_cache >> 20} MiB "
            "are assumed"
        )
    if machine.gpu is None and started.load_average > _BUSY * machine.cores:
        found.append(
            f"the machine was busy (load average {started.load_average:.1f} before the run): "
            "the times are too long"
        )
    return found
