"""Recipes that work in pieces go on where they stopped, and never measure a thing twice."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A recipe by name, imported as a script finds its neighbours."""
    monkeypatch.syspath_prepend(str(RECIPES))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def fails() -> Any:
    raise AssertionError("made twice")


@pytest.mark.parametrize("name", ["findings", "input_sparsity"])
def test_a_finished_piece_is_read_and_time_stops_the_next(
    recipe: Any, name: str, tmp_path: Path
) -> None:
    if name == "findings":
        pytest.importorskip("matplotlib")
    module = recipe(name)
    work = tmp_path / "result.work"

    def pieces(seconds: float) -> Any:
        if name == "findings":
            return module.Pieces(work, seconds)
        return module.Work(work, time.monotonic() + seconds)

    assert pieces(60).kept("one", lambda: [1.5]) == [1.5]
    late = pieces(-1)
    assert late.kept("one", fails) == [1.5]
    with pytest.raises(module.Stopped, match="two"):
        late.kept("two", fails)
    with pytest.raises(AssertionError, match="made twice"):
        pieces(60).kept("two", fails)
    assert json.loads(work.read_text(encoding="utf-8")) == {"one": [1.5]}
    assert [path.name for path in tmp_path.iterdir()] == ["result.work"]


def test_findings_name_what_is_missing(recipe: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    module = recipe("findings")

    class Instant:
        """A study whose every answer is there at once."""

        def contexts(self) -> dict[str, Any]:
            return {"arms": []}

        def predicted(self, tokens: int, distance: float) -> dict[str, Any]:
            return {"tokens": tokens, "distance": distance}

        def drift(self, kind: str) -> dict[str, Any]:
            return {"kind": kind}

    work = tmp_path / "work.json"
    stopped = module.results(Instant(), module.Pieces(work, -1))
    assert "contexts" in stopped["missing"]
    assert stopped["predicted"] == stopped["drift"] == []
    whole = module.results(Instant(), module.Pieces(work))
    assert whole["missing"] == []
    assert [d["kind"] for d in whole["drift"]] == list(module.KINDS)
    assert module.results(Instant(), module.Pieces(work, -1)) == whole


def test_predictor_pieces_are_kept_as_tensors(recipe: Any, tmp_path: Path) -> None:
    module = recipe("predictor_study")
    study = object.__new__(module.Study)  # the pieces alone, without a model
    study._work = tmp_path
    value = {"x": torch.arange(3), "names": ["a"]}
    assert not study.has("piece")
    study.kept("piece", lambda: value)
    assert study.has("piece")
    again = study.kept("piece", fails)
    assert torch.equal(again["x"], value["x"])
    assert again["names"] == ["a"]


class Budgets:
    """Perplexities that grow with the budget, each asked for once."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def budget(self, target: float) -> dict[str, Any]:
        assert target not in self.asked
        self.asked.append(target)
        return {"target": target, "perplexity_ratio": 1 + target**2 / 4}


@pytest.mark.parametrize(
    "targets",
    [(0.25, 0.4), (0.28, 0.4), (0.1, 0.29), (0.4, 0.5)],
    ids=["between", "the answer is known", "high is near", "all too much"],
)
def test_the_highest_budget_is_measured_once(recipe: Any, targets: tuple[float, ...]) -> None:
    module = recipe("input_sparsity")
    study = Budgets()
    found = [study.budget(target) for target in targets]
    best = module.highest(study, found)
    assert best["perplexity_ratio"] <= module.ALLOWED
    assert best["target"] >= 0.2  # 0.283 is the true one
    assert len({entry["target"] for entry in found}) == len(found) == len(study.asked)
    assert best in found
