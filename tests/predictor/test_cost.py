"""Lines through times; the real timing only for its shape, never for its speed."""

from __future__ import annotations

import pytest
import torch

from dejavu.kernels.matrix import Matrix
from dejavu.load import LoadedModel
from dejavu.predictor.cost import Line, StepTimes, measured_times
from dejavu.predictor.curve import Curve
from dejavu.predictor.network import Predictor
from dejavu.predictor.search import Candidate, Place
from dejavu.sparsity.policy import Site


def test_a_line_goes_through_its_points_and_never_falls() -> None:
    line = Line.through([(0.0, 5.0), (10.0, 25.0), (20.0, 45.0)])
    assert (line.start, line.slope) == pytest.approx((5.0, 2.0))
    falling = Line.through([(0.0, 9.0), (10.0, 3.0)])
    assert falling.slope == 0.0
    assert falling.at(1e9) == pytest.approx(6.0)
    assert Line.through([(3.0, 7.0)]).at(100.0) == 7.0
    assert Line.through([(10.0, 1.0), (20.0, 11.0)]).start == 0.0  # no time before zero


def test_parts_of_a_step_add_up() -> None:
    times = StepTimes(1000.0, 100.0, Line(10.0, 0.5), Line(1.0, 0.25))
    curve = Curve()
    curve.add(torch.tensor([[1.0, 1.0, -1.0, -1.0]]), torch.ones(1, 4), torch.ones(1, 4).bool())
    first = Matrix(torch.zeros(2, 6, dtype=torch.int8), torch.ones(2))
    second = Matrix(torch.zeros(4, 2, dtype=torch.int8), torch.ones(4))
    found = Candidate(Predictor(first, second, torch.zeros(4)), 0.0, curve)
    place = Place((Site.NEURONS, 0), 4, 1.0, 20.0, 10.0, 1.0, exact=True, candidates=(found,))
    assert times.dense(place) == 100.0
    assert times.full(place) == 10.0 + 0.5 * (4 * 20 + 1 * 10)
    size = 2 * 6 + 2 * 4 + 4 * 2 + 4 * 4 + 4 * 4
    assert found.predictor.nbytes == size
    expected = 1.0 + 0.25 * size + 10.0 + 0.5 * (2 * 20 + 2 * 10)
    assert times.sparse(place, found, place.figures(found, 0.0)) == expected
    heads = Place((Site.HEADS, 0), 4, 4.0, 20.0, 0.0, 1.0, exact=False)
    assert times.dense(heads) == 0.5 * 80
    assert times.dense_speed == 1e6
    assert times.speed(500.0) == 2e6


def test_the_models_own_layers_can_be_timed(loaded: LoadedModel) -> None:
    found = measured_times(loaded.model)
    if isinstance(found, str):
        assert "kernels" in found or "busy" in found
    else:
        assert 0 < found.mlp < found.step
        assert found.dense_speed > 0
