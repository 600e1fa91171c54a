"""`dejavu tune` around kernels that are not there: what is kept, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dejavu.cli.tune import tune as command
from dejavu.errors import BackendError, InputError
from pretend_gpu import pretend_gpu

pytest.importorskip("triton")

from dejavu.kernels.gpu import measure_costs, ops
from dejavu.kernels.gpu import tune as measuring
from dejavu.kernels.gpu.costs import CostTable, MLPCost, costs_path
from dejavu.kernels.gpu.tuning import Config, read_table, user_path


def test_an_interruption_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    chosen = Config(4, 64, 1, 4)

    def two_then_stop(*_: Any, progress: Any, **__: Any) -> None:
        progress("a", chosen, 1.5)
        progress("b", chosen, 2.5)
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "tune", two_then_stop)
    result = tmp_path / "result.json"
    with pretend_gpu(), pytest.raises(Exception, match="130") as stopped:
        command(shape="opt-125m", dtype="fp16", batches="1", device="cuda", json_file=result)
    assert stopped.value.exit_code == 130  # type: ignore[attr-defined]
    assert read_table(user_path("Some GPU")) == {"a": chosen, "b": chosen}
    written = json.loads(result.read_text())
    assert written["interrupted"]
    assert written["kernels"]["b"]["microseconds"] == 2.5


def test_costs_are_kept_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(measuring, "tune", lambda *_, **__: None)
    monkeypatch.setattr(ops, "TritonOps", lambda *_: None)
    cost = MLPCost(100.0, ((0.1, 20.0), (1.0, 200.0)))

    def one(*_: Any, progress: Any, **__: Any) -> None:
        progress("mlp/8/3072x768/2", cost)

    monkeypatch.setattr(measure_costs, "measure_costs", one)
    result = tmp_path / "result.json"
    with pretend_gpu():
        command(shape="opt-125m", dtype="fp16", batches="1", device="cuda", json_file=result)
        assert CostTable.of(torch.device("cuda", 0)).costs == {"mlp/8/3072x768/2": cost}
    written = json.loads(result.read_text())
    assert written["platform"]["device_name"] == "Some GPU"
    assert written["costs"]["mlp/8/3072x768/2"]["limit"] == pytest.approx(0.5, abs=0.01)
    assert str(costs_path("Some GPU")) in capsys.readouterr().out


def test_what_cannot_be_tuned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="only a GPU's kernels"):
        command(shape="opt-125m", device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="PyTorch finds no GPU here, and only a GPU's kernels"):
        command(shape="opt-125m")
    with pytest.raises(InputError, match="MODEL or --shape"):
        command(model="x", shape="opt-125m")
    with pretend_gpu(), pytest.raises(InputError, match=r"--batches 17"):
        command(shape="opt-125m", batches="17")
