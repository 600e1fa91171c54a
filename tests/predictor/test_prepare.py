"""The whole pipeline on small models: what becomes of each of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from dejavu.errors import InputError, PlanError
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel
from dejavu.predictor import pipeline
from dejavu.predictor.options import PrepareOptions
from dejavu.predictor.plan import LayerPolicy, Level, Plan, load_plan

from . import tiny


def test_a_plan_runs_carefully_where_nothing_else_was_asked_for(plan: Plan) -> None:
    assert list(plan.levels) == ["exact", "careful", "balanced", "fast"]
    assert plan.default_level == "careful"
    assert plan.level() is plan.levels["careful"]


def test_the_plan_is_plain_json(plan_folder: Path) -> None:
    text = (plan_folder / "plan.json").read_text(encoding="utf-8")
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in plan.json"))
    assert load_plan(plan_folder).levels["fast"].max_loss == 0.03
    assert load_plan(plan_folder).levels["careful"].max_loss == 0.005
    assert LayerPolicy() in load_plan(plan_folder).levels["exact"].heads
    assert isinstance(load_plan(plan_folder).levels["exact"], Level)


def test_a_layer_that_never_fires_is_named(tmp_path: Path) -> None:
    loaded = tiny.load(tiny.save(tmp_path / "model", dead_layer=1))
    with pytest.raises(PlanError, match=r"layer 1, neurons: nothing is ever active on 1024 tokens"):
        tiny.prepared(loaded, tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


def test_damaged_weights_are_no_predictor(loaded: LoadedModel, tmp_path: Path) -> None:
    bias = loaded.model.weights.blocks[0].mlp.up.bias
    assert bias is not None
    kept = float(bias[3])
    try:
        bias[3] = math.nan
        with pytest.raises(PlanError, match="layer 0, neurons: activations are not finite"):
            tiny.prepared(loaded, tmp_path / "plan")
    finally:
        bias[3] = kept


def test_a_silu_model_gets_a_warning_and_an_honest_plan(tmp_path: Path) -> None:
    loaded = tiny.load(tiny.save_llama(tmp_path / "model"))
    with pytest.warns(UserWarning, match=r"100% of this model's neurons.*\(activation silu\)"):
        plan = tiny.prepared(loaded, tmp_path / "plan", tokens=2048, epochs=2.0, kind="paper")
    assert {p.kind for p in plan.levels["exact"].neurons} == {"dense"}
    assert plan.levels["exact"].report["weight_bytes"] == 1.0
    assert plan.report["selection_rule"].startswith("selected where")
    for name, allowed in (("balanced", 0.01), ("fast", 0.03)):
        report = plan.levels[name].report
        assert report["perplexity_ratio"] <= 1 + allowed
        assert report["weight_bytes"] <= 1.0


def test_layers_that_do_not_fit_together_are_recorded_apart(
    loaded: LoadedModel, plan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "room", lambda device, memory_gib: 128 * 32 * 32 * 2)
    stages: list[str] = []
    tiny.prepared(
        loaded,
        tmp_path / "plan",
        progress=lambda now, done, total: stages.append(f"{now} {done}"),
    )
    assert stages.count("recording 1") == tiny.LAYERS
    for name in ("plan.json", "predictors.safetensors"):
        assert (tmp_path / "plan" / name).read_bytes() == (plan_folder / name).read_bytes()


def test_look_ahead_is_compared_and_costs_accuracy(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = tiny.prepared(loaded, tmp_path / "plan", lookahead=(0.0, 0.5, 1.0))
    tried = plan.report["places"]["neurons.1"]["lookahead"]
    assert sorted(tried) == ["0", "0.5", "1"]
    own = tried["0"]["missed_mass_at_equal_density"]
    assert own < tried["0.5"]["missed_mass_at_equal_density"]
    assert own < tried["1"]["missed_mass_at_equal_density"]
    assert sorted(plan.report["places"]["neurons.0"]["lookahead"]) == ["0", "0.5"]
    assert {source.distance for source in plan.predictors.values()} == {0.0}


def test_an_earlier_input_gets_the_rank_that_is_worth_its_bytes(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    def tried(name: str, *ranks: int) -> dict[str, float]:
        plan = tiny.prepared(loaded, tmp_path / name, lookahead=(0.0, 0.5), ranks=ranks, epochs=1.0)
        found: dict[str, float] = plan.report["places"]["neurons.1"]["lookahead"]["0.5"]
        del found["missed_mass_at_equal_density"]  # beside what the own input's rank selects
        return found

    cheap, dear = sorted((tried("low", 1), tried("high", 8)), key=lambda one: one["cost_bytes"])
    assert dear["cost_bytes"] > 1.05 * cheap["cost_bytes"]  # else nothing is shown
    assert tried("both", 1, 8) == cheap


def test_heads_are_skipped_where_most_do_nothing(tmp_path: Path) -> None:
    """In a model whose heads 1 to 3 add almost nothing, heads are predicted and skipped."""
    loaded = tiny.load(tiny.save(tmp_path / "model", idle_heads=True))
    plan = tiny.prepared(loaded, tmp_path / "plan", heads=True, max_loss=0.02, fast_loss=0.1)
    report = plan.levels["fast"].report
    assert report["head_density"] < 0.6  # a quarter would do; 0.50 as found
    assert report["perplexity_ratio"] < 1.1
    selector = plan.selector(loaded, "fast")
    loaded.model.logits(tiny.windows(1)[0, :1], loaded.model.new_cache(32), selector, TorchOps())
    groups = [r.groups for r in selector.reads()]
    assert any(g is not None and g < tiny.HEADS for g in groups)


def test_heads_that_all_matter_stay(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = tiny.prepared(loaded, tmp_path / "plan", heads=True)
    assert {p.kind for p in plan.levels["balanced"].heads} == {"dense"}


def test_the_papers_predictor_is_there_to_compare_with(
    plan: Plan, loaded: LoadedModel, tmp_path: Path
) -> None:
    paper = tiny.prepared(loaded, tmp_path / "plan", kind="paper")
    assert paper.calibration["options"]["kind"] == "paper"
    ours = plan.report["places"]["neurons.0"]["ranks"][0]
    theirs = paper.report["places"]["neurons.0"]["ranks"][0]
    assert theirs["rank"] in PrepareOptions().neuron_ranks(loaded.model.config)
    assert theirs != ours


def test_a_share_for_predictors_holds(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = tiny.prepared(loaded, tmp_path / "plan", predictor_share=0.025)
    report = plan.levels["balanced"].report
    assert report["predictor_bytes"] <= 0.025 * plan.report["dense_bytes"]


def test_threads_are_put_back(loaded: LoadedModel, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    with pytest.raises(InputError, match="too short"):
        tiny.prepared(loaded, tmp_path / "plan", words="short", threads=before + 1)
    assert torch.get_num_threads() == before
