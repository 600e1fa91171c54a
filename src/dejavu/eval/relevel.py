"""Another level for a plan that exists: its predictors and curves hold every loss, none is trained.

Scores of all layers share one unit, so a level is one threshold (`predictor.search`), and one price
where input channels are skipped (`predictor.input_budget`). What it costs is measured on text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dejavu.errors import InputError
from dejavu.eval.compare import Comparison, compare
from dejavu.eval.text import EvalText
from dejavu.load import LoadedModel
from dejavu.predictor.input_budget import curves_from_json, price_for_loss, priced_thresholds
from dejavu.predictor.options import EXACT
from dejavu.predictor.plan import LayerPolicy, Level, Plan
from dejavu.sparsity.inputs import Thresholds
from dejavu.sparsity.losses import Mean
from dejavu.sparsity.policy import Site

Progress = Callable[[str, int, int], None]  # stage, done, in all
_TRIALS = 6
_CLOSE = 0.93  # of the allowed loss: near enough to stop searching
_SLOPE = 1.2  # growth of the logarithm of the loss with the threshold, about
_LEAST = 0.05  # of the allowed loss: what is measured below counts as so much


def add_level(
    loaded: LoadedModel,
    plan: Plan,
    name: str,
    max_loss: float,
    text: EvalText,
    progress: Progress | None = None,
) -> Plan:
    """The plan with one more level (or another one of that name): the fewest bytes found whose
    measured loss, two standard errors added, is at most `max_loss` of relative perplexity.

    text: best one that the plan was not made from. Raises PlanError for another model's plan,
    InputError for a loss of 0 or less, the name `exact`, and where no threshold keeps the loss.
    """
    if not max_loss > 0:
        raise InputError(f"max_loss must be above 0, not {max_loss!r}; `exact` loses nothing")
    if name == EXACT:
        raise InputError(f"the level {EXACT} loses nothing; choose another name")
    plan.selector(loaded, next(iter(plan.levels)))  # refuses another model's plan
    trial = _Trial(loaded, plan, text, progress or (lambda stage, done, total: None))
    level = (_by_threshold if plan.predictors else _by_price)(trial, max_loss)
    if level is None:
        raise InputError(
            f"no threshold of this plan keeps a loss of {max_loss:.2%} on this text; allow more"
        )
    levels = plan.levels | {name: level}
    order = sorted(levels, key=lambda key: levels[key].max_loss)
    return replace(plan, levels={key: levels[key] for key in order})


class _Trial:
    """Measures levels on a text; the last one stays at hand with its figures."""

    def __init__(self, loaded: LoadedModel, plan: Plan, text: EvalText, progress: Progress) -> None:
        self.plan = plan
        self._loaded, self._text, self._progress = loaded, text, progress
        self._count = 0

    def measure(self, level: Level) -> tuple[Level, Mean]:
        """The level with its report, and its loss above the dense model's in nats a token."""
        self._count += 1
        named = replace(self.plan, levels={"": level})
        found = compare(
            self._loaded.model,
            self._text,
            named.selector(self._loaded, ""),
            progress=lambda done, total: self._progress(f"trial {self._count}", done, total),
        )
        error = None if found.ratio_error is None else found.ratio_error / found.ratio
        return replace(level, report=level.report | _report(found)), Mean(
            math.log(found.ratio), error
        )


def _report(found: Comparison) -> dict[str, Any]:
    reads = found.reads
    assert reads is not None, "a plan's selector is counted"
    return {
        "tokens": found.dense.tokens,
        "dense_perplexity": found.dense.perplexity,
        "perplexity": found.sparse.perplexity,
        "perplexity_ratio": found.ratio,
        "perplexity_ratio_error": found.ratio_error,
        "kl": found.kl,
        "agreement": found.agreement,
        "neuron_density": reads.neuron_density,
        "head_density": reads.head_density,
        "weight_bytes": reads.weight_bytes,
    }


def _by_threshold(trial: _Trial, max_loss: float) -> Level | None:
    """Bisection that guesses by the loss growing like a power of the score's unit."""
    allowed = math.log1p(max_loss)
    low, high, best = -math.inf, math.inf, None
    threshold = _first_guess(trial.plan, allowed)
    for _ in range(_TRIALS):
        level, loss = trial.measure(_at(trial.plan, max_loss, threshold))
        bound = loss.upper
        if bound <= allowed:
            best, low = level, threshold
            if bound >= _CLOSE * allowed:
                break
        else:
            high = threshold
        aimed = (1 + _CLOSE) / 2 * allowed
        guess = threshold + math.log(aimed / max(bound, _LEAST * allowed)) / _SLOPE
        threshold = guess if low < guess < high else (low + high) / 2
        if not math.isfinite(threshold):
            break
    return best


def _first_guess(plan: Plan, allowed: float) -> float:
    """From the level whose loss is nearest."""
    known = [
        (math.log(bound), float(level.report["threshold"]))
        for level in plan.levels.values()
        if level.report.get("threshold") is not None and (bound := _log_ratio(level.report)) > 0
    ]
    if not known:
        return 0.0
    nearest, threshold = min(known, key=lambda entry: abs(entry[0] - math.log(allowed)))
    return threshold + (math.log(0.97 * allowed) - nearest) / _SLOPE


def _log_ratio(report: dict[str, Any]) -> float:
    """Upper bound of a level's loss, two standard errors added."""
    error = report.get("perplexity_ratio_error") or 0.0
    return math.log(float(report["perplexity_ratio"]) + 2 * float(error))


def _at(plan: Plan, max_loss: float, threshold: float) -> Level:
    """One threshold wherever the level next in loss predicts; `prepare` knew why not elsewhere."""
    ordered = sorted(plan.levels.values(), key=lambda level: level.max_loss)
    exact = ordered[0]
    near = next((level for level in ordered if level.max_loss >= max_loss), ordered[-1])

    def policies(site: Site) -> tuple[LayerPolicy, ...]:
        return tuple(
            LayerPolicy("predictor", threshold) if like.kind == "predictor" else lossless
            for like, lossless in zip(near.policies(site), exact.policies(site), strict=True)
        )

    sources = [
        plan.predictors[site, layer]
        for site in Site
        for layer, policy in enumerate(near.policies(site))
        if policy.kind == "predictor"
    ]
    report = {
        "threshold": threshold,
        "predictor_bytes": sum(source.predictor.nbytes for source in sources),
    }
    return Level(max_loss, policies(Site.NEURONS), policies(Site.HEADS), report)


def _by_price(trial: _Trial, max_loss: float) -> Level | None:
    """By the curves of damage that the plan's report holds."""
    plan = trial.plan
    places = plan.report.get("places")
    if not places:
        raise InputError("this plan has neither predictors nor curves; make it anew")
    curves = curves_from_json(places)
    dense = (LayerPolicy(),) * plan.base.num_hidden_layers
    measured: dict[str, Level] = {}

    def measure(thresholds: Sequence[Thresholds]) -> Mean:
        level = Level(max_loss, dense, dense, {"predictor_bytes": 0}, tuple(thresholds))
        level, loss = trial.measure(level)
        measured[repr(level.inputs)] = level
        return loss

    found = price_for_loss(curves, max_loss, measure)
    if found is None:
        return None
    price, _ = found
    level = measured[repr(tuple(priced_thresholds(curves, price)))]
    return replace(level, report=level.report | {"price_nats_per_byte": price})
