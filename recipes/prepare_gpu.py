"""How long `prepare` takes for a shape on this device, stage by stage, with random weights.

Usage: python recipes/prepare_gpu.py [--shape opt-6.7b] [--device cuda] [--tokens 500000]
           [--layers N] [--text FILE] [--json docs/results/gpu-prepare-opt-6.7b.json]

Weights are random, so the plan means nothing and its levels may differ from a real model's; the
work is the same. Biases of the up projections leave about 7 % of the neurons active. FILE's bytes
are the token ids; without it ids are drawn by Zipf's law. Only reading the checkpoint is left out.
--layers: a shorter model; the JSON then extrapolates each stage to all layers by how its work grows
(passes over the text: by their number times the layers; everything else: by the layers).
"""

import argparse
import json
import math
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch

import dejavu
from dejavu.bench.shapes import hf_config
from dejavu.kernels.device import free_memory, resolve_device
from dejavu.load import LoadedModel, random_model
from dejavu.predictor.calibration import Windows
from dejavu.predictor.options import PrepareOptions
from dejavu.predictor.pipeline import FP16_BYTES, Pipeline
from dejavu.predictor.recording import room
from dejavu.registry import architecture
from dejavu.weights.checkpoint import Checkpoint

_ACTIVE_FROM = 1.48  # standard deviations: 7 % of a normal distribution lie above
_SPREAD = 0.02  # of the random weights
_QUADRATIC = ("measuring sensitivity",)  # a forward of all layers for every layer


class NoCheckpoint:
    """Stands where a plan asks which weights it was made for."""

    path = Path("random")

    def identity(self) -> str:
        return "0" * 64


class StageClock:
    """Wall seconds by stage, from the calls of `progress`."""

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self._device, self._say = device, say
        self.seconds: dict[str, float] = {}
        self.passes: dict[str, int] = {}
        self._last = time.perf_counter()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if done == total:
            self._wait()
            self.passes[stage] = self.passes.get(stage, 0) + 1
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now
        if done == total:
            self._say(f"{stage}: {self.seconds[stage]:.1f} s so far")

    def end(self) -> None:
        """Whatever came after the last call."""
        self._wait()
        self.seconds["the rest"] = time.perf_counter() - self._last

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def token_windows(text: Path | None, vocabulary: int, count: int, length: int) -> torch.Tensor:
    """Ids int64 `[count, length + 1]`."""
    wanted = count * (length + 1)
    if text is not None:
        ids = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long() % vocabulary
        return ids.repeat(-(-wanted // len(ids)))[:wanted].view(count, length + 1)
    weights = 1.0 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(weights, wanted, replacement=True, generator=generator)
    return drawn.view(count, length + 1)


def extrapolated(clock: StageClock, layers: int, all_layers: int, passes: float) -> dict[str, Any]:
    """Seconds of each stage with all layers. passes: over the training text there, over here."""
    ratio = all_layers / layers
    found = {}
    for stage, seconds in clock.seconds.items():
        factor = ratio * ratio if stage in _QUADRATIC else ratio
        found[stage] = seconds * (factor * passes if stage == "recording" else factor)
    return found


def main() -> None:
    """Prepare, and write the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="opt-6.7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--tokens", type=int, default=500_000)
    parser.add_argument("--held-out", type=int, default=16_384)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--neurons", type=int, help="of a layer, for a try on a small machine")
    parser.add_argument("--hidden", type=int, help="likewise")
    parser.add_argument("--no-heads", action="store_true")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    device = resolve_device(asked.device)
    hf = hf_config(asked.shape)
    all_layers = hf["num_hidden_layers"]
    layers = asked.layers or all_layers
    hf["num_hidden_layers"] = layers
    if asked.hidden:
        hf |= {"hidden_size": asked.hidden, "word_embed_proj_dim": asked.hidden}
        hf |= {"num_attention_heads": max(1, asked.hidden // 64), "vocab_size": 512}
    if asked.neurons:
        hf["ffn_dim"] = asked.neurons
    config = architecture(hf["model_type"]).config_from_hf(hf)
    options = PrepareOptions(
        tokens=asked.tokens,
        held_out=asked.held_out,
        window=asked.window,
        heads=not asked.no_heads,
        measure_cost=False,
    )
    clock = StageClock(device, lambda line: print(line, flush=True))
    model = random_model(config, dtype=asked.dtype, device=device)
    for block in model.weights.blocks:
        assert block.mlp.up.bias is not None, "a shape whose MLP has biases is needed"
        block.mlp.up.bias.fill_(-_ACTIVE_FROM * _SPREAD * math.sqrt(config.hidden_size))
    counts = max(2, options.tokens // options.window), max(2, options.held_out // options.window)
    cut = token_windows(asked.text, config.vocab_size, sum(counts), options.window)
    windows = Windows(cut[: counts[0]].contiguous(), cut[counts[0] :].contiguous())
    clock("making random weights and ids", 1, 1)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        loaded = LoadedModel(model, cast(Checkpoint, NoCheckpoint()), asked.dtype)
        name = f"{asked.shape} with random weights"
        plan = Pipeline(loaded, windows, Path(folder) / "plan", options, name, clock).run()
    clock.end()
    total = sum(clock.seconds.values())
    recorded = counts[0] * options.window * config.hidden_size * FP16_BYTES
    fits = max(1, int(room(device, options.memory_gib) / recorded))
    here = max(1, clock.passes.get("recording", 1))
    passes = max(1, math.ceil(here * all_layers / layers if layers > fits else all_layers / fits))
    result = {
        "weights": "random",
        "shape": asked.shape,
        "layers": layers,
        "layers_of_the_shape": all_layers,
        "dtype": asked.dtype,
        "ids": "Zipf" if asked.text is None else asked.text.name,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.machine(),
        "torch": torch.__version__,
        "dejavu": dejavu.__version__,
        "options": asdict(options),
        "tokens_trained": counts[0] * options.window,
        "seconds": {stage: round(s, 2) for stage, s in clock.seconds.items()},
        "passes_over_the_text": here,
        "total_seconds": round(total, 1),
        "free_bytes_at_the_end": free_memory(device),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "report": plan.report,
    }
    if layers < all_layers:
        found = extrapolated(clock, layers, all_layers, passes / here)
        result["extrapolated_to_all_layers"] = {
            "seconds": {stage: round(s, 1) for stage, s in found.items()},
            "passes_over_the_text": passes,
            "total_seconds": round(sum(found.values()), 1),
        }
    text = json.dumps(result, indent=1, default=str)
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(text + "\n", encoding="utf-8")
    shown = {k: v for k, v in result.items() if k not in ("report", "options")}
    print(json.dumps(shown, indent=1, default=str))


if __name__ == "__main__":
    main()
