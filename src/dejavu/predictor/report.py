"""What a plan says about itself: quality, density, bytes and speed of every level and layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dejavu.models.base import DecoderLM
from dejavu.predictor.cost import StepTimes
from dejavu.predictor.levels import HeldOut
from dejavu.predictor.plan import LayerPolicy, key_name
from dejavu.predictor.search import Candidate, Found, Place
from dejavu.sparsity.accounting import LayerReads, dense_bytes, step_bytes
from dejavu.sparsity.policy import Key, Site

SELECTION_RULE = "selected where second (first x) + bias > threshold"


class Reporter:
    """Turns what was found into plain values.

    model: with matrices as they are stored. chosen: the candidate of each place.
    """

    def __init__(
        self,
        model: DecoderLM,
        places: Sequence[Place],
        chosen: Mapping[Key, Candidate],
        held_out: HeldOut,
        times: StepTimes | None,
    ) -> None:
        self._model, self._places, self._chosen = model, places, chosen
        self._held_out, self._times = held_out, times

    def level(self, found: Found) -> dict[str, Any]:
        """Figures of one level."""
        used = self._held_out.used(found.policies)
        reads = {p.key: self._read(p, found.policies[p.key], used) for p in self._places}
        rows = self._rows(reads)
        c = self._model.config
        predictors = [
            self._chosen[key].predictor.nbytes
            for key, policy in found.policies.items()
            if policy.kind == "predictor"
        ]
        total = step_bytes(
            self._model.weights,
            rows,
            groups=c.num_key_value_heads,
            predictor_bytes=sum(predictors),
        )
        layers = {
            key_name(p.key): self._layer(p, found.policies[p.key], reads[p.key])
            for p in self._places
        }
        dense, ratio = self._held_out.dense, found.loss.exp()
        return {
            "threshold": found.threshold,
            "tokens": self._held_out.tokens,
            "dense_perplexity": dense.exp().value,
            "perplexity": math.exp(dense.value + found.loss.value),
            "perplexity_ratio": ratio.value,
            "perplexity_ratio_error": ratio.error,
            "neuron_density": _share([r.neurons for r in rows], c.intermediate_size),
            "active_density": _share([r.active for r in rows], c.intermediate_size),
            "head_density": _share([r.groups for r in rows], c.num_key_value_heads),
            "bytes_per_token": total,
            "weight_bytes": total / dense_bytes(self._model.weights),
            "predictor_bytes": sum(predictors),
            "largest_missed_mass": max(entry["missed_mass"] for entry in layers.values()),
            "tokens_per_second": self._speed(found),
            "layers": layers,
        }

    def summary(self, threshold: float | None, notes: Mapping[str, Any]) -> dict[str, Any]:
        """Figures that levels share; every rank that was tried, at one threshold."""
        at = 0.0 if threshold is None else threshold
        return {
            "selection_rule": SELECTION_RULE,
            "dense_loss": self._held_out.dense.value,
            "dense_loss_error": self._held_out.dense.error,
            "dense_bytes": dense_bytes(self._model.weights),
            "dense_tokens_per_second": None if self._times is None else self._times.dense_speed,
            "places": {
                key_name(p.key): {
                    "sensitivity": p.sensitivity,
                    "active": p.active / p.entries,
                    "threshold": at,
                    "ranks": [self._figures(p, candidate, at) for candidate in p.candidates],
                }
                | notes.get(key_name(p.key), {})
                for p in self._places
            },
        }

    def _layer(
        self, place: Place, policy: LayerPolicy, read: tuple[float, float]
    ) -> dict[str, Any]:
        if policy.kind != "predictor":
            return {"kind": policy.kind, "density": 1.0, "missed_mass": 0.0}
        candidate = self._chosen[place.key]
        figures = self._figures(place, candidate, policy.threshold)
        return figures | {"kind": policy.kind, "density": read[0] / place.entries}

    def _figures(self, place: Place, candidate: Candidate, threshold: float) -> dict[str, Any]:
        figures = asdict(place.figures(candidate, threshold))
        selected = figures.pop("selected")
        figures.pop("active")
        return {
            "rank": candidate.predictor.rank,
            "distance": candidate.distance,
            "predictor_bytes": candidate.predictor.nbytes,
            "density": selected / place.entries,
            "tokens_judged": candidate.curve.rows,
        } | figures

    def _read(
        self, place: Place, policy: LayerPolicy, used: Mapping[Key, float]
    ) -> tuple[float, float]:
        """Entries listed and entries active, mean over tokens."""
        if policy.kind == "dense":
            return place.entries, place.entries
        if policy.kind == "full":
            return place.entries, place.active
        figures = place.figures(self._chosen[place.key], policy.threshold)
        listed = used.get(place.key, figures.selected)
        return listed, listed * figures.precision_active

    def _rows(self, reads: Mapping[Key, tuple[float, float]]) -> list[LayerReads]:
        rows = []
        for layer in range(self._model.config.num_hidden_layers):
            listed, active = reads[Site.NEURONS, layer]
            heads = reads.get((Site.HEADS, layer))
            rows.append(LayerReads(listed, active, None if heads is None else heads[0]))
        return rows

    def _speed(self, found: Found) -> float | None:
        """Predicted tokens/s of one sequence."""
        if self._times is None:
            return None
        saved = 0.0
        for place in self._places:
            policy = found.policies[place.key]
            if policy.kind == "dense":
                continue
            now = self._times.full(place)
            if policy.kind == "predictor":
                candidate = self._chosen[place.key]
                figures = place.figures(candidate, policy.threshold)
                now = self._times.sparse(place, candidate, figures)
            saved += self._times.dense(place) - now
        return self._times.speed(saved)


def _share(values: Sequence[float | None], entries: int) -> float:
    return sum(1.0 if v is None else v / entries for v in values) / len(values)
