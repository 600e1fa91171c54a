"""What `prepare` may be asked for, and what it takes where nothing was asked."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest

from dejavu.config import ModelConfig
from dejavu.errors import InputError
from dejavu.load import LoadedModel
from dejavu.predictor.options import PrepareOptions


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_loss": 0.0}, "max_loss"),
        ({"max_loss": 0.05}, "fast_loss"),
        ({"tokens": 0}, "tokens"),
        ({"kind": "svdd"}, "did you mean 'svd'"),
        ({"ranks": ()}, "ranks"),
        ({"ranks": (0, 4)}, "ranks"),
        ({"predictor_share": 1.5}, "predictor_share"),
        ({"lookahead": (0.5,)}, "lookahead"),
        ({"lookahead": (0.0, 2.0)}, "lookahead"),
        ({"threads": 0}, "threads"),
        ({"epochs": math.nan}, "epochs"),
    ],
)
def test_bad_options_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PrepareOptions(**fields)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"careful_loss": 0.02}, "careful_loss"),
        ({"careful_loss": 0.0}, "careful_loss"),
        ({"default_level": "carefull"}, "careful"),
    ],
)
def test_levels_that_make_no_sense_are_refused(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        PrepareOptions(**asked)


def test_default_ranks_suit_the_shape(loaded: LoadedModel) -> None:
    def shape(width: int, neurons: int) -> ModelConfig:
        c = asdict(loaded.model.config) | {"hidden_size": width, "intermediate_size": neurons}
        return ModelConfig(**c)

    options = PrepareOptions()
    assert options.neuron_ranks(shape(512, 2048)) == (96, 128, 176)
    assert options.neuron_ranks(shape(4096, 16384)) == (160, 208, 272)
    assert options.neuron_ranks(shape(6, 5)) == options.neuron_ranks(shape(6, 5), 0.5)[:1] == (1,)
    assert options.neuron_ranks(shape(512, 2048), 0.5) == (96, 128, 176, 352)
    assert options.neuron_ranks(shape(200, 2048), 0.5)[-1] <= 200
    for distance in (0.0, 1.0):
        assert PrepareOptions(ranks=(999, 3)).neuron_ranks(shape(8, 6), distance) == (3, 6)
