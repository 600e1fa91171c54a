"""Bytes counted from a shape are those of the model and the predictors of that shape."""

import pytest
import torch

from dejavu.bench.shapes import model_config
from dejavu.embedded import NAME
from dejavu.kernels.matrix import Matrix
from dejavu.kernels.nibbles import Nibbles
from dejavu.load import load_model
from dejavu.predictor.counting import dense_step_bytes, predictor_bytes, predictor_share
from dejavu.predictor.network import Predictor
from dejavu.predictor.options import PrepareOptions
from dejavu.sparsity.accounting import dense_bytes

from . import tiny


@pytest.mark.parametrize(("bits", "rank"), [(4, 1), (4, 7), (4, 16), (8, 1), (8, 7)])
def test_predictors_count_as_they_are_stored(bits: int, rank: int) -> None:
    width, neurons = 33, 50
    stages = torch.randn(rank, width), torch.randn(neurons, rank)
    if bits == 4:
        first, second = map(Nibbles.from_float, stages)
        predictor = Predictor(first, second, torch.zeros(neurons))
    else:
        one, two = (Matrix.from_float(stage, "int8") for stage in stages)
        predictor = Predictor(one, two, torch.zeros(neurons))
    assert predictor_bytes(width, neurons, rank, bits) == predictor.nbytes


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("kind", ["opt", "llama", "embedded"])
def test_a_dense_step_counts_as_accounting_does(
    kind: str, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if kind == "embedded":
        loaded = load_model(NAME, dtype=dtype)
    else:
        save = tiny.save if kind == "opt" else tiny.save_llama
        loaded = load_model(save(tmp_path_factory.mktemp(kind)), dtype=dtype)
    found = dense_step_bytes(loaded.model.config, dtype)
    assert found == dense_bytes(loaded.model.weights)


@pytest.mark.parametrize("shape", ["opt-6.7b", "opt-30b", "opt-66b", "opt-175b-layer"])
def test_large_models_read_little_for_their_predictors(shape: str) -> None:
    config = model_config(shape)
    for dtype, bits in (("int8", 4), ("int8", 8), ("fp16", 8)):
        found = predictor_share(config, PrepareOptions(bits=bits), dtype)
        assert found.share < 0.03, (dtype, bits)
