"""How much worse a selection gets when it is made earlier: from half a block or a block before.

Look-ahead hides the predictor's latency where something runs beside it (Deja Vu, section 4.2); it
saves no bytes, so on the CPU an earlier source is taken only where it is no worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dejavu.kernels.ops import Ops
from dejavu.predictor.curve import HIGH, LOW, STEP, Curve
from dejavu.predictor.layer import Task, learn
from dejavu.predictor.recording import Recorded
from dejavu.predictor.training import TrainOptions

_THRESHOLD = -1.0  # where levels of 1 % loss come to lie
_NO_WORSE = 0.99
_JUDGED = 4096  # tokens: enough to compare


def best_distance(
    task: Task,
    data: Recorded,
    held: Recorded,
    rank: int,
    distances: Sequence[float],
    options: TrainOptions,
    ops: Ops,
) -> dict[str, Any]:
    """Train one predictor a distance on the little text in `data` and compare.

    Returns the `distance` that costs least and, in `tried`, for each distance the density at equal
    threshold and the missed mass at the density of distance 0.
    """
    curves: dict[float, Curve] = {}
    held = held.first(_JUDGED)
    for distance in sorted(distances):
        if data.source(task.key[0], task.key[1], distance) is not None:
            (found,) = learn(task, data, held, [rank], distance, options, ops)
            curves[distance] = found.curve
    costs = {distance: _cost(task, curve) for distance, curve in curves.items()}
    best = min(costs, key=lambda distance: costs[distance])
    if costs[best] > _NO_WORSE * costs[0.0]:
        best = 0.0
    mind = task.survey.sensitivity
    density = curves[0.0].at(_THRESHOLD, mind).selected
    tried = {}
    for distance, curve in curves.items():
        figures = curve.at(_THRESHOLD, mind)
        equal = curve.at(_threshold_for(curve, density), mind)
        tried[f"{distance:g}"] = {
            "selected": figures.selected,
            "nats": figures.nats,
            "missed_mass_at_equal_density": equal.missed_mass,
        }
    return {"distance": best, "tried": tried, "rank": rank}


def _cost(task: Task, curve: Curve) -> float:
    s = task.survey
    figures = curve.at(_THRESHOLD, s.sensitivity)
    rows = figures.selected * s.row_bytes + figures.active * s.down_bytes
    return rows + figures.nats / (task.price * math.exp(_THRESHOLD))


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
