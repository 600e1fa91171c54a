"""Prompts in pieces, several selectors at once, probabilities and activity: whatever runs beside
a request, it gets what it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dejavu.embedded import NAME
from dejavu.engine.engine import Engine
from dejavu.engine.logprobs import logprob_of
from dejavu.engine.params import SamplingParams
from dejavu.engine.scheduler import Request
from dejavu.errors import InputError
from dejavu.kernels.native import NativeOps
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel, load_model
from dejavu.predictor.plan import Plan, load_plan
from dejavu.sparsity.policy import Dense
from models.tiny import Tiny, prompt, reference_greedy

from .stub import scripted


def finish(engine: Engine) -> None:
    while engine.running or engine.waiting:
        engine.step()


@pytest.mark.parametrize("model_type", ["opt", "llama", "mistral"])
@pytest.mark.parametrize("chunk", [1, 7, 30])
def test_a_prompt_in_pieces_equals_transformers(
    model_type: str, chunk: int, ops: Ops, tiny: Callable[..., Tiny]
) -> None:
    case = tiny(model_type)
    engine = Engine(load_model(case.path), ops=ops, prefill_chunk=chunk)
    prompts = [prompt(length, seed=length) for length in (30, 1, 15)]
    requests = [engine.add(ids, SamplingParams(max_tokens=8)) for ids in prompts]
    finish(engine)
    for ids, request in zip(prompts, requests, strict=True):
        assert request.token_ids == reference_greedy(case.reference, ids, 8)


def test_answers_go_on_between_the_pieces_of_a_prompt(tiny: Callable[..., Tiny]) -> None:
    engine = Engine(load_model(tiny("opt").path), ops=TorchOps(), prefill_chunk=4)
    stream = engine.add([5, 6], SamplingParams(max_tokens=30))
    engine.step()
    long = engine.add(prompt(20), SamplingParams(max_tokens=2))
    said = []
    while not long.token_ids:
        before = len(stream.token_ids)
        engine.step()
        said.append(len(stream.token_ids) - before)
    assert said == [1] * 5, "five pieces of four tokens, and a token of the stream with each"


def test_a_prompt_that_fails_ends_alone() -> None:
    engine, model = scripted(lambda ids: [1, 2, 3, 4])
    sound = engine.add([1], SamplingParams(max_tokens=4))
    engine.step()
    broken = engine.add([2], SamplingParams(max_tokens=4))
    calls = 0

    def fail_once() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("no memory")

    model.before = fail_once
    finish(engine)
    assert "no memory" in str(broken.error)
    assert sound.token_ids == [1, 2, 3, 4]


def test_a_cache_too_small_for_a_block_is_refused() -> None:
    with pytest.raises(InputError, match="cache of 100 bytes"):
        scripted(lambda ids: [1], cache_bytes=100)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(NAME)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return load_plan(NAME)


def test_arms_side_by_side_give_the_bits_of_each_alone(loaded: LoadedModel, plan: Plan) -> None:
    def engine() -> Engine:
        arms = {name: plan.selector(loaded, name) for name in plan.levels} | {"dense": Dense()}
        return Engine(loaded, arms=arms, ops=NativeOps(threads=1), prefill_chunk=16)

    params = SamplingParams(max_tokens=12, logprobs=2)
    jobs = [
        (arm, prompt(length, seed=length))
        for length in (3, 40)
        for arm in (*plan.levels, "dense", "fast")
    ]
    together = engine()
    requests = [together.add(ids, params, arm=arm) for arm, ids in jobs]
    finish(together)

    def said(request: Request) -> tuple[object, ...]:
        return request.token_ids, request.logprobs

    for (arm, ids), request in zip(jobs, requests, strict=True):
        alone = engine()
        single = alone.add(ids, params, arm=arm)
        finish(alone)
        assert said(single) == said(request)
    by_arm = {
        arm: said(r) for (arm, _), r in zip(jobs[: len(plan.levels) + 1], requests, strict=False)
    }
    assert by_arm["exact"] == by_arm["dense"] != by_arm["fast"]
    with pytest.raises(InputError, match="unknown arm 'slow'"):
        together.add([5], params, arm="slow")


@pytest.mark.parametrize("failing", ["mlp", "attention", "combine"])
def test_what_fails_within_a_forward_leaves_nothing_behind(
    failing: str, loaded: LoadedModel, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a step is recorded, in the middle of the model: the next answers have their bits."""
    ops = NativeOps(threads=1)
    arms = {"fast": plan.selector(loaded, "fast"), "dense": Dense()}
    engine = Engine(loaded, arms=arms, ops=ops)
    params, ids = SamplingParams(max_tokens=12, logprobs=1), prompt(9)

    def said(arm: str, rows: int) -> list[tuple[object, ...]]:
        requests = [engine.add(ids, params, arm=arm) for _ in range(rows)]
        finish(engine)
        assert [request.error for request in requests] == [None] * rows
        return [(request.token_ids, request.logprobs) for request in requests]

    expected = said("fast", 1)
    record, calls = ops.recorder, 0

    def recorder() -> Any:
        made = record()
        op = getattr(made, failing)

        def counted(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise RuntimeError("a failing op")
            return op(*args, **options)

        monkeypatch.setattr(made, failing, counted)
        return made

    monkeypatch.setattr(ops, "recorder", recorder)
    broken = [engine.add(ids, params, arm="fast") for _ in range(2)]
    sound = engine.add(ids, params, arm="dense")
    finish(engine)
    assert sound.error is None
    assert len(sound.token_ids) == 12
    assert ["a failing op" in str(request.error) for request in broken] == [True] * 2
    assert said("fast", 2) == expected * 2
    assert engine.free_blocks == engine.cache_blocks


def test_activity_is_the_selection_of_every_row(loaded: LoadedModel, plan: Plan) -> None:
    """Its densities, summed up, are what the meter counts."""
    arms = {"fast": plan.selector(loaded, "fast")}
    engine = Engine(loaded, arms=arms, ops=NativeOps(threads=1))
    prompts = [prompt(length, seed=length) for length in (3, 5, 9)]
    requests = [
        engine.add(ids, SamplingParams(max_tokens=6, ignore_eos=True), arm="fast", watched=watched)
        for ids, watched in zip(prompts, (True, True, False), strict=True)
    ]
    engine.add(prompts[0], SamplingParams(max_tokens=6), watched=True)  # the dense arm cannot tell
    while len(requests[0].token_ids) < 5:
        engine.step()
    assert [len(r.activity) for r in requests] == [4, 4, 0]
    layers = requests[0].activity[0]
    assert len(layers) == loaded.model.config.num_hidden_layers
    assert all(all(layer.heads) and len(layer.heads) == 16 for layer in layers)
    assert all(sum(x.neurons) / 32 == pytest.approx(x.density) for x in layers)
    first, second = (
        sum(layer.density for step in r.activity for layer in step) for r in requests[:2]
    )
    finish(engine)
    engine.add(prompts[0], SamplingParams(max_tokens=5), arm="fast")
    finish(engine)
    alone = engine.density_of("fast")
    assert alone is not None
    assert first / (4 * len(layers)) == pytest.approx(alone)
    assert first != second


def test_logprobs_are_those_of_log_softmax() -> None:
    logits = torch.randn(1000) * 5
    logits[7] = logits[3]
    want = torch.log_softmax(logits.double(), dim=0)
    found = logprob_of(logits.numpy(), 11, 4)
    assert found.logprob == pytest.approx(want[11].item(), abs=1e-5)
    values, ids = want.topk(4)
    assert [i for i, _ in found.top] == ids.tolist()
    assert [p for _, p in found.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert logprob_of(logits.numpy(), 11, 0).top == ()


@pytest.mark.parametrize("chunk", [4, 128])
def test_prompt_logprobs_are_the_models(chunk: int, tiny: Callable[..., Tiny]) -> None:
    case = tiny("llama")
    engine = Engine(load_model(case.path), ops=TorchOps(), prefill_chunk=chunk)
    ids = prompt(11)
    request = engine.add(ids, SamplingParams(max_tokens=3, prompt_logprobs=1, logprobs=0))
    finish(engine)
    whole = torch.tensor([ids + request.token_ids[:-1]])
    with torch.no_grad():
        want = torch.log_softmax(case.reference(whole).logits[0].double(), dim=-1)
    found = request.prompt_logprobs + request.logprobs
    assert [f.token for f in found] == (ids + request.token_ids)[1:]
    assert [f.logprob for f in found] == pytest.approx(
        [want[i, f.token].item() for i, f in enumerate(found)], abs=1e-3
    )
    assert [len(f.top) for f in found] == [1] * 10 + [0] * 3
