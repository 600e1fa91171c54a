"""Speed of decoding, arm by arm, on one model in one run.

The arms take turns, so that whatever else the machine does meanwhile hits all of them alike. They
rest a moment between turns, until the threads of the arm before have gone to sleep.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from time import sleep

from dejavu.bench.arms import Arm, Decoded, EngineArm
from dejavu.bench.forced import Forced, force
from dejavu.bench.machine import origin, this_machine
from dejavu.bench.options import BenchOptions
from dejavu.bench.peers import open_peer
from dejavu.bench.result import BenchResult, Missing
from dejavu.bench.script import Script
from dejavu.bench.subject import Subject, make_prompts, open_subject
from dejavu.bench.summary import summarize
from dejavu.config import ModelConfig
from dejavu.errors import BackendError, InputError
from dejavu.kernels.native import NativeOps, measure_read_bandwidth
from dejavu.load import LoadedModel
from dejavu.predictor.selector import Choice, PlanSelector
from dejavu.sparsity.policy import Dense, Selector, Site

__all__ = ["BenchOptions", "bench", "bench_subject"]

Progress = Callable[[int, int], None]  # turns done, turns in all

_REST = 0.2  # seconds; libgomp gives up spinning within milliseconds
_CORRECTIONS = 4
_DENSITY_ERROR = 0.002


def bench(
    source: str | os.PathLike[str] | LoadedModel,
    selectors: Mapping[str, Selector] | None = None,
    options: BenchOptions | None = None,
    *,
    dtype: str = "auto",
    progress: Progress | None = None,
) -> BenchResult:
    """Time greedy decoding: whole steps of the engine with sampling, in ms a token.

    source: a name in `shapes.SHAPES` (random weights), a checkpoint or a loaded model.
    selectors: further arms by name, such as the levels of a plan.

    Raises InputError for options that cannot be used, and what `load_model` raises.
    """
    options = options or BenchOptions()
    subject = open_subject(source, dtype=dtype, seed=options.seed)
    return bench_subject(subject, selectors or {}, options, progress=progress)


def bench_subject(
    subject: Subject,
    selectors: Mapping[str, Selector],
    options: BenchOptions,
    *,
    progress: Progress | None = None,
) -> BenchResult:
    """`bench` of a model that is ready."""
    started, machine = origin(), this_machine()
    ops = NativeOps(options.threads, options.isa)
    script = Script(subject, options)
    arms: list[Arm] = [*_own_arms(subject, selectors, options, script, ops)]
    missing = []
    with ExitStack() as running:
        for name in options.peers:
            try:
                peer = running.enter_context(open_peer(name, subject, threads=ops.threads))
                script.play(peer, 0)
                arms.append(peer)
            except BackendError as error:
                missing.append(Missing(name, str(error)))
        size = max(1 << 28, 8 * machine.last_level_cache)
        bandwidth, decoded = _take_turns(arms, script, options, ops.threads, size, progress)
    return summarize(
        subject,
        options,
        arms,
        decoded,
        missing,
        ops=ops,
        prompt_tokens=script.prompt_tokens,
        bandwidth=bandwidth,
        machine=machine,
        started=started,
    )


def _take_turns(
    arms: Sequence[Arm],
    script: Script,
    options: BenchOptions,
    threads: int,
    size: int,
    progress: Progress | None,
) -> tuple[float, list[list[Decoded]]]:
    """The best read bandwidth in GB/s, over `size` bytes, and the turns of every arm."""
    bandwidth = 0.0
    decoded: list[list[Decoded]] = [[] for _ in arms]
    for repeat in range(options.repeats):
        sleep(_REST)
        rate = measure_read_bandwidth(threads, size=size, repeats=3)
        bandwidth = max(bandwidth, rate)
        for turn in range(len(arms)):
            place = (turn + repeat) % len(arms)  # nobody is always the one after the bandwidth
            sleep(_REST)
            decoded[place].append(script.play(arms[place], repeat))
            if progress is not None:
                progress(repeat * len(arms) + turn + 1, options.repeats * len(arms))
    return bandwidth, decoded


def _own_arms(
    subject: Subject,
    selectors: Mapping[str, Selector],
    options: BenchOptions,
    script: Script,
    ops: NativeOps,
) -> list[EngineArm]:
    """Dense first, then exact, the caller's and the forced ones, all warmed up."""
    chosen: dict[str, Selector] = {"dense": Dense()}
    config = subject.loaded.model.config
    exact = options.exact
    if exact is None:
        exact = subject.loaded.model.activation.is_sparse and not subject.random
    if exact:
        chosen["exact"] = _exact(config)
    chosen |= selectors
    chosen |= {f"forced {f.density:.4g}": f for f in _forced(subject, options, script)}
    if stray := set(options.at_once) - chosen.keys():
        raise InputError(f"at_once: no arm named {', '.join(sorted(stray))}; have {list(chosen)}")
    arms = []
    for name, selector in chosen.items():
        arm = EngineArm(
            name,
            subject.loaded,
            selector,
            ops=ops,
            batch=options.batch,
            max_model_len=script.max_model_len,
            recorded=name not in options.at_once,
        )
        script.play(arm, 0)
        if isinstance(selector, Forced):
            _correct(arm, selector, script)
        arms.append(arm)
    return arms


def _exact(config: ModelConfig) -> PlanSelector:
    """All neurons computed; down rows of those that come out zero are not read."""
    layers = config.num_hidden_layers
    choices = {(Site.NEURONS, layer): Choice(None) for layer in range(layers)}
    return PlanSelector(layers, config.intermediate_size, choices)


def _forced(subject: Subject, options: BenchOptions, script: Script) -> list[Forced]:
    densities = options.densities
    if densities is None:
        densities = (0.1,) if subject.random else ()
    if not densities:
        return []
    prompt = script.first_prompt
    answer = make_prompts(subject, 1, script.max_model_len - len(prompt), seed=options.seed - 1)
    return force(subject.loaded, densities, prompt, answer[0], rank=options.rank, seed=options.seed)


def _correct(arm: EngineArm, forced: Forced, script: Script) -> None:
    """Bring a forced arm, just played, to its density."""
    for _ in range(_CORRECTIONS):
        if forced.correct() < _DENSITY_ERROR:
            break
        script.play(arm, 0)
