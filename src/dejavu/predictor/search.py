"""From trained candidates to a plan: which rank a layer gets, and one threshold for each level.

All scores are in one unit (log of expected damage over price), so a level is one number: the
threshold of every layer. Raising it lowers bytes and raises the loss of all layers at equal
marginal rates, which is what an allocation by greedy steps would end at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dejavu.predictor.curve import HIGH, LOW, STEP, Curve, Figures
from dejavu.predictor.network import Predictor
from dejavu.predictor.plan import Kind, LayerPolicy
from dejavu.sparsity.losses import Mean
from dejavu.sparsity.policy import Key

# A row found by its number costs more than the same bytes in a stream, and rows of a batch add up
# while they share the predictor: a byte of a selected row counts so much.
ROW_PREMIUM = 1.5
_TRIALS = 6
_WEIGHTS = 33  # of a predictor's byte, a quarter octave apart
_CLOSE = 0.93  # of the allowed loss: near enough to stop searching


@dataclass(frozen=True, eq=False)
class Candidate:
    """A trained predictor, the look-ahead distance it reads from, and what it does."""

    predictor: Predictor
    distance: float
    curve: Curve


@dataclass(frozen=True, eq=False)
class Place:
    """One site of one layer: what it costs and who could predict it.

    entries: neurons or KV groups. active: of them with activation != 0, mean over tokens.
    row_bytes: of one entry, what is read to compute it (up and gate; q and o for a group);
    down_bytes: what is read more where its activation is not 0. exact: whether zeros can be
    skipped without a predictor.
    """

    key: Key
    entries: int
    active: float
    row_bytes: float
    down_bytes: float
    sensitivity: float
    exact: bool
    candidates: tuple[Candidate, ...] = ()

    @property
    def dense_bytes(self) -> float:
        """Read by a step that leaves nothing out."""
        return self.entries * (self.row_bytes + self.down_bytes)

    @property
    def full_bytes(self) -> float:
        """Read by a step that skips the down rows of zeros."""
        return self.entries * self.row_bytes + self.active * self.down_bytes

    def figures(self, candidate: Candidate, threshold: float) -> Figures:
        """Of a candidate at a threshold."""
        return candidate.curve.at(threshold, self.sensitivity)

    def sparse_bytes(self, candidate: Candidate, figures: Figures, premium: float = 1.0) -> float:
        """Read by a step that a candidate selects for, selected rows weighed by `premium`."""
        rows = figures.selected * self.row_bytes + figures.active * self.down_bytes
        return candidate.predictor.nbytes + premium * rows


class Timings(Protocol):
    """Nanoseconds of one token at a site and layer, measured on this machine."""

    def dense(self, place: Place) -> float:
        """Everything computed."""
        ...

    def full(self, place: Place) -> float:
        """Everything listed, zeros skipped."""
        ...

    def sparse(self, place: Place, candidate: Candidate, figures: Figures) -> float:
        """Predictor, selection and what it leaves."""
        ...


Evaluate = Callable[[Mapping[Key, LayerPolicy], Mapping[Key, Candidate]], Mean]
"""Mean loss a token above the dense model's, on held-out text."""


class Found(NamedTuple):
    """A level: threshold (None where nothing but exact skipping is left), policies, loss."""

    threshold: float | None
    policies: dict[Key, LayerPolicy]
    loss: Mean


class Search:
    """Chooses for all places of a model. price: nats a byte at which scores are 0."""

    def __init__(
        self, places: Sequence[Place], price: float, timings: Timings | None = None
    ) -> None:
        self._places = places
        self._price = price
        self._timings = timings
        self._ratio = 1.0  # of measured loss over predicted damage, as last seen
        self.chosen: dict[Key, Candidate] = {}

    def choose_candidates(self, nats: float, budget: float = math.inf) -> None:
        """Fix one candidate a place: the cheapest in all at the threshold that may lose `nats`.

        budget: bytes of all predictors at most; they are weighed up until it holds, which takes
        rank where it brings least.
        """
        predictable = [place for place in self._places if place.candidates]
        for weight in (2.0 ** (n / 4) for n in range(_WEIGHTS)):
            best = self._candidates(predictable, nats, weight)
            self.chosen = {place.key: c for place, c in zip(predictable, best, strict=True) if c}
            if sum(c.predictor.nbytes for c in self.chosen.values()) <= budget:
                return
        self.chosen = {}

    def _candidates(
        self, places: Sequence[Place], nats: float, weight: float
    ) -> list[Candidate | None]:
        """The best of each place; None where lossless is cheaper, once predictors are rationed."""
        low, high = LOW, HIGH
        while high - low > STEP:
            middle = (low + high) / 2
            if sum(self._best(place, middle, weight)[1] for place in places) > nats:
                high = middle
            else:
                low = middle
        found = [self._best(place, low, weight) for place in places]
        return [c if weight == 1.0 or lost > 0 else None for c, lost in found]

    def exact(self) -> dict[Key, LayerPolicy]:
        """Policies that lose nothing."""
        return {place.key: LayerPolicy(self._lossless(place)[0]) for place in self._places}

    def policies(self, threshold: float) -> dict[Key, LayerPolicy]:
        """The cheapest policy of every place at a threshold, damage included."""
        return {place.key: self._policy(place, threshold) for place in self._places}

    def level(self, max_loss: float, evaluate: Evaluate) -> Found:
        """The highest threshold whose measured loss, two standard errors added, is allowed.

        max_loss: relative rise of perplexity. Predictions say where to measure; only measured
        losses decide.
        """
        allowed = math.log1p(max_loss)
        exact = self.exact()
        best = Found(None, exact, Mean(0.0, 0.0))
        low, high = LOW, HIGH
        for _ in range(_TRIALS):
            threshold = self._threshold_for(allowed * 0.97 / self._ratio, low, high)
            policies = self.policies(threshold)
            if policies == exact:  # no predictor pays at this price: a higher one may
                low = threshold
                if high - low <= STEP:
                    break
                self._ratio *= 0.5
                continue
            loss = evaluate(policies, self.chosen)
            bound = loss.upper
            self._ratio = max(bound, 0.05 * allowed) / max(self._nats(policies), 1e-9)
            if bound <= allowed:
                best, low = Found(threshold, policies, loss), threshold
                if bound >= _CLOSE * allowed:
                    break
            else:
                high = threshold
            if high - low <= STEP:
                break
        return best

    def _threshold_for(self, nats: float, low: float, high: float) -> float:
        """The grid point strictly between two others at which about `nats` are predicted to go."""
        first, last = round((low - LOW) / STEP) + 1, round((high - LOW) / STEP) - 1
        while first < last:
            middle = (first + last + 1) // 2
            if self._nats(self.policies(LOW + middle * STEP)) <= nats:
                first = middle
            else:
                last = middle - 1
        return LOW + max(first, 0) * STEP

    def _nats(self, policies: Mapping[Key, LayerPolicy]) -> float:
        total = 0.0
        for place in self._places:
            policy = policies[place.key]
            if policy.kind == "predictor":
                total += place.figures(self.chosen[place.key], policy.threshold).nats
        return total

    def _policy(self, place: Place, threshold: float) -> LayerPolicy:
        candidate = self.chosen.get(place.key)
        kind, cost = self._lossless(place)
        if candidate is not None:
            figures = place.figures(candidate, threshold)
            if self._cost(place, candidate, figures, threshold) < cost and not self._slow(
                place, candidate, figures
            ):
                return LayerPolicy("predictor", threshold)
        return LayerPolicy(kind)

    def _lossless(self, place: Place) -> tuple[Kind, float]:
        """Kind and cost in bytes of the better of `dense` and `full`."""
        full = place.entries * place.row_bytes + ROW_PREMIUM * place.active * place.down_bytes
        if not place.exact or full >= place.dense_bytes:
            return "dense", place.dense_bytes
        if self._timings is not None and self._timings.full(place) >= self._timings.dense(place):
            return "dense", place.dense_bytes
        return "full", full

    def _slow(self, place: Place, candidate: Candidate, figures: Figures) -> bool:
        """Whether selecting takes longer than computing everything."""
        t = self._timings
        return t is not None and t.sparse(place, candidate, figures) >= t.dense(place)

    def _cost(
        self, place: Place, candidate: Candidate, figures: Figures, threshold: float
    ) -> float:
        """Bytes of a token, its damage turned into bytes at the price of the threshold."""
        price = self._price * math.exp(threshold)
        return place.sparse_bytes(candidate, figures, ROW_PREMIUM) + figures.nats / price

    def _best(self, place: Place, threshold: float, weight: float) -> tuple[Candidate, float]:
        """The cheapest candidate of a place and its nats, 0 where lossless is cheaper."""
        costs = []
        for number, candidate in enumerate(place.candidates):
            figures = place.figures(candidate, threshold)
            cost = self._cost(place, candidate, figures, threshold)
            cost += (weight - 1) * candidate.predictor.nbytes
            costs.append((cost, number, figures.nats))
        cost, number, nats = min(costs)
        return place.candidates[number], nats if cost < self._lossless(place)[1] else 0.0
