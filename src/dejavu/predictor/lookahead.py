"""How much worse a selection gets when it is made earlier: from half a block or a block before.

Look-ahead hides the predictor's latency where something runs beside it (Deja Vu, section 4.2). An
earlier input says less, and rank makes up for it, so every distance comes with the rank that is
worth its bytes there. Bytes alone are compared, so an earlier input is taken only where it costs
none more: hidden latency is not weighed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dejavu.kernels.ops import Ops
from dejavu.predictor.curve import HIGH, LOW, STEP, Curve
from dejavu.predictor.layer import TYPICAL_THRESHOLD, Task, cost, learn
from dejavu.predictor.recording import Recorded
from dejavu.predictor.search import Candidate
from dejavu.predictor.training import TrainOptions

_NO_WORSE = 0.99
_JUDGED = 4096  # tokens: enough to compare


def best_distance(
    task: Task,
    data: Recorded,
    held: Recorded,
    ranks: Callable[[float], Sequence[int]],
    distances: Sequence[float],
    options: TrainOptions,
    ops: Ops,
) -> dict[str, Any]:
    """Train a predictor for each distance on the little text in `data` and compare.

    ranks: to choose from at a distance. Returns the `distance` that costs fewest bytes, predictor
    and damage included, and in `tried` for each distance the rank taken, its predictor's bytes, the
    cost, what it selects and loses at equal threshold, and the missed mass at the density of
    distance 0.
    """
    found: dict[float, Candidate] = {}
    held = held.first(_JUDGED)
    for distance in sorted(distances):
        if data.source(task.key[0], task.key[1], distance) is not None:
            (found[distance],) = learn(
                task, data, held, ranks(distance), distance, options, ops, one=True
            )
    costs = {distance: cost(task, candidate) for distance, candidate in found.items()}
    best = min(costs, key=lambda distance: costs[distance])
    if costs[best] > _NO_WORSE * costs[0.0]:
        best = 0.0
    mind = task.survey.sensitivity
    density = found[0.0].curve.at(TYPICAL_THRESHOLD, mind).selected
    tried = {}
    for distance, candidate in found.items():
        figures = candidate.curve.at(TYPICAL_THRESHOLD, mind)
        equal = candidate.curve.at(_threshold_for(candidate.curve, density), mind)
        tried[f"{distance:g}"] = {
            "rank": candidate.predictor.rank,
            "predictor_bytes": candidate.predictor.nbytes,
            "cost_bytes": costs[distance],
            "selected": figures.selected,
            "nats": figures.nats,
            "missed_mass_at_equal_density": equal.missed_mass,
        }
    return {"distance": best, "tried": tried}


def _threshold_for(curve: Curve, selected: float) -> float:
    """The lowest threshold at which at most so many are selected."""
    low, high = LOW, HIGH
    while high - low > STEP:
        middle = (low + high) / 2
        if curve.at(middle, 1.0).selected > selected:
            low = middle
        else:
            high = middle
    return high
