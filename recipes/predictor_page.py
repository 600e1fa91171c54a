"""Draw what `predictor_study.py` found, and print its tables as Markdown.

Usage: python recipes/predictor_page.py docs/results/predictor-study.json docs/plots/predictors.png
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dejavu.weights.files import atomic_write

Arms = list[dict[str, Any]]
DENSITIES = (0.04, 0.1, 0.2)
NEURONS = 2048  # of a layer
CURVES = {
    ("paper", 8): ("the paper's, int8", "s--", "tab:red"),
    ("ours", 8): ("ours, int8", "o-", "tab:blue"),
    ("ours", 4): ("ours, 4 bits (default)", "o-", "tab:green"),
    ("SVD alone", 8): ("SVD without training", "^:", "tab:purple"),
    ("SVD, fitted", 8): ("SVD, scale and offset fitted", "v:", "tab:orange"),
    ("low-bit copy", None): ("copy in 2, 3, 4 bits", "x:", "tab:gray"),
    ("signs, fitted", 1): ("signs, fitted", "d", "black"),
}


def missed(arm: dict[str, Any], density: float) -> float:
    """Missed mass at a density, between the measured ones on a straight line of logarithms."""
    points: list[tuple[float, float]] = [(d, max(m, 1e-7)) for d, m, _ in arm["points"]]
    for (low, high), (right, least) in itertools.pairwise(points):
        if low <= density <= right:
            share = (density - low) / max(right - low, 1e-12)
            return math.exp((1 - share) * math.log(high) + share * math.log(least))
    return points[-1][1] if density > points[-1][0] else points[0][1]


def those(arms: Arms, name: str, bits: int | None) -> Arms:
    """Arms of a name and bits, by bytes."""
    found = [a for a in arms if a["name"] == name and (bits is None or a["bits"] == bits)]
    return sorted(found, key=lambda a: a["bytes"])


def best_paper(arms: Arms, density: float) -> Arms:
    """The paper's predictor at each rank with the learning rate that misses least, by bytes."""
    best: dict[int, dict[str, Any]] = {}
    for arm in arms:
        if arm["name"].startswith("paper"):
            known = best.get(arm["rank"])
            if known is None or missed(arm, density) < missed(known, density):
                best[arm["rank"]] = arm
    return [best[rank] for rank in sorted(best)]


def bytes_for(arms: Arms, density: float, mass: float) -> float | None:
    """Bytes at which a family of arms misses no more than a mass; between ranks by logarithms."""
    points = [(a["bytes"], missed(a, density)) for a in arms]
    for (small, high), (large, low) in itertools.pairwise(points):
        if high >= mass >= low:
            share = math.log(high / mass) / max(math.log(high / low), 1e-12)
            return math.exp((1 - share) * math.log(small) + share * math.log(large))
    return points[0][0] if points and points[0][1] <= mass else None


def speed(content: dict[str, Any], arm: dict[str, Any], active: float, density: float) -> str:
    """Tokens/s by the times of `predictor_speed.py`; `-` where no kernel has this form."""
    cpu, listed = content.get("cpu"), density * NEURONS
    if cpu is None or not arm["rank"]:
        return "-"
    rows = listed * content["row_bytes"] + min(active, listed) * cpu["down_bytes"]
    sparse = sum(
        line["start"] + line["slope"] * size
        for line, size in (
            (cpu["predictor_ns"][str(arm["bits"])], arm["bytes"]),
            (cpu["rows_ns"], rows),
        )
    )
    return f"{1e9 / (cpu['step_ns'] - cpu['layers'] * (cpu['mlp_ns'] - sparse)):.0f}"


def draw(content: dict[str, Any], path: Path) -> None:
    """Missed mass against bytes, a panel for each layer and density."""
    layers = list(content["layers"].items())
    figure = Figure(figsize=(4.4 * len(DENSITIES), 3.8 * len(layers)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(layers), len(DENSITIES), sharex=True, squeeze=False)
    for row, (number, arms) in zip(grid, layers, strict=True):
        for axes, density in zip(row, DENSITIES, strict=True):
            for (name, bits), (label, style, color) in CURVES.items():
                found = those(arms, name, bits)
                if name == "paper":
                    found = best_paper(arms, density)
                sizes = [a["bytes"] / 1024 for a in found]
                masses = [100 * missed(a, density) for a in found]
                axes.plot(sizes, masses, style, color=color, label=label, markersize=4)
            axes.set(xscale="log", yscale="log")
            axes.set_title(f"layer {number}, {density:.0%} of the neurons read")
            axes.grid(alpha=0.3)
        row[0].set_ylabel("missed mass, %")
    for axes in grid[-1]:
        axes.set_xlabel("predictor, KiB")
        axes.set_xticks((50, 100, 200, 500), ("50", "100", "200", "500"))
        axes.minorticks_off()
    grid[0][0].legend(fontsize=7)
    with atomic_write(path) as aside:
        figure.savefig(aside, format="png", dpi=110, metadata={"Software": None})


def tables(content: dict[str, Any]) -> str:
    """All arms by layer, what the paper's would need, and perplexities."""
    lines = []
    ratios = {
        (e["name"], e["rank"], e["bits"]): f"{e['perplexity_ratio']:.4f} ± {e['error']:.4f}"
        for e in content["perplexity"]["arms"]
    }
    for number, arms in content["layers"].items():
        lines += [
            f"Layer {number}: missed mass in % with {', '.join(f'{d:.0%}' for d in DENSITIES)} of "
            "the neurons read, and tokens/s on the CPU if all layers were like this",
            "",
            "| predictor | rank | bits | KB | "
            + " | ".join([f"{d:.0%}" for d in DENSITIES] + [f"tok/s, {d:.0%}" for d in DENSITIES])
            + " |",
            "|---|---|---|---|" + "---|" * 2 * len(DENSITIES),
        ]
        for arm in arms:
            values = " | ".join(
                [f"{100 * missed(arm, d):.2f}" for d in DENSITIES]
                + [speed(content, arm, content["active"][number], d) for d in DENSITIES]
            )
            rank = arm["rank"] or "-"
            size = arm["bytes"] / 1000
            lines.append(f"| {arm['name']} | {rank} | {arm['bits']} | {size:.0f} | {values} |")
        lines.append("")
    lines += [
        "| layer | read | paper's: rank, KB, missed | ours at its bytes | ratio | "
        "ours: KB at its missed mass | share of its bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, arms in content["layers"].items():
        ours = those(arms, "ours", 8)
        for density in DENSITIES:
            for paper in best_paper(arms, density):
                theirs = missed(paper, density)
                same = [a for a in ours if a["bytes"] == paper["bytes"]]
                mass = missed(same[0], density) if same else None
                size = bytes_for(ours, density, theirs)
                least = ours[0]["bytes"]
                sign = "<= " if size == least else ""
                lines.append(
                    f"| {number} | {density:.0%} | {paper['rank']}, {paper['bytes'] / 1000:.0f}, "
                    f"{theirs:.2%} | {'-' if mass is None else f'{mass:.2%}'} | "
                    f"{'-' if mass is None else f'{mass / theirs:.2f}'} | "
                    + ("- | - |" if size is None else f"{sign}{size / 1000:.0f} | "
                       f"{sign}{size / paper['bytes']:.2f} |")
                )  # fmt: skip
    lines += [
        "",
        "| both layers at 10 % | rank | bits | perplexity over dense |",
        "|---|---|---|---|",
    ]
    lines += [f"| {n} | {r or '-'} | {b or '-'} | {text} |" for (n, r, b), text in ratios.items()]
    return "\n".join([*lines, "", *adaptive(content)])


def adaptive(content: dict[str, Any]) -> list[str]:
    """One rank for all layers against a rank a layer: bytes a token that count as one."""
    price, row = content["price_nats_per_byte"], content["row_bytes"]

    def cost(arm: dict[str, Any]) -> float:
        return float(
            arm["bytes"] + min(d * NEURONS * row + nats / price for d, _, nats in arm["points"])
        )

    layers = [arms for arms in content["all_layers"].values() if arms]
    if not layers:
        return []
    lines = ["| rank of all layers | KB a token, damage counted |", "|---|---|"]
    for place, arm in enumerate(layers[0]):
        total = sum(cost(arms[place]) for arms in layers)
        lines.append(f"| {arm['rank']} | {total / 1000:.0f} |")
    best = [min(arms, key=cost) for arms in layers]
    names = ", ".join(str(arm["rank"]) for arm in best)
    return [*lines, f"| {names} | {sum(map(cost, best)) / 1000:.0f} |"]


def main() -> None:
    """Draw and print."""
    content = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    draw(content, Path(sys.argv[2]))
    print(tables(content))


if __name__ == "__main__":
    main()
