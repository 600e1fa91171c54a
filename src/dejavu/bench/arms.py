"""An arm is one way of decoding that is timed; these are our own, all on one engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from dejavu.engine.engine import Engine
from dejavu.engine.params import SamplingParams
from dejavu.kernels.ops import Ops
from dejavu.load import LoadedModel
from dejavu.sparsity.accounting import LayerReads, dense_bytes, step_bytes
from dejavu.sparsity.meter import MeteredSelector
from dejavu.sparsity.policy import Dense, Selector, Site

Prompt = Sequence[int]


@dataclass(frozen=True)
class Decoded:
    """One turn of an arm.

    seconds: of each timed step, sampling included. token_ids: sampled for the first sequence, from
    the first token after the prompt on. step_bytes: weight bytes that a timed step read. reads: of
    which rows of each layer, None where nobody counted (then all of them are in step_bytes).
    used: neurons that one row used, mean by layer; under a batch a step reads more than each row
    uses. bandwidth: GB/s that a streaming sum read around the turn, None where nobody measured.
    """

    seconds: list[float]
    token_ids: list[int]
    step_bytes: float
    reads: list[LayerReads] | None = None
    used: list[float] | None = None
    bandwidth: float | None = None


@dataclass(frozen=True)
class ArmInfo:
    """What distinguishes an arm; a ratio of two arms means something where the rest is equal.

    program: dejavu, transformers, ... with its mode. threads: None on a GPU. recorded: whether a
    step is replayed from a recording (a CUDA graph on a GPU), without Python; None where the word
    does not apply.
    """

    name: str
    program: str
    dtype: str
    threads: int | None
    recorded: bool | None = None
    notes: list[str] = field(default_factory=list)


class Arm(Protocol):
    """One way of decoding."""

    @property
    def info(self) -> ArmInfo:
        """What it is."""
        ...

    def decode(
        self, prompts: Sequence[Prompt], steps: int, *, skip: int, fed: Sequence[Prompt] | None
    ) -> Decoded:
        """Greedy decoding of all prompts together: `skip` untimed steps, then `steps` timed ones.

        The prompts themselves are never timed, and end tokens end nothing. fed: token ids, at least
        `skip + steps` for each prompt, that every step reads in place of the sampled ones: random
        weights repeat one token for ever, and with it one selection. An arm that cannot do so
        says it in its notes.
        """
        ...


class _AtOnce(Selector):
    """Another selector, in a step that goes through Python op by op."""

    capturable = False

    def __init__(self, inner: Selector) -> None:
        self.select = inner.select  # type: ignore[method-assign]
        self.observe = inner.observe  # type: ignore[method-assign]
        self.inputs = inner.inputs  # type: ignore[method-assign]
        self.inputs = inner.inputs  # type: ignore[method-assign]


class EngineArm:
    """The engine with a selector: dense, exact, forced or a plan, all timed the same way."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        loaded: LoadedModel,
        selector: Selector,
        *,
        threads: int | None,
        recorded: bool,
    ) -> None:
        """name: of the engine's arm too. recorded: off, its steps go through Python op by op."""
        self.selector = selector
        self.model = loaded.model
        self._engine = engine
        notes = []
        if not isinstance(selector, Dense | MeteredSelector):
            notes.append("does not count what it reads: bytes are the dense model's")
        recorded = recorded and selector.capturable
        self.info = ArmInfo(name, "dejavu", loaded.dtype, threads, recorded, notes)

    def decode(
        self, prompts: Sequence[Prompt], steps: int, *, skip: int, fed: Sequence[Prompt] | None
    ) -> Decoded:
        """See `Arm.decode`."""
        params = SamplingParams(max_tokens=skip + steps + 3, ignore_eos=True)
        requests = [self._engine.add(prompt, params, arm=self.info.name) for prompt in prompts]
        if fed is not None:  # the first step feeds a token that was sampled
            for request, ids in zip(requests, fed, strict=True):
                request.fed = dict(enumerate(ids[: skip + steps], start=1))
        seconds, sampled = [], []
        try:
            self._engine.step()  # the prompts, and a first decode step with them
            for done in range(skip + steps):
                if done == skip and isinstance(self.selector, MeteredSelector):
                    self.selector.reset()
                sampled.append(requests[0].token_ids[-1])
                if fed is not None:
                    for request, ids in zip(requests, fed, strict=True):
                        request.token_ids[-1] = ids[done]
                started = perf_counter()
                self._engine.step()
                if done >= skip:
                    seconds.append(perf_counter() - started)
        finally:
            for request in requests:
                self._engine.abort(request)
        for request in requests:
            if request.error is not None:
                raise request.error
        token_ids = [requests[0].token_ids[0], *sampled]
        if not isinstance(self.selector, MeteredSelector):
            return Decoded(seconds, token_ids, self._step_bytes(None))
        reads, used = self.selector.reads(), self.selector.meter.used(Site.NEURONS)
        return Decoded(seconds, token_ids, self._step_bytes(reads), reads, used)

    def _step_bytes(self, reads: list[LayerReads] | None) -> float:
        if reads is None:
            return dense_bytes(self.model.weights)
        return step_bytes(
            self.model.weights,
            reads,
            groups=self.model.config.num_key_value_heads,
            predictor_bytes=getattr(self.selector, "predictor_bytes", 0),
        )


def engine_arms(
    loaded: LoadedModel,
    selectors: Mapping[str, Selector],
    *,
    ops: Ops,
    threads: int | None,
    batch: int,
    max_model_len: int,
    at_once: Collection[str] = (),
    lazy_kv: Collection[str] = (),
) -> list[EngineArm]:
    """An arm for each selector by name, all on one engine, whose cache they share.

    at_once: names of arms whose steps shall not be recorded. lazy_kv: of those that leave keys and
    values of unused heads for later.
    """
    engine = Engine(
        loaded,
        threads=threads,
        max_batch=batch,
        max_model_len=max_model_len,
        eos_token_ids=(),
        ops=ops,
        arms={n: _AtOnce(s) if n in at_once else s for n, s in selectors.items()},
        prefill_chunk=batch * max_model_len,  # all prompts in the first step
        lazy_kv=lazy_kv,
    )
    return [
        EngineArm(name, engine, loaded, selector, threads=threads, recorded=name not in at_once)
        for name, selector in selectors.items()
    ]
