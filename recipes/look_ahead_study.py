"""What choosing neurons half a block ahead costs, and what rank buys back: relu-30m, whole model.

Usage: python recipes/look_ahead_study.py TEXT RESULT.json [WINDOWS] [DEVICE]

TEXT: .txt or .xz. WINDOWS: of 512 tokens to train on, default 1400, 3.2 MB of books. DEVICE: cpu or
cuda. Every layer has a 4-bit predictor of one rank, trained as `prepare` trains; all share the
threshold at which so many neurons of the calibration's held-out text are chosen. Perplexity is of
the package's held-out books.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from predictor_arms import Arm, ascending
from predictor_study import WINDOW, Scored, Study

from dejavu.embedded import HELDOUT_TEXT
from dejavu.eval.text import read_text
from dejavu.predictor.recording import window_losses
from dejavu.sparsity.losses import mean_rise
from dejavu.sparsity.policy import Dense, Site
from dejavu.weights.files import atomic_write

LAYERS = 8
DENSITIES = (0.14, 0.18, 0.24)
EPOCHS, BATCH, BITS = 2.0, 2048, 4
JUDGED = 32  # windows
SAMPLED = 7  # every so many scores say where the threshold lies
EARLY = {  # the first layer that reads half a block ahead (None: none does), and ranks
    "own inputs": (None, (128,)),
    "half a block ahead": (0, (128, 256)),
    "half a block ahead but layer 0": (1, (128, 256)),
}


def predictors(study: Study, first: int | None, ranks: tuple[int, ...]) -> list[list[Arm]]:
    """For each rank the predictors of all layers, those from `first` on of an earlier input."""
    made: list[list[Arm]] = [[] for _ in ranks]
    for number in study.layers:
        layer = study.layer(number)
        early = first is not None and number >= first
        source = (Site.HEADS if early else Site.NEURONS, number)
        starts = layer.starts(ranks, source=source)
        trained = layer.trained(layer.task, starts, source, bits=BITS, epochs=EPOCHS, batch=BATCH)
        for found, factors in zip(made, trained, strict=True):
            found.append(layer.low_rank("", factors, BITS, source))
    return made


def judged(
    study: Study, arms: list[Arm], windows: torch.Tensor, dense: list[float]
) -> Iterator[dict[str, Any]]:
    """Perplexity over the dense model's at each density, one threshold for all layers; dense: the
    dense model's losses of the windows."""
    counts = [WINDOW] * len(windows)
    held = (arm.scores(study.held.inputs[arm.source].float()) for arm in arms)
    scores = torch.cat([found.flatten()[::SAMPLED] for found in held])
    places = [round((1 - density) * (len(scores) - 1)) for density in DENSITIES]
    for density, threshold in zip(DENSITIES, ascending(scores, places), strict=True):
        for arm in arms:
            arm.threshold = threshold
        selector = Scored(dict(enumerate(arms)))
        losses = window_losses(study.model, windows, selector, study.ops)
        ratio = mean_rise(losses, dense, counts).exp()
        yield {
            "aimed": density,
            "density": sum(selector.densities) / len(selector.densities),
            "perplexity_ratio": ratio.value,
            "error": ratio.error,
        }


def main() -> None:
    """Train, judge and write."""
    text, result = Path(sys.argv[1]), Path(sys.argv[2])
    trained = int(sys.argv[3]) if sys.argv[3:] else 1400
    device = sys.argv[4] if sys.argv[4:] else "cpu"
    study = Study(text, None, range(LAYERS), device, trained)
    books = read_text(HELDOUT_TEXT, study.tokenizer, WINDOW, max_tokens=WINDOW * JUDGED).windows
    windows = torch.stack([window.ids for window in books if len(window.ids) == WINDOW + 1])
    dense = window_losses(study.model, windows, Dense(), study.ops)
    rows = []
    for name, (first, ranks) in EARLY.items():
        for rank, arms in zip(ranks, predictors(study, first, ranks), strict=True):
            about = {"arm": name, "rank": rank, "predictor_bytes": arms[0].nbytes}
            for found in judged(study, arms, windows, dense):
                rows.append(about | found)
                print(rows[-1], flush=True)
    content = {
        "model": "relu-30m",
        "tokens": len(study.windows.train) * WINDOW,
        "held_out_tokens": len(windows) * WINDOW,
        "epochs": EPOCHS,
        "rows": rows,
    }
    with atomic_write(result) as aside:
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
