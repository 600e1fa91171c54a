"""Tables and plots of the two-pass experiment."""

import sys
from pathlib import Path

import pytest

from dejavu.sparsity.measure import measure
from dejavu.sparsity.measure_plots import save_plots
from dejavu.sparsity.measure_tables import tables
from dejavu.sparsity.measurement import Measurement, MeasureOptions

from .references import LAYERS, Pair, windows


@pytest.fixture(scope="module")
def small(opt: Pair) -> Measurement:
    options = MeasureOptions(densities=(0.5, 0.2))
    return measure(opt[0], windows([20, 20]), windows([20], seed=1), options)


def test_tables_show_every_layer_and_arm(small: Measurement) -> None:
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    for table in tables(small):
        console.print(table)
    text = console.export_text()
    assert f"{small.layers[1].active:.1%}" in text
    for result in small.arms:
        assert f"{result.ratio:.3f}" in text or f"{result.ratio:.0f}" in text


@pytest.mark.filterwarnings("error")
def test_little_asked_little_shown(opt: Pair, tmp_path: Path) -> None:
    options = MeasureOptions(densities=(), thresholds=(), distances=())
    m = measure(opt[0], windows([5]), options=options)
    assert len(m.arms) == 1
    assert [table.row_count for table in tables(m)] == [LAYERS, 1, 0]
    pytest.importorskip("matplotlib")
    assert len(save_plots(m, tmp_path)) == 4


def test_plots_leave_matplotlib_alone(small: Measurement, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    before, pyplot = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    paths = save_plots(small, tmp_path / "plots")
    assert sorted(path.name for path in paths) == sorted(
        entry.name for entry in (tmp_path / "plots").iterdir()
    )
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in paths)
    assert ("matplotlib.pyplot" in sys.modules) == pyplot
    assert dict(matplotlib.rcParams) == before
