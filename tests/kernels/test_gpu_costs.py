"""What an MLP costs: how it is measured, kept and asked for; rows of weights that are broken."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from truth import random_weight, selection_of

from dejavu.kernels.gpu.costs import (
    CostTable,
    MLPCost,
    Platform,
    costs_path,
    key,
    read_costs,
    shipped_costs_path,
    write_costs,
)
from dejavu.kernels.ops import Activation, Projection

HERE = Platform("Some GPU", "570.1", "2.11", "3.6")
COST = MLPCost(100.0, ((0.1, 20.0), (0.5, 60.0), (1.0, 160.0)), choosing=5.0)


def test_times_lie_on_a_line_between_what_was_measured():
    assert COST.at([0.0, 0.1, 0.3, 0.75, 1.0]).tolist() == [25.0, 25.0, 45.0, 115.0, 165.0]
    assert COST.limit == pytest.approx(0.675, abs=0.01)
    assert MLPCost(200.0, COST.listed).limit == 1.0
    assert MLPCost(10.0, COST.listed).limit == 0.0


def test_a_file_keeps_what_it_has_and_forgets_other_versions(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = costs_path("Some GPU")
    assert path == tmp_path / "dejavu" / "costs" / "some-gpu.json"
    assert read_costs(path, HERE) == {}
    write_costs(path, HERE, {"a": COST})
    write_costs(path, HERE, {"b": COST._replace(whole=2.0)})
    assert read_costs(path, HERE) == {"a": COST, "b": COST._replace(whole=2.0)}
    for field in ("device_name", "driver", "torch_version", "triton_version"):
        assert read_costs(path, replace(HERE, **{field: "other"})) == {}
    write_costs(path, replace(HERE, driver="580"), {"c": COST})
    assert read_costs(path, replace(HERE, driver="580")) == {"c": COST}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"platform": 1}', '{"platform": %s, "costs": {"a": {"whole": 1}}}']
)
def test_a_file_that_cannot_be_read_is_none(tmp_path, text):
    path = tmp_path / "costs.json"
    write_costs(path, HERE, {"a": COST})
    stored = path.read_text()
    path.write_text(text.replace("%s", stored[stored.index("{", 1) : stored.index("}") + 1]))
    assert read_costs(path, HERE) == {}


def test_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    write_costs(path, HERE, {"a": COST})

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(type(path), "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_costs(path, HERE, {"b": COST})
    assert read_costs(path, HERE) == {"a": COST}
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_answers_for_its_shapes_and_guesses_others():
    table = CostTable({key(8, 64, 32, 2, gated=False): COST})
    assert table.mlp(8, 64, 32, 2, gated=False) == COST
    assert table.mlp(8, 64, 32, 2, gated=True) != COST
    large, small = (16384 * 4, 4096 * 2), (2048, 512)
    for rows in (1, 4):
        other = table.mlp(rows, *large, 2, gated=False)
        assert 0.5 < other.limit < 1.0
        assert (np.diff(other.at([0.0, 0.5, 1.0])) > 0).all()
        assert table.mlp(rows, *small, 2, gated=False).limit < 0.1  # nothing to gain there


def test_the_package_brings_costs_of_a_known_device():
    shipped = read_costs(shipped_costs_path("NVIDIA H200"))
    cost = shipped[key(8, 36864, 9216, 2, gated=False)]
    assert 0.5 < cost.limit < 0.9
    assert read_costs(shipped_costs_path("Some GPU")) == {}


def test_every_bucket_is_measured_listed_whole_and_chosen(triton_ops):
    from dejavu.kernels.gpu.measure_costs import measure_costs
    from dejavu.kernels.gpu.tune import Shape

    shape = Shape(16, 64, 2, 2, 8, 50, gated=True)
    ops = triton_ops().ops
    ran = []

    def timer(work):
        if len(ran) in (0, 1, 3):  # the interpreter takes its time
            work()
        ran.append(work)
        return 1e-3 * len(ran)

    kept = {}
    found = measure_costs(
        shape, ops, torch.float32, rows=(1, 4), shares=(0.5, 1.0), rank=128, timer=timer,
        cache=1, progress=kept.__setitem__,
    )  # fmt: skip
    assert found == kept
    assert list(found) == [key(rows, 64, 16, 4, gated=True) for rows in (1, 4)]
    layers = 2  # at least
    assert found["gated-mlp/4/64x16/4"] == MLPCost(
        pytest.approx(5e3 / layers),
        ((0.5, pytest.approx(6e3 / layers)), (1.0, pytest.approx(7e3 / layers))),
        pytest.approx(8e3 / layers),
    )


BAD = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_broken_row_reaches_those_that_use_it_alone(triton_ops, rows, bad):
    """Row 0 of the step uses neuron 7, whose down row is broken; in row 2 its activation is 0."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 40, generator=g)
    up, down = (random_weight(150, 40, "fp32", g) for _ in range(2))
    used = torch.rand(rows, 150, generator=g) < 0.5
    used[:, 7] = False
    if rows == 3:
        used[0, 7] = used[2, 7] = True
    up.data[7] = x[0] / x[0].norm()
    if rows == 3:
        x[2] = x[2] - 2 * x[0] * (x[2] @ x[0]).clamp(min=1.0) / x[0].norm() ** 2
        assert x[2] @ up.data[7] < 0 < x[0] @ up.data[7]
    chosen = selection_of(used)
    ops = triton_ops()

    def run():
        return ops.mlp(x, Projection(up), None, down, None, Activation("relu"), chosen, None)

    clean = run()
    down.data[7, 5] = bad
    broken = run()
    sound = [n for n in range(rows) if not (rows == 3 and n == 0)]
    assert torch.equal(broken[sound], clean[sound])
    if rows == 3:
        assert not broken[0, 5].isfinite()
        others = torch.arange(40) != 5
        assert torch.equal(broken[0, others], clean[0, others])


@pytest.mark.parametrize("bad", BAD[:2], ids=str)
@pytest.mark.parametrize("shares", [1, 5])
def test_a_broken_row_of_a_head(triton_ops, bad, shares):
    from on_device import Cut

    g = torch.Generator().manual_seed(2)
    x, weight = torch.randn(2, 5 * 8, generator=g), random_weight(5 * 8, 30, "fp32", g)
    used = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 0]], dtype=torch.bool)
    ops = triton_ops(tuning=Cut(16, 16, 1, shares))
    chosen = selection_of(used)
    clean = ops.combine(x, weight, None, chosen, None)
    weight.data[3] = bad  # of head 0, which row 0 uses
    broken = ops.combine(x, weight, None, chosen, None)
    assert torch.equal(broken[1], clean[1])
    assert not broken[0].isfinite().any()
