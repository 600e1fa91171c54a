"""Which predictor misses how little at how many bytes: one harness over the embedded ReLU model.

Usage: python recipes/predictor_study.py TEXT RESULT.json [LAYERS] [SECONDS]

TEXT: .txt or .xz. LAYERS: studied with training, default 1,4. Works in pieces: whatever is finished
waits in RESULT.work; after SECONDS (default: never) it writes RESULT from that and stops, and the
same command goes on. All arms see the same tokens, equally often. What comes out is drawn by
`recipes/predictor_page.py`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dejavu.embedded import model_path
from dejavu.kernels.nibbles import Nibbles
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.load import load_model
from dejavu.predictor.calibration import make_windows
from dejavu.predictor.layer import Task, quantise
from dejavu.predictor.recording import Recorded, record, window_losses
from dejavu.predictor.start import (
    Factors,
    Moments,
    calibrate,
    random_start,
    regression,
    svd_start,
)
from dejavu.predictor.survey import Survey, make_survey
from dejavu.predictor.training import TrainOptions, train
from dejavu.predictor.wide import widened
from dejavu.predictor.worth import Neurons
from dejavu.sparsity.losses import block_mean
from dejavu.sparsity.policy import Dense, Points, Selector, Site
from dejavu.weights.files import atomic_write
from dejavu.weights.tokenizer import load_tokenizer

WINDOW, TRAINED, HELD_OUT, JUDGED = 512, 128, 16, 8  # tokens a window, and windows
DENSITIES = (0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.13, 0.16, 0.2, 0.3, 0.5)
PAPER_RATES, PAPER_RANKS = (0.001, 0.003, 0.008), (16, 32, 64, 128, 256)
FASTER_RATES, FASTER_RANKS = (0.02, 0.05), (32, 64)
RANKS, NIBBLE_RANKS, ALL_RANKS = (8, 16, 32, 64, 112), (32, 64, 112, 144), (16, 32, 64, 96, 128)
MIDDLE = 64  # the rank of everything that is tried at one rank
FITTED = 4096  # tokens that scales and offsets are fitted to
STEPS = {4: 0.335, 3: 0.586, 2: 0.996}  # of a normal spread: least squared error of even levels
DENSITY = 0.1  # at which perplexity is compared
COMPARED = (
    ("paper", 64, 8),
    ("paper", 256, 8),
    ("paper, rate 0.02", 64, 8),
    ("ours", 32, 8),
    ("ours", 64, 8),
    ("ours", 112, 8),
    ("ours", 112, 4),
    ("SVD alone", 64, 8),
    ("SVD, fitted", 64, 8),
)


@dataclass
class Arm:
    """A predictor of one layer. source: site and layer whose input it reads. factors: as stored,
    in floating point; None where it has another form. points: (density, missed mass, nats)."""

    name: str
    rank: int
    bits: int
    nbytes: int
    source: tuple[Site, int]
    factors: Factors | None
    points: list[tuple[float, float, float]]
    threshold: float  # at `DENSITY`

    def to_plain(self) -> dict[str, Any]:
        """For `from_plain`; nothing but values and tensors."""
        factors = (
            None
            if self.factors is None
            else (self.factors.first, self.factors.second, self.factors.bias)
        )
        return vars(self) | {"factors": factors, "source": (str(self.source[0]), self.source[1])}

    @staticmethod
    def from_plain(content: dict[str, Any]) -> Arm:
        """What `to_plain` gave."""
        factors, (site, layer) = content["factors"], content["source"]
        found = None if factors is None else Factors(*factors)
        return Arm(**content | {"factors": found, "source": (Site(site), layer)})


class Study:
    """The model, what was recorded of it, and the arms of each unit of work."""

    def __init__(self, text: Path, work: Path, layers: Sequence[int]) -> None:
        self.layers, self._work, self.ops = layers, work, TorchOps()
        loaded = load_model(model_path("relu-30m"))
        self.stored, self.model = loaded.model, widened(loaded.model)
        self.windows = make_windows(
            [text],
            load_tokenizer(loaded.checkpoint),
            length=WINDOW,
            train=TRAINED,
            held_out=HELD_OUT,
            separator=loaded.model.config.eos_token_ids[0],
        )
        found = self.kept("recorded", self._recorded)
        self.train, self.held = (
            Recorded({(Site(site), n): x for site, n, x in part}) for part in found["inputs"]
        )
        self.survey = Survey.from_json(found["survey"])

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """A finished piece of work (plain values and tensors) from its file, or made and kept."""
        path = self._work / f"{name}.pt"
        if path.is_file():
            return torch.load(path, weights_only=True)
        found = make()
        with atomic_write(path) as aside:
            torch.save(found, aside)
        return found

    def has(self, name: str) -> bool:
        """Whether a piece of work is finished."""
        return (self._work / f"{name}.pt").is_file()

    def _recorded(self) -> dict[str, Any]:
        keys = [(Site.NEURONS, n) for n in range(self.model.config.num_hidden_layers)]
        keys += [(Site.HEADS, n) for n in self.layers]
        parts = [
            record(self.model, windows, keys, set(), self.ops, _quiet)
            for windows in (self.windows.train, self.windows.held_out)
        ]
        survey = make_survey(
            self.model,
            self.stored,
            parts[1],
            self.windows.held_out,
            max_loss=0.01,
            heads=False,
            ops=self.ops,
            tick=_quiet,
        )
        inputs = [[(str(key[0]), key[1], x) for key, x in p.inputs.items()] for p in parts]
        return {"inputs": inputs, "survey": survey.to_json()}

    def layer(self, number: int) -> Layer:
        """One layer's targets and inputs."""
        return Layer(self, number)


class Layer:
    """One layer: contributions of its neurons on all recorded tokens, and what to do with them."""

    def __init__(self, study: Study, number: int) -> None:
        key = (Site.NEURONS, number)
        self.number, self.study, self.key = number, study, key
        self.mlp = study.model.weights.blocks[number].mlp
        neurons = Neurons.of(self.mlp, study.model.activation)
        self.norms = neurons.norms
        self.survey = study.survey.sites[key]
        self.task = Task(key, self.survey, study.survey.price, neurons)
        self.paper = Task(key, self.survey, study.survey.price, neurons, alike=True)
        self.contributions = self._all(study.train)
        self.held = self._all(study.held).float()
        self.moments = Moments.of(study.train.inputs[key])

    def _all(self, data: Recorded) -> Tensor:
        parts = [
            self.task.contributions(data, slice(start, start + 4096), self.study.ops).half()
            for start in range(0, len(data.inputs[self.key]), 4096)
        ]
        return torch.cat(parts)

    def weights(self, task: Task, rows: Tensor | slice) -> Tensor:
        """What the loss weighs an entry by, fp32 `[n, entries]`."""
        return task.weights(self.contributions[rows].float())

    def trained(
        self,
        task: Task,
        starts: Sequence[Factors],
        source: tuple[Site, int] | None = None,
        **options: Any,
    ) -> list[Factors]:
        """One pass over all tokens."""
        x = self.study.train.inputs[source or self.key]
        return train(x, lambda rows: self.weights(task, rows), starts, TrainOptions(**options))

    def starts(self, ranks: Sequence[int], fitted: bool = True) -> list[Factors]:
        """Low-rank stand-ins of the layer's first matrix, and their fit."""
        found = svd_start(self.mlp.up.weight.float(), self.mlp.up.bias, self.moments, ranks)
        return [self.fitted(start) for start in found] if fitted else found

    def fitted(self, start: Factors, x: Tensor | None = None) -> Factors:
        """Scale and offset of every entry by Newton's method."""
        x = self.study.train.inputs[self.key] if x is None else x
        return calibrate(start, x[:FITTED].float(), self.weights(self.task, slice(0, FITTED)))

    def low_rank(
        self, name: str, factors: Factors, bits: int, source: tuple[Site, int] | None = None
    ) -> Arm:
        """An arm of two stages, rounded to their bits."""
        predictor = quantise(factors, bits)
        first, second = (
            (m.int8() if isinstance(m, Nibbles) else m).float()
            for m in (predictor.first, predictor.second)
        )
        found = Factors(first, second, predictor.bias)
        source = source or self.key
        scores = found.scores(self.study.held.inputs[source].float())
        arm = Arm(name, predictor.rank, bits, predictor.nbytes, source, found, [], 0.0)
        return self.judged(arm, scores)

    def other(self, name: str, bits: int, nbytes: int, scores: Tensor) -> Arm:
        """An arm that scores in another way."""
        return self.judged(Arm(name, 0, bits, nbytes, self.key, None, [], 0.0), scores)

    def judged(self, arm: Arm, scores: Tensor) -> Arm:
        """Fill in what is missed at every density: entries that score above one threshold."""
        flat = scores.flatten().numpy()
        places = [round((1 - density) * (len(flat) - 1)) for density in DENSITIES]
        levels = np.partition(flat, places)[places]
        arm.threshold = float(levels[DENSITIES.index(DENSITY)])
        mass = self.held.sum(dtype=torch.float64)
        squares = self.held.square()
        for level in levels:
            left = scores <= float(level)
            missed = float(self.held[left].sum(dtype=torch.float64) / mass)
            damage = float(squares[left].sum(dtype=torch.float64)) / len(scores)
            nats = self.survey.sensitivity / 2 * damage
            arm.points.append((1 - float(left.float().mean()), missed, nats))
        return arm


def paper(layer: Layer) -> Iterator[Arm]:
    """Random start, BCE, every active neuron alike; the best of some rates at every rank."""
    width = layer.study.model.config.hidden_size
    entries = layer.study.model.config.intermediate_size
    tried = []
    for rate in PAPER_RATES:
        start = random_start(entries, width, MIDDLE, 0)
        (factors,) = layer.trained(layer.paper, [start], rate=rate, bits=8)
        arm = layer.low_rank(f"paper, rate {rate:g}", factors, 8)
        tried.append((arm.points[DENSITIES.index(DENSITY)][1], rate, arm))
        yield arm
    _, rate, best = min(tried, key=lambda found: found[0])
    ranks = [rank for rank in PAPER_RANKS if rank != MIDDLE]
    starts = [random_start(entries, width, rank, 0) for rank in ranks]
    for factors in layer.trained(layer.paper, starts, rate=rate, bits=8):
        yield layer.low_rank("paper", factors, 8)
    assert best.factors is not None
    yield layer.low_rank("paper", best.factors, 8)


def faster(layer: Layer) -> Iterator[Arm]:
    """The paper's at higher rates: in one pass a random start has far to go."""
    width = layer.study.model.config.hidden_size
    entries = layer.study.model.config.intermediate_size
    for rate in FASTER_RATES:
        starts = [random_start(entries, width, rank, 0) for rank in FASTER_RANKS]
        for factors in layer.trained(layer.paper, starts, rate=rate, bits=8):
            yield layer.low_rank(f"paper, rate {rate:g}", factors, 8)


def ours(layer: Layer) -> Iterator[Arm]:
    """Whitened SVD, scale and offset fitted, trained with contribution-aware labels; int8."""
    for factors in layer.trained(layer.task, layer.starts(RANKS), bits=8):
        yield layer.low_rank("ours", factors, 8)


def nibbles(layer: Layer) -> Iterator[Arm]:
    """The same in 4 bits, the second half of the training rounded: the default."""
    for factors in layer.trained(layer.task, layer.starts(NIBBLE_RANKS), bits=4):
        yield layer.low_rank("ours", factors, 4)


def parts(layer: Layer) -> Iterator[Arm]:
    """What start and labels bring by themselves."""
    width = layer.study.model.config.hidden_size
    entries = layer.study.model.config.intermediate_size
    (start,) = layer.starts([MIDDLE])
    (factors,) = layer.trained(layer.paper, [start], bits=8)
    yield layer.low_rank("SVD start, labels of the paper", factors, 8)
    start = random_start(entries, width, MIDDLE, 0)
    (factors,) = layer.trained(layer.task, [start], bits=8)
    yield layer.low_rank("random start, labels by contribution", factors, 8)


def untrained(layer: Layer) -> Iterator[Arm]:
    """No gradient at all: SVD, signs, and copies of the first matrix in few bits."""
    for rank, start in zip(RANKS, layer.starts(RANKS, fitted=False), strict=True):
        yield layer.low_rank("SVD alone", start, 8)
        if rank in (32, MIDDLE, 112):
            yield layer.low_rank("SVD, fitted", layer.fitted(start), 8)
    up, bias = layer.mlp.up.weight.float(), layer.mlp.up.bias
    x, held = (d.inputs[layer.key] for d in (layer.study.train, layer.study.held))
    entries, width = up.shape
    agreeing = held.float().sign() @ up.sign().t()
    yield layer.other("signs, one threshold", 1, entries * width // 8, agreeing)
    signs = Factors(up.sign(), torch.eye(entries) / width**0.5, torch.zeros(entries))
    fit = layer.fitted(signs, x.sign())
    scores = agreeing * fit.second.diagonal() + fit.bias
    yield layer.other("signs, fitted", 1, entries * width // 8 + 4 * entries, scores)
    for bits, step in STEPS.items():
        unit = up.square().mean(dim=1, keepdim=True).sqrt() * step
        top = 2.0 ** (bits - 1) - 0.5
        rounded = ((up / unit - 0.5).round() + 0.5).clamp(-top, top) * unit
        scores = torch.addmm(torch.zeros(entries) if bias is None else bias, held.float(),
                             rounded.t()) * layer.norms  # fmt: skip
        yield layer.other("low-bit copy", bits, entries * width * bits // 8 + 8 * entries, scores)


def lookahead(layer: Layer) -> Iterator[Arm]:
    """From earlier inputs: half a block, a block, and one early point for all layers."""
    own = layer.study.train.inputs[layer.key]
    first = (Site.NEURONS, min(layer.study.layers))
    sources = {
        "half a block ahead": (Site.HEADS, layer.number),
        "a block ahead": (Site.NEURONS, layer.number - 1),
    }
    if first != layer.key:
        sources[f"from layer {first[1]} on"] = first
    for name, source in sources.items():
        x = layer.study.train.inputs[source]
        moments = Moments.of(x)
        sample = x[:8192].float()
        matrix = layer.mlp.up.weight.float() @ regression(sample, own[:8192].float(), moments)
        (start,) = svd_start(matrix, layer.mlp.up.bias, moments, [MIDDLE])
        (factors,) = layer.trained(layer.task, [layer.fitted(start, x)], source, bits=8)
        yield layer.low_rank(name, factors, 8, source)


def ranks(layer: Layer) -> Iterator[Arm]:
    """Fitted stand-ins at many ranks, for budgets over all layers."""
    for start in layer.starts(ALL_RANKS):
        yield layer.low_rank("SVD, fitted", start, 8)


class Scored(Selector):
    """Layers choose by arms at their thresholds; `None` as an arm: by the true contributions."""

    capturable = False

    def __init__(self, layers: dict[int, tuple[Layer, Arm | None]]) -> None:
        self._layers = layers

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if site != Site.NEURONS or layer not in self._layers:
            return None
        known, arm = self._layers[layer]
        if arm is None:
            neurons = known.task.neurons
            assert neurons is not None
            scores = neurons.squares(points.source(site, layer), ops)
            count = max(1, round(DENSITY * scores.numel()))
            limit = float(np.partition(scores.flatten().numpy(), -count)[-count])
            return Selection.from_mask(scores >= limit)
        assert arm.factors is not None
        place = 2 * layer + 1 - (2 * arm.source[1] + (arm.source[0] == Site.NEURONS))
        x = points.source(site, layer, place / 2)
        return Selection.from_mask(arm.factors.scores(x) > arm.threshold)


def perplexities(study: Study, arms: dict[int, list[Arm]]) -> list[dict[str, Any]]:
    """Perplexity over the dense model's with the studied layers at one density, all arms that
    exist in each of them as two stages."""
    windows = study.windows.held_out[:JUDGED]
    counts = [WINDOW] * len(windows)
    dense = window_losses(study.model, windows, Dense(), study.ops)
    layers = {n: study.layer(n) for n in study.layers}
    names = [
        (a.name, a.rank, a.bits)
        for a in arms[study.layers[0]]
        if (a.name, a.rank, a.bits) in COMPARED
    ]
    found = []
    for name in [None, *names]:
        chosen: dict[int, tuple[Layer, Arm | None]] = {}
        for n in study.layers:
            same = [a for a in arms[n] if (a.name, a.rank, a.bits) == name]
            if name is None or same:
                chosen[n] = layers[n], (same[0] if same else None)
        if len(chosen) < len(study.layers):
            continue
        losses = window_losses(study.model, windows, Scored(chosen), study.ops)
        rises = [own - full for own, full in zip(losses, dense, strict=True)]
        ratio = block_mean(rises, counts).exp()
        arm = dict(zip(("name", "rank", "bits"), name or ("true contributions", 0, 0), strict=True))
        found.append(arm | {"perplexity_ratio": ratio.value, "error": ratio.error})
    return found


def _made(
    study: Study, number: int, make: Callable[[Layer], Iterator[Arm]]
) -> list[dict[str, Any]]:
    return [arm.to_plain() for arm in make(study.layer(number))]


def _quiet(done: int, total: int) -> None:
    """Progress that nobody watches."""


UNITS: dict[str, Callable[[Layer], Iterator[Arm]]] = {
    "paper": paper,
    "ours": ours,
    "faster": faster,
    "untrained": untrained,
    "nibbles": nibbles,
    "parts": parts,
    "lookahead": lookahead,
}


def main() -> None:
    """Do what is left to do as far as the time goes, and write what is there."""
    text, result = Path(sys.argv[1]), Path(sys.argv[2])
    layers = [int(n) for n in (sys.argv[3] if sys.argv[3:] else "1,4").split(",")]
    end = time.monotonic() + (float(sys.argv[4]) if sys.argv[4:] else float("inf"))
    work = result.with_suffix(".work")
    work.mkdir(parents=True, exist_ok=True)
    study = Study(text, work, layers)
    todo = [(name, n, make) for name, make in UNITS.items() for n in layers]
    todo += [("ranks", n, ranks) for n in range(study.model.config.num_hidden_layers)]
    compared = len(layers) * (1 + list(UNITS).index("nibbles"))
    arms: dict[str, list[Arm]] = {}
    by_layer: dict[int, list[Arm]] = {n: [] for n in layers}
    ratios: list[dict[str, Any]] = []
    missing = []
    for place, (name, number, make) in enumerate(todo, 1):
        unit = f"{name}-{number}"
        started = time.monotonic()
        if study.has(unit) or started < end:
            made = partial(_made, study, number, make)
            arms[unit] = [Arm.from_plain(content) for content in study.kept(unit, made)]
            if name in UNITS:
                by_layer[number] += arms[unit]
            if time.monotonic() - started > 1:
                print(f"{unit}: {time.monotonic() - started:.0f} s", flush=True)
        else:
            missing.append(unit)
        if place == compared:
            if study.has("perplexities") or (not missing and time.monotonic() < end):
                ratios = study.kept("perplexities", partial(perplexities, study, by_layer))
            else:
                missing.append("perplexities")
    content = {
        "model": "relu-30m",
        "tokens": TRAINED * WINDOW,
        "held_out_tokens": HELD_OUT * WINDOW,
        "judged_tokens": JUDGED * WINDOW,
        "missing": missing,
        "price_nats_per_byte": study.survey.price,
        "row_bytes": study.survey.sites[Site.NEURONS, 0].row_bytes,
        "active": {n: study.survey.sites[Site.NEURONS, n].active for n in layers},
        "layers": {n: [_plain(a) for a in by_layer[n]] for n in layers},
        "all_layers": {
            n: [_plain(a) for a in arms.get(f"ranks-{n}", ())]
            for n in range(study.model.config.num_hidden_layers)
        },
        "perplexity": {"density": DENSITY, "arms": ratios},
    }
    with atomic_write(result) as aside:
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if missing:
        print(f"stopped before {', '.join(missing)}; run the same command again")


def _plain(arm: Arm) -> dict[str, Any]:
    return {
        "name": arm.name,
        "rank": arm.rank,
        "bits": arm.bits,
        "bytes": arm.nbytes,
        "points": [[round(value, 7) for value in point] for point in arm.points],
    }


if __name__ == "__main__":
    with torch.inference_mode():
        main()
