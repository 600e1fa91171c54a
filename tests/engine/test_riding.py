"""Selections that ride along with other launches: what a step computes and counts stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dejavu.engine.engine import Engine
from dejavu.engine.graph_step import GraphStep
from dejavu.engine.params import SamplingParams
from dejavu.engine.scheduler import Request
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.load import load_model
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.kv_cache import KVCache, blocks_for
from dejavu.predictor.network import Predictor
from dejavu.predictor.selector import Choice, PlanSelector
from dejavu.sparsity.policy import Dense, Key, Site
from models.tiny import Tiny, prompt

LENGTH = 64


def plan(model: DecoderLM, distance: float, *, heads: bool = True) -> PlanSelector:
    """Random int8 predictors everywhere, about half of everything chosen."""
    c = model.config
    generator = torch.Generator().manual_seed(7)
    choices: dict[Key, Choice] = {}
    for layer in range(c.num_hidden_layers):
        for site, entries in (
            (Site.NEURONS, c.intermediate_size),
            (Site.HEADS, c.num_key_value_heads),
        ):
            if site is Site.HEADS and not heads:
                continue
            first, second = (
                Matrix.from_float(torch.randn(shape, generator=generator), "int8")
                for shape in ((12, c.hidden_size), (entries, 12))
            )
            reach = distance if layer + 0.5 * (site is Site.NEURONS) >= distance else 0.0
            predictor = Predictor(first, second, torch.zeros(entries))
            choices[site, layer] = Choice(predictor, reach)
    return PlanSelector(c.num_hidden_layers, c.intermediate_size, choices, model.device)


def run(model: DecoderLM, selector: PlanSelector, ops: Ops, lazy: bool, steps: int) -> torch.Tensor:
    """Logits of some steps of one request, which is fed fixed tokens."""
    cache = KVCache(model.config, blocks_for(LENGTH))
    step = GraphStep(
        model, cache, selector, ops, max_rows=1, max_length=LENGTH, lazy_kv=lazy,
        capture=lambda forward: forward,
    )  # fmt: skip
    request = Request(tuple(prompt(5, 1)), LENGTH)
    request.blocks = cache.allocate(blocks_for(LENGTH))
    model.forward(Batch.prefill(list(request.prompt), request.blocks), cache, Dense(), TorchOps())
    found = []
    for token in range(steps):
        request.token_ids.append(3 + token)
        found.append(step.run([request]).clone())
    return torch.stack(found)


@pytest.mark.parametrize(
    ("distance", "lazy", "steps"), [(0.5, False, 1), (0.5, True, 2), (1.0, True, 1)]
)
def test_a_step_is_what_it_is_without(
    distance: float, lazy: bool, steps: int, tiny: Callable[..., Tiny], few_programs: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = load_model(tiny("opt").path).model
    alone = []

    def watched(rider: Any, launch: Callable[[Any], None] = few_programs._launch_rider) -> None:
        alone.extend([] if rider.done else [rider])
        launch(rider)

    monkeypatch.setattr(few_programs, "_launch_rider", watched)
    monkeypatch.setattr(few_programs, "fuse", True)
    ours, theirs = plan(model, distance), plan(model, distance)
    found = run(model, ours, few_programs, lazy, steps)
    torch.testing.assert_close(
        found, run(model, theirs, TorchOps(), lazy, steps), rtol=1e-4, atol=1e-4
    )
    assert ours.reads() == theirs.reads()
    assert ours.meter.used() == theirs.meter.used()
    assert ours.meter.used(Site.HEADS) == theirs.meter.used(Site.HEADS)
    if distance == 0.5:
        assert not alone


@pytest.mark.cuda
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("distance", [0.5, 1.0])
def test_a_gpu_writes_the_same_text(distance: float, lazy: bool, tiny: Callable[..., Tiny]) -> None:
    loaded = load_model(tiny("opt").path, device="cuda")
    texts = []
    for fuse in (False, True):
        selector = plan(loaded.model, distance)
        engine = Engine(loaded, selector, max_batch=2, lazy_kv=lazy, whole_layers=False)
        step = engine.arms["default"].step
        assert isinstance(step, GraphStep)
        step._ops.fuse = fuse  # type: ignore[attr-defined]
        requests = [
            engine.add(prompt(3 + n, seed=n), SamplingParams(max_tokens=40, ignore_eos=True))
            for n in range(1)
        ]
        while engine.running or engine.waiting:
            engine.step()
        texts.append([r.token_ids for r in requests])
        assert [r.error for r in requests] == [None]
    assert texts[0] == texts[1]


def test_norms_let_their_successor_come_early_where_no_list_is_new(
    few_programs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = []
    monkeypatch.setattr(
        few_programs, "_launch", lambda *arguments, **options: late.append(options.get("LATE"))
    )
    rows = torch.randn(2, 16)
    second, bias = Matrix(torch.randn(40, 16)), torch.zeros(40)

    def norm() -> bool:
        few_programs.rms_norm(rows, torch.ones(16), 1e-5)
        return bool(late[-1])

    norm()
    assert not norm()
    chosen = few_programs.select(rows, second, bias)
    assert not few_programs._early(chosen)
    assert norm()
    assert few_programs._early(chosen)
    assert not norm()
    monkeypatch.setattr(few_programs, "_begun", few_programs._joined + 1)  # not waited for yet
    assert norm()
