"""`dejavu tune` around kernels that are not there: what is kept, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dejavu.cli.tune import tune as command
from dejavu.errors import InputError
from pretend_gpu import pretend_gpu

pytest.importorskip("triton")

from dejavu.kernels.gpu import tune as measuring
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


def test_what_cannot_be_tuned_is_refused() -> None:
    with pytest.raises(InputError, match="nothing to tune"):
        command(shape="opt-125m", device="cpu")
    with pytest.raises(InputError, match="MODEL or --shape"):
        command(model="x", shape="opt-125m")
    with pretend_gpu(), pytest.raises(InputError, match=r"--batches 17"):
        command(shape="opt-125m", batches="17")
