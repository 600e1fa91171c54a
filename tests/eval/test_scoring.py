"""Scores against transformers' logits and against one uncut forward of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dejavu.errors import DejavuError, InputError
from dejavu.eval.pairs import Pair
from dejavu.eval.scoring import Scorer
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.models.base import DecoderLM
from dejavu.sparsity.policy import Dense, Points, Selector, Site

from .conftest import Pair as Twins
from .tiny import CONTEXT, Guess, Reference, build, random_ids

# Contexts of one token, with a common beginning, longer than a chunk, back to an earlier one.
LONG = tuple(random_ids(90, seed=1).tolist())
PAIRS = [
    Pair((5,), (6,)),
    Pair(LONG[:20], LONG[20:27]),
    Pair(LONG[:20], (9, 8)),
    Pair(LONG[:20], (9, 7)),
    Pair(LONG[:20], (9,)),
    Pair(LONG[:12], (1, 2, 3)),
    Pair((*LONG[:70], 3), LONG[70:]),
    Pair(LONG[:12], (1, 2, 3)),
    Pair(LONG, ()),
]


@torch.inference_mode()
def expected(logits: Tensor, pair: Pair) -> tuple[float, bool]:
    """From logits `[fed, V]` of the whole pair."""
    rows = logits[len(pair.context) - 1 :][: len(pair.continuation)].double().log_softmax(1)
    targets = torch.tensor(pair.continuation, dtype=torch.int64)
    picked = rows.gather(1, targets[:, None])
    return float(picked.sum()), bool((rows.argmax(1) == targets).all())


def fed(pair: Pair) -> Tensor:
    return torch.tensor((pair.context + pair.continuation)[: pair.fed])


def check(
    model: DecoderLM, scorer: Scorer, selector: Selector, pairs: list[Pair], arm: str
) -> None:
    for pair, scored in zip(pairs, scorer.score(pairs)[arm], strict=True):
        if not pair.continuation:
            assert scored[:2] == (0.0, True)
            continue
        ids = fed(pair)
        logits = model.logits(
            ids, model.new_cache(len(ids)), selector_at(selector, pair), TorchOps()
        )
        total, greedy = expected(logits, pair)
        assert scored.logprob == pytest.approx(total, abs=1e-4)
        assert scored.greedy == greedy
        assert scored.logits.shape == (len(pair.continuation), logits.shape[1])


class From(Selector):
    """Another selector's choices from one row on, everything before it."""

    def __init__(self, inner: Selector, first: int) -> None:
        self.inner, self.first = inner, first

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        selection = self.inner.select(site, layer, points, ops)
        if selection is None:
            return None
        mask = selection.to_mask(len(points.source(site, layer))).clone()
        mask[: self.first] = True
        return Selection.from_mask(mask)


def selector_at(selector: Selector, pair: Pair) -> Selector:
    return From(selector, len(pair.context) - 1) if not isinstance(selector, Dense) else selector


@torch.inference_mode()
def reference_scores(reference: Reference, pairs: list[Pair]) -> list[tuple[float, bool]]:
    return [
        expected(reference(fed(pair)[None]).logits[0], pair) if pair.continuation else (0.0, True)
        for pair in pairs
    ]


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_dense_scores_are_those_of_transformers(name: str, request: pytest.FixtureRequest) -> None:
    model, reference = request.getfixturevalue(name)
    found = Scorer(model, {"a": Dense()}).score(PAIRS)["a"]
    for scored, (total, greedy) in zip(found, reference_scores(reference, PAIRS), strict=True):
        assert scored.logprob == pytest.approx(total, abs=2e-4)
        assert scored.greedy == greedy


def test_answers_are_sparse_and_questions_dense(opt: Twins) -> None:
    model, _ = opt
    guess = Guess(model)
    scorer = Scorer(model, {"dense": Dense(), "sparse": guess})
    check(model, scorer, guess, PAIRS, "sparse")
    check(model, scorer, Dense(), PAIRS, "dense")
    one = scorer.score(PAIRS)
    assert one["dense"][0].logprob != one["sparse"][0].logprob, "one token is tested too"


def test_questions_may_be_sparse_too(llama: Twins) -> None:
    model, _ = llama
    guess = Guess(model)
    scorer = Scorer(model, {"dense": Dense(), "sparse": guess}, prompts="sparse")
    found = scorer.score(PAIRS)
    for pair, scored in zip(PAIRS, found["sparse"], strict=True):
        if pair.continuation:
            logits = model.logits(fed(pair), model.new_cache(pair.fed), guess, TorchOps())
            assert scored.logprob == pytest.approx(expected(logits, pair)[0], abs=1e-4)
    check(model, scorer, Dense(), PAIRS, "dense")


def test_a_context_is_read_once(opt: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = opt
    rows: list[int] = []
    embed = TorchOps.embed

    def counting(self: TorchOps, ids: Tensor, table: Any) -> Tensor:
        rows.append(len(ids))
        return embed(self, ids, table)

    monkeypatch.setattr(TorchOps, "embed", counting)
    choices = [Pair(LONG[:40], tail) for tail in ((1, 2), (3, 4, 5), (6,), (7,))]
    scorer = Scorer(model, {"dense": Dense(), "sparse": Guess(model)})
    scorer.score(choices)
    tokens = sum(rows) // 2  # OPT embeds ids and positions
    assert tokens == 39 + 2 * (2 + 3 + 1), "both arms share the question; one-token answers a row"
    rows.clear()
    scorer.score([Pair((*LONG[:40], 8), (9,))])
    assert sum(rows) // 2 == 1 + 2 * 1, "what two items have in common is not read again"


def test_a_base_that_follows_the_length_mixes_nothing(tmp_path: Path) -> None:
    """Dynamic rope: keys of a short question do not fit after a long one."""
    rope = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 50.0}
    model, reference = build("llama", tmp_path, rope_parameters=rope, max_position_embeddings=16)
    scorer = Scorer(model, {"a": Dense()})
    for pair in (Pair(LONG[:8], (4, 5)), Pair(LONG[:50], (4, 5)), Pair(LONG[:8], (4, 5))):
        (scored,) = scorer.score([pair])["a"]
        assert scored.logprob == pytest.approx(reference_scores(reference, [pair])[0][0], abs=2e-4)


def test_limits(opt: Twins) -> None:
    model, _ = opt
    scorer = Scorer(model, {"a": Dense()}, window=20)
    assert scorer.fits(Pair(LONG[:18], (1, 2, 3)))
    assert not scorer.fits(Pair(LONG[:18], (1, 2, 3, 4)))
    assert scorer.score([]) == {"a": []}
    with pytest.raises(InputError, match=f"max_length: {CONTEXT + 1}"):
        Scorer(model, {"a": Dense()}, window=CONTEXT + 1)
    with pytest.raises(InputError, match="did you mean 'dense'"):
        Scorer(model, {"a": Dense()}, prompts="dence")
    with pytest.raises(InputError, match="token id 99"):
        scorer.score([Pair((1,), (99,))])


def test_broken_weights_are_an_error(tmp_path: Path) -> None:
    model, _ = build("opt", tmp_path)
    bias = model.weights.blocks[1].mlp.down.bias
    assert bias is not None
    bias[3] = float("nan")
    with pytest.raises(DejavuError, match="not finite"):
        Scorer(model, {"a": Dense()}).score([Pair((1,), (2,))])
