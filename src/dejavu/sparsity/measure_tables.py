"""A measurement for people: tables for the terminal."""

from __future__ import annotations

from rich.table import Table

from dejavu.sparsity.measurement import ArmResult, Measurement
from dejavu.sparsity.policy import Site

RULES = {
    "true": "what each token needs",
    "static": "static, chosen on other text",
    "static-same": "static, chosen on this text",
}


def tables(measurement: Measurement) -> list[Table]:
    """Layers, cost of a density, and what dropping the small contributions costs."""
    return [_layers(measurement), _natural(measurement), _densities(measurement)]


def _layers(m: Measurement) -> Table:
    near, far = min(m.options.distances, default=None), max(m.options.distances, default=None)
    mass = f"{m.options.mass:.0%} of mass"
    columns = ["layer", "neurons\nactive", f"neurons for\n{mass}", f"heads for\n{mass}"]
    keys = [str(distance) for distance in dict.fromkeys((near, far)) if distance is not None]
    table = Table(
        title=f"Layers: {m.windows} windows, {m.tokens} tokens, perplexity {m.perplexity:.3f}",
        caption="Overlap: Jaccard index of the active neurons of two tokens. Cosine: block input "
        "with block output. Added: norm of what a half block adds, over the norm it is added to.",
    )
    overlaps = [f"overlap\ndistance {key}" for key in keys] + ["overlap\nother text"]
    for name in [*columns, *overlaps, "cosine", "attention\nadds", "MLP\nadds"]:
        table.add_column(name, justify="right")
    for number, layer in enumerate(m.layers):
        table.add_row(
            str(number),
            f"{layer.active:.1%}",
            f"{layer.neurons_for_mass:.1%}",
            f"{layer.heads_for_mass:.1%}",
            *(_share(layer.neuron_overlap.get(key)) for key in [*keys, "other"]),
            f"{layer.change.cosine:.3f}",
            f"{layer.change.attention:.2f}",
            f"{layer.change.mlp:.2f}",
        )
    return table


def _natural(m: Measurement) -> Table:
    table = Table(title="Leaving out neurons that contribute little")
    for name in ("kept", "density", "perplexity / dense", "largest missed mass"):
        table.add_column(name, justify="left" if name == "kept" else "right")
    for result in [*m.find("exact"), *m.find("threshold")]:
        target = result.arm.target
        table.add_row(
            "activation not 0" if target is None else f"contribution at least {target:g}",
            f"{result.mean_density(Site.NEURONS):.1%}",
            _ratio(result),
            f"{max(result.missed_mass[Site.NEURONS]):.2%}",
        )
    return table


def _densities(m: Measurement) -> Table:
    table = Table(
        title="Perplexity / dense when only a share is kept",
        caption="Uniform: of every layer. Global, relative: of all layers together, by one "
        "threshold on contributions, or on contributions over the norm of the stream. `at`: the "
        "share kept where it is another than asked, as a threshold never reaches down to zeros.",
    )
    for name in ("kept", "chosen", "budget"):
        table.add_column(name)
    for density in m.options.densities:
        table.add_column(f"{density:.0%}", justify="right")
    for parts in m.options.parts:
        for rule, wording in RULES.items():
            for budget in m.options.budgets:
                if results := m.find(rule, parts, budget):
                    table.add_row(parts, wording, budget, *(_brief(r) for r in results))
        table.add_section()
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _brief(result: ArmResult) -> str:
    ratio = f"{result.ratio:.3f}" if result.ratio < 100 else f"{result.ratio:.0f}"
    kept, asked = result.mean_density(result.arm.sites[0]), result.arm.target
    # Heads come in few pieces, and one threshold for all layers never reaches down to zeros.
    exact = asked is None or abs(kept - asked) < 0.05 * asked
    return ratio if exact else f"{ratio} at {kept:.1%}"


def _ratio(result: ArmResult) -> str:
    error = "" if result.ratio_error is None else f" ± {result.ratio_error:.4f}"
    return f"{result.ratio:.4f}{error}"
