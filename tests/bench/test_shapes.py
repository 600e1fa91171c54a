"""Named shapes have the published sizes."""

from __future__ import annotations

from math import prod

import pytest

from dejavu.bench.shapes import SHAPES, hf_config, model_config
from dejavu.errors import InputError
from dejavu.models.slots import slots

PARAMETERS = {
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
    "opt-175b-layer": 7_891_353_600,
    "llama-1b-relu": 1_235_814_400,
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters(name):
    count = sum(prod(slot.shape) for slot in slots(model_config(name)).values())
    assert count == PARAMETERS[name]


def test_unknown_shape_names_the_known_ones():
    with pytest.raises(InputError, match=r"opt-1\.3b"):
        model_config("opt-1.3")


def test_configs_are_copies():
    hf_config("opt-125m")["vocab_size"] = 3
    assert hf_config("opt-125m")["vocab_size"] == 50272
