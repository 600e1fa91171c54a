"""Tables, plots, and the description of the machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from dejavu.bench import kernels
from dejavu.bench.kernels import MLPShape, bench_mlp
from dejavu.bench.machine import GPU, Machine, _caches, origin
from dejavu.bench.plots import plot_density
from dejavu.bench.result import BenchResult, Missing
from dejavu.bench.spread import Spread
from dejavu.bench.table import decode_table, kernel_table
from dejavu.errors import BackendError, InputError

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def text(renderable, width: int = 200) -> str:
    console = Console(width=width, record=True, file=StringIO())
    console.print(renderable)
    return console.export_text()


def test_decode_table_tells_arms_flags_and_what_is_missing(result):
    shown = text(decode_table(replace(result, missing=[Missing("ctranslate2", "not installed")])))
    for arm in result.arms:
        assert arm.name in shown
    assert "random weights: speed only" in shown
    assert "* CTranslate2 int8: weights in int8, dense arm in fp32" in shown
    assert "ctranslate2 is missing: not installed" in shown
    assert "roofline" in shown


@pytest.mark.parametrize("name", ["gpu-opt-66b", "bench-relu-30m"])
def test_the_table_cuts_no_figure_in_80_columns(name):
    result = BenchResult.from_json(json.loads((RESULTS / f"{name}.json").read_text()))
    narrow = text(decode_table(result), 80)
    assert "…" not in narrow
    assert max(map(len, narrow.splitlines())) <= 80
    figures = re.compile(r"\d[\d.]*(?:-[\d.]+|%|x)")
    assert figures.findall(narrow) == figures.findall(text(decode_table(result), 10_000))
    for arm in result.arms:
        spread = arm.ms_per_token
        assert f" {spread.p10:.3g}-{spread.p90:.3g} " in narrow
    assert ("of best" in narrow) == (result.roofline_ms is not None)


def test_roofline_stands_in_the_table_of_a_large_model(result):
    arms = [replace(arm, of_roofline=0.5, of_bandwidth=0.5) for arm in result.arms]
    shown = text(decode_table(replace(result, roofline_ms=12.25, arms=arms)))
    assert "dense roofline 12.25 ms/token" in shown
    assert "50%" in shown


def test_kernel_table(monkeypatch):
    machine = replace(kernels.this_machine(), caches={"L2": 1 << 16})
    monkeypatch.setattr(kernels, "this_machine", lambda *_: machine)
    done = bench_mlp(MLPShape(16, 64), (0.25,), dtype="fp32", threads=1, repeats=1)
    shown = text(kernel_table(done))
    assert "dense" in shown
    assert "25%" in shown
    assert "warm us" in shown


@pytest.mark.parametrize("roofline", [None, 3.0])
def test_plot(result, roofline, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    plot_density(replace(result, roofline_ms=roofline), path)
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_a_plot_is_drawn_from_a_file(result, tmp_path):
    pytest.importorskip("matplotlib")
    told = json.loads(json.dumps(result.to_json()))
    assert json.loads(json.dumps(BenchResult.from_json(told).to_json())) == told
    gpu = GPU("a GPU", 1, 2, 3, "sm_90", None, None)
    elsewhere = replace(result, machine=replace(result.machine, gpu=gpu))
    assert BenchResult.from_json(elsewhere.to_json()) == elsewhere
    source, plot = tmp_path / "a.json", tmp_path / "a.png"
    source.write_text(json.dumps(elsewhere.to_json()))
    subprocess.run([sys.executable, "-m", "dejavu.bench.plots", source, plot], check=True)
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_plot_needs_densities_and_matplotlib(result, tmp_path, monkeypatch):
    bare = [replace(arm, density=None) for arm in result.arms]
    with pytest.raises(InputError, match="density"):
        plot_density(replace(result, arms=bare), tmp_path / "plot.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BackendError, match=r"dejavu-llm\[plots\]"):
        plot_density(result, tmp_path / "plot.png")


def test_caches_are_read_from_sysfs(tmp_path):
    for number, (level, kind, size) in enumerate(
        [(1, "Data", "32K"), (1, "Instruction", "32K"), (2, "Unified", "1M"), (3, "Unified", "96M")]
    ):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{value}\n")
    found = _caches(tmp_path)
    assert found == {"L1d": 32 << 10, "L2": 1 << 20, "L3": 96 << 20}
    machine = Machine("cpu", "x", "y", 1, 1, found, [])
    assert machine.to_json()["last_level_cache"] == 96 << 20
    assert _caches(tmp_path / "none") == {}
    assert Machine("cpu", "x", "y", 1, 1, {}, []).last_level_cache == 32 << 20


def test_origin_says_when_and_with_what(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("HF_TOKEN", "secret")
    told = origin()
    assert told.environment["OMP_WAIT_POLICY"] == "passive"
    assert "HF_TOKEN" not in told.environment
    assert told.date.endswith("+00:00")


def test_spread():
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 3.0)
    spread = Spread.of([float(i) for i in range(11)][::-1])
    assert spread == Spread(5.0, 1.0, 9.0, 0.0)
    assert Spread.of([1.0, 2.0]).median == 1.5
