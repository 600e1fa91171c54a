"""Prompts on recorded steps: what the plain forward says, whatever shares the step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dejavu.embedded import NAME
from dejavu.engine.backend import PromptReader, prompt_reader
from dejavu.engine.engine import Engine
from dejavu.engine.params import SamplingParams
from dejavu.engine.prompt_pass import PromptPass
from dejavu.engine.prompt_step import Piece, PromptStep
from dejavu.engine.scheduler import Request
from dejavu.kernels.native import NativeOps
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel, load_model
from dejavu.models.base import Batch
from dejavu.models.kv_cache import KVCache, blocks_for
from dejavu.sparsity.policy import Dense
from models.tiny import Tiny, prompt


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(NAME)


def a_step(model: LoadedModel, threads: int = 1, rows: int = 400) -> tuple[PromptStep, KVCache]:
    cache = model.model.new_cache(rows)
    ops = NativeOps(threads)
    vocab = model.model.config.vocab_size
    return PromptStep(model.model, cache, ops, max_length=128, vocab_size=vocab), cache


def a_request(cache: KVCache, ids: list[int]) -> Request:
    return Request(tuple(ids), len(ids) + 1, blocks=cache.allocate(blocks_for(len(ids) + 1)))


def stored(cache: KVCache, request: Request) -> list[Tensor]:
    """Keys and values of a prompt, layer by layer."""
    length = len(request.prompt)
    layers = [*cache.keys, *cache.values]
    return [layer[request.blocks].flatten(0, 1)[:length].clone() for layer in layers]


def read(step: PromptStep, request: Request, *ends: int, every: bool = False) -> list[Tensor]:
    """Logits of each piece."""
    found = []
    for end in ends:
        (logits,) = step.run([Piece(request, end, every)])
        found.append(torch.from_numpy(logits))
        request.computed = end
    return found


@pytest.mark.parametrize("length", [1, 2, 17, 100])
def test_it_is_the_plain_forward_within_rounding(loaded: LoadedModel, length: int) -> None:
    step, cache = a_step(loaded)
    request = a_request(cache, prompt(length, seed=length))
    (logits,) = read(step, request, length, every=True)
    plain = loaded.model.new_cache(length)
    batch = Batch.prefill(list(request.prompt), plain.allocate(blocks_for(length)), last_only=False)
    truth = loaded.model.forward(batch, plain, Dense(), TorchOps())
    # Inputs are rounded to 16 bits, the cache to bf16: a thousandth of the spread of the logits.
    assert logits.shape == truth.shape
    assert (logits - truth).abs().max() < 2e-2 * truth.std()


@pytest.mark.parametrize("length", [3, 40])
def test_zeros_that_are_passed_over_change_no_bit(loaded: LoadedModel, length: int) -> None:
    step, cache = a_step(loaded)
    dense, other = a_step(loaded)
    dense._whole = dense._keys_only = Dense()  # type: ignore[assignment]
    ids = prompt(length, seed=7)
    first, second = a_request(cache, ids), a_request(other, ids)
    assert torch.equal(read(step, first, length)[0], read(dense, second, length)[0])
    for a, b in zip(stored(cache, first), stored(other, second), strict=True):
        assert torch.equal(a, b)


def test_cuts_neighbours_and_what_is_wanted_change_no_bit(loaded: LoadedModel) -> None:
    ids = prompt(70, seed=1)
    step, cache = a_step(loaded)
    alone = a_request(cache, ids)
    (last,) = read(step, alone, 70)
    everything = a_request(cache, ids)
    (every,) = read(step, everything, 70, every=True)
    assert torch.equal(last[-1], every[-1])
    for cuts in ((1, 2, 70), (16, 32, 48, 64, 70), (33, 69, 70)):
        pieces = a_request(cache, ids)
        found = read(step, pieces, *cuts)
        assert [len(one) for one in found[:-1]] == [0] * (len(cuts) - 1)
        assert torch.equal(found[-1], last)
        for a, b, c in zip(*(stored(cache, r) for r in (alone, pieces, everything)), strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)
        cache.release(pieces.blocks)
    # Beside others, on two threads, at places of the cache that others had.
    step, cache = a_step(loaded, threads=2)
    crowd = [a_request(cache, prompt(n, seed=n)) for n in (3, 40, 1)]
    mine = a_request(cache, ids)
    pieces = [Piece(crowd[0], 3, False), Piece(mine, 70, False), Piece(crowd[1], 20, True)]
    found = step.run([*pieces, Piece(crowd[2], 1, False)])
    assert [len(one) for one in found] == [1, 1, 20, 1]
    assert torch.equal(torch.from_numpy(found[1]), last)


def test_engines_read_int8_prompts_so_and_others_not(
    loaded: LoadedModel, tiny: Callable[..., Tiny]
) -> None:
    assert PromptStep.suits(loaded.model)
    assert not PromptStep.suits(load_model(tiny("opt").path).model)
    engine = Engine(loaded, threads=1)
    params = SamplingParams(max_tokens=6, logprobs=2, prompt_logprobs=1)
    prompts = [prompt(n, seed=n) for n in (1, 40, 9, 17, 150)]

    def run(*wanted: list[int]) -> list[Request]:
        requests = [engine.add(ids, params) for ids in wanted]
        while engine.running or engine.waiting:
            engine.step()
        return requests

    def said(request: Request) -> tuple[object, ...]:
        return request.token_ids, request.logprobs, request.prompt_logprobs

    together = run(*prompts)
    for ids, request in zip(prompts, together, strict=True):
        assert len(request.prompt_logprobs) == len(ids) - 1
        assert request.prefill_seconds > 0
        (alone,) = run(ids)
        assert said(alone) == said(request)


def test_what_reads_prompts_follows_the_model_and_the_ops(
    loaded: LoadedModel, tiny: Callable[..., Tiny]
) -> None:
    other = load_model(tiny("opt").path)

    def reader(of: LoadedModel, ops: Ops | None = None) -> PromptReader:
        cache = of.model.new_cache(64)
        return prompt_reader(of.model, cache, ops, threads=1, max_length=64, vocab_size=50)

    assert isinstance(reader(loaded), PromptStep)
    assert isinstance(reader(loaded, NativeOps(1)), PromptStep)
    for prompts in (reader(loaded, TorchOps()), reader(other), reader(other, NativeOps(1))):
        assert isinstance(prompts, PromptPass)
    # Where the ops of steps are the caller's own, prompts are torch's.
    assert isinstance(Engine(loaded, ops=NativeOps(1))._prompts, PromptPass)


def test_who_is_aborted_meanwhile_writes_to_nobody_elses_blocks(loaded: LoadedModel) -> None:
    """A dropped stream may be collected while its rows are on their way."""
    engine = Engine(loaded, threads=1, max_batch=2)
    kept, dropped = prompt(60, seed=1), prompt(60, seed=2)  # both in one piece
    request = engine.add(kept, SamplingParams(max_tokens=3))
    while not request.done:
        engine.step()
    truth = request.token_ids
    step = engine._prompts
    assert isinstance(step, PromptStep)
    sound, gone = (engine.add(ids, SamplingParams(max_tokens=3)) for ids in (kept, dropped))
    run, calls = step._step, []

    def aborting(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 2:
            engine.abort(gone)
        return run(*arguments)  # type: ignore[arg-type]

    step._step = aborting  # type: ignore[method-assign, assignment]
    while not sound.done:
        engine.step()
    assert len(calls) == 8
    assert sound.token_ids == truth
    assert gone.token_ids == []
    assert engine.free_blocks == engine.cache_blocks


def test_a_fault_of_one_prompt_is_not_that_of_others_in_its_step(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loaded, threads=1)
    sound, broken = (
        engine.add(prompt(20, seed=n), SamplingParams(max_tokens=3, prompt_logprobs=top))
        for n, top in ((1, None), (2, 1))
    )

    def failing(*_: object) -> list[object]:
        raise ValueError("no such logit")

    monkeypatch.setattr("dejavu.engine.engine.prompt_logprobs", failing)
    while engine.running or engine.waiting:
        engine.step()
    assert "no such logit" in str(broken.error)
    assert sound.error is None
    assert len(sound.token_ids) == 3
    assert engine.free_blocks == engine.cache_blocks
