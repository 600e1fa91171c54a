"""A model that does not fit: prepare and eval block by block, with the same results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dejavu.eval.compare import compare
from dejavu.eval.text import EvalText, Setting
from dejavu.load import LoadedModel
from dejavu.load_blocks import BlockReader, load_to_read
from dejavu.predictor.plan import Plan, load_plan

from . import tiny

OPTIONS = replace(
    tiny.OPTIONS, tokens=1024, held_out=256, epochs=2.0, ranks=(4,), heads=True,
    lookahead=(0.0, 0.5),
)  # fmt: skip


@pytest.fixture(scope="module")
def streamed(folder: Path) -> LoadedModel:
    reader = BlockReader(folder)
    with pytest.warns(UserWarning, match="read one by one"):
        return load_to_read(folder, memory=int(0.99 * reader.total / 0.85))


def made(loaded: LoadedModel, out: Path) -> Plan:
    tiny.prepared(loaded, out, options=OPTIONS)
    return load_plan(out)


def close(found: Any, expected: Any, path: str = "") -> None:
    """The same, but for rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            close(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for n, value in enumerate(expected):
            close(found[n], value, f"{path}[{n}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), path
    else:
        assert found == expected, path


def test_prepare_makes_the_same_plan(
    streamed: LoadedModel, loaded: LoadedModel, tmp_path: Path
) -> None:
    one, other = made(streamed, tmp_path / "one"), made(loaded, tmp_path / "other")
    assert one.base == other.base
    close(one.report, other.report)
    for name, level in other.levels.items():
        close(one.levels[name].report, level.report)
        assert one.levels[name].neurons == level.neurons


def test_eval_reads_the_same(streamed: LoadedModel, loaded: LoadedModel, plan: Plan) -> None:
    """Dense and a plan side by side; every window has its own selections."""
    ids = torch.tensor(tiny.Characters().encode(tiny.text(500, 3), add_special_tokens=False))
    setting = Setting("random", None, "", "whole", "", 40, 23, (), "all", None, "none", tiny.VOCAB)
    text = EvalText(setting, "x" * len(ids), ids, np.arange(1, len(ids) + 1))
    results = [
        compare(model.model, text, plan.selector(model, "fast")) for model in (streamed, loaded)
    ]
    close(results[0].to_json(), results[1].to_json())
    assert results[0].reads is not None
    assert results[0].reads.neuron_density < 1
