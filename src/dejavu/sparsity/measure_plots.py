"""A measurement in pictures; needs matplotlib (the extra `plots`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.errors import InputError
from dejavu.sparsity.measurement import ArmResult, Measurement
from dejavu.weights.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLES = {"true": "o-", "static": "s--", "static-same": "^:"}


def save_plots(measurement: Measurement, folder: str | os.PathLike[str]) -> list[Path]:
    """Write density.png, layers.png, overlap.png and residual.png; returns their paths.

    Figures are drawn without pyplot, so no state of the caller's matplotlib is touched.
    Raises InputError without matplotlib, DejavuError where a file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "plots need matplotlib, which is not installed: pip install 'dejavu-llm[plots]'"
        ) from error
    paths = []
    for name, draw in (
        ("density", _density),
        ("layers", _layers),
        ("overlap", _overlap),
        ("residual", _residual),
    ):
        figure = Figure(figsize=(10, 4), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure, measurement)
        path = Path(folder) / f"{name}.png"
        with atomic_write(path) as partial:
            figure.savefig(partial, format="png", dpi=120, metadata={"Software": None})
        paths.append(path)
    return paths


def _density(figure: Figure, m: Measurement) -> None:
    """Perplexity over dense, a panel for neurons, heads and both."""
    lines = {}
    for place, parts in enumerate(m.options.parts, 1):
        axes = figure.add_subplot(1, len(m.options.parts), place)
        for rule, style in _STYLES.items():
            for color, budget in enumerate(m.options.budgets):
                results = m.find(rule, parts, budget)
                density = [_place(result) for result in results]
                ratios = [result.ratio for result in results]
                if results:
                    (line,) = axes.plot(density, ratios, style, color=f"C{color}", markersize=4)
                    lines[f"{rule}, {budget}"] = line
        kind = "asked" if parts == "both" else "kept"
        axes.set(title=parts, xlabel=f"density {kind}", ylabel="perplexity / dense", yscale="log")
    figure.legend(lines.values(), lines.keys(), loc="outside right center")


def _place(result: ArmResult) -> float:
    """Density really kept; as asked where neurons and heads may differ in it."""
    if result.arm.parts == "both":
        return result.arm.target or 0.0
    return result.mean_density(*result.arm.sites)


def _layers(figure: Figure, m: Measurement) -> None:
    axes = _axes(figure, "layer", "share")
    for name, values in (
        ("neurons not 0", [layer.active for layer in m.layers]),
        (f"neurons for {m.options.mass:.0%} of mass", [x.neurons_for_mass for x in m.layers]),
        (f"heads for {m.options.mass:.0%} of mass", [x.heads_for_mass for x in m.layers]),
    ):
        axes.plot(range(len(values)), values, "o-", label=name)
    axes.set_ylim(0, 1)
    axes.legend()


def _overlap(figure: Figure, m: Measurement) -> None:
    axes = _axes(figure, "distance between tokens", "Jaccard index of active neurons")
    for number, layer in enumerate(m.layers):
        values = [layer.neuron_overlap[str(distance)] for distance in m.options.distances]
        shown = [float("nan") if value is None else value for value in values]
        color = f"C{number % 10}"
        axes.plot(m.options.distances, shown, "o-", color=color, label=f"layer {number}")
        if (other := layer.neuron_overlap["other"]) is not None:
            axes.axhline(other, color=color, linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(m.options.distances, [str(distance) for distance in m.options.distances])
    axes.minorticks_off()
    axes.set_title("solid: same text; dotted: another text")
    figure.legend(loc="outside right center", ncols=-(-len(m.layers) // 16))


def _residual(figure: Figure, m: Measurement) -> None:
    axes = _axes(figure, "layer", "mean over tokens")
    for name in ("cosine", "block", "attention", "mlp"):
        label = "cosine of input and output" if name == "cosine" else f"{name} adds / norm"
        values = [getattr(layer.change, name) for layer in m.layers]
        axes.plot(range(len(values)), values, "o-", label=label)
    axes.legend()


def _axes(figure: Figure, x: str, y: str) -> Axes:
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    return axes
