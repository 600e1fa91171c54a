"""Speed of decoding, arm by arm, on one model in one run.

The arms take turns, so that whatever else the machine does meanwhile hits all of them alike. They
rest a moment between turns, until the threads of the program before have gone to sleep: two OpenMP
runtimes that spin on the same cores would each miss the other's share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import sleep

from dejavu.bench.arms import Arm, Decoded, EngineArm, Prompt
from dejavu.bench.forced import DEFAULT_RANK, Forced, force
from dejavu.bench.machine import origin, this_machine
from dejavu.bench.peers import PEERS, open_peer, parse_peer
from dejavu.bench.result import BenchResult, Missing
from dejavu.bench.subject import Subject, make_prompts, open_subject
from dejavu.bench.summary import summarize
from dejavu.config import ModelConfig
from dejavu.errors import BackendError, InputError
from dejavu.kernels.native import NativeOps, measure_read_bandwidth
from dejavu.load import LoadedModel
from dejavu.predictor.selector import Choice, PlanSelector
from dejavu.sparsity.policy import Dense, Selector, Site

Progress = Callable[[int, int], None]  # turns done, turns in all

_REST = 0.2  # seconds; libgomp gives up spinning within milliseconds
_CORRECTIONS = 4
_DENSITY_ERROR = 0.002


@dataclass(frozen=True)
class BenchOptions:
    """What to run beside the dense arm, and how.

    densities: of neurons, a forced arm each; default: 0.1 on random weights, else none.
    exact: an arm that skips what the model itself zeroes; default: where the model is trained and
        has a ReLU.
    peers: other programs, as `peers.open_peer` takes them. One that cannot run here is reported.
    threads, isa: of our kernels and the peers; default: all physical cores, the best set.
    batch: sequences decoded together. prompt_tokens: fewer where the context is short.
    skipped: untimed steps at the start of each turn, while threads wake and caches fill.
    rank: of forced predictors.
    at_once: names of our arms whose steps shall not be replayed from a recording.
    text: of the prompts, where weights are not random; default: random ids.
    """

    densities: Sequence[float] | None = None
    exact: bool | None = None
    peers: Sequence[str] = tuple(PEERS)
    threads: int | None = None
    isa: str | None = None
    batch: int = 1
    prompt_tokens: int = 128
    new_tokens: int = 64
    skipped: int = 4
    repeats: int = 5
    rank: int = DEFAULT_RANK
    at_once: Sequence[str] = ()
    text: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "prompt_tokens", "new_tokens", "repeats", "rank"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        for peer in self.peers:
            parse_peer(peer)
        if self.skipped < 0:
            raise InputError(f"skipped must not be negative, not {self.skipped}")


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
    started = origin()
    machine = this_machine()
    ops = NativeOps(options.threads, options.isa)
    script = _Script(subject, options)
    arms, missing = _arms(subject, dict(selectors), options, script, ops)
    decoded: list[list[Decoded]] = [[] for _ in arms]
    bandwidth = 0.0
    size = max(1 << 28, 8 * machine.last_level_cache)
    for repeat in range(options.repeats):
        sleep(_REST)
        rate = measure_read_bandwidth(ops.threads, size=size, repeats=3)
        bandwidth = max(bandwidth, rate)
        for turn in range(len(arms)):
            place = (turn + repeat) % len(arms)  # nobody is always the one after the bandwidth
            sleep(_REST)
            decoded[place].append(script.play(arms[place], repeat))
            if progress is not None:
                progress(repeat * len(arms) + turn + 1, options.repeats * len(arms))
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


class _Script:
    """What the arms read: the same in every arm, other tokens in every repeat.

    Trained weights continue prompts of a text, each repeat its own. Random ones are fed random
    tokens after a prompt that stays (see `Arm.decode`): attention spreads a common part over the
    whole answer, and densities would follow the prompt.
    """

    def __init__(self, subject: Subject, options: BenchOptions) -> None:
        self._options = options
        steps = options.skipped + options.new_tokens
        context = subject.loaded.model.config.context_length
        self.prompt_tokens = min(options.prompt_tokens, context - steps - 3)
        if self.prompt_tokens < 1:
            raise InputError(
                f"new_tokens {options.new_tokens} does not fit into the context of {context} "
                "tokens together with a prompt"
            )
        self.max_model_len = self.prompt_tokens + steps + 3
        batch, repeats, seed = options.batch, options.repeats, options.seed
        self.fed: list[list[list[int]]] | None = None
        if subject.random:
            self._prompts = [make_prompts(subject, batch, self.prompt_tokens, seed=seed)] * repeats
            self.fed = [
                make_prompts(subject, batch, steps, seed=seed + 1 + repeat)
                for repeat in range(repeats)
            ]
        else:
            ids = make_prompts(subject, batch * repeats, self.prompt_tokens, text=options.text)
            self._prompts = [ids[i * batch : (i + 1) * batch] for i in range(repeats)]

    @property
    def first_prompt(self) -> Prompt:
        """Of the first sequence in the first repeat."""
        return self._prompts[0][0]

    def play(self, arm: Arm, repeat: int) -> Decoded:
        """One turn of an arm."""
        return arm.decode(
            self._prompts[repeat],
            self._options.new_tokens,
            skip=self._options.skipped,
            fed=None if self.fed is None else self.fed[repeat],
        )


def _arms(
    subject: Subject,
    selectors: dict[str, Selector],
    options: BenchOptions,
    script: _Script,
    ops: NativeOps,
) -> tuple[list[Arm], list[Missing]]:
    """All arms, warmed up, and what is missing and why."""
    loaded, model = subject.loaded, subject.loaded.model
    own: dict[str, Selector] = {"dense": Dense()}
    exact = options.exact
    if exact is None:
        exact = model.activation.is_sparse and not subject.random
    if exact:
        own["exact"] = _exact(model.config)
    own |= selectors
    densities = options.densities
    if densities is None:
        densities = (0.1,) if subject.random else ()
    if densities:
        answer = make_prompts(subject, 1, script.max_model_len - script.prompt_tokens, seed=-1)[0]
        for forced in force(
            loaded, densities, script.first_prompt, answer, rank=options.rank, seed=options.seed
        ):
            own[f"forced {forced.density:.4g}"] = forced
    if stray := set(options.at_once) - own.keys():
        raise InputError(f"at_once: no arm named {', '.join(sorted(stray))}; have {list(own)}")
    arms: list[Arm] = []
    for name, selector in own.items():
        arm = EngineArm(
            name,
            loaded,
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
    missing = []
    for name in options.peers:
        try:
            peer = open_peer(name, subject, threads=ops.threads)
            script.play(peer, 0)
            arms.append(peer)
        except BackendError as error:
            missing.append(Missing(name, str(error)))
    return arms, missing


def _exact(config: ModelConfig) -> PlanSelector:
    """All neurons computed; down rows of those that come out zero are not read."""
    layers = config.num_hidden_layers
    choices = {(Site.NEURONS, layer): Choice(None) for layer in range(layers)}
    return PlanSelector(layers, config.intermediate_size, choices)


def _correct(arm: EngineArm, forced: Forced, script: _Script) -> None:
    """Bring a forced arm, just played, to its density."""
    for _ in range(_CORRECTIONS):
        if forced.correct() < _DENSITY_ERROR:
            break
        script.play(arm, 0)
