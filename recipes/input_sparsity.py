"""Perplexity against input sparsity: magnitudes, weight-aware scores, and budgets by sensitivity.

Usage: python recipes/input_sparsity.py MODEL CALIBRATION.txt HELD_OUT.txt RESULT.json [TOKENS]
       [SECONDS]
MODEL: a gated model (Llama, Qwen). CALIBRATION: .txt or .xz. TOKENS: of held-out text. Sparsity is
the share of the blocks' weight bytes that a token does not read, as counted there. What is finished
waits in RESULT.work; after SECONDS (default: never) it writes RESULT from that and stops, and the
same command goes on.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dejavu.bench.machine import origin, this_machine
from dejavu.kernels.reference import TorchOps
from dejavu.load import load_model
from dejavu.predictor.calibration import make_windows
from dejavu.predictor.input_budget import (
    Curves,
    curves_from_json,
    curves_to_json,
    input_curves,
    price_for_sparsity,
    priced_thresholds,
    uniform_thresholds,
)
from dejavu.predictor.recording import window_losses
from dejavu.predictor.wide import widened
from dejavu.sparsity.accounting import LayerReads, dense_bytes, input_parts, step_bytes
from dejavu.sparsity.inputs import InputSelector, Thresholds
from dejavu.sparsity.losses import block_mean
from dejavu.sparsity.policy import Dense
from dejavu.weights.files import atomic_write
from dejavu.weights.tokenizer import load_tokenizer

WINDOW, CALIBRATED = 512, 8
BUDGETS, UNIFORM, MORE = (0.25, 0.4), (0.25, 0.4), (0.35, 0.5)
ALLOWED = 1.02  # perplexity over dense, at which the highest sparsity is looked for


class Stopped(Exception):  # noqa: N818 - no error
    """The time is up; what is finished is kept."""


class Work:
    """Results by name, in a file; each is kept as soon as it is there."""

    def __init__(self, path: Path, end: float) -> None:
        self._path, self._end = path, end
        self._found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """A result that is there already, or made and kept."""
        if name not in self._found:
            if time.monotonic() > self._end:
                raise Stopped(name)
            self._found[name] = make()
            with atomic_write(self._path) as aside:
                aside.write_text(json.dumps(self._found), encoding="utf-8")
        return self._found[name]


class Study:
    """A model, its curves of damage, and perplexities at thresholds."""

    def __init__(self, source: str, texts: Sequence[str], tokens: int, work: Work) -> None:
        self._work = work
        loaded = load_model(source, dtype="bf16")
        self._stored, self._model = loaded.model, widened(loaded.model)
        tokenizer = load_tokenizer(loaded.checkpoint)

        def windows(path: str, count: int) -> torch.Tensor:
            return make_windows(
                [Path(path)],
                tokenizer,
                length=WINDOW,
                train=count,
                held_out=2,
                separator=tokenizer.eos_token_id,
            ).train

        self._train = windows(texts[0], CALIBRATED)
        self._test = windows(texts[1], tokens // WINDOW)
        self.tokens = len(self._test) * WINDOW

    def curves(self, weighted: bool) -> Curves:
        """Damage of every sparsity at every place."""

        def make() -> dict[str, Any]:
            found = input_curves(self._model, self._train, _quiet, weighted=weighted)
            return curves_to_json(found)

        return curves_from_json(self._work.kept(f"curves, weighted {weighted}", make))

    def dense(self) -> list[float]:
        """Loss of every window, in nats."""

        def one(window: torch.Tensor) -> float:
            with torch.inference_mode():
                return window_losses(self._model, window[None], Dense(), TorchOps())[0]

        return [
            self._work.kept(f"dense, window {n}", partial(one, window))
            for n, window in enumerate(self._test)
        ]

    def measured(
        self, rule: str, target: float, thresholds: list[Thresholds], weighted: bool = True
    ) -> dict[str, Any]:
        """Sparsity and perplexity over dense at thresholds."""
        selector = InputSelector(self._model, thresholds, weighted=weighted)

        def one(window: torch.Tensor) -> tuple[float, list[dict[str, float]]]:
            selector.reset()
            with torch.inference_mode():
                (loss,) = window_losses(self._model, window[None], selector, TorchOps())
            return loss, [dict(read.inputs or {}) for read in selector.meter.used_channels()]

        dense = self.dense()
        found = [
            self._work.kept(f"{rule} {target:.4f}, window {n}", partial(one, window))
            for n, window in enumerate(self._test)
        ]
        rises = [own - full for (own, _), full in zip(found, dense, strict=True)]
        ratio = block_mean(rises, [WINDOW] * len(rises)).exp()
        reads = [reads for _, reads in found]
        blocks, everything = self._read(reads)
        entry = {
            "rule": rule,
            "target": target,
            "sparsity": 1 - blocks,
            "weight_bytes": everything,
            "perplexity_ratio": ratio.value,
            "perplexity_ratio_error": ratio.error,
        }
        print(entry, flush=True)
        return entry

    def _read(self, windows: list[list[dict[str, float]]]) -> tuple[float, float]:
        """Bytes a token read over dense: of the blocks' matrices, and of everything."""
        weights, groups = self._stored.weights, self._stored.config.num_key_value_heads
        whole = dense_bytes(weights)
        size = sum(size for b in weights.blocks for _, size in input_parts(b).values())
        reads = [[LayerReads(inputs=inputs or None) for inputs in layers] for layers in windows]
        steps = [step_bytes(weights, layers, groups=groups) for layers in reads]
        skipped = whole - sum(steps) / len(steps)
        return 1 - skipped / size, 1 - skipped / whole

    def budget(self, sparsity: float) -> dict[str, Any]:
        """Thresholds by the price of a byte at which so much is left out."""
        curves = self.curves(True)
        thresholds = priced_thresholds(curves, price_for_sparsity(curves, sparsity))
        return self.measured("budget", sparsity, thresholds)

    def summary(self) -> dict[str, Any]:
        """What everything is measured on."""
        dense = self.dense()
        return {
            "dense_perplexity": block_mean(dense, [WINDOW] * len(dense)).exp().value,
            "tokens": self.tokens,
            "calibration_tokens": CALIBRATED * WINDOW,
        }


def highest(study: Study, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The highest budget within `ALLOWED`: between measured ones by logarithms, then measured."""
    points = sorted((e["target"], math.log(e["perplexity_ratio"])) for e in found)
    goal = math.log(ALLOWED)
    low = max((p for p in points if p[1] <= goal), default=(0.0, 0.0))
    high = min((p for p in points if p[1] > goal), default=(1.0, 10.0))
    share = (goal - low[1]) / (high[1] - low[1])
    target = math.floor(100 * (low[0] + share * (high[0] - low[0]))) / 100
    known = {entry["target"]: entry for entry in found}
    while True:
        if target not in known:
            known[target] = study.budget(target)
            found.append(known[target])
        if known[target]["perplexity_ratio"] <= ALLOWED:
            return known[target]
        target = round(target - 0.02, 2)


def _quiet(done: int, total: int) -> None:
    """Progress that nobody watches."""


def main() -> None:
    """Measure what is left to measure as far as the time goes, and write what is there."""
    source, *texts, result = sys.argv[1:5]
    tokens = int(sys.argv[5]) if sys.argv[5:] else 8192
    end = time.monotonic() + (float(sys.argv[6]) if sys.argv[6:] else math.inf)
    study = Study(source, texts, tokens, Work(Path(result).with_suffix(".work"), end))
    content: dict[str, Any] = {
        "model": Path(source).name,
        "calibration": Path(texts[0]).name,
        "held_out": Path(texts[1]).name,
        "origin": vars(origin()),
        "machine": this_machine().to_json(),
        "complete": False,
    }
    found: list[dict[str, Any]] = []
    try:
        content |= study.summary()
        content["curve"] = found
        found.extend(study.budget(sparsity) for sparsity in BUDGETS)
        content[f"highest_within_{ALLOWED}"] = highest(study, found)
        for weighted, name in ((True, "uniform weighted"), (False, "uniform magnitude")):
            curves = study.curves(weighted)
            for sparsity in UNIFORM:
                thresholds = uniform_thresholds(curves, sparsity)
                found.append(study.measured(name, sparsity, thresholds, weighted))
        found.extend(study.budget(sparsity) for sparsity in MORE)
        content["complete"] = True
    except Stopped as stopped:
        print(f"stopped before {stopped}; run the same command again")
    with atomic_write(Path(result)) as aside:
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
