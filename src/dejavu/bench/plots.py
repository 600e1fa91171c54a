"""Speed over density, with the rooflines drawn.

`python -m dejavu.bench.plots RESULT.json PLOT.png` draws what another machine has measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dejavu.bench.result import BenchResult, Density
from dejavu.errors import BackendError, InputError
from dejavu.weights.files import atomic_write

_MARKERS = "osD^vP*"


def check_plot(path: Path) -> None:
    """Raises InputError where the suffix of `path` is no format of a plot, BackendError without
    matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(
            "matplotlib is not installed: pip install 'dejavu-llm[plots]'"
        ) from error
    if path.suffix[1:].lower() not in Figure().canvas.get_supported_filetypes():
        raise InputError(f"plot {path}: give a name that ends in .png, .svg or .pdf")


def plot_density(result: BenchResult, path: Path) -> None:
    """Write ms/token of all our arms over the density of bytes; peers are horizontal lines.

    The sloping line is the time that the bytes read need at the measured bandwidth, its right end
    the dense roofline; neither is drawn for cache-resident models. The suffix of `path` says the
    format. Raises InputError where no arm has a density, DejavuError where the file cannot be
    written, and what `check_plot` raises.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    own = [(arm, arm.density) for arm in result.arms if arm.density is not None]
    if not own:
        raise InputError("no arm of this result has a density to plot")
    figure = Figure(figsize=(8.5, 4), layout="constrained")
    axes = figure.add_subplot()
    own.sort(key=lambda pair: pair[1].bytes)
    for place, (arm, density) in enumerate(own):
        spread = arm.ms_per_token
        reach = [[spread.median - spread.p10], [spread.p90 - spread.median]]
        axes.errorbar(
            density.bytes,
            spread.median,
            yerr=reach,
            fmt=_MARKERS[place % len(_MARKERS)],
            capsize=3,
            color=f"C{place}",
            label=f"{_kept(arm.name, density)}: {spread.median:.3g} ms",
        )
    for number, arm in enumerate(a for a in result.arms if a.density is None):
        axes.axhline(
            arm.ms_per_token.median,
            color=f"C{len(own) + number}",
            linestyle="--",
            label=f"{arm.name}: {arm.ms_per_token.median:.3g} ms",
        )
    if result.roofline_ms is not None:
        axes.plot(
            [0, 1],
            [0, result.roofline_ms],
            color="black",
            linewidth=1,
            label=f"bytes read / {result.read_bandwidth:.1f} GB/s",
        )
        axes.axhline(
            result.roofline_ms,
            color="black",
            linewidth=1,
            linestyle=":",
            label=f"dense roofline: {result.roofline_ms:.3g} ms",
        )
    c = result.conditions
    weights = ", random weights: speed only" if result.random_weights else ""
    title = f"{result.name}, {c.dtype}, batch {c.batch}, {_where(result)}{weights}"
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("weight bytes read for a token, share of the dense model's")
    axes.set_ylabel("ms/token")
    axes.set_xlim(0, 1.05)
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", fontsize=8)
    with atomic_write(path) as partial:
        figure.savefig(partial, format=path.suffix[1:].lower(), dpi=150)


def _kept(name: str, density: Density) -> str:
    """What an arm is called, and what it keeps; a forced arm is called by that."""
    heads = "" if density.groups == 1.0 else f", {density.groups:.0%} of heads"
    kept = f"{density.neurons:.0%} of neurons{heads}"
    if name.startswith("forced "):
        return kept + (", lazy-kv" if name.endswith("lazy-kv") else "")
    return name if density.neurons == density.groups == 1.0 else f"{name}: {kept}"


def _where(result: BenchResult) -> str:
    gpu = result.machine.gpu
    return result.conditions.runs_on if gpu is None else gpu.name


if __name__ == "__main__":
    source, plot = map(Path, sys.argv[1:])
    plot_density(BenchResult.from_json(json.loads(source.read_text(encoding="utf-8"))), plot)
