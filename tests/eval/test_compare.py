"""Dense and sparse side by side, and what the sparse one read."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dejavu.eval.compare import compare, divergence
from dejavu.eval.counting import Counting
from dejavu.eval.perplexity import evaluate
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.models.base import DecoderLM
from dejavu.predictor.network import Predictor
from dejavu.predictor.selector import Choice, PlanSelector
from dejavu.sparsity.accounting import LayerReads
from dejavu.sparsity.policy import Dense, Points, Selector, Site
from dejavu.sparsity.replay import Replay

from .conftest import Pair
from .tiny import NEURONS, Guess, random_ids, text_of

LAYERS = 2


class Listed(Selector):
    """The same neurons for every token, counted by itself."""

    predictor_bytes = 500

    def __init__(self, mask: Tensor) -> None:
        self.selection = Selection.from_mask(mask[None])
        self.kept = int(mask.sum())
        self.resets = 0

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        return self.selection if site == Site.NEURONS else None

    def reset(self) -> None:
        self.resets += 1

    def reads(self) -> list[LayerReads]:
        return [LayerReads(neurons=self.kept)] * LAYERS


def masks(model: DecoderLM, count: int) -> dict[tuple[Site, int], Tensor]:
    generator = torch.Generator().manual_seed(2)
    groups = model.config.num_key_value_heads
    sizes = {Site.NEURONS: (NEURONS, 0.3), Site.HEADS: (groups, 0.8)}
    return {
        (site, layer): torch.rand(count, size, generator=generator) < share
        for site, (size, share) in sizes.items()
        for layer in range(LAYERS)
    }


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_against_the_two_logits(name: str, request: pytest.FixtureRequest) -> None:
    model, _ = request.getfixturevalue(name)
    ids = random_ids(60)
    chosen = masks(model, 59)
    found = compare(model, text_of(ids, 59, 59), Replay(chosen))
    with torch.inference_mode():
        cache = model.new_cache(59)
        p, q = (
            model.logits(ids[:-1], cache, selector, TorchOps()).double().log_softmax(dim=1)
            for selector in (Dense(), Replay(chosen))
        )
    losses = [float(functional.nll_loss(x, ids[1:])) for x in (p, q)]
    assert found.dense.loss == pytest.approx(losses[0], rel=1e-6)
    assert found.sparse.loss == pytest.approx(losses[1], rel=1e-6)
    assert found.ratio == pytest.approx(math.exp(losses[1] - losses[0]), rel=1e-5)
    assert found.kl == pytest.approx(
        float(functional.kl_div(q, p, log_target=True, reduction="batchmean")), rel=1e-5
    )
    assert found.agreement == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()))
    assert found.ratio_error is None
    assert found.reads is not None
    assert found.reads.weight_bytes is None  # a replay does not know what choosing would cost
    for site, densities in ((Site.NEURONS, found.reads.neurons), (Site.HEADS, found.reads.heads)):
        wanted = [float(chosen[site, layer].double().mean()) for layer in range(LAYERS)]
        assert densities == pytest.approx(wanted)


def test_errors_are_of_the_paired_difference(opt: Pair) -> None:
    model, _ = opt
    text = text_of(random_ids(401), 40, 40)
    selector = Guess(model)
    found = compare(model, text, selector)
    dense, sparse = [], []
    for window in text.windows:
        part = text_of(window.ids, 40, 40)
        dense.append(evaluate(model, part).loss)
        sparse.append(evaluate(model, part, selector).loss)
    assert found.dense.loss == pytest.approx(sum(dense) / 10)
    pairs = torch.tensor(sparse, dtype=torch.float64) - torch.tensor(dense, dtype=torch.float64)
    assert found.ratio == pytest.approx(math.exp(float(pairs.mean())), rel=1e-6)
    assert found.ratio_error == pytest.approx(found.ratio * float(pairs.std()) / 10**0.5, rel=1e-5)
    assert found.kl > 0
    assert found.kl_error is not None
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["reads"]["neuron_density"] < 1


@pytest.mark.parametrize("through", ["prefill", "decode"])
def test_dense_beside_dense(opt: Pair, through: str) -> None:
    found = compare(opt[0], text_of(random_ids(50), 20, 15), Dense(), through=through)
    assert (found.ratio, found.ratio_error) == (1.0, 0.0)
    assert (found.kl, found.agreement) == (0.0, 1.0)
    assert found.dense == found.sparse
    if through == "prefill":
        assert found.reads is not None
        assert found.reads.neurons == found.reads.heads == [1.0] * LAYERS
    else:
        assert found.reads is None


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_decode_agrees_with_prefill(name: str, request: pytest.FixtureRequest) -> None:
    model, _ = request.getfixturevalue(name)
    text = text_of(random_ids(150, seed=8), 20, 11)
    forced = compare(model, text, Guess(model))
    decoded = compare(model, text, Guess(model), through="decode")
    assert decoded.ratio == pytest.approx(forced.ratio, rel=1e-5)
    assert decoded.ratio_error == pytest.approx(forced.ratio_error, rel=1e-3)
    assert decoded.kl == pytest.approx(forced.kl, rel=1e-4)
    assert decoded.agreement == forced.agreement


def test_bytes_of_a_token_by_hand(opt: Pair) -> None:
    model, _ = opt
    mask = torch.arange(NEURONS) % 3 == 0
    selector, ids = Listed(mask), random_ids(31)
    found = compare(model, text_of(ids, 30, 30), selector)
    assert selector.resets == 0
    # Of an OPT: everything but the positions (the tied head counts once), fp32.
    w = model.weights
    assert w.embed_positions is not None
    parameters = w.lm_head.data.numel() + 2 * 24
    active: list[Tensor] = []
    for block in w.blocks:
        a, m = block.attention, block.mlp
        parameters += sum(x.weight.data.numel() + 24 for x in (a.q, a.k, a.v, a.o))
        parameters += 4 * 24 + m.up.weight.data.numel() + NEURONS + m.down.weight.data.numel() + 24

    class Look(Selector):
        def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
            if site == Site.HEADS:
                return None
            up = w.blocks[layer].mlp.up
            scores = functional.linear(points.source(site, layer), up.weight.data, up.bias)
            active.append((scores > 0) & mask)
            return selector.selection

    with torch.inference_mode():
        model.logits(ids[:-1], model.new_cache(30), Look(), TorchOps())
    skipped = LAYERS * (NEURONS - selector.kept) * (24 + 1)
    skipped += sum(24 * (NEURONS - float(a.sum(dim=1).double().mean())) for a in active)
    assert found.reads is not None
    assert found.reads.rows == 1
    assert found.reads.neurons == pytest.approx([24 / 70] * LAYERS)
    assert found.reads.weight_bytes == pytest.approx(
        (4 * (parameters - skipped) + 500) / (4 * parameters)
    )

    decoded = compare(model, text_of(ids, 10, 10), selector, through="decode", rows=2)
    assert selector.resets == 2
    assert decoded.reads is not None
    assert decoded.reads.rows == 1.5  # windows of 10: two side by side, then one
    skipped = LAYERS * (NEURONS - selector.kept) * (24 + 1 + 24)
    assert decoded.reads.weight_bytes == pytest.approx(
        (4 * (parameters - skipped) + 500) / (4 * parameters) / 1.5
    )


def test_decode_steps_count_the_union_of_their_rows(opt: Pair) -> None:
    """Against the masks of the same selector, put together by hand; rows 2, 2, 1 and 1."""
    model, _ = opt
    plan = Guess(model)
    choices = {
        (Site.NEURONS, layer): Choice(Predictor(first, second, bias))
        for (site, layer), (first, second, bias) in plan.parts.items()
        if site == Site.NEURONS
    }
    selector = PlanSelector(LAYERS, NEURONS, choices)
    text = text_of(random_ids(56, seed=1), 10, 10)
    assert [len(w.ids) - 1 for w in text.windows] == [10] * 5 + [5]
    used: list[list[Tensor]] = [[] for _ in range(LAYERS)]

    class Look(Selector):
        def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
            selection = selector.select(site, layer, points, ops)
            if selection is not None:
                used[layer].append(selection.to_mask(len(points.source(site, layer))).clone())
            return selection

    with torch.inference_mode():
        for window in text.windows:
            model.logits(window.ids[:-1], model.new_cache(10), Look(), TorchOps())
    wanted = []
    for layer in range(LAYERS):
        first, second, third, fourth, fifth, last = used[layer]
        unions = [first | second, third | fourth, fifth, last]
        wanted.append(float(torch.cat(unions).double().mean()))
    found = compare(model, text, selector, through="decode", rows=2)
    assert found.reads is not None
    assert found.reads.neurons == pytest.approx(wanted)
    assert found.reads.heads == [1.0] * LAYERS
    assert found.reads.rows == pytest.approx(55 / 35)
    alone = compare(model, text, selector, through="decode", rows=1).reads
    forced = compare(model, text, selector).reads
    assert alone is not None
    assert forced is not None
    assert alone.neurons == pytest.approx(forced.neurons)
    assert alone.weight_bytes == pytest.approx(forced.weight_bytes)


def test_counting_is_per_token_not_of_the_union(opt: Pair) -> None:
    model, _ = opt
    each = torch.eye(NEURONS, dtype=torch.bool)[:50]
    counting = Counting(Replay({(Site.NEURONS, i): each for i in range(LAYERS)}), model)
    with torch.inference_mode():
        model.logits(random_ids(50), model.new_cache(50), counting, TorchOps())
    for read in counting.reads():
        assert read.neurons == 1.0
        assert read.active is not None
        assert 0 < read.active < 1
        assert read.groups == model.config.num_key_value_heads


def test_divergence() -> None:
    p, q = torch.randn(300, 7), torch.randn(300, 7)
    wanted = functional.kl_div(
        q.double().log_softmax(1), p.double().log_softmax(1), log_target=True, reduction="none"
    ).sum(dim=1)
    torch.testing.assert_close(divergence(p, q).double(), wanted, rtol=1e-4, atol=1e-6)
    assert not divergence(p, p).any()
