"""Bucketed steps on fixed buffers: what a captured graph would read and write, run eagerly.

A forward stands for its graph: it is made once for each bucket and then called again with nothing
but what lies in the buffers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dejavu.engine.decode_step import DecodeStep
from dejavu.engine.device_sampling import draw_rows
from dejavu.engine.graph_step import GraphStep, Replay
from dejavu.engine.params import SamplingParams
from dejavu.engine.sampling import Sampler, probabilities
from dejavu.engine.scheduler import Request
from dejavu.kernels import reference
from dejavu.kernels.matrix import HALVES, Matrix
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.load import load_model, random_model
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.kv_cache import KVCache, blocks_for
from dejavu.sparsity.meter import MeteredSelector
from dejavu.sparsity.policy import Dense, Points, Selector, Site
from models.tiny import VOCAB, Tiny, prompt

LENGTH = 128
GREEDY = SamplingParams()


class Graphs:
    """Stands for CUDA graphs; counts captures, and like them runs the forward once before."""

    def __init__(self) -> None:
        self.captures = 0

    def __call__(self, forward: Replay) -> Replay:
        self.captures += 1
        forward()
        return forward


class Runner:
    """A model, a cache with NaN in every block but the scratch one, and a step over both."""

    def __init__(
        self,
        model: DecoderLM,
        rows: int,
        selector: Selector | None = None,
        *,
        plain: bool = False,
        overlapped: bool = True,
    ) -> None:
        self.model = model
        self.cache = KVCache(model.config, rows * blocks_for(LENGTH), dtype=model.cache_dtype)
        for layer in (*self.cache.keys, *self.cache.values):
            layer[: self.cache.scratch].fill_(torch.nan)
        self.graphs = Graphs()
        self.selector = Dense() if selector is None else selector
        arguments = (model, self.cache, self.selector, TorchOps())
        self.step: GraphStep | DecodeStep
        if plain:
            self.step = DecodeStep(*arguments, max_rows=rows, max_length=LENGTH)
        else:
            self.step = GraphStep(*arguments, max_rows=rows, max_length=LENGTH, capture=self.graphs)
            self.step.overlapped = overlapped

    def start(self, length: int, seed: int = 0) -> Request:
        request = Request(tuple(prompt(length, seed)), LENGTH)
        request.blocks = self.cache.allocate(blocks_for(LENGTH))
        batch = Batch.prefill(list(request.prompt), request.blocks)
        self.model.prepare(length)
        logits = self.model.forward(batch, self.cache, Dense(), TorchOps())
        request.token_ids.append(int(logits[0].argmax()))
        return request

    def greedy(self, rows: list[Request]) -> list[int]:
        """One more token for each, as the step picks them."""
        logits = self.step.run(rows)
        likeliest = logits.argmax(dim=1).tolist()
        if isinstance(self.step, GraphStep):
            picked = self.step.pick([Sampler(GREEDY, r.prompt, VOCAB) for r in rows])
            assert picked == likeliest
        for request, token in zip(rows, likeliest, strict=True):
            request.token_ids.append(token)
        return likeliest


def changing(count: int, most: int) -> list[list[int]]:
    """Seats of `count` steps: sizes 1 to `most` in changing order, rows in changing order."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for step in range(count):
        size = (step * 5) % most + 1
        found.append(torch.randperm(most, generator=generator)[:size].tolist())
    return found


@pytest.mark.parametrize("model_type", ["opt", "llama"])
def test_padded_steps_are_the_plain_steps(model_type: str, tiny: Callable[..., Tiny]) -> None:
    """60 steps over all bucket borders, a long request beside short ones, seats that change."""
    model = load_model(tiny(model_type).path).model
    texts = []
    for plain in (False, True):
        runner = Runner(model, 9, plain=plain)
        requests = [runner.start(40 if n == 0 else n, seed=n) for n in range(9)]
        for seats in changing(60, 9):
            runner.greedy([requests[n] for n in seats])
        texts.append([r.token_ids for r in requests])
        if not plain:
            assert runner.graphs.captures == 5  # 1, 2, 4, 8 and 16 rows
    assert texts[0] == texts[1]


def test_padding_writes_nothing_but_its_scratch_block(tiny: Callable[..., Tiny]) -> None:
    """After a request ended, its memory stays as it is, whatever runs in its former bucket."""
    runner = Runner(load_model(tiny("llama").path).model, 4)
    requests = [runner.start(3 + n, seed=n) for n in range(4)]
    runner.greedy(requests)
    before = [layer.clone() for layer in (*runner.cache.keys, *runner.cache.values)]
    for _ in range(3):
        runner.greedy(requests[:3])  # the fourth row is padding now
    after = (*runner.cache.keys, *runner.cache.values)
    ended = requests[3].blocks
    free = sorted(set(range(runner.cache.num_blocks)) - {b for r in requests for b in r.blocks})
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[ended].nan_to_num(9.0), new[ended].nan_to_num(9.0))
        assert not new[free].isfinite().any()
        assert new[runner.cache.scratch].isfinite().all()


def test_blocks_of_an_ended_request_serve_the_next(tiny: Callable[..., Tiny]) -> None:
    """The same row, other blocks: a table baked into the graph would show."""
    model = load_model(tiny("llama").path).model
    runner, alone = Runner(model, 2), Runner(model, 2, plain=True)
    first = runner.start(40)
    for _ in range(4):
        runner.greedy([first])
    runner.cache.release(first.blocks)
    runner.cache.allocate(1)  # so that the next request's blocks lie elsewhere
    second, reference = runner.start(5, seed=1), alone.start(5, seed=1)
    for _ in range(40):
        assert runner.greedy([second]) == alone.greedy([reference])


def test_rows_do_not_see_their_neighbours_nor_the_bucket(tiny: Callable[..., Tiny]) -> None:
    model = load_model(tiny("opt").path).model
    alone, crowd = Runner(model, 8), Runner(model, 8)
    one = alone.start(4)
    many = [crowd.start(4), *(crowd.start(20 + n, seed=n) for n in range(4))]
    for _ in range(20):
        alone.greedy([one])
        crowd.greedy(many)
    assert one.token_ids == many[0].token_ids


class Swinging(MeteredSelector):
    """Selects a share of the neurons that swings from none to all: by a threshold in a buffer."""

    def __init__(self, model: DecoderLM, rows: int) -> None:
        super().__init__(model.config.num_hidden_layers)
        c = model.config
        generator = torch.Generator().manual_seed(3)
        self._second = [
            Matrix(torch.randn(c.intermediate_size, c.hidden_size, generator=generator))
            for _ in range(c.num_hidden_layers)
        ]
        self.bias = torch.zeros(c.intermediate_size)
        self._neurons = c.intermediate_size
        self._buffers: dict[tuple[int, int], Selection] = {}
        self.shares: list[float] = []

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if site is not Site.NEURONS:
            return None
        x = points.source(site, layer)
        if (layer, len(x)) not in self._buffers:
            found = Selection.empty(self._neurons, len(x))
            self._buffers[layer, len(x)] = self.meter.watch(layer, found)
        selection = self._buffers[layer, len(x)]
        ops.select(x, self._second[layer], self.bias, out=selection)
        self.meter.tally(site, layer, selection, len(x), ops)
        self.shares.append(int(selection.counts.sum()) / self._neurons)
        return selection


def test_selections_swing_from_none_to_all(tiny: Callable[..., Tiny]) -> None:
    model = load_model(tiny("llama").path).model
    texts = []
    for plain in (False, True):
        selector = Swinging(model, 4)
        runner = Runner(model, 4, selector, plain=plain, overlapped=False)  # the selector changes
        requests = [runner.start(3 + n, seed=n) for n in range(4)]
        for step in range(24):
            selector.bias.fill_((-1e4, -3.0, 0.0, 1e4)[step % 4])
            runner.greedy(requests)
        texts.append([r.token_ids for r in requests])
        assert min(selector.shares) == 0.0
        assert max(selector.shares) == 1.0
    assert texts[0] == texts[1]


def test_the_trial_run_of_a_capture_is_not_counted(tiny: Callable[..., Tiny]) -> None:
    model = load_model(tiny("llama").path).model
    selector = Swinging(model, 2)
    runner = Runner(model, 2, selector, overlapped=False)
    selector.bias.fill_(1e4)
    request = runner.start(3)
    for _ in range(3):
        runner.greedy([request])
    (reads, *_) = selector.reads()
    assert reads.neurons == 53
    counted = selector.meter.snapshot()[1]
    assert counted[0].tolist() == [3 * 53, 3 * 53, 3]


def test_uncapturable_selectors_run_on_just_their_rows(tiny: Callable[..., Tiny]) -> None:
    rows = []

    class Oracle(Dense):
        capturable = False

        def select(self, site: Site, layer: int, points: Points, ops: Ops) -> None:
            if layer == 0 and site is Site.NEURONS:
                rows.append(len(points.source(site, layer)))

    runner = Runner(load_model(tiny("opt").path).model, 4, Oracle())
    requests = [runner.start(3 + n, seed=n) for n in range(3)]
    for size in (3, 1, 2, 3):
        runner.greedy(requests[:size])
    assert rows == [3, 1, 2, 3]
    assert runner.graphs.captures == 0


def test_a_row_that_is_not_finite_harms_no_other(tiny: Callable[..., Tiny]) -> None:
    model = load_model(tiny("opt").path).model
    runner = Runner(model, 4)
    requests = [runner.start(3 + n, seed=n) for n in range(3)]
    hot = SamplingParams(temperature=1.0)
    for bad in (torch.nan, torch.inf, -torch.inf):
        runner.cache.values[1][requests[1].blocks[0], 0] = bad
        logits = runner.step.run(requests)
        assert isinstance(runner.step, GraphStep)
        samplers = [
            Sampler(p, r.prompt, VOCAB)
            for p, r in zip((GREEDY, GREEDY, hot), requests, strict=True)
        ]
        picked = runner.step.pick(samplers)
        assert picked[0] == int(logits[0].argmax())
        assert picked[1] is None
        assert picked[2] is not None
        assert runner.step.pick([None, *samplers[1:]])[0] is None


def test_ids_lie_below_the_tokenizer_s_vocabulary(tiny: Callable[..., Tiny]) -> None:
    model = load_model(tiny("opt").path).model
    runner = Runner(model, 2)
    step = GraphStep(
        model, runner.cache, Dense(), TorchOps(),
        max_rows=2, max_length=LENGTH, vocab_size=7, capture=Graphs(),
    )  # fmt: skip
    requests = [runner.start(3 + n, seed=n) for n in range(2)]
    for _ in range(20):
        assert step.run(requests).shape == (2, 7)
        params = SamplingParams(temperature=3.0)
        for token in step.pick([Sampler(params, r.prompt, 7) for r in requests]):
            assert token is not None
            assert 0 <= token < 7


KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, top_k=5, seed=2),
    SamplingParams(temperature=1.0, top_p=0.7, seed=3),
    SamplingParams(temperature=2.0, min_p=0.05, top_k=60, top_p=0.9, seed=4),
    SamplingParams(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, seed=5),
    SamplingParams(frequency_penalty=1.0),
    SamplingParams(temperature=1.0, logit_bias={3: 4.0}, seed=6),
]


def test_mixed_rows_pick_what_the_host_s_samplers_pick(tiny: Callable[..., Tiny]) -> None:
    """Every kind of request side by side, whose neighbours leave one after the other."""
    model = load_model(tiny("llama").path).model
    runner = Runner(model, len(KINDS))
    assert isinstance(runner.step, GraphStep)
    requests = [runner.start(3 + n, seed=n) for n in range(len(KINDS))]
    here, there = (
        {r: Sampler(p, r.prompt, VOCAB) for p, r in zip(KINDS, requests, strict=True)}
        for _ in range(2)
    )
    for step in range(60):
        rows = requests[: max(1, len(KINDS) - step // 8)]
        logits = runner.step.run(rows).clone()
        picked = runner.step.pick([here[r] for r in rows])
        expected = [there[r].sample(row.numpy()) for r, row in zip(rows, logits, strict=True)]
        assert picked == expected
        for request, token in zip(rows, expected, strict=True):
            request.token_ids.append(token)


@pytest.mark.parametrize("params", KINDS[1:5])
def test_draws_follow_the_probabilities(params: SamplingParams) -> None:
    vocab, draws = 40, 4096
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(vocab, generator=generator)
    expected = probabilities(logits.numpy(), params)
    ids = draw_rows(
        logits.expand(draws, -1),
        torch.full((draws,), params.temperature),
        torch.full((draws,), params.top_k or vocab),
        torch.full((draws,), params.top_p),
        torch.full((draws,), params.min_p),
        torch.rand(draws, dtype=torch.float64, generator=generator),
    )
    counts = np.bincount(ids.numpy(), minlength=vocab)
    assert not counts[expected == 0].any()
    share = expected.astype(np.float64) / expected.sum(dtype=np.float64)
    spread = np.sqrt(draws * share * (1 - share))
    assert (np.abs(counts - draws * share) < 5 * spread + 1).all()


def test_draws_at_the_ends() -> None:
    """The smallest and the largest random number, equals, one candidate, hopeless rows."""
    logits = torch.tensor([[1.0, 3.0, 3.0, -5.0]]).repeat(7, 1)
    logits[6] = torch.nan
    last = 1 - 2**-53
    ids = draw_rows(
        logits,
        torch.tensor([1.0, 1.0, 1e-3, 1e-3, 1.0, 0.0, 1.0]),
        torch.tensor([4, 4, 1, 1, 4, 9, 0]),
        torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0]),
        torch.zeros(7),
        torch.tensor([0.0, last, 0.0, last, 0.99, 0.5, 0.5], dtype=torch.float64),
    )
    # Equals of the k-th and of the nucleus's last are kept: 1 and 2 both stay.
    assert ids.tolist()[:5] == [0, 3, 1, 2, 2]
    assert ((ids >= 0) & (ids < 4)).all()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("model_type", ["opt", "llama"])
def test_short_and_long_prompts_together_in_half_precision(
    model_type: str, dtype: str, tiny: Callable[..., Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 1 and 40 tokens: no NaN anywhere, and the tokens of the single runs."""
    monkeypatch.setattr(reference, "in_halves", lambda tensor: tensor.dtype in HALVES)
    config = load_model(tiny(model_type).path).model.config
    model = random_model(config, dtype=dtype, seed=1)
    seen: list[bool] = []

    class Watching(Dense):
        def observe(self, stage: object, layer: int, value: torch.Tensor) -> None:
            seen.append(bool(value.isfinite().all()))

    texts = []
    for together in (True, False):
        runner = Runner(model, 3, Watching())
        runner.cache.keys = [k.to(torch.float16) for k in runner.cache.keys]
        runner.cache.values = [v.to(torch.float16) for v in runner.cache.values]
        requests = [runner.start(1), runner.start(40), runner.start(2)]
        for group in [requests] if together else [[r] for r in requests]:
            for _ in range(12):
                runner.greedy(group)
        texts.append([r.token_ids for r in requests])
    assert texts[0] == texts[1]
    assert all(seen)
