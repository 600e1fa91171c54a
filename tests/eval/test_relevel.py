"""A level found anew on an existing plan: the loss is kept, and bytes follow the loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dejavu.bench.level_speed import timed
from dejavu.errors import InputError, PlanError
from dejavu.eval.compare import compare
from dejavu.eval.relevel import add_level
from dejavu.eval.text import EvalText
from dejavu.load import LoadedModel
from dejavu.predictor.plan import Plan, load_plan
from dejavu.predictor.prepare import prepare
from predictor import tiny

from .tiny import text_of

KINDS = ("relu", "gated")


@pytest.fixture(scope="module")
def text() -> EvalText:
    ids = tiny.Characters().encode(tiny.text(1025, seed=7), add_special_tokens=False)
    return text_of(torch.tensor(ids), 32, 32)


@pytest.fixture(scope="module", params=KINDS)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedModel, Plan]:
    save = tiny.save if request.param == "relu" else tiny.save_llama
    loaded = tiny.load(save(tmp_path_factory.mktemp("model")))
    out = tmp_path_factory.mktemp("plans") / "plan"
    options = replace(tiny.OPTIONS, max_loss=0.05, fast_loss=0.3)
    prepare(loaded, [tiny.text()], out, tokenizer=tiny.Characters(), options=options, name="tiny")
    return loaded, load_plan(out)


def test_the_loss_is_kept_and_more_loss_reads_less(
    made: tuple[LoadedModel, Plan], text: EvalText, tmp_path: Path
) -> None:
    loaded, plan = made
    sizes = []
    for allowed in (0.001, 0.15):
        found = add_level(loaded, plan, "new", allowed, text)
        report = found.level("new").report
        assert report["perplexity_ratio"] + report["perplexity_ratio_error"] <= 1 + allowed
        sizes.append(report["weight_bytes"])
        found.save(tmp_path / str(allowed))
        again = load_plan(tmp_path / str(allowed))
        assert again.level("new") == found.level("new")
        measured = compare(loaded.model, text, again.selector(loaded, "new"))
        assert measured.ratio == pytest.approx(report["perplexity_ratio"])
        assert {name: plan.levels[name] for name in plan.levels} == {
            name: again.levels[name] for name in plan.levels
        }
    assert sizes[1] < sizes[0] < 1


def test_levels_stand_in_the_order_of_their_loss(
    made: tuple[LoadedModel, Plan], text: EvalText
) -> None:
    loaded, plan = made
    found = add_level(loaded, plan, "between", 0.1, text)
    assert list(found.levels) == ["exact", "careful", "balanced", "between", "fast"]


def test_what_cannot_be_found_is_refused(made: tuple[LoadedModel, Plan], text: EvalText) -> None:
    loaded, plan = made
    with pytest.raises(InputError, match="above 0"):
        add_level(loaded, plan, "new", 0.0, text)
    with pytest.raises(InputError, match="loses nothing"):
        add_level(loaded, plan, "exact", 0.1, text)
    other = replace(plan, base=replace(plan.base, identity="0" * 64))
    with pytest.raises(PlanError, match="made for"):
        add_level(loaded, other, "new", 0.1, text)
    if not plan.predictors:
        with pytest.raises(InputError, match="curves"):
            add_level(loaded, replace(plan, report={}), "new", 0.1, text)


@pytest.mark.usefixtures("brief_bench")
def test_levels_are_timed_and_nothing_else_changes(made: tuple[LoadedModel, Plan]) -> None:
    loaded, plan = made
    done: list[int] = []
    found = timed(loaded, plan, progress=lambda stage, turn, turns: done.append(turn))
    assert done == list(range(1, 2 * (1 + len(plan.levels)) + 1))
    assert found.report.pop("dense_tokens_per_second") > 0
    for name, level in found.levels.items():
        assert level.report.pop("tokens_per_second") > 0
        before = plan.levels[name]
        kept = {k: v for k, v in before.report.items() if k != "tokens_per_second"}
        assert level == replace(before, report=kept)
    kept = {k: v for k, v in plan.report.items() if k != "dense_tokens_per_second"}
    assert found.report == kept
    assert found.predictors is plan.predictors
