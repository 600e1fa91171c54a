"""The search on made-up places, where the right answer is known."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch

from dejavu.kernels.matrix import Matrix
from dejavu.predictor.curve import Curve, Figures
from dejavu.predictor.network import Predictor
from dejavu.predictor.plan import LayerPolicy
from dejavu.predictor.search import Candidate, Place, Search
from dejavu.sparsity.losses import Mean
from dejavu.sparsity.policy import Key, Site

ENTRIES, WIDTH = 200, 64
PRICE = 1e-5
MIND = 0.05


def candidate(rank: int, skill: float, seed: int = 0) -> Candidate:
    """A predictor whose scores follow the contributions as well as `skill` says."""
    generator = torch.Generator().manual_seed(seed)
    c = torch.randn(300, ENTRIES, generator=generator).sub(1.3).clamp(min=0)
    noise = torch.randn(300, ENTRIES, generator=generator)
    curve = Curve()
    curve.add(3 * (skill * (4 * c - 1) + (1 - skill) * 2 * noise), c, c > 0.2)
    first = Matrix(torch.zeros(rank, WIDTH, dtype=torch.int8), torch.ones(rank))
    second = Matrix(torch.zeros(ENTRIES, rank, dtype=torch.int8), torch.ones(ENTRIES))
    return Candidate(Predictor(first, second, torch.zeros(ENTRIES)), 0.0, curve)


def place(layer: int, mind: float = MIND, *ranks: tuple[int, float], exact: bool = True) -> Place:
    found = tuple(candidate(rank, skill, seed=layer) for rank, skill in ranks)
    key = (Site.NEURONS, layer)
    return Place(key, ENTRIES, 0.1 * ENTRIES, 72.0, 68.0, mind, exact, found)


def nats(places: list[Place], search: Search, policies: Mapping[Key, LayerPolicy]) -> float:
    return sum(
        p.figures(search.chosen[p.key], policies[p.key].threshold).nats
        for p in places
        if policies[p.key].kind == "predictor"
    )


class Truth:
    """The model's answer: a factor times what was predicted, and an error."""

    def __init__(self, places: list[Place], search: Search, factor: float, error: float) -> None:
        self.places, self.search, self.factor, self.error = places, search, factor, error
        self.asked = 0

    def __call__(
        self, policies: Mapping[Key, LayerPolicy], chosen: Mapping[Key, Candidate]
    ) -> Mean:
        self.asked += 1
        return Mean(self.factor * nats(self.places, self.search, policies), self.error)


@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
def test_a_level_comes_close_to_its_loss_and_never_above(factor: float) -> None:
    places = [place(n, MIND, (4, 0.6), (8, 0.8)) for n in range(4)]
    search = Search(places, PRICE)
    search.choose_candidates(0.01)
    truth = Truth(places, search, factor, error=0.0005)
    found = search.level(0.01, truth)
    bound = found.loss.value + 0.0005
    assert 0.7 * math.log(1.01) < bound <= math.log(1.01)
    assert truth.asked <= 6
    assert {p.kind for p in found.policies.values()} == {"predictor"}
    assert {p.threshold for p in found.policies.values()} == {found.threshold}


def test_a_looser_level_reads_less() -> None:
    places = [place(n, MIND, (4, 0.7)) for n in range(3)]
    search = Search(places, PRICE)
    search.choose_candidates(0.01)
    truth = Truth(places, search, 1.0, 0.0)
    tight, loose = (search.level(loss, truth).threshold for loss in (0.01, 0.05))
    assert tight is not None
    assert loose is not None
    assert tight < loose


def test_where_no_loss_is_allowed_by_the_model_levels_are_exact() -> None:
    places = [place(0, MIND, (4, 0.7))]
    search = Search(places, PRICE)
    search.choose_candidates(0.01)
    found = search.level(0.01, lambda policies, chosen: Mean(1.0, 0.1))
    assert found.threshold is None
    assert found.policies == search.exact()
    assert found.policies[Site.NEURONS, 0].kind == "full"


def test_exact_is_dense_where_nothing_is_exactly_zero() -> None:
    search = Search([place(0, MIND, exact=False)], PRICE)
    assert search.exact()[Site.NEURONS, 0].kind == "dense"


def test_a_useless_predictor_is_not_used() -> None:
    places = [place(0, MIND, (4, 0.8)), place(1, MIND, (150, 0.05))]
    search = Search(places, PRICE)
    search.choose_candidates(0.01)
    policies = search.policies(-1.0)
    assert policies[Site.NEURONS, 0].kind == "predictor"
    assert policies[Site.NEURONS, 1].kind == "full"


def test_rank_goes_where_it_helps() -> None:
    even, steep = place(0, MIND, (4, 0.70), (24, 0.71)), place(1, MIND, (4, 0.2), (24, 0.9))
    search = Search([even, steep], PRICE)
    search.choose_candidates(0.01)
    ranks = [search.chosen[Site.NEURONS, n].predictor.rank for n in (0, 1)]
    assert ranks == [4, 24]


def test_a_budget_of_predictor_bytes_holds() -> None:
    places = [place(n, MIND, (4, 0.6), (16, 0.9)) for n in range(4)]
    free = Search(places, PRICE)
    free.choose_candidates(0.01)
    spent = sum(c.predictor.nbytes for c in free.chosen.values())
    for share in (0.9, 0.5, 0.2, 1e-6):
        search = Search(places, PRICE)
        search.choose_candidates(0.01, budget=share * spent)
        assert sum(c.predictor.nbytes for c in search.chosen.values()) <= share * spent


class Slow:
    """A machine on which whatever is sparse takes longer."""

    def __init__(self, sparse: float, full: float) -> None:
        self._sparse, self._full = sparse, full

    def dense(self, place: Place) -> float:
        return 1.0

    def full(self, place: Place) -> float:
        return self._full

    def sparse(self, place: Place, candidate: Candidate, figures: Figures) -> float:
        return self._sparse


@pytest.mark.parametrize(
    ("sparse", "full", "kinds"),
    [
        (2.0, 2.0, {"dense"}),
        (2.0, 0.5, {"full"}),
        (0.5, 2.0, {"predictor"}),
    ],
)
def test_no_layer_runs_slower_than_dense(sparse: float, full: float, kinds: set[str]) -> None:
    places = [place(n, MIND, (4, 0.8)) for n in range(2)]
    search = Search(places, PRICE, Slow(sparse, full))
    search.choose_candidates(0.01)
    found = search.level(0.01, Truth(places, search, 1.0, 0.0))
    assert {p.kind for p in found.policies.values()} == kinds
    exact = {p.kind for p in search.exact().values()}
    assert exact == ({"full"} if full < 1 else {"dense"})
