"""Recorded steps read new inputs in place and are the eager step, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dejavu.engine.decode_step import DecodeStep
from dejavu.engine.scheduler import Request
from dejavu.errors import BackendError
from dejavu.kernels.native import NativeOps
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.load import load_model
from dejavu.models.base import Batch
from dejavu.models.kv_cache import BLOCK_SIZE, KVCache, blocks_for
from dejavu.sparsity.policy import Dense, Selector
from models.tiny import Tiny, prompt

LENGTH = 64


class Uncapturable(Dense):
    """Dense, but only eagerly."""

    capturable = False


@pytest.fixture(scope="module")
def native() -> NativeOps:
    try:
        return NativeOps(threads=1)
    except BackendError as error:
        pytest.skip(f"compiled kernels: {error}")


class Runner:
    """A model, a cache, a decode step, and requests whose answers are given."""

    def __init__(self, path: object, ops: Ops, selector: Selector, rows: int) -> None:
        self.model = load_model(path).model  # type: ignore[arg-type]
        self.cache = KVCache(self.model.config, rows * blocks_for(LENGTH))
        for layer in (*self.cache.keys, *self.cache.values):
            layer.fill_(torch.nan)  # whatever reads a slot that was never written shows
        self.step = DecodeStep(
            self.model, self.cache, selector, ops, max_rows=rows, max_length=LENGTH
        )

    def start(self, length: int, seed: int) -> Request:
        request = Request(tuple(prompt(length, seed)), LENGTH)
        request.blocks = self.cache.allocate(blocks_for(LENGTH))
        batch = Batch.prefill(list(request.prompt), request.blocks)
        self.model.prepare(length)
        self.model.forward(batch, self.cache, Dense(), TorchOps())
        return request

    def play(self, rows: list[Request], token: int) -> torch.Tensor:
        for request in rows:
            request.token_ids.append(token)
        return self.step.run(rows).clone()


@pytest.mark.parametrize("model_type", ["opt", "llama"])
def test_recorded_eager_and_plain_steps_agree(
    model_type: str, native: NativeOps, tiny: Callable[..., Tiny]
) -> None:
    """Rows leave and come back in another order, over a block border; logits at every step."""
    arms = {
        "recorded": (native, Dense()),
        "eager": (native, Uncapturable()),
        "plain": (TorchOps(), Dense()),
    }
    logits: dict[str, list[torch.Tensor]] = {}
    for name, (ops, selector) in arms.items():
        runner = Runner(tiny(model_type).path, ops, selector, rows=3)
        a, b, c = (runner.start(length, seed=length) for length in (1, BLOCK_SIZE - 1, 7))
        seats = [[a], [a, b], [a, b, c], [c, a], [c, b], [b], [a, c, b], [a, c, b]]
        logits[name] = [runner.play(rows, token) for token, rows in enumerate(seats)]
    for recorded, eager, plain in zip(*logits.values(), strict=True):
        assert torch.equal(recorded, eager)
        # fp32 sums of at most 101 terms in another order, through two layers.
        assert (recorded - plain).abs().max() < 1e-4 * plain.std()


@pytest.mark.parametrize("capturable", [True, False])
def test_one_program_a_batch_size(
    capturable: bool, native: NativeOps, tiny: Callable[..., Tiny]
) -> None:
    """A selector is asked once for each number of rows, or every time if it cannot be recorded."""
    asked = 0

    class Counting(Dense):
        def select(self, *arguments: object) -> None:
            nonlocal asked
            asked += 1

    selector = Counting()
    selector.capturable = capturable
    runner = Runner(tiny("opt").path, native, selector, rows=2)
    a, b = runner.start(3, 0), runner.start(5, 1)
    sites = 2 * 2  # of two layers
    for steps, (rows, programs) in enumerate(
        [([a], 1), ([b], 1), ([a, b], 2), ([b, a], 2), ([a], 2)], 1
    ):
        runner.play(rows, 1)
        assert asked == sites * (programs if capturable else steps)


def test_result_is_one_static_buffer(native: NativeOps, tiny: Callable[..., Tiny]) -> None:
    runner = Runner(tiny("opt").path, native, Dense(), rows=1)
    request = runner.start(3, 0)
    pointers = set()
    for token in (4, 5, 6):
        request.token_ids.append(token)
        pointers.add(runner.step.run([request]).data_ptr())
    assert len(pointers) == 1
