"""Speed of decoding, arm by arm, on one model in one run.

The arms take turns, so that whatever else the machine does meanwhile hits all of them alike. They
rest a moment between turns, until the threads of the arm before have gone to sleep.

On a GPU, whose clocks are its own, peers of a named shape run before our arms instead, each alone:
two copies of a large shape would not fit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import fmean
from time import sleep
from typing import Any

import torch

from dejavu.bench.arms import Arm, ArmInfo, Decoded, EngineArm, engine_arms
from dejavu.bench.backend import Backend, open_backend
from dejavu.bench.forced import Forced, Target, force
from dejavu.bench.machine import origin, this_machine
from dejavu.bench.options import BenchOptions
from dejavu.bench.peers import DEFAULT_PEERS, open_peer, open_random_peer
from dejavu.bench.result import BenchResult, Missing
from dejavu.bench.script import Script
from dejavu.bench.shapes import hf_config
from dejavu.bench.spread import Spread
from dejavu.bench.subject import Subject, is_shape, make_prompts, open_subject, shape_dtype
from dejavu.bench.summary import milliseconds, summarize
from dejavu.config import ModelConfig
from dejavu.errors import BackendError, InputError
from dejavu.kernels.device import resolve_device
from dejavu.load import LoadedModel
from dejavu.predictor.selector import Choice, PlanSelector
from dejavu.registry import architecture
from dejavu.sparsity.accounting import dense_bytes
from dejavu.sparsity.policy import Dense, Selector, Site

__all__ = ["BenchOptions", "Played", "bench", "bench_subject", "play_peers_alone"]

Progress = Callable[[int, int], None]  # turns done, turns in all
Tell = Callable[[str], None]  # gets a line for people

_REST = 0.2  # seconds; libgomp gives up spinning within milliseconds
_CORRECTIONS = 4
_DENSITY_ERROR = 0.002


@dataclass(frozen=True)
class Played:
    """Peers that have had their turns. turns: of each, with bytes yet to be told."""

    turns: list[tuple[ArmInfo, list[Decoded]]] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)


def bench(
    source: str | os.PathLike[str] | LoadedModel,
    selectors: Mapping[str, Selector] | None = None,
    options: BenchOptions | None = None,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    tell: Tell | None = None,
) -> BenchResult:
    """Time greedy decoding: whole steps of the engine with sampling, in ms a token.

    source: a name in `shapes.SHAPES` (random weights), a checkpoint or a loaded model.
    selectors: further arms by name, such as the levels of a plan. tell: gets what is known early.

    Raises InputError for options that cannot be used, and what `load_model` raises.
    """
    options = options or BenchOptions()
    target = resolve_device(device)
    played = None
    if target.type == "cuda" and is_shape(source):
        name = os.fspath(source)  # type: ignore[arg-type]
        weights = shape_dtype(dtype, target)
        played = play_peers_alone(hf_config(name), options, weights, target, tell=tell)
    subject = open_subject(source, dtype=dtype, device=target, seed=options.seed)
    return bench_subject(subject, selectors or {}, options, played=played, progress=progress)


def play_peers_alone(
    config: dict[str, Any],
    options: BenchOptions,
    dtype: str,
    device: torch.device,
    *,
    tell: Tell | None = None,
) -> Played:
    """All turns of each peer, one peer after the other, on random weights of its own.

    config: a `config.json`. tell: gets a line for each peer as it is through.
    """
    parsed: ModelConfig = architecture(config.get("model_type")).config_from_hf(config)
    script = Script(parsed, options, None)
    played = Played()
    for name in _peers(options, device):
        try:
            with open_random_peer(name, config, dtype, device) as peer:
                script.play(peer, 0)
                turns = [script.play(peer, repeat) for repeat in range(options.repeats)]
                played.turns.append((peer.info, turns))
                said = f"{Spread.of(milliseconds(turns, options.batch)).median:.3g} ms/token"
        except BackendError as error:
            played.missing.append(Missing(name, str(error)))
            said = str(error)
        if tell is not None:
            tell(f"{name}: {said}")
    return played


def bench_subject(
    subject: Subject,
    selectors: Mapping[str, Selector],
    options: BenchOptions,
    *,
    played: Played | None = None,
    progress: Progress | None = None,
) -> BenchResult:
    """`bench` of a model that is ready. played: peers that have run; None: they run with ours."""
    model = subject.loaded.model
    started, machine = origin(), this_machine(model.device)
    backend = open_backend(
        model.device,
        model.cache_dtype,
        threads=options.threads,
        isa=options.isa,
        machine=machine,
    )
    script = Script(model.config, options, None if subject.random else subject.loaded.checkpoint)
    arms: list[Arm] = [*_own_arms(subject, selectors, options, script, backend)]
    missing = [] if played is None else [*played.missing]
    with ExitStack() as running:
        for name in _peers(options, model.device) if played is None else ():
            try:
                peer = running.enter_context(open_peer(name, subject, threads=backend.threads))
                script.play(peer, 0)
                arms.append(peer)
            except BackendError as error:
                missing.append(Missing(name, str(error)))
        bandwidth, decoded = _take_turns(arms, script, options, backend, progress)
    infos = [arm.info for arm in arms]
    for info, turns in played.turns if played is not None else ():
        size = dense_bytes(model.weights, info.dtype)
        infos.append(info)
        decoded.append([replace(turn, step_bytes=size) for turn in turns])
    return summarize(
        subject,
        options,
        infos,
        decoded,
        missing,
        selectors={arm.info.name: arm.selector for arm in arms if isinstance(arm, EngineArm)},
        backend=backend,
        prompt_tokens=script.prompt_tokens,
        bandwidth=bandwidth,
        started=started,
    )


def _peers(options: BenchOptions, device: torch.device) -> Sequence[str]:
    return DEFAULT_PEERS[device.type] if options.peers is None else options.peers


def _take_turns(
    arms: Sequence[Arm],
    script: Script,
    options: BenchOptions,
    backend: Backend,
    progress: Progress | None,
) -> tuple[float, list[list[Decoded]]]:
    """The best read bandwidth in GB/s, and the turns of every arm."""
    sleep(_REST)
    met = [backend.read_bandwidth()]
    decoded: list[list[Decoded]] = [[] for _ in arms]
    for repeat in range(options.repeats):
        for turn in range(len(arms)):
            place = (turn + repeat) % len(arms)  # nobody always follows the same arm
            sleep(_REST)
            done = script.play(arms[place], repeat)
            sleep(_REST)
            met.append(backend.read_bandwidth())
            decoded[place].append(replace(done, bandwidth=fmean(met[-2:])))
            if progress is not None:
                progress(repeat * len(arms) + turn + 1, options.repeats * len(arms))
    return max(met), decoded


def _own_arms(
    subject: Subject,
    selectors: Mapping[str, Selector],
    options: BenchOptions,
    script: Script,
    backend: Backend,
) -> list[EngineArm]:
    """Dense first, then exact, the caller's and the forced ones, all warmed up."""
    model = subject.loaded.model
    chosen: dict[str, Selector] = {"dense": Dense()}
    exact = options.exact
    if exact is None:
        exact = model.activation.is_sparse and not subject.random
    if exact:
        chosen["exact"] = _exact(model.config, model.device)
    chosen |= selectors
    forced = {f.target.label: f for f in _forced(subject, options, script)}
    chosen |= forced
    lazy = {}
    if options.lazy_kv:
        lazy = {f"{name}, lazy-kv": f for name, f in forced.items() if f.target.heads < 1.0}
        if not lazy:
            raise InputError("lazy-kv needs a density of heads, as in 0.1/0.5")
    chosen |= lazy
    if stray := set(options.at_once) - chosen.keys():
        raise InputError(f"at_once: no arm named {', '.join(sorted(stray))}; have {list(chosen)}")
    arms = engine_arms(
        subject.loaded,
        chosen,
        ops=backend.ops,
        threads=backend.threads,
        batch=options.batch,
        max_model_len=script.max_model_len,
        at_once=options.at_once,
        lazy_kv=lazy,
    )
    for arm in arms:
        script.play(arm, 0)
        if isinstance(arm.selector, Forced):
            _correct(arm, arm.selector, script)
    return arms


def _exact(config: ModelConfig, device: torch.device) -> PlanSelector:
    """All neurons computed; down rows of those that come out zero are not read."""
    layers = config.num_hidden_layers
    choices = {(Site.NEURONS, layer): Choice(None) for layer in range(layers)}
    return PlanSelector(layers, config.intermediate_size, choices, device)


def _forced(subject: Subject, options: BenchOptions, script: Script) -> list[Forced]:
    densities: Sequence[float | Target] | None = options.densities
    if densities is None:
        densities = (0.1,) if subject.random else ()
    if not densities:
        return []
    prompt = script.first_prompt
    answer = make_prompts(subject, 1, script.max_model_len - len(prompt), seed=options.seed - 1)
    return force(
        subject.loaded,
        densities,
        prompt,
        answer[0],
        rank=options.rank,
        head_rank=options.head_rank,
        look_ahead=options.look_ahead,
        seed=options.seed,
    )


def _correct(arm: EngineArm, forced: Forced, script: Script) -> None:
    """Bring a forced arm, just played, to its density."""
    for _ in range(_CORRECTIONS):
        if forced.correct() < _DENSITY_ERROR:
            break
        script.play(arm, 0)
