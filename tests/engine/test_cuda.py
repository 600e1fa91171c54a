"""The real thing: models on a GPU against the same models on the CPU, graphs against eager steps.

fp32 throughout where tokens are compared: the two sides add in different orders, so a token may
differ only where the two best logits nearly tie; the checkpoints here are random and seldom do.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dejavu.engine.backend import decode_ops
from dejavu.engine.engine import Engine
from dejavu.engine.graph_step import GraphStep
from dejavu.engine.params import SamplingParams
from dejavu.engine.sampling import Sampler
from dejavu.engine.scheduler import Request
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.load import LoadedModel, load_model, random_model
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.kv_cache import KVCache, blocks_for
from dejavu.sparsity.meter import MeteredSelector
from dejavu.sparsity.policy import Dense, Points, Selector, Site
from models.tiny import VOCAB, Tiny, prompt

pytestmark = pytest.mark.cuda
ARCHITECTURES = ("opt", "llama", "mistral", "qwen2", "qwen3")
GREEDY = SamplingParams()
TIE = 1e-3  # of the logits' spread: closer than this, the first difference is no error


class Thresholded(MeteredSelector):
    """Neurons whose random linear score exceeds a threshold that lies in a buffer: capturable."""

    def __init__(self, model: DecoderLM) -> None:
        c = model.config
        super().__init__(c.num_hidden_layers, model.device)
        generator = torch.Generator().manual_seed(3)
        shape = c.intermediate_size, c.hidden_size
        self._second = [
            Matrix(torch.randn(shape, generator=generator).to(model.device))
            for _ in range(c.num_hidden_layers)
        ]
        self.bias = torch.zeros(c.intermediate_size, device=model.device)
        self._buffers: dict[tuple[int, int], Selection] = {}

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if site is not Site.NEURONS:
            return None
        x = points.source(site, layer).float()
        if (layer, len(x)) not in self._buffers:
            found = Selection.empty(len(self.bias), len(x), device=x.device)
            self._buffers[layer, len(x)] = self.meter.watch(layer, found)
        selection = self._buffers[layer, len(x)]
        ops.select(x, self._second[layer], self.bias, out=selection)
        self.meter.tally(site, layer, selection, len(x), ops)
        return selection


class Eager(Thresholded):
    capturable = False


class EagerDense(Dense):
    capturable = False


@pytest.fixture(autouse=True)
def exact_products() -> None:
    assert not torch.backends.cuda.matmul.allow_tf32


def texts(loaded: LoadedModel, selector: Selector | None, ops: Ops | None) -> list[list[int]]:
    """Three prompts of several lengths side by side, 40 tokens each, greedily."""
    engine = Engine(loaded, selector, ops=ops, max_batch=4, whole_layers=False)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [engine.add(prompt(n, seed=n), params) for n in (1, 40, 7)]
    while engine.running or engine.waiting:
        engine.step()
    assert [r.error for r in requests] == [None] * 3
    return [r.token_ids for r in requests]


def assert_same_up_to_ties(
    model: DecoderLM, selector: Selector, found: list[list[int]], expected: list[list[int]]
) -> None:
    """model: on the CPU; at the first difference its two candidates must be all but equal."""
    for n, ours, theirs in zip((1, 40, 7), found, expected, strict=True):
        differing = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        if not differing:
            continue
        first = differing[0]
        ids = torch.tensor(prompt(n, seed=n) + theirs[:first])
        logits = model.logits(ids, model.new_cache(len(ids)), selector, TorchOps())[-1]
        gap = float(logits[theirs[first]] - logits[ours[first]])
        assert gap < TIE * float(logits.std()), f"prompt {n}, token {first}"


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_gpu_and_cpu_write_the_same_text(
    model_type: str, sparse: bool, tiny: Callable[..., Tiny]
) -> None:
    path = tiny(model_type).path
    here, there = load_model(path), load_model(path, device="cuda")
    one = Thresholded(here.model) if sparse else None
    other = Thresholded(there.model) if sparse else None
    expected = texts(here, one, TorchOps())
    found = texts(there, other, None)
    # Prompts are dense, so a teacher-forced sparse pass is no reference: compare outright there.
    if sparse:
        assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1
    else:
        assert_same_up_to_ties(here.model, Dense(), found, expected)


class Runner:
    """A model with requests and two steps, captured and eager, over caches of their own."""

    def __init__(self, model: DecoderLM, make: Callable[[bool], Selector], rows: int) -> None:
        self.model = model
        self.selectors = [make(True), make(False)]
        self.caches = []
        self.steps = []
        for selector in self.selectors:
            blocks = rows * blocks_for(model.config.context_length)
            cache = KVCache(model.config, blocks, device=model.device, dtype=model.cache_dtype)
            for layer in (*cache.keys, *cache.values):
                layer[: cache.scratch].fill_(torch.nan)
            self.caches.append(cache)
            self.steps.append(
                GraphStep(
                    model,
                    cache,
                    selector,
                    decode_ops(model),
                    max_rows=rows,
                    max_length=model.config.context_length,
                )
            )

    def start(self, length: int, seed: int) -> tuple[Request, ...]:
        pair = []
        for cache in self.caches:
            request = Request(tuple(prompt(length, seed)), self.model.config.context_length)
            request.blocks = cache.allocate(blocks_for(self.model.config.context_length))
            batch = Batch.prefill(list(request.prompt), request.blocks, device=self.model.device)
            self.model.prepare(length)
            logits = self.model.forward(batch, cache, Dense(), TorchOps())
            request.token_ids.append(int(logits[0].argmax()))
            pair.append(request)
        return tuple(pair)

    def play(self, pairs: list[tuple[Request, ...]]) -> None:
        picked = []
        for n, step in enumerate(self.steps):
            rows = [pair[n] for pair in pairs]
            step.run(rows)
            picked.append(step.pick([Sampler(GREEDY, r.prompt, VOCAB) for r in rows]))
        assert picked[0] == picked[1]
        for n, tokens in enumerate(picked):
            for pair, token in zip(pairs, tokens, strict=True):
                assert token is not None
                pair[n].token_ids.append(token)


def dense(captured: bool) -> Selector:
    return Dense() if captured else EagerDense()


@pytest.mark.parametrize("model_type", ["opt", "llama"])
def test_graphs_write_what_eager_steps_write(model_type: str, tiny: Callable[..., Tiny]) -> None:
    """300 tokens over every bucket border, sizes 1 to 9 in changing order, a long request beside
    short ones, a request that ends early and whose memory stays as it was; two models in turn."""
    path = tiny(model_type, max_position_embeddings=400).path
    models = [load_model(path, device="cuda").model for _ in range(2)]
    runners = [Runner(model, dense, 9) for model in models]
    requests = [[r.start(1 + 7 * n, seed=n) for n in range(9)] for r in runners]
    generator = torch.Generator().manual_seed(7)
    ended = requests[0][8][0].blocks
    before = None
    for step in range(300):
        last = 9 if step < 40 else 8
        size = (5 * step) % last + 1
        seats = torch.randperm(last, generator=generator)[:size].tolist()
        for runner, pairs in zip(runners, requests, strict=True):
            runner.play([pairs[n] for n in seats])
        if step == 40:
            before = [k[ended].clone() for k in runners[0].caches[0].keys]
    assert before is not None
    for old, layer in zip(before, runners[0].caches[0].keys, strict=True):
        assert torch.equal(old.nan_to_num(9.0), layer[ended].nan_to_num(9.0))
    assert [r[0].token_ids for r in requests[0]] == [r[0].token_ids for r in requests[1]]


@pytest.mark.parametrize("model_type", ["opt", "llama"])
def test_selections_swing_from_none_to_all(model_type: str, tiny: Callable[..., Tiny]) -> None:
    model = load_model(tiny(model_type).path, device="cuda").model
    runner = Runner(model, lambda captured: (Thresholded if captured else Eager)(model), 4)
    for step_of in runner.steps:
        step_of.overlapped = False  # the selectors change between steps
    pairs = [runner.start(3 + n, seed=n) for n in range(4)]
    for step in range(60):
        for selector in runner.selectors:
            assert isinstance(selector, Thresholded)
            selector.bias.fill_((-1e4, -3.0, 0.0, 1e4)[step % 4])
        runner.play(pairs[: step % 4 + 1])
    graphs, eager = (s.meter.snapshot()[1] for s in runner.selectors if isinstance(s, Thresholded))
    # Three of four steps have a whole bucket of rows; the fourth is padded, and may read more.
    assert (graphs >= eager).all()


def test_a_row_does_not_see_its_neighbours(tiny: Callable[..., Tiny]) -> None:
    model = load_model(tiny("llama").path, device="cuda").model
    alone, crowd = Runner(model, dense, 8), Runner(model, dense, 8)
    one, many = alone.start(4, 0), [crowd.start(4, 0), *(crowd.start(9 + n, n) for n in range(6))]
    for _ in range(60):
        alone.play([one])
        crowd.play(many)
    assert one[0].token_ids == many[0][0].token_ids


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("model_type", ["opt", "llama"])
def test_short_and_long_prompts_together_in_half_precision(
    model_type: str, dtype: str, tiny: Callable[..., Tiny]
) -> None:
    """Prompts of 1 and 40 tokens: nothing that is not finite, and the tokens of single runs."""
    config = load_model(tiny(model_type).path).model.config
    model = random_model(config, dtype=dtype, device="cuda", seed=1)
    texts = []
    for together in (True, False):
        runner = Runner(model, dense, 2)
        pairs = [runner.start(1, 0), runner.start(40, 1)]
        for group in [pairs] if together else [[p] for p in pairs]:
            for _ in range(30):
                runner.play(group)
        texts.append([pair[0].token_ids for pair in pairs])
        for cache, pair in ((c, p) for n, c in enumerate(runner.caches) for p in [pairs[0][n]]):
            assert all(k[pair.blocks[0], : pair.length - 1].isfinite().all() for k in cache.keys)
    assert texts[0] == texts[1]


def test_sampled_rows_draw_what_the_host_draws(tiny: Callable[..., Tiny]) -> None:
    """Same generators, same numbers: at most one draw in 200 falls on a rounding border."""
    model = load_model(tiny("llama").path, device="cuda").model
    runner = Runner(model, dense, 4)
    kinds = [
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=1.3, top_k=5, top_p=0.9, seed=2),
        SamplingParams(temperature=1.0, min_p=0.05, repetition_penalty=1.3, seed=3),
        GREEDY,
    ]
    requests = [runner.start(3 + n, seed=n)[0] for n in range(4)]
    here, there = (
        [Sampler(p, r.prompt, VOCAB) for p, r in zip(kinds, requests, strict=True)]
        for _ in range(2)
    )
    wrong = 0
    for _ in range(50):
        logits = runner.steps[0].run(requests).cpu().numpy()
        picked = runner.steps[0].pick(here)
        for request, sampler, row, token in zip(requests, there, logits, picked, strict=True):
            assert token is not None
            wrong += sampler.sample(row) != token
            request.token_ids.append(token)
    assert wrong <= 1


def test_a_step_waits_once(tiny: Callable[..., Tiny]) -> None:
    """Between its start and its ids, a captured greedy step never waits for the GPU."""
    model = load_model(tiny("opt").path, device="cuda").model
    runner = Runner(model, dense, 2)
    request = runner.start(3, 0)[0]
    sampler = Sampler(GREEDY, request.prompt, VOCAB)
    for warm in (True, False):
        torch.cuda.set_sync_debug_mode("default" if warm else "error")
        try:
            for _ in range(3):
                runner.steps[0].run([request])
                if warm:
                    runner.steps[0].pick([sampler])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert runner.steps[0].pick([sampler])[0] is not None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu_writes_the_same_while_the_first_is_current(
    tiny: Callable[..., Tiny],
) -> None:
    path = tiny("llama").path
    with torch.cuda.device(0):
        first, second = (texts(load_model(path, device=f"cuda:{n}"), None, None) for n in (0, 1))
    assert first == second
