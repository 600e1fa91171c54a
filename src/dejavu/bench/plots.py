"""Speed over density, with the rooflines drawn.

`python -m dejavu.bench.plots RESULT.json PLOT.png` draws what another machine has measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dejavu.bench.result import BenchResult, Density
from dejavu.errors import BackendError, InputError


def plot_density(result: BenchResult, path: Path) -> None:
    """Write ms/token of all our arms over the density of bytes; peers are horizontal lines.

    The sloping line is the time that the bytes read need at the measured bandwidth, its right end
    the dense roofline; neither is drawn for cache-resident models. The suffix of `path` says the
    format. Raises InputError where no arm has a density, BackendError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(
            "matplotlib is not installed: pip install 'dejavu-llm[plots]'"
        ) from error
    own = [(arm, arm.density) for arm in result.arms if arm.density is not None]
    if not own:
        raise InputError("no arm of this result has a density to plot")
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    own.sort(key=lambda pair: pair[1].bytes)
    for place, (arm, density) in enumerate(own):
        spread = arm.ms_per_token
        reach = [[spread.median - spread.p10], [spread.p90 - spread.median]]
        axes.errorbar(density.bytes, spread.median, yerr=reach, fmt="o", capsize=3, color="C0")
        axes.annotate(
            f"{arm.name}\n{_kept(density)}",
            (density.bytes, spread.median),
            textcoords="offset points",
            xytext=(8, 6 if place % 2 else -26),  # neighbours may lie close together
            fontsize=8,
        )
    for number, arm in enumerate(a for a in result.arms if a.density is None):
        axes.axhline(
            arm.ms_per_token.median, color=f"C{number + 1}", linestyle="--", label=arm.name
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
            result.roofline_ms, color="black", linewidth=1, linestyle=":", label="dense roofline"
        )
    c = result.conditions
    weights = ", random weights: speed only" if result.random_weights else ""
    title = f"{result.name}, {c.dtype}, batch {c.batch}, {_where(result)}{weights}"
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("weight bytes read for a token, share of the dense model's")
    axes.set_ylabel("ms/token")
    axes.set_xlim(0, 1.25)
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _kept(density: Density) -> str:
    heads = "" if density.groups == 1.0 else f", {density.groups:.0%} of heads"
    return f"{density.neurons:.0%} of neurons{heads}"


def _where(result: BenchResult) -> str:
    gpu = result.machine.gpu
    return result.conditions.runs_on if gpu is None else gpu.name


if __name__ == "__main__":
    source, plot = map(Path, sys.argv[1:])
    plot_density(BenchResult.from_json(json.loads(source.read_text(encoding="utf-8"))), plot)
