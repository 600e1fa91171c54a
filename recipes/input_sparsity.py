"""Perplexity against input sparsity: magnitudes, weight-aware scores, and budgets by sensitivity.

Usage: python recipes/input_sparsity.py MODEL CALIBRATION.txt HELD_OUT.txt RESULT.json [TOKENS]
MODEL: a gated model (Llama, Qwen). CALIBRATION: .txt or .xz. TOKENS: of held-out text. Sparsity is
the share of the blocks' weight bytes that a token does not read, as counted there.
"""

import json
import sys
from pathlib import Path

import torch

from dejavu.kernels.reference import TorchOps
from dejavu.load import load_model
from dejavu.models.base import DecoderLM
from dejavu.predictor.calibration import make_windows
from dejavu.predictor.input_budget import (
    input_curves,
    price_for_sparsity,
    priced_thresholds,
    uniform_thresholds,
)
from dejavu.predictor.recording import window_losses
from dejavu.predictor.wide import widened
from dejavu.sparsity.accounting import dense_bytes, input_parts, step_bytes
from dejavu.sparsity.inputs import InputSelector, Thresholds
from dejavu.sparsity.losses import block_mean
from dejavu.sparsity.policy import Dense, Selector
from dejavu.weights.tokenizer import load_tokenizer

WINDOW, CALIBRATED = 512, 8
SPARSITIES = (0.25, 0.3, 0.35, 0.4, 0.5)


def read_share(model: DecoderLM, selector: InputSelector) -> tuple[float, float]:
    """Bytes a token read over the dense model's: of the blocks' matrices, and of everything."""
    used = selector.meter.used_channels()
    groups = model.config.num_key_value_heads
    blocks = sum(size for b in model.weights.blocks for _, size in input_parts(b).values())
    skipped = dense_bytes(model.weights) - step_bytes(model.weights, used, groups=groups)
    return 1 - skipped / blocks, 1 - skipped / dense_bytes(model.weights)


def main() -> None:
    """Measure all curves and write them."""
    source, calibration, held_out, result = sys.argv[1:5]
    tokens = int(sys.argv[5]) if sys.argv[5:] else 8192
    loaded = load_model(source, dtype="bf16")
    model, tokenizer = widened(loaded.model), load_tokenizer(loaded.checkpoint)
    separator = tokenizer.eos_token_id

    def windows(path: str, count: int) -> torch.Tensor:
        found = make_windows(
            [Path(path)],
            tokenizer,
            length=WINDOW,
            train=count,
            held_out=2,
            separator=separator,
        )
        return found.train

    train, test = windows(calibration, CALIBRATED), windows(held_out, tokens // WINDOW)
    counts = [WINDOW] * len(test)

    def losses(selector: Selector) -> list[float]:
        with torch.inference_mode():
            return window_losses(model, test, selector, TorchOps(), lambda done, total: None)

    dense = losses(Dense())
    found = []

    def measure(rule: str, target: float, thresholds: list[Thresholds], weighted: bool) -> None:
        selector = InputSelector(model, thresholds, weighted=weighted)
        pairs = zip(losses(selector), dense, strict=True)
        ratio = block_mean([own - full for own, full in pairs], counts).exp()
        blocks, everything = read_share(loaded.model, selector)
        entry = {
            "rule": rule,
            "target": target,
            "sparsity": 1 - blocks,
            "weight_bytes": everything,
            "perplexity_ratio": ratio.value,
            "perplexity_ratio_error": ratio.error,
        }
        print(entry, flush=True)
        found.append(entry)

    for weighted in (True, False):
        curves = input_curves(model, train, lambda done, total: None, weighted=weighted)
        name = "weighted" if weighted else "magnitude"
        for sparsity in SPARSITIES:
            if weighted:
                price = price_for_sparsity(curves, sparsity)
                measure("budget", sparsity, priced_thresholds(curves, price), True)
            measure(f"uniform {name}", sparsity, uniform_thresholds(curves, sparsity), weighted)
    summary = {
        "model": Path(source).name,
        "dense_perplexity": block_mean(dense, counts).exp().value,
        "tokens": sum(counts),
        "calibration_tokens": CALIBRATED * WINDOW,
        "curve": found,
    }
    Path(result).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
