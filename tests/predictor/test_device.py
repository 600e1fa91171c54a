"""`prepare`, `measure` and `eval` with the model on a GPU that is not there: the CPU's figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dejavu.eval.compare import Comparison, compare
from dejavu.kernels.reference import TorchOps
from dejavu.load import load_model
from dejavu.predictor.plan import Plan, load_plan
from dejavu.sparsity.measure import measure
from dejavu.sparsity.measurement import MeasureOptions
from eval.tiny import text_of
from pretend_gpu import DEVICE, pretend_gpu

from . import tiny

OPTIONS = replace(
    tiny.OPTIONS, heads=True, lookahead=(0.0, 0.5), tokens=512, held_out=256, epochs=1.0, ranks=(4,)
)


def made(model: Path, out: Path, device: str, kind: str) -> Plan:
    loaded = load_model(model, device=device)
    # 4-bit arithmetic is the CPU's own.
    return tiny.prepared(loaded, out, options=OPTIONS, kind=kind, bits=8)


@pytest.mark.parametrize("kind", ["svd", "paper"])
def test_prepare_makes_the_same_plan(kind: str, tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", idle_heads=True)
    expected = made(model, tmp_path / "cpu", "cpu", kind)
    with pretend_gpu():
        found = made(model, tmp_path / "gpu", "cuda", kind)
    assert found.levels == expected.levels
    assert kind == "paper" or any(p.kind == "predictor" for p in found.levels["fast"].neurons)
    loaded = load_plan(tmp_path / "gpu")
    for key, source in expected.predictors.items():
        assert torch.equal(
            loaded.predictors[key].predictor.second.data, source.predictor.second.data
        )


def ids(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, tiny.VOCAB, (count,), generator=generator)


def test_measure_gives_the_same_figures(folder: Path) -> None:
    options = MeasureOptions(densities=(0.4,), distances=(1,))
    windows, other = [ids(12), ids(9, 1)], [ids(10, 2)]
    expected = measure(load_model(folder).model, windows, other, options)
    with pretend_gpu():
        found = measure(load_model(folder, device="cuda").model, windows, other, options)
    assert found == expected


@pytest.mark.parametrize("through", ["prefill", "decode"])
def test_eval_gives_the_same_figures(through: str, folder: Path, tmp_path: Path) -> None:
    plan = made(folder, tmp_path / "plan", "cpu", "svd")
    text = text_of(ids(50), window=16, stride=8)

    def compared(device: str) -> Comparison:
        loaded = load_model(folder, device=device)
        selector = plan.selector(loaded, "fast")
        return compare(loaded.model, text, selector, through=through, ops=TorchOps(), rows=3)

    expected = compared("cpu")
    with pretend_gpu():
        found = compared("cuda")
    assert found.sparse.backend == f"torch {DEVICE}"
    for field in ("ratio", "kl", "agreement", "reads"):
        assert getattr(found, field) == getattr(expected, field)
    assert found.dense.loss == expected.dense.loss
