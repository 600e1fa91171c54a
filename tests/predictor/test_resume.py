"""Runs of `prepare` that are stopped, go on, or find something in their way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dejavu.errors import InputError, PlanError
from dejavu.load import LoadedModel
from dejavu.predictor.levels import Progress

from . import tiny


class Stop(BaseException):
    """Like Ctrl-C."""


def stop_at(stage: str) -> Progress:
    def progress(now: str, done: int, total: int) -> None:
        if now == stage and done == 1:
            raise Stop

    return progress


def noting() -> tuple[list[str], Progress]:
    stages: list[str] = []
    return stages, lambda now, done, total: stages.append(f"{now} {done}")


@pytest.mark.parametrize("stage", ["measuring sensitivity", "training", "measuring a threshold"])
def test_an_interrupted_run_continues_to_the_same_plan(
    stage: str, loaded: LoadedModel, plan_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "plan"
    with pytest.raises(Stop):
        tiny.prepared(loaded, out, progress=stop_at(stage))
    assert not out.exists()
    assert (tmp_path / "plan.partial").is_dir()
    again, progress = noting()
    tiny.prepared(loaded, out, progress=progress)
    if stage == "training":
        assert "measuring sensitivity 1" not in again
        assert "training 1" not in again
        assert "training 2" in again
    if stage == "measuring a threshold":
        assert "recording held-out text 1" in again
        assert not any(line.startswith("training") for line in again)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan"]
    for name in ("plan.json", "predictors.safetensors"):
        assert (out / name).read_bytes() == (plan_folder / name).read_bytes()


@pytest.mark.parametrize("make", [tiny.save, tiny.save_llama], ids=["predictors", "inputs"])
def test_other_levels_are_found_from_the_same_work(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    loaded = tiny.load(make(tmp_path / "model"))
    asked: dict[str, Any] = {"default_level": "fast", "careful_loss": 0.004, "fast_loss": 0.05}
    whole = tiny.prepared(loaded, tmp_path / "whole", **asked)
    with pytest.raises(Stop):
        tiny.prepared(loaded, tmp_path / "plan", progress=stop_at("measuring the dense model"))
    again, progress = noting()
    plan = tiny.prepared(loaded, tmp_path / "plan", progress=progress, **asked)
    assert not any(line.startswith(("training", "measuring sensitivity")) for line in again)
    assert plan.default_level == "fast"
    assert {name: level.max_loss for name, level in plan.levels.items()} == {
        "exact": 0.0, "careful": 0.004, "balanced": 0.01, "fast": 0.05,
    }  # fmt: skip
    assert plan.levels == whole.levels


@pytest.mark.parametrize("other", [{"seed": 1}, {"max_loss": 0.02}, {"words": tiny.text(seed=1)}])
def test_leftovers_of_another_run_are_not_continued(
    other: dict[str, Any], loaded: LoadedModel, tmp_path: Path
) -> None:
    with pytest.raises(Stop):
        tiny.prepared(loaded, tmp_path / "plan", progress=stop_at("training"))
    again, progress = noting()
    tiny.prepared(loaded, tmp_path / "plan", progress=progress, **other)
    assert "training 1" in again
    assert "measuring sensitivity 1" in again


def test_a_destination_that_is_something_else_is_refused(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("x")
    for name in ("file", "folder"):
        with pytest.raises(InputError, match=name):
            tiny.prepared(loaded, tmp_path / name)
    (tmp_path / "plan.partial").mkdir()
    (tmp_path / "plan.partial" / "thesis.tex").write_text("x")
    with pytest.raises(PlanError, match=r"plan\.partial is in the way"):
        tiny.prepared(loaded, tmp_path / "plan")
    assert (tmp_path / "plan.partial" / "thesis.tex").exists()
