"""The whole pipeline on a small model: what the report says must be what decoding does."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dejavu.errors import InputError, PlanError
from dejavu.kernels.ops import Projection
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel
from dejavu.models.base import Batch
from dejavu.predictor import pipeline
from dejavu.predictor.calibration import make_windows
from dejavu.predictor.options import PrepareOptions
from dejavu.predictor.plan import LayerPolicy, Level, Plan, load_plan
from dejavu.predictor.prepare import prepare
from dejavu.predictor.recording import window_losses
from dejavu.sparsity.losses import block_mean
from dejavu.sparsity.policy import Dense

from . import tiny


def run(loaded: LoadedModel, out: Path, text: str | None = None, **fields: Any) -> Plan:
    options = replace(tiny.OPTIONS, **fields)
    texts = [tiny.text() if text is None else text]
    return prepare(loaded, texts, out, tokenizer=tiny.Characters(), options=options, name="tiny")


def fresh_windows(count: int = 40) -> torch.Tensor:
    ids = torch.tensor(tiny.Characters().encode(tiny.text(33 * count, 9), add_special_tokens=False))
    return ids[: 33 * count].view(count, 33)


def test_every_token_collected_is_trained_on_or_held_out(plan: Plan) -> None:
    assert plan.calibration["tokens_trained"] == 128 * 32
    assert plan.calibration["tokens_held_out"] == 32 * 32
    for place in plan.report["places"].values():
        assert place["rows_trained"] == 128 * 32
        assert {r["tokens_judged"] for r in place["ranks"]} == {32 * 32}
        assert 0 < place["active"] < 0.5


def test_levels_keep_their_losses_on_fresh_text(plan: Plan, loaded: LoadedModel) -> None:
    windows = fresh_windows()
    ops = TorchOps()
    dense = window_losses(loaded.model, windows, Dense(), ops)
    previous = 1.0
    for name, allowed in (("careful", 0.005), ("balanced", 0.01), ("fast", 0.03)):
        report = plan.levels[name].report
        assert report["perplexity_ratio"] <= 1 + allowed
        losses = window_losses(loaded.model, windows, plan.selector(loaded, name), ops)
        mean = block_mean([a - b for a, b in zip(losses, dense, strict=True)], [32] * 40)
        assert mean.error is not None
        assert mean.value - 3 * mean.error < math.log1p(allowed)
        assert report["neuron_density"] < previous
        assert 0.3 < report["weight_bytes"] < plan.levels["exact"].report["weight_bytes"]
        previous = report["neuron_density"]


def held_out_windows() -> torch.Tensor:
    return make_windows(
        [tiny.text()], tiny.Characters(), length=32, train=128, held_out=32, separator=1
    ).held_out


def test_the_reports_loss_and_reads_are_those_of_the_held_out_text(
    plan: Plan, loaded: LoadedModel
) -> None:
    windows, ops = held_out_windows(), TorchOps()
    dense = window_losses(loaded.model, windows, Dense(), ops)
    tokens = windows.shape[0] * 32
    for name, level in plan.levels.items():
        selector = plan.selector(loaded, name)
        active = torch.zeros(tiny.LAYERS)

        class Watch(Dense):
            def __init__(self, inner: Any, active: torch.Tensor) -> None:
                self.inner, self.active = inner, active

            def select(self, site: Any, layer: int, points: Any, ops: Any) -> Any:
                found = self.inner.select(site, layer, points, ops)
                if found is not None:
                    x = points.source(site, layer)
                    up = loaded.model.weights.blocks[layer].mlp.up
                    (a,) = ops.linear(x, [Projection(up.weight, up.bias)])
                    self.active[layer] += (found.to_mask(len(x)) & (a > 0)).sum()
                return found

        losses = window_losses(loaded.model, windows, Watch(selector, active), ops)
        rise = (sum(losses) - sum(dense)) / tokens
        assert level.report["perplexity_ratio"] == pytest.approx(math.exp(rise), rel=1e-5)
        assert level.report["dense_perplexity"] == pytest.approx(math.exp(sum(dense) / tokens))
        share = float(active.mean()) / tokens / tiny.NEURONS
        assert level.report["active_density"] == pytest.approx(share, abs=0.005)


def test_density_while_decoding_is_the_reports(plan: Plan, loaded: LoadedModel) -> None:
    """The held-out windows decoded token by token, side by side, as the engine does it."""
    held_out = held_out_windows()
    rows = len(held_out)
    for name in ("balanced", "fast"):
        selector = plan.selector(loaded, name)
        cache = loaded.model.new_cache(32, sequences=rows)
        for n in range(32):
            batch = Batch(
                held_out[:, n].contiguous(),
                torch.full((rows,), n),
                torch.arange(rows, dtype=torch.int32)[:, None],
                torch.full((rows,), n + 1, dtype=torch.int32),
            )
            loaded.model.forward(batch, cache, selector, TorchOps())
        stated = plan.levels[name].report["neuron_density"]
        assert selector.meter.density(tiny.NEURONS) == pytest.approx(stated, abs=0.001)


def test_recall_is_reported_with_the_density_it_cost(plan: Plan, loaded: LoadedModel) -> None:
    """Both rise together, and recomputing them from the stored rule gives the report's figures."""
    fast, balanced = plan.levels["fast"].report["layers"], plan.levels["balanced"].report["layers"]
    for name in fast:
        if fast[name]["kind"] == "predictor" == balanced[name]["kind"]:
            assert fast[name]["recall_active"] < balanced[name]["recall_active"]
            assert fast[name]["density"] < balanced[name]["density"]
            assert fast[name]["missed_mass"] > balanced[name]["missed_mass"]
    selector = plan.selector(loaded, "balanced")
    counts = torch.zeros(3, dtype=torch.int64)  # selected and active, active, selected

    class Watch(Dense):
        def select(self, site: Any, layer: int, points: Any, ops: Any) -> None:
            found = selector.select(site, layer, points, ops)
            if found is not None and layer == 0:
                x = points.source(site, layer)
                up = loaded.model.weights.blocks[0].mlp.up
                (a,) = ops.linear(x, [Projection(up.weight, up.bias)])
                picked, true = found.to_mask(len(x)), a > 0
                counts.add_(torch.stack(((picked & true).sum(), true.sum(), picked.sum())))

    for window in fresh_windows(30):
        loaded.model.logits(window[:-1], loaded.model.new_cache(32), Watch(), TorchOps())
    hit, active, chosen = counts.tolist()
    entry = balanced["neurons.0"]
    assert hit / active == pytest.approx(entry["recall_active"], abs=0.02)
    assert hit / chosen == pytest.approx(entry["precision_active"], abs=0.03)


def test_a_layer_that_never_fires_is_named(tmp_path: Path) -> None:
    loaded = tiny.load(tiny.save(tmp_path / "model", dead_layer=1))
    with pytest.raises(PlanError, match=r"layer 1, neurons: nothing is ever active on 1024 tokens"):
        run(loaded, tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


def test_damaged_weights_are_no_predictor(loaded: LoadedModel, tmp_path: Path) -> None:
    bias = loaded.model.weights.blocks[0].mlp.up.bias
    assert bias is not None
    kept = float(bias[3])
    try:
        bias[3] = math.nan
        with pytest.raises(PlanError, match="layer 0, neurons: activations are not finite"):
            run(loaded, tmp_path / "plan")
    finally:
        bias[3] = kept


def test_a_silu_model_gets_a_warning_and_an_honest_plan(tmp_path: Path) -> None:
    loaded = tiny.load(tiny.save_llama(tmp_path / "model"))
    with pytest.warns(UserWarning, match=r"100% of this model's neurons.*\(activation silu\)"):
        plan = run(loaded, tmp_path / "plan", tokens=2048, epochs=2.0, kind="paper")
    assert {p.kind for p in plan.levels["exact"].neurons} == {"dense"}
    assert plan.levels["exact"].report["weight_bytes"] == 1.0
    assert plan.report["selection_rule"].startswith("selected where")
    for name, allowed in (("balanced", 0.01), ("fast", 0.03)):
        report = plan.levels[name].report
        assert report["perplexity_ratio"] <= 1 + allowed
        assert report["weight_bytes"] <= 1.0


class Stop(BaseException):
    """Like Ctrl-C."""


@pytest.mark.parametrize("stage", ["measuring sensitivity", "training", "measuring a threshold"])
def test_an_interrupted_run_continues_to_the_same_plan(
    stage: str, loaded: LoadedModel, plan_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "plan"
    seen: list[str] = []

    def interrupt(now: str, done: int, total: int) -> None:
        seen.append(now)
        if now == stage and done == 1:
            raise Stop

    def go(progress: Any) -> Plan:
        return prepare(
            loaded,
            [tiny.text()],
            out,
            tokenizer=tiny.Characters(),
            options=tiny.OPTIONS,
            name="tiny",
            progress=progress,
        )

    with pytest.raises(Stop):
        go(interrupt)
    assert not out.exists()
    assert (tmp_path / "plan.partial").is_dir()
    again: list[str] = []
    go(lambda now, done, total: again.append(f"{now} {done}"))
    if stage == "training":
        assert "measuring sensitivity 1" not in again
        assert "training 1" not in again
        assert "training 2" in again
    if stage == "measuring a threshold":
        assert not any(line.startswith(("training", "recording ")) for line in again) or (
            "recording held-out text 1" in again
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan"]
    for name in ("plan.json", "predictors.safetensors"):
        assert (out / name).read_bytes() == (plan_folder / name).read_bytes()


@pytest.mark.parametrize("other", ["seed", "text"])
def test_leftovers_of_another_run_are_not_continued(
    other: str, loaded: LoadedModel, tmp_path: Path
) -> None:
    def interrupt(now: str, done: int, total: int) -> None:
        if now == "training":
            raise Stop

    def go(number: int, progress: Any) -> None:
        prepare(
            loaded,
            [tiny.text(seed=number if other == "text" else 0)],
            tmp_path / "plan",
            tokenizer=tiny.Characters(),
            options=replace(tiny.OPTIONS, seed=number if other == "seed" else 0),
            progress=progress,
        )

    with pytest.raises(Stop):
        go(0, interrupt)
    stages: list[str] = []
    go(1, lambda now, done, total: stages.append(f"{now} {done}"))
    assert "training 1" in stages
    assert "measuring sensitivity 1" in stages


def test_layers_that_do_not_fit_together_are_recorded_apart(
    loaded: LoadedModel, plan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "room", lambda device, memory_gib: 128 * 32 * 32 * 2)
    stages: list[str] = []
    prepare(
        loaded,
        [tiny.text()],
        tmp_path / "plan",
        tokenizer=tiny.Characters(),
        options=tiny.OPTIONS,
        name="tiny",
        progress=lambda now, done, total: stages.append(f"{now} {done}"),
    )
    assert stages.count("recording 1") == tiny.LAYERS
    for name in ("plan.json", "predictors.safetensors"):
        assert (tmp_path / "plan" / name).read_bytes() == (plan_folder / name).read_bytes()


def test_look_ahead_is_compared_and_costs_accuracy(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = run(loaded, tmp_path / "plan", lookahead=(0.0, 0.5, 1.0))
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
        plan = run(loaded, tmp_path / name, lookahead=(0.0, 0.5), ranks=ranks, epochs=1.0)
        found: dict[str, float] = plan.report["places"]["neurons.1"]["lookahead"]["0.5"]
        del found["missed_mass_at_equal_density"]  # beside what the own input's rank selects
        return found

    cheap, dear = sorted((tried("low", 1), tried("high", 8)), key=lambda one: one["cost_bytes"])
    assert dear["cost_bytes"] > 1.05 * cheap["cost_bytes"]  # else nothing is shown
    assert tried("both", 1, 8) == cheap


def test_heads_are_skipped_where_most_do_nothing(tmp_path: Path) -> None:
    """In a model whose heads 1 to 3 add almost nothing, heads are predicted and skipped."""
    loaded = tiny.load(tiny.save(tmp_path / "model", idle_heads=True))
    plan = run(loaded, tmp_path / "plan", heads=True, max_loss=0.02, fast_loss=0.1)
    report = plan.levels["fast"].report
    assert report["head_density"] < 0.6  # a quarter would do; 0.50 as found
    assert report["perplexity_ratio"] < 1.1
    selector = plan.selector(loaded, "fast")
    loaded.model.logits(fresh_windows(1)[0, :1], loaded.model.new_cache(32), selector, TorchOps())
    groups = [r.groups for r in selector.reads()]
    assert any(g is not None and g < tiny.HEADS for g in groups)


def test_heads_that_all_matter_stay(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = run(loaded, tmp_path / "plan", heads=True)
    assert {p.kind for p in plan.levels["balanced"].heads} == {"dense"}


def test_the_papers_predictor_is_there_to_compare_with(
    plan: Plan, loaded: LoadedModel, tmp_path: Path
) -> None:
    paper = run(loaded, tmp_path / "plan", kind="paper")
    assert paper.calibration["options"]["kind"] == "paper"
    ours = plan.report["places"]["neurons.0"]["ranks"][0]
    theirs = paper.report["places"]["neurons.0"]["ranks"][0]
    assert theirs["rank"] in PrepareOptions().neuron_ranks(loaded.model.config)
    assert theirs != ours


def test_a_share_for_predictors_holds(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = run(loaded, tmp_path / "plan", predictor_share=0.025)
    report = plan.levels["balanced"].report
    assert report["predictor_bytes"] <= 0.025 * plan.report["dense_bytes"]


def test_a_destination_that_is_something_else_is_refused(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("x")
    for name in ("file", "folder"):
        with pytest.raises(InputError, match=name):
            run(loaded, tmp_path / name)
    (tmp_path / "plan.partial").mkdir()
    (tmp_path / "plan.partial" / "thesis.tex").write_text("x")
    with pytest.raises(PlanError, match=r"plan\.partial is in the way"):
        run(loaded, tmp_path / "plan")
    assert (tmp_path / "plan.partial" / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_loss": 0.0}, "max_loss"),
        ({"max_loss": 0.05}, "fast_loss"),
        ({"tokens": 0}, "tokens"),
        ({"kind": "svdd"}, "did you mean 'svd'"),
        ({"ranks": ()}, "ranks"),
        ({"ranks": (0, 4)}, "ranks"),
        ({"predictor_share": 1.5}, "predictor_share"),
        ({"lookahead": (0.5,)}, "lookahead"),
        ({"lookahead": (0.0, 2.0)}, "lookahead"),
        ({"threads": 0}, "threads"),
        ({"epochs": math.nan}, "epochs"),
    ],
)
def test_bad_options_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PrepareOptions(**fields)


def test_default_ranks_suit_the_shape(loaded: LoadedModel) -> None:
    from dejavu.config import ModelConfig

    def shape(width: int, neurons: int) -> ModelConfig:
        c = asdict(loaded.model.config) | {"hidden_size": width, "intermediate_size": neurons}
        return ModelConfig(**c)

    options = PrepareOptions()
    assert options.neuron_ranks(shape(512, 2048)) == (96, 128, 176)
    assert options.neuron_ranks(shape(4096, 16384)) == (160, 208, 272)
    assert options.neuron_ranks(shape(6, 5)) == options.neuron_ranks(shape(6, 5), 0.5)[:1] == (1,)
    assert options.neuron_ranks(shape(512, 2048), 0.5) == (96, 128, 176, 352)
    assert options.neuron_ranks(shape(200, 2048), 0.5)[-1] <= 200
    for distance in (0.0, 1.0):
        assert PrepareOptions(ranks=(999, 3)).neuron_ranks(shape(8, 6), distance) == (3, 6)


def test_a_plan_runs_carefully_where_nothing_else_was_asked_for(plan: Plan) -> None:
    assert list(plan.levels) == ["exact", "careful", "balanced", "fast"]
    assert plan.default_level == "careful"
    assert plan.level() is plan.levels["careful"]


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"careful_loss": 0.02}, "careful_loss"),
        ({"careful_loss": 0.0}, "careful_loss"),
        ({"default_level": "carefull"}, "careful"),
    ],
)
def test_levels_that_make_no_sense_are_refused(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        PrepareOptions(**asked)


def test_threads_are_put_back(loaded: LoadedModel, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    with pytest.raises(InputError, match="too short"):
        run(loaded, tmp_path / "plan", text="short", threads=before + 1)
    assert torch.get_num_threads() == before


def test_the_plan_is_plain_json(plan_folder: Path) -> None:
    text = (plan_folder / "plan.json").read_text(encoding="utf-8")
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in plan.json"))
    assert load_plan(plan_folder).levels["fast"].max_loss == 0.03
    assert load_plan(plan_folder).levels["careful"].max_loss == 0.005
    assert LayerPolicy() in load_plan(plan_folder).levels["exact"].heads
    assert isinstance(load_plan(plan_folder).levels["exact"], Level)
