"""Where a plan's steps compute everything: who is chosen when, and what the steps write then."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray

from dejavu.engine.backend import whole_choices
from dejavu.engine.engine import Engine
from dejavu.engine.graph_step import GraphStep, Replay
from dejavu.engine.params import SamplingParams
from dejavu.engine.scheduler import Request
from dejavu.engine.whole_layers import Layers, WholeLayers
from dejavu.kernels.gpu.costs import CostTable, MLPCost
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.load import load_model
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.kv_cache import KVCache, blocks_for
from dejavu.predictor.network import Predictor
from dejavu.predictor.selector import Choice, PlanSelector
from dejavu.sparsity.meter import MeteredSelector
from dejavu.sparsity.policy import Dense, Key, Points, Site, Stage
from models.tiny import Tiny, prompt

LENGTH = 64


class Line:
    """A cost that rises with the share; the whole costs 1."""

    whole = 1.0

    def __init__(self, slope: float) -> None:
        self.slope = slope

    def at(self, shares: ArrayLike) -> NDArray[np.float64]:
        return self.slope * np.asarray(shares, dtype=np.float64)


def chooser(cost: Callable[[int], Line], layers: int) -> WholeLayers:
    """Of MLPs with 100 neurons, and predictors for as many layers."""
    return WholeLayers(cost, 100, range(layers))


def noted(whole: WholeLayers, rows: int, listed: list[int], steps: int) -> Layers:
    for _ in range(steps):
        whole.note(rows, np.asarray(listed), whole.of(rows))
    return whole.of(rows)


def test_the_cheaper_side_is_chosen_layer_by_layer() -> None:
    whole = chooser(lambda rows: Line(1.5), 5)
    assert noted(whole, 8, [10, 90, 60, 100, 0], 3) == Layers()  # nothing is known yet
    assert noted(whole, 8, [10, 90, 60, 100, 0], 1) == {1, 3}
    assert whole.of(4) == frozenset()  # every bucket by itself


def test_costs_are_of_the_bucket_s_rows() -> None:
    whole = chooser(lambda rows: Line(0.9 if rows == 1 else 1.5), 2)
    assert noted(whole, 1, [50, 55], 4) == Layers()
    assert noted(whole, 2, [90, 95], 4) == {0, 1}


def test_a_choice_follows_what_is_listed_and_not_every_whim() -> None:
    whole = chooser(lambda rows: Line(1.5), 3)
    assert noted(whole, 2, [10, 90, 10], 4) == {1}
    noted(whole, 2, [68, 90, 10], 400)  # hardly dearer: no capture for that
    assert whole.of(2) == {1}
    assert noted(whole, 2, [90, 90, 10], 400) == {0, 1}


def test_a_bucket_has_few_choices() -> None:
    """Each means a capture and memory for a graph."""
    whole = chooser(lambda rows: Line(1.5), 12)
    generator = np.random.default_rng(0)
    seen = set()
    for _ in range(30):
        seen.add(noted(whole, 2, generator.integers(0, 101, size=12).tolist(), 200))
    assert 1 < len(seen) <= 4


def test_a_choice_is_made_anew_some_day() -> None:
    """Whole layers do not tell what they would have listed."""
    whole = chooser(lambda rows: Line(1.5), 1)
    assert noted(whole, 2, [100], 4) == {0}
    assert noted(whole, 2, [0], 5000) == Layers()


class Graphs:
    """Stands for CUDA graphs; like them runs the forward once before."""

    def __init__(self) -> None:
        self.captures = 0

    def __call__(self, forward: Replay) -> Replay:
        self.captures += 1
        forward()
        return forward


def plan(model: DecoderLM, shifts: dict[int, float], distance: float = 0.0) -> PlanSelector:
    """Predictors of random scores; a layer's shift says how many neurons pass."""
    c = model.config
    generator = torch.Generator().manual_seed(5)
    choices: dict[Key, Choice] = {}
    for layer, shift in shifts.items():
        first, second = (
            Matrix(torch.randn(shape, generator=generator) * shape[1] ** -0.5)
            for shape in ((16, c.hidden_size), (c.intermediate_size, 16))
        )
        bias = torch.full((c.intermediate_size,), shift)
        reach = distance if layer else 0.0
        choices[Site.NEURONS, layer] = Choice(Predictor(first, second, bias), reach)
    return PlanSelector(c.num_hidden_layers, c.intermediate_size, choices, model.device)


class Table:
    """Costs of which the whole is less than that of the half chosen; notes what is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def mlp(self, *shape: int, gated: bool) -> Line:
        self.asked.append((*shape, gated))
        return Line(2.0)

    def heads(self, rows: int, size: int) -> Line:
        self.asked.append((rows, size))
        return Line(2.0)


@pytest.mark.parametrize(("model_type", "gated"), [("opt", False), ("llama", True)])
def test_costs_are_those_of_the_models_own_matrices(
    model_type: str, gated: bool, tiny: Callable[..., Tiny]
) -> None:
    model = load_model(tiny(model_type).path).model
    c, selector, table = model.config, plan(model, {1: 0.0}), Table()
    ops = cast(Ops, SimpleNamespace(costs=table))
    neurons, heads = whole_choices(model, selector, ops)
    assert neurons is not None
    assert heads is not None
    everything = [c.intermediate_size] * c.num_hidden_layers
    assert noted(neurons, 2, everything, 4) == {1}, "no other layer has a predictor"
    assert noted(heads, 4, [c.num_key_value_heads] * c.num_hidden_layers, 4) == Layers()
    q = c.num_attention_heads * c.head_dim * c.hidden_size
    assert table.asked == [
        (2, c.intermediate_size, c.hidden_size, 4, gated), (4, 2 * q * 4)
    ]  # fmt: skip
    assert whole_choices(model, Dense(), ops) == (None, None)
    assert whole_choices(model, selector, TorchOps()) == (None, None)


class Turned(MeteredSelector):
    """Another selector, and from `turned` on all neurons of layer 1."""

    turned = False

    def __init__(self, inner: PlanSelector) -> None:
        self.inner, self.meter = inner, inner.meter

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if self.turned and site is Site.NEURONS and layer == 1:
            return None
        return self.inner.select(site, layer, points, ops)

    def observe(self, stage: Stage, layer: int, value: torch.Tensor) -> None:
        self.inner.observe(stage, layer, value)


class Side:
    """Requests of a model, stepped together."""

    def __init__(
        self,
        model: DecoderLM,
        selector: PlanSelector | Turned,
        rows: int,
        whole: WholeLayers | None,
        heads: WholeLayers | None = None,
    ) -> None:
        self.selector, self.graphs = selector, Graphs()
        cache = KVCache(model.config, rows * blocks_for(LENGTH))
        self.step = GraphStep(
            model, cache, selector, TorchOps(), max_rows=rows, max_length=LENGTH,
            capture=self.graphs, whole_layers=whole, whole_heads=heads,
        )  # fmt: skip
        self.requests = []
        for seed in range(rows):
            request = Request(tuple(prompt(4 + seed, seed)), LENGTH)
            request.blocks = cache.allocate(blocks_for(LENGTH))
            batch = Batch.prefill(list(request.prompt), request.blocks)
            logits = model.forward(batch, cache, Dense(), TorchOps())
            request.token_ids.append(int(logits[0].argmax()))
            self.requests.append(request)

    def play(self, tokens: list[int] | None = None) -> torch.Tensor:
        logits = self.step.run(self.requests).clone()
        self.step.pick([None] * len(self.requests))
        for request, token in zip(
            self.requests, tokens or logits.argmax(dim=1).tolist(), strict=True
        ):
            request.token_ids.append(token)
        return logits


@pytest.mark.parametrize(("rows", "distance"), [(1, 0.0), (2, 0.5)])
def test_steps_compute_whole_what_is_cheaper(
    rows: int, distance: float, tiny: Callable[..., Tiny]
) -> None:
    """Layer 1 lists nearly all, layer 0 little: after four steps layer 1 is computed whole."""
    model = load_model(tiny("opt").path).model
    shifts = {0: -1.0, 1: 2.0}
    chosen, turned = plan(model, shifts, distance), Turned(plan(model, shifts, distance))
    predicted = chosen.predicted(Site.NEURONS)
    whole = WholeLayers(lambda rows: Line(1.5), model.config.intermediate_size, predicted)
    ours, theirs = (Side(model, selector, rows, whole) for selector in (chosen, turned))
    for step in range(6):
        if step == 4:
            before = [(read.neurons, read.active) for read in turned.reads()]
            assert before == [(read.neurons, read.active) for read in chosen.reads()]
            used = turned.meter.used()[1]
            turned.turned = True
        expected = theirs.play()
        found = ours.play(expected.argmax(dim=1).tolist())
        torch.testing.assert_close(found, expected)
        assert whole.of(rows) == (Layers() if step < 3 else {1})
    assert ours.graphs.captures == 2
    share = 2 / 6 / model.config.num_hidden_layers
    assert chosen.meter.whole_share() == pytest.approx(share)
    assert turned.meter.whole_share() == 0.0
    every = model.config.intermediate_size
    mine, (listed, active) = chosen.reads()[1], before[1]
    assert listed is not None
    assert active is not None
    assert active <= listed < every
    assert mine.neurons == pytest.approx((4 * listed + 2 * every) / 6)
    assert mine.active == pytest.approx((4 * active + 2 * every) / 6)
    assert chosen.meter.used()[1] == pytest.approx((4 * used + 2 * every) / 6)
    size = plan(model, {0: 0.0}).predictor_bytes
    assert chosen.predictor_bytes == pytest.approx(size * (1 + 4 / 6))


def test_layers_without_a_predictor_are_never_chosen(tiny: Callable[..., Tiny]) -> None:
    model = load_model(tiny("opt").path).model
    selector = plan(model, {1: 4.0})
    side = Side(model, selector, 2, WholeLayers(lambda rows: Line(1.5), 1, ()))
    side.play()
    found = torch.zeros(2, 2, dtype=torch.int32)
    selector.count_listed(2, out=found)
    listed, heads = found
    assert heads.tolist() == [0, 0]
    assert listed[0] == 0
    assert 0 < listed[1] <= model.config.intermediate_size


def with_heads(model: DecoderLM, shifts: dict[int, float]) -> PlanSelector:
    """Predictors of heads alone; a layer's shift says how many pass."""
    c = model.config
    generator = torch.Generator().manual_seed(6)
    choices: dict[Key, Choice] = {}
    for layer, shift in shifts.items():
        first, second = (
            Matrix(torch.randn(shape, generator=generator) * shape[1] ** -0.5)
            for shape in ((8, c.hidden_size), (c.num_key_value_heads, 8))
        )
        bias = torch.full((c.num_key_value_heads,), shift)
        choices[Site.HEADS, layer] = Choice(Predictor(first, second, bias))
    return PlanSelector(c.num_hidden_layers, c.intermediate_size, choices, model.device)


def test_all_heads_are_computed_where_nearly_all_are_used(tiny: Callable[..., Tiny]) -> None:
    """Layer 1 uses every head: after four steps its predictor runs no more, and nothing changes."""
    model = load_model(tiny("opt").path).model
    shifts = {0: -1.0, 1: 1e3}
    chosen, kept = with_heads(model, shifts), with_heads(model, shifts)
    heads = WholeLayers(
        lambda rows: Line(1.5), model.config.num_key_value_heads, chosen.predicted(Site.HEADS)
    )
    ours, theirs = Side(model, chosen, 2, None, heads), Side(model, kept, 2, None)
    for step in range(6):
        expected = theirs.play()
        found = ours.play(expected.argmax(dim=1).tolist())
        torch.testing.assert_close(found, expected)
        assert heads.of(2) == (Layers() if step < 3 else {1})
    assert ours.graphs.captures == 2
    assert chosen.meter.used(Site.HEADS) == kept.meter.used(Site.HEADS)
    assert chosen.reads() == kept.reads()
    assert chosen.predictor_bytes < kept.predictor_bytes


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
def test_what_choosing_heads_costs(rows: int) -> None:
    """One row's choice hides; of more rows it must leave out more bytes than it costs."""
    table = CostTable()
    small, large = table.heads(rows, 67_000_000), table.heads(rows, 340_000_000)
    if rows == 1:
        assert small.at(0.99) < small.whole
    else:
        assert small.at(0.75) > small.whole
        assert large.at(0.75) < large.whole
        assert large.at(0.996) > large.whole


@pytest.mark.cuda
@pytest.mark.parametrize("model_type", ["opt", "llama"])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_gpu_writes_the_same_text_with_layers_computed_whole(
    rows: int, model_type: str, tiny: Callable[..., Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32, half a block ahead; layer 1's predictor lists everything, so that whole is the same.
    One text may part where a score lies next to its threshold."""
    cost = MLPCost(1.0, ((0.0, 0.1), (1.0, 1.5)))
    monkeypatch.setattr(CostTable, "mlp", lambda *_, **__: cost)
    loaded = load_model(tiny(model_type).path, device="cuda")
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    texts = []
    for whole_layers in (True, False):
        engine = Engine(
            loaded, plan(loaded.model, {0: -2.0, 1: 1e3}, 0.5), max_batch=8,
            whole_layers=whole_layers,
        )  # fmt: skip
        requests = [engine.add(prompt(3 + n, seed=n), params) for n in range(rows)]
        while engine.running or engine.waiting:
            engine.step()
        assert [r.error for r in requests] == [None] * rows
        texts.append([r.token_ids for r in requests])
        step = engine.arms["default"].step
        assert isinstance(step, GraphStep)
        chosen = {whole for _, _, whole, _ in step._graphs}
        assert chosen == ({Layers(), Layers({1})} if whole_layers else {Layers()})
    assert sum(a != b for a, b in zip(*texts, strict=True)) <= 1


@pytest.mark.cuda
def test_counting_waits_for_nothing(tiny: Callable[..., Tiny]) -> None:
    """A step of a plan starts without waiting for the GPU, also when it reads layers whole."""
    loaded = load_model(tiny("opt").path, device="cuda")
    engine = Engine(loaded, plan(loaded.model, {0: -1.0, 1: 4.0}), max_batch=2)
    request = engine.add(prompt(5), SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(12):
        engine.step()
    step = engine.arms["default"].step
    assert isinstance(step, GraphStep)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run([request])
    finally:
        torch.cuda.set_sync_debug_mode("default")
