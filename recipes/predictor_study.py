"""Which predictor misses how little at how many bytes: one harness over the embedded ReLU model.

Usage: python recipes/predictor_study.py TEXT RESULT.json [LAYERS] [SECONDS] [DEVICE]

TEXT: .txt or .xz. LAYERS: studied with training, default 1,4. DEVICE: cpu or cuda. Works in pieces:
whatever is finished waits in RESULT.work; after SECONDS (default: never) it writes RESULT from that
and stops, and the same command goes on. All arms (`predictor_arms.py`) see the same tokens, equally
often. What comes out is drawn by `recipes/predictor_page.py`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from predictor_arms import (
    DENSITY,
    Arm,
    Layer,
    ascending,
    faster,
    lookahead,
    nibbles,
    ours,
    paper,
    parts,
    ranks,
    untrained,
)

from dejavu.embedded import model_path
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.load import load_model
from dejavu.predictor.calibration import make_windows
from dejavu.predictor.layer import Task
from dejavu.predictor.recording import Recorded, record, window_losses
from dejavu.predictor.survey import Survey, make_survey
from dejavu.predictor.wide import widened
from dejavu.sparsity.losses import mean_rise
from dejavu.sparsity.policy import Dense, Points, Selector, Site
from dejavu.weights.files import atomic_write
from dejavu.weights.tokenizer import load_tokenizer

WINDOW, TRAINED, HELD_OUT, JUDGED = 512, 128, 16, 8  # tokens a window, and windows
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


class Study:
    """The model, what was recorded of it, and the arms of each unit of work."""

    def __init__(
        self,
        text: Path,
        work: Path | None,
        layers: Sequence[int],
        device: str,
        trained: int = TRAINED,
    ) -> None:
        """work: where finished pieces wait, None: nowhere. layers: whose inputs half a block before
        are recorded too. trained: windows."""
        self.layers, self._work, self.ops = layers, work, TorchOps()
        loaded = load_model(model_path("relu-30m"))
        self.stored, self.model = loaded.model, widened(loaded.model)
        if device != "cpu":
            self.model = load_model(model_path("relu-30m"), dtype="fp32", device=device).model
        self.tokenizer = load_tokenizer(loaded.checkpoint)
        self.windows = make_windows(
            [text],
            self.tokenizer,
            length=WINDOW,
            train=trained,
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
        if self._work is None:
            return make()
        path = self._work / f"{name}.pt"
        if path.is_file():
            return torch.load(path, weights_only=True)
        found = make()
        with atomic_write(path) as aside:
            torch.save(found, aside)
        return found

    def has(self, name: str) -> bool:
        """Whether a piece of work is finished."""
        return self._work is not None and (self._work / f"{name}.pt").is_file()

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


class Scored(Selector):
    """Layers choose by arms at their thresholds, or (a task) by the true contributions.

    densities: share of the neurons chosen, of every layer and window in turn."""

    capturable = False

    def __init__(self, layers: Mapping[int, Arm | Task]) -> None:
        self._layers = layers
        self.densities: list[float] = []

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if site != Site.NEURONS or layer not in self._layers:
            return None
        arm = self._layers[layer]
        if isinstance(arm, Task):
            assert arm.neurons is not None
            scores = arm.neurons.squares(points.source(site, layer), ops)
            count = max(1, round(DENSITY * scores.numel()))
            (limit,) = ascending(scores, [scores.numel() - count])
            return Selection.from_mask(scores >= limit)
        place = 2 * layer + 1 - (2 * arm.source[1] + (arm.source[0] == Site.NEURONS))
        mask = arm.scores(points.source(site, layer, place / 2)) > arm.threshold
        self.densities.append(float(mask.float().mean()))
        return Selection.from_mask(mask)


def perplexities(study: Study, arms: dict[int, list[Arm]]) -> list[dict[str, Any]]:
    """Perplexity over the dense model's with the studied layers at one density, all arms that
    exist in each of them as two stages."""
    windows = study.windows.held_out[:JUDGED]
    counts = [WINDOW] * len(windows)
    dense = window_losses(study.model, windows, Dense(), study.ops)
    tasks = {n: study.layer(n).task for n in study.layers}
    names = [
        (a.name, a.rank, a.bits)
        for a in arms[study.layers[0]]
        if (a.name, a.rank, a.bits) in COMPARED
    ]
    found = []
    for name in [None, *names]:
        chosen: dict[int, Arm | Task] = {}
        for n in study.layers:
            same = [a for a in arms[n] if (a.name, a.rank, a.bits) == name]
            if name is None or same:
                chosen[n] = same[0] if same else tasks[n]
        if len(chosen) < len(study.layers):
            continue
        losses = window_losses(study.model, windows, Scored(chosen), study.ops)
        ratio = mean_rise(losses, dense, counts).exp()
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
    study = Study(text, work, layers, sys.argv[5] if sys.argv[5:] else "cpu")
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
