"""Plans on disk and at work: what is saved is what runs, and damage never passes."""

from __future__ import annotations

import errno
import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dejavu.errors import DejavuError, PlanError
from dejavu.kernels.nibbles import Nibbles
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel
from dejavu.predictor import plan as plan_module
from dejavu.predictor.network import Predictor
from dejavu.predictor.plan import LayerPolicy, Level, Plan, Source, default_level, load_plan
from dejavu.sparsity.policy import Dense, Selector

from . import tiny


@pytest.fixture
def copy(plan_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plan_folder, tmp_path / "copy"))


def edit(folder: Path, change: Any) -> None:
    path = folder / "plan.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def logits(loaded: LoadedModel, selector: Selector, count: int = 24, seed: int = 0) -> torch.Tensor:
    ids = torch.randint(2, 60, (count,), generator=torch.Generator().manual_seed(seed))
    return loaded.model.logits(ids, loaded.model.new_cache(count), selector, TorchOps())


def test_a_plan_comes_back_as_it_was_saved(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "again")
    again = load_plan(tmp_path / "again")
    assert again.base == plan.base
    assert again.levels == plan.levels
    assert again.default_level == plan.default_level == "careful"
    assert again.calibration == plan.calibration
    assert again.report == plan.report
    assert again.predictors.keys() == plan.predictors.keys() != set()
    for key, source in plan.predictors.items():
        other = again.predictors[key]
        assert other.distance == source.distance
        for part in ("first", "second"):
            mine, theirs = getattr(source.predictor, part), getattr(other.predictor, part)
            assert isinstance(mine, Nibbles)
            assert isinstance(theirs, Nibbles)
            assert mine.columns == theirs.columns
            assert torch.equal(mine.data, theirs.data)
            assert torch.equal(mine.step, theirs.step)
        assert torch.equal(source.predictor.bias, other.predictor.bias)
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == [
        "plan.json",
        "predictors.safetensors",
    ]


def test_any_flipped_byte_of_the_predictors_is_refused(copy: Path) -> None:
    path = copy / "predictors.safetensors"
    good = path.read_bytes()
    for place in (8, len(good) // 2, len(good) - 1):
        bad = bytearray(good)
        bad[place] ^= 1
        path.write_bytes(bad)
        with pytest.raises(PlanError, match=r"predictors\.safetensors is damaged"):
            load_plan(copy)
    path.unlink()
    with pytest.raises(PlanError, match=r"predictors\.safetensors cannot be read"):
        load_plan(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format_version=99), "format_version is 99"),
        (lambda c: c.pop("levels"), "levels"),
        (lambda c: c["base_model"].pop("identity"), "identity"),
        (lambda c: c.update(default_level="slow"), "default_level is 'slow'"),
        (lambda c: c["levels"]["balanced"]["neurons"].pop(), "1 neurons policies for 2"),
        (lambda c: c["levels"]["exact"]["neurons"][0].update(kind="odd"), "odd"),
        (lambda c: c["predictors"].pop("neurons.1"), r"lacks the predictor neurons\.1"),
        (lambda c: c["predictors"].update({"neurons.7": {"distance": 0}}), r"neurons\.7"),
        (lambda c: c["predictors"].update({"elbows.1": {"distance": 0}}), "wrong.*elbows"),
        (lambda c: c["predictors"].update({"neurons": {"distance": 0}}), "wrong.*int"),
    ],
)
def test_a_wrong_field_is_named(copy: Path, change: Any, message: str) -> None:
    edit(copy, change)
    with pytest.raises(PlanError, match=message):
        load_plan(copy)


@pytest.mark.parametrize("content", ["", "[]", "{", "nonsense"])
def test_what_is_no_plan_is_named(copy: Path, content: str) -> None:
    (copy / "plan.json").write_text(content)
    with pytest.raises(PlanError, match=r"plan\.json"):
        load_plan(copy)


def test_a_plan_says_which_level_runs_by_default(plan: Plan, copy: Path) -> None:
    edit(copy, lambda c: c.update(default_level="fast"))
    assert load_plan(copy).level() == plan.level("fast")
    edit(copy, lambda c: c.pop("default_level"))
    assert load_plan(copy).level() == plan.level("balanced")
    assert plan.level() == plan.level("careful")


def test_an_unknown_level_lists_those_that_exist(plan: Plan, loaded: LoadedModel) -> None:
    with pytest.raises(
        PlanError, match=r"'balancd'; did you mean 'balanced'\?.*balanced, careful, exact, fast"
    ):
        plan.selector(loaded, "balancd")


def test_another_model_is_refused_and_both_are_named(plan: Plan, tmp_path: Path) -> None:
    other = tiny.load(tiny.save(tmp_path / "other", seed=5))
    with pytest.raises(PlanError, match=r"made for tiny.*other"):
        plan.selector(other)


def test_another_dtype_of_the_same_model_runs_with_a_notice(
    plan: Plan, loaded: LoadedModel, folder: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.selector(loaded)
    narrow = tiny.load(folder, dtype="int8")
    with pytest.warns(UserWarning, match=r"fp32 weights and runs on int8"):
        selector = plan.selector(narrow)
    dense, sparse = logits(narrow, Dense()), logits(narrow, selector)
    assert (dense - sparse).norm() < 0.5 * dense.norm()


def test_the_exact_level_is_the_dense_model(plan: Plan, loaded: LoadedModel) -> None:
    exact = plan.selector(loaded, "exact")
    assert torch.equal(logits(loaded, exact), logits(loaded, Dense()))
    assert exact.predictor_bytes == 0


def moved(plan: Plan, threshold: float) -> Plan:
    policies = (LayerPolicy("predictor", threshold),) * tiny.LAYERS
    level = Level(0.01, policies, (LayerPolicy(),) * tiny.LAYERS)
    return replace(plan, levels={"moved": level})


def test_a_threshold_below_all_scores_is_dense(plan: Plan, loaded: LoadedModel) -> None:
    everything = moved(plan, -1e6).selector(loaded, "moved")
    assert torch.equal(logits(loaded, everything), logits(loaded, Dense()))
    assert everything.meter.density(tiny.NEURONS) == 1.0


def test_a_threshold_above_all_scores_leaves_the_bias(plan: Plan, loaded: LoadedModel) -> None:
    nothing = moved(plan, 1e6).selector(loaded, "moved")

    class Middle(Selector):
        def __init__(self) -> None:
            self.streams: list[torch.Tensor] = []

        def select(self, *args: Any) -> Any:
            return nothing.select(*args)

        def observe(self, stage: Any, layer: int, value: torch.Tensor) -> None:
            if stage in ("block_input", "block_middle"):
                self.streams.append(value)

    watch = Middle()
    logits(loaded, watch)
    for layer, block in enumerate(loaded.model.weights.blocks):
        middle, after = watch.streams[2 * layer + 1 : 2 * layer + 3]
        assert block.mlp.down.bias is not None
        torch.testing.assert_close(after, middle + block.mlp.down.bias)
    assert nothing.meter.density(tiny.NEURONS) == 0.0


def test_rows_select_for_themselves(plan: Plan, loaded: LoadedModel) -> None:
    """A forward over a sequence agrees with one token at a time."""
    from dejavu.models.base import Batch

    selector = plan.selector(loaded, "fast")
    together = logits(loaded, selector, 12)
    ids = torch.randint(2, 60, (12,), generator=torch.Generator().manual_seed(0))
    cache = loaded.model.new_cache(12)
    alone = plan.selector(loaded, "fast")
    for n, token in enumerate(ids):
        batch = Batch(
            token[None],
            torch.tensor([n]),
            torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([n + 1], dtype=torch.int32),
        )
        row = loaded.model.forward(batch, cache, alone, TorchOps())[0]
        torch.testing.assert_close(row, together[n], rtol=1e-4, atol=1e-4)
    assert alone.meter.used() == selector.meter.used()


def test_a_failing_save_keeps_the_old_plan(
    plan: Plan, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p.name: p.read_bytes() for p in copy.iterdir()}

    def full(path: Path, *args: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(plan_module, "write_safetensors", full)
    with pytest.raises(DejavuError, match="No space left"):
        plan.save(copy)
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == before
    assert [p.name for p in copy.parent.iterdir()] == [copy.name]


def test_a_recorded_step_selects_as_the_reference_does(plan: Plan, loaded: LoadedModel) -> None:
    """On the compiled kernels, replayed: the same neurons, the same logits within rounding."""
    from dejavu.engine.decode_step import DecodeStep
    from dejavu.engine.scheduler import Request
    from dejavu.errors import BackendError
    from dejavu.kernels.native import NativeOps

    try:
        ops = NativeOps(threads=1)
    except BackendError:
        pytest.skip("needs the compiled kernels, which this installation does not have")
    ids = torch.randint(2, 60, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    reference = plan.selector(loaded)
    expected = logits(loaded, reference, 12)
    selector, cache = plan.selector(loaded), loaded.model.new_cache(32)
    assert selector.capturable
    step = DecodeStep(loaded.model, cache, selector, ops, max_rows=1, max_length=32)
    request = Request((), 32, blocks=[0])
    for n, token in enumerate(ids):
        request.token_ids.append(token)
        torch.testing.assert_close(step.run([request])[0], expected[n], rtol=1e-3, atol=1e-3)
    assert selector.meter.used() == reference.meter.used()


@pytest.mark.parametrize("version", [1, 2])
def test_int8_predictors_of_either_version_are_read(
    plan: Plan, loaded: LoadedModel, tmp_path: Path, version: int
) -> None:
    """Before 4 bits there were only int8 ones: they load, and choose by what they hold."""
    wide = {
        key: Source(
            Predictor(s.predictor.first.int8(), s.predictor.second.int8(), s.predictor.bias),
            s.distance,
        )
        for key, s in plan.predictors.items()
        if isinstance(s.predictor.first, Nibbles) and isinstance(s.predictor.second, Nibbles)
    }
    assert wide.keys() == plan.predictors.keys()
    replace(plan, predictors=wide).save(tmp_path / "old")
    edit(tmp_path / "old", lambda content: content.update(format_version=version))
    old = load_plan(tmp_path / "old")
    assert {s.predictor.bits for s in old.predictors.values()} == {8}
    # The same numbers; only activations are rounded in one of them.
    dense = logits(loaded, Dense())
    for level in ("balanced", "fast"):
        found, expected = (logits(loaded, p.selector(loaded, level)) for p in (old, plan))
        assert (found - expected).abs().max() <= (expected - dense).abs().max() + 1e-5


def test_the_default_level_is_told_without_the_predictors(copy: Path) -> None:
    expected = load_plan(copy).default_level
    (copy / "predictors.safetensors").unlink()
    assert default_level(copy) == expected
    edit(copy, lambda content: content.update(format_version=99))
    with pytest.raises(PlanError, match="format_version is 99"):
        default_level(copy)
