"""What `measure` is asked and what it answers, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from dejavu.errors import InputError
from dejavu.registry import unknown
from dejavu.sparsity.policy import Site
from dejavu.sparsity.similarity import Change

FORMAT = 1
PARTS = {
    "neurons": (Site.NEURONS,),
    "heads": (Site.HEADS,),
    "both": (Site.NEURONS, Site.HEADS),
}
BUDGETS = ("uniform", "global", "relative")
STATIC = ("other", "same")


@dataclass(frozen=True)
class MeasureOptions:
    """Which questions to ask. Every arm costs one forward a window.

    densities: shares kept, for neurons, heads or both (`parts`). budgets: a density is that of each
    layer (`uniform`), or of all layers together by one threshold on contributions (`global`) or on
    contributions over the norm of the residual stream (`relative`).
    thresholds: neurons whose contribution is under it are dropped.
    static: texts on which static pruning chooses its neurons and heads: `other` text than it is
    tested on, or the `same`.
    distances: between the tokens whose active sets are compared.
    mass: an active set without exact zeros is the smallest one that holds this share of the sum of
    a token's contributions (heads: of its heads' output norms).

    Raises InputError for a value that cannot be used.
    """

    densities: tuple[float, ...] = (1.0, 0.8, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
    thresholds: tuple[float, ...] = (0.05, 0.1, 0.2)
    parts: tuple[str, ...] = tuple(PARTS)
    budgets: tuple[str, ...] = BUDGETS
    static: tuple[str, ...] = STATIC
    distances: tuple[int, ...] = (1, 2, 4, 8, 16)
    mass: float = 0.95

    def __post_init__(self) -> None:
        for name, known in (("parts", PARTS), ("budgets", BUDGETS), ("static", STATIC)):
            for value in getattr(self, name):
                if value not in known:
                    raise unknown(f"{name} value", value, known, InputError)
        _check("densities", [x for x in self.densities if not 0 < x <= 1], "above 0, at most 1")
        _check("thresholds", [x for x in self.thresholds if not x > 0], "above 0")
        _check("distances", [x for x in self.distances if not x >= 1], "1 or more")
        _check("mass", [] if 0 < self.mass <= 1 else [self.mass], "above 0, at most 1")


def _check(name: str, bad: list[float], wanted: str) -> None:
    if bad:
        raise InputError(f"{name}: {bad[0]} cannot be used; what can is {wanted}")


@dataclass(frozen=True)
class Arm:
    """One way of leaving parts out, tested on all windows.

    rule: `exact` (activation not 0), `threshold` (contribution at least `target`), `true` (what
    matters most to each token), `static` (what matters most on average on other text),
    `static-same` (on the tested text itself).
    parts: neurons, heads or both. budget: see `MeasureOptions`. target: density or threshold asked.
    """

    rule: str
    parts: str = "neurons"
    budget: str | None = None
    target: float | None = None

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites at which something is left out."""
        return PARTS[self.parts]


@dataclass(frozen=True)
class ArmResult:
    """density, missed_mass: by layer, for the sites the arm leaves out (mean over tokens; mass is
    that of contributions, of head output norms for heads). loss: nats a token. ratio: perplexity
    over the dense one, with the standard error of the paired comparison over windows."""

    arm: Arm
    density: dict[str, list[float]]
    missed_mass: dict[str, list[float]]
    loss: float
    perplexity: float
    ratio: float
    ratio_error: float | None

    def mean_density(self, site: Site) -> float:
        """Over layers; 1 where the arm leaves nothing out at a site."""
        layers = self.density.get(site)
        return 1.0 if layers is None else sum(layers) / len(layers)


@dataclass(frozen=True)
class LayerFigures:
    """One layer in the dense run, means over tokens.

    active: share of neurons whose activation is not 0. neurons_for_mass, heads_for_mass: share of
    neurons (heads) in the smallest set that holds `mass` of a token's sum. neuron_overlap,
    head_overlap: Jaccard index of the active sets of tokens so far apart, and of tokens of the
    tested and of the other text (key `other`). change: what the layer does to the residual stream.
    """

    active: float
    neurons_for_mass: float
    heads_for_mass: float
    neuron_overlap: dict[str, float | None]
    head_overlap: dict[str, float | None]
    change: Change


@dataclass(frozen=True)
class Contextuality:
    """How much more the same density costs when it is the same for all tokens.

    nats: loss of the static arm (chosen on other text) minus that of the true arm, a token.
    """

    parts: str
    budget: str
    density: float
    nats: float
    nats_error: float | None


@dataclass(frozen=True)
class Measurement:
    """tokens: scored. active_set: the rule behind `neuron_overlap`, `nonzero` or `mass`."""

    options: MeasureOptions
    model_type: str
    windows: int
    other_windows: int
    tokens: int
    active_set: str
    loss: float
    loss_error: float | None
    perplexity: float
    layers: tuple[LayerFigures, ...]
    arms: tuple[ArmResult, ...]
    contextuality: tuple[Contextuality, ...]

    def find(self, rule: str, parts: str = "neurons", budget: str | None = None) -> list[ArmResult]:
        """The results of one family of arms, in the order of the options."""
        family = (rule, parts, budget)
        return [r for r in self.arms if (r.arm.rule, r.arm.parts, r.arm.budget) == family]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists; figures have six digits, which a re-run reproduces."""
        named = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {"format": FORMAT, **named}


def _plain(value: Any) -> Any:
    if isinstance(value, Change):
        return _plain(value._asdict())
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
