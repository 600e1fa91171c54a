"""Decode time against input sparsity, dense arm and sparse steps in turn over the same text.

Usage: python recipes/input_speed.py MODEL HELD_OUT.txt STUDY.work RESULT.json [THREADS]
STUDY.work: curves that `input_sparsity.py` kept. Weights in bf16, one row, steps replayed as the
engine replays them; every step reads what its own token chooses.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dejavu.bench.machine import origin, this_machine
from dejavu.kernels.native import NativeOps, measure_read_bandwidth
from dejavu.load import load_model
from dejavu.models.base import Batch, DecoderLM
from dejavu.models.kv_cache import blocks_for
from dejavu.predictor.calibration import make_windows
from dejavu.predictor.input_budget import curves_from_json, price_for_sparsity, priced_thresholds
from dejavu.sparsity.accounting import dense_bytes, step_bytes
from dejavu.sparsity.inputs import InputSelector, InputSite
from dejavu.sparsity.policy import Dense, Selector
from dejavu.weights.files import atomic_write
from dejavu.weights.tokenizer import load_tokenizer

TOKENS, SKIPPED, ROUNDS = 96, 32, 3
SPARSITIES = (0.25, 0.4, 0.5)
NOTHING = 1e-9  # a threshold that everything but zeros exceeds


class Arm:
    """A recorded step of one row, replayed over a text from its first token on."""

    def __init__(self, model: DecoderLM, selector: Selector, threads: int, text: list[int]) -> None:
        self._text, length = text, len(text)
        model.prepare(length)
        self._cache = model.new_cache(length)
        table = torch.arange(blocks_for(length), dtype=torch.int32)[None]
        self._batch = Batch(
            torch.tensor(text[:1]), torch.tensor([0]), table, torch.ones(1, dtype=torch.int32)
        )
        self._ops = NativeOps(threads).recorder()
        with torch.inference_mode():
            self.logits = model.forward(self._batch, self._cache, selector, self._ops)

    def times(self) -> list[int]:
        """ns of every step past the first few."""
        found = []
        run: Callable[[], None] = self._ops.program.run
        for place, token in enumerate(self._text):
            self._batch.ids[0], self._batch.positions[0] = token, place
            self._batch.lengths[0] = place + 1
            start = time.perf_counter_ns()
            run()
            found.append(time.perf_counter_ns() - start)
        return found[SKIPPED:]


def main() -> None:
    """Measure all arms in turn, a few rounds, and write the medians."""
    source, held_out, work, result = sys.argv[1:5]
    threads = int(sys.argv[5]) if sys.argv[5:] else 2
    loaded = load_model(source, dtype="bf16")
    model = loaded.model
    tokenizer = load_tokenizer(loaded.checkpoint)
    text = make_windows(
        [Path(held_out)],
        tokenizer,
        length=TOKENS,
        train=2,
        held_out=2,
        separator=tokenizer.eos_token_id,
    ).train[1, :-1]
    content = json.loads(Path(work).read_text(encoding="utf-8"))
    curves = curves_from_json(content["curves, weighted True"])
    layers = model.config.num_hidden_layers
    selectors: dict[str, InputSelector | None] = {"dense": None}
    selectors["nothing skipped"] = InputSelector(
        model, [dict.fromkeys(InputSite, NOTHING)] * layers
    )
    for sparsity in SPARSITIES:
        thresholds = priced_thresholds(curves, price_for_sparsity(curves, sparsity))
        selectors[f"budget {sparsity}"] = InputSelector(model, thresholds)
    arms = {
        name: Arm(model, selector or Dense(), threads, text.tolist())
        for name, selector in selectors.items()
    }
    times: dict[str, list[int]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, arm in arms.items():
            times[name] += arm.times()
    whole = dense_bytes(model.weights)
    bandwidth = measure_read_bandwidth(threads)
    found: list[dict[str, Any]] = []
    dense = statistics.median(times["dense"])
    for name, selector in selectors.items():
        size = float(whole)
        if selector is not None:
            used = selector.meter.used_channels()
            size = step_bytes(model.weights, used, groups=model.config.num_key_value_heads)
        ns = statistics.median(times[name])
        gain, bound = dense / ns, whole / size
        entry = {
            "arm": name,
            "ms_per_token": ns / 1e6,
            "best_ms": min(times[name]) / 1e6,
            "weight_bytes": size / whole,
            "gb_per_s": size / ns,
            "gain": gain,
            "byte_bound": bound,
            "share_of_bound": gain / bound,
            "share_of_gain": (gain - 1) / (bound - 1) if bound > 1.001 else None,
        }
        print(entry, flush=True)
        found.append(entry)
    summary = {
        "model": Path(source).name,
        "threads": threads,
        "origin": vars(origin()),
        "machine": this_machine().to_json(),
        "read_gb_per_s": bandwidth,
        "roofline_ms": whole / bandwidth / 1e6,
        "arms": found,
    }
    with atomic_write(Path(result)) as aside:
        aside.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
