"""Pictures of what `findings.py` measured; also `python recipes/findings_plots.py RESULT PLOTS`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dejavu.weights.files import atomic_write

Content = dict[str, Any]


def draw(content: Content, folder: Path) -> list[Path]:
    """A PNG for every question that has an answer; returns their paths."""
    pictures: dict[str, tuple[str, Callable[[Figure, Content], None]]] = {
        "context": ("contexts", _context),
        "residual": ("contexts", _residual),
        "training": ("predicted", _training),
        "drift": ("drift", _drift),
    }
    paths = []
    for name, (part, make) in pictures.items():
        if not content.get(part):
            continue
        figure = Figure(figsize=(10, 4), layout="constrained")
        FigureCanvasAgg(figure)
        make(figure, content)
        path = folder / f"findings-{name}.png"
        with atomic_write(path) as aside:
            figure.savefig(aside, format="png", dpi=110, metadata={"Software": None})
        paths.append(path)
    return paths


def _context(figure: Figure, content: Content) -> None:
    """Perplexity against density, by token and the same for all tokens."""
    styles = {"true": ("chosen for each token", "o-"), "static": ("the same for all", "s--")}
    for place, parts in enumerate(("neurons", "heads"), 1):
        axes: Axes = figure.add_subplot(1, 2, place)
        for rule, (label, style) in styles.items():
            arms = [
                a
                for a in content["contexts"]["arms"]
                if (a["arm"]["rule"], a["arm"]["parts"]) == (rule, parts)
            ]
            shares = [100 * a["arm"]["target"] for a in arms]
            axes.plot(shares, [a["ratio"] for a in arms], style, label=label)
        axes.set(xlabel=f"{parts} kept, %", ylabel="perplexity / dense", xscale="log", yscale="log")
        axes.legend()
        axes.grid(alpha=0.3)


def _residual(figure: Figure, content: Content) -> None:
    """How much a block changes the stream, and how alike neighbouring tokens' active sets are."""
    layers = content["contexts"]["layers"]
    numbers = range(len(layers))
    left: Axes = figure.add_subplot(1, 2, 1)
    left.plot(numbers, [n["change"]["cosine"] for n in layers], "o-")
    left.set(xlabel="layer", ylabel="cosine of a block's input and output", ylim=(0, 1.02))
    right: Axes = figure.add_subplot(1, 2, 2)
    for distance in ("1", "16", "other"):
        label = "of another text" if distance == "other" else f"{distance} tokens apart"
        right.plot(numbers, [n["neuron_overlap"][distance] for n in layers], "o-", label=label)
    right.set(xlabel="layer", ylabel="overlap of active neurons (Jaccard)", ylim=(0, None))
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)


def _training(figure: Figure, content: Content) -> None:
    """Perplexity over dense against the text a predictor saw, and how far ahead it looks."""
    found = content["predicted"]
    most = max(p["tokens"] for p in found)
    amounts = sorted((p for p in found if p["distance"] == 0), key=lambda p: p["tokens"])
    ahead = sorted((p for p in found if p["tokens"] == most), key=lambda p: p["distance"])
    for place, (arms, key, label) in enumerate(
        ((amounts, "tokens", "tokens trained on"), (ahead, "distance", "blocks ahead")), 1
    ):
        axes: Axes = figure.add_subplot(1, 2, place)
        axes.errorbar(
            [p[key] for p in arms],
            [p["perplexity_ratio"] for p in arms],
            [p["perplexity_ratio_error"] for p in arms],
            fmt="o-",
            capsize=3,
        )
        axes.set(xlabel=label, ylabel="perplexity / dense")
        if key == "tokens":
            axes.set_xscale("log")
        axes.grid(alpha=0.3)


def _drift(figure: Figure, content: Content) -> None:
    """What a plan costs on other kinds of text, and the density that a server sees there."""
    found = content["drift"]
    kinds = [d["kind"] for d in found]
    left: Axes = figure.add_subplot(1, 2, 1)
    left.bar(
        kinds,
        [100 * (d["perplexity_ratio"] - 1) for d in found],
        yerr=[100 * (d["perplexity_ratio_error"] or 0) for d in found],
        capsize=3,
    )
    left.axhline(1.0, color="black", linestyle=":", linewidth=1)
    left.set(ylabel="perplexity over dense, %")
    right: Axes = figure.add_subplot(1, 2, 2)
    numbers = range(len(found[0]["densities"]))
    for d in found:
        right.plot(numbers, [100 * x for x in d["densities"]], "o-", label=d["kind"])
    planned = [100 * x for x in found[0]["planned_densities"]]
    right.plot(numbers, planned, "k:", label="as the plan says")
    right.set(xlabel="layer", ylabel="neurons read, %")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)


if __name__ == "__main__":
    for written in draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])):
        print(f"wrote {written}")
