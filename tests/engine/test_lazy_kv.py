"""Lazy-kv against dense-kv: the same logits whatever heads are left out, for how long, by whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from dejavu.engine.graph_step import GraphStep
from dejavu.engine.lazy_rows import MOST_ROWS
from dejavu.engine.scheduler import Request
from dejavu.kernels.lazy import RING
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.load import load_model
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.deferred_kv import obstacle
from dejavu.models.kv_cache import KVCache, blocks_for
from dejavu.sparsity.policy import Dense, Points, Selector, Site
from models.tiny import Tiny, prompt

LENGTH = 96
HEADS = 4


class Scripted(Selector):
    """Heads of each layer and row as they were put into `masks`, bool `[layers, rows, heads]`."""

    def __init__(self) -> None:
        self.masks = torch.zeros(2, 1, HEADS, dtype=torch.bool)

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if site is not Site.HEADS:
            return None
        rows = len(points.source(site, layer))
        used = self.masks[layer]
        return Selection.from_mask(used[torch.arange(rows).clamp(max=len(used) - 1)])


class Side:
    """A model with a cache full of NaN and its steps."""

    def __init__(self, model: DecoderLM, ops: Ops, rows: int, *, lazy: bool) -> None:
        self.model = model
        self.cache = KVCache(model.config, rows * blocks_for(LENGTH))
        for layer in (*self.cache.keys, *self.cache.values):
            layer[: self.cache.scratch].fill_(torch.nan)
        self.selector = Scripted()
        self.step = GraphStep(
            model, self.cache, self.selector, ops, max_rows=rows, max_length=LENGTH,
            lazy_kv=lazy, capture=_twice,
        )  # fmt: skip

    def start(self, length: int, seed: int) -> Request:
        request = Request(tuple(prompt(length, seed)), LENGTH)
        request.blocks = self.cache.allocate(blocks_for(LENGTH))
        batch = Batch.prefill(list(request.prompt), request.blocks)
        logits = self.model.forward(batch, self.cache, Dense(), TorchOps())
        request.token_ids.append(int(logits[0].argmax()))
        return request

    def end(self, request: Request) -> None:
        request.done = True
        self.cache.release(request.blocks)

    def logits(self, rows: Sequence[Request], masks: Tensor) -> Tensor:
        self.selector.masks = masks
        return self.step.run(rows).clone()


def _twice(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Like a capture, which runs the forward once before."""
    forward()
    return forward


class Pair:
    """The same requests on both sides; the next token is the dense-kv side's."""

    def __init__(self, model: DecoderLM, ops: Ops, rows: int) -> None:
        self.sides = [
            Side(model, TorchOps(), rows, lazy=False),
            Side(model, ops, rows, lazy=True),
        ]

    def start(self, length: int, seed: int = 0) -> list[Request]:
        return [side.start(length, seed) for side in self.sides]

    def end(self, request: list[Request]) -> None:
        for side, one in zip(self.sides, request, strict=True):
            side.end(one)

    def step(self, rows: Sequence[list[Request]], masks: Tensor) -> None:
        expected, found = (
            side.logits([row[i] for row in rows], masks) for i, side in enumerate(self.sides)
        )
        assert expected.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        tokens = expected.argmax(dim=1).tolist()
        assert found.argmax(dim=1).tolist() == tokens
        for row, token in zip(rows, tokens, strict=True):
            for request in row:
                request.token_ids.append(token)


@pytest.fixture(params=["torch", "triton"])
def lazy_ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "torch":
        return TorchOps()
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("in Triton's interpreter; on a GPU see test_cuda.py")
    from dejavu.kernels.gpu.ops import TritonOps
    from dejavu.kernels.gpu.tuning import Config, Tuning

    class Few(Tuning):
        """Few programs: the interpreter takes its time for each."""

        def project(self, *shape: int) -> Config:
            return Config(128, 64, 1, 4)

        up = lazy = select = project  # type: ignore[assignment]

        def sums(self, *shape: object) -> Config:
            return Config(64, 64, 1, 4)

        def attention(self, *shape: int) -> Config:
            return Config(64, 0, 1, 4, 2)

    return TritonOps("cpu", tuning=Few(4))


@pytest.fixture
def model(tiny: Callable[..., Tiny]) -> DecoderLM:
    return load_model(tiny("opt").path).model


def masks(*layers: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(layers, dtype=torch.bool)


def test_a_head_rests_15_steps_and_comes_back(model: DecoderLM, lazy_ops: Ops) -> None:
    """Head 0 of layer 0 rests for 14 steps and is used in the 15th and the 16th; head 1 rests up to
    the 16th, which completes it, and is used in the 17th; head 3 is used at last."""
    pair = Pair(model, lazy_ops, 1)
    row = pair.start(21)
    for step in range(1, 36 if isinstance(lazy_ops, TorchOps) else 18):
        first, second, last = step in (15, 16), step in (17, 34), step == 35
        pair.step([row], masks([[first, second, True, last]], [[True, last, first, step % 2]]))


def test_a_head_that_never_works_is_complete_every_16th_step(model: DecoderLM) -> None:
    pair = Pair(model, TorchOps(), 1)
    row = pair.start(3)
    lazy = pair.sides[1]
    nothing = masks([[0] * HEADS], [[0] * HEADS])
    for step in range(1, 2 * RING + 1):
        pair.step([row], nothing)
        held = lazy.cache.keys[0][row[1].blocks].flatten(0, 1)[3 : 3 + step].isfinite()
        assert held[: step - step % RING].all()
        assert not held[step - step % RING :].any()  # nobody computed them


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32])
def test_prompts_around_the_ring_s_end(
    length: int, model: DecoderLM, lazy_ops: Ops, request: pytest.FixtureRequest
) -> None:
    if not isinstance(lazy_ops, TorchOps) and length != 16:
        pytest.skip("enough of them in the interpreter")
    pair = Pair(model, lazy_ops, 1)
    row = pair.start(length)
    generator = torch.Generator().manual_seed(length)
    for _ in range(20 if isinstance(lazy_ops, TorchOps) else 3):
        pair.step([row], torch.rand(2, 1, HEADS, generator=generator) < 0.3)


@pytest.mark.parametrize("seed", range(3))
def test_rows_come_and_go(seed: int, model: DecoderLM, lazy_ops: Ops) -> None:
    """Up to six rows of all lengths: lazy up to four, complete before the fifth; slots and blocks
    of ended rows serve the next; rows change places and pause."""
    if not isinstance(lazy_ops, TorchOps) and seed:
        pytest.skip("once is enough in the interpreter")
    pair = Pair(model, lazy_ops, 6)
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    brief = not isinstance(lazy_ops, TorchOps)
    rows = [pair.start(4)]
    kinds = set()
    for step in range(19 if brief else 40):
        if len(rows) < (6 if step > 20 else 2 if brief else MOST_ROWS) and draw(4) == 0:
            rows.append(pair.start(1 + draw(40), seed=step))
        elif len(rows) > 1 and draw(8) == 0:
            pair.end(rows.pop(draw(len(rows))))
        order = torch.randperm(len(rows), generator=generator).tolist()
        seats = [rows[n] for n in order[: max(1, len(rows) - (draw(5) == 0))]]
        pair.step(seats, torch.rand(2, len(seats), HEADS, generator=generator) < 0.3)
        kinds = {kind for _, kind in pair.sides[1].step._graphs}
    assert kinds >= ({"used"} if brief else {"used", "owed"})


def test_models_that_cannot_wait(tiny: Callable[..., Tiny]) -> None:
    assert "GQA" in str(obstacle(load_model(tiny("llama").path).model.config))
    same = load_model(tiny("llama", num_key_value_heads=4).path).model.config
    assert "rotated" in str(obstacle(same))
    late = load_model(tiny("opt", do_layer_norm_before=False).path).model.config
    assert obstacle(late) is not None
    assert obstacle(load_model(tiny("opt").path).model.config) is None
