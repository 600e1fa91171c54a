"""Prepare and evaluate a model in a part of the memory it takes, against doing so with all of it.

Usage: python recipes/streamed_gpu.py [--shape opt-1.3b] [--share 0.5] [--device cuda]
           [--tokens 100000] [--folder FOLDER] [--json docs/results/gpu-streamed-opt-1.3b.json]

Writes a checkpoint of random weights to a temporary folder (or FOLDER, which is kept and used
again), as large as the model. Times of the streamed side contain the reading of every block for
every pass over the text, from the page cache where the machine has room for it.
"""

import argparse
import gc
import json
import math
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from prepare_gpu import StageClock, token_windows

from dejavu.bench.export import export
from dejavu.bench.machine import origin, this_machine
from dejavu.bench.shapes import hf_config
from dejavu.kernels.device import resolve_device
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel, load_model, random_model
from dejavu.load_blocks import BlockReader, load_to_read
from dejavu.predictor.calibration import Windows
from dejavu.predictor.options import PrepareOptions
from dejavu.predictor.pipeline import Pipeline
from dejavu.predictor.recording import window_losses
from dejavu.registry import architecture
from dejavu.sparsity.policy import Dense

_ACTIVE_FROM = 1.48  # standard deviations: 7 % of a normal distribution lie above
_SPREAD = 0.02  # of the random weights


def write_checkpoint(shape: str, layers: int | None, folder: Path, device: torch.device) -> None:
    """Random weights whose neurons are rarely active."""
    hf = hf_config(shape)
    hf["num_hidden_layers"] = layers or hf["num_hidden_layers"]
    config = architecture(hf["model_type"]).config_from_hf(hf)
    dtype = "fp16" if device.type == "cuda" else "bf16"
    model = random_model(config, dtype=dtype, device=device)
    for block in model.weights.blocks:
        assert block.mlp.up.bias is not None, "a shape whose MLP has biases is needed"
        block.mlp.up.bias.fill_(-_ACTIVE_FROM * _SPREAD * math.sqrt(config.hidden_size))
    folder.mkdir(parents=True, exist_ok=True)
    export(model, hf, folder, dtype)


def peak(device: torch.device) -> int | None:
    """Bytes that tensors on a GPU took at most since the last reset."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def run(
    loaded: LoadedModel, windows: Windows, options: PrepareOptions, folder: Path
) -> dict[str, Any]:
    """Losses of the held-out text and a plan, with times."""
    device = loaded.model.device
    clock = StageClock(device, lambda line: print(line, flush=True))
    started = time.perf_counter()
    losses = window_losses(loaded.model, windows.held_out, Dense(), TorchOps())
    evaluated = time.perf_counter() - started
    plan = Pipeline(loaded, windows, folder / "plan", options, "random weights", clock).run()
    clock.end()
    return {
        "streamed": loaded.model.streamed,
        "seconds_eval": round(evaluated, 2),
        "nats": sum(losses) / windows.held_out[:, 1:].numel(),
        "seconds_prepare": {stage: round(s, 2) for stage, s in clock.seconds.items()},
        "levels": {name: level.report for name, level in plan.levels.items()},
        "peak_bytes": peak(device),
    }


def main() -> None:
    """Both sides, and a file with what they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="opt-1.3b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--share", type=float, default=0.5, help="of the model's bytes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--held-out", type=int, default=8_192)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    device = resolve_device(asked.device)
    options = PrepareOptions(
        tokens=asked.tokens,
        held_out=asked.held_out,
        window=asked.window,
        heads=False,
        measure_cost=False,
    )
    result: dict[str, Any] = {
        "shape": asked.shape,
        "share": asked.share,
        "machine": this_machine(device).to_json(),
        "origin": origin().to_json(),
    }
    with tempfile.TemporaryDirectory() as temporary, torch.inference_mode():
        folder = asked.folder or Path(temporary) / "model"
        if not (folder / "config.json").is_file():
            write_checkpoint(asked.shape, asked.layers, folder, device)
        reader = BlockReader(folder, device=device)
        counts = max(2, asked.tokens // asked.window), max(2, asked.held_out // asked.window)
        cut = token_windows(None, reader.config.vocab_size, sum(counts), asked.window)
        windows = Windows(cut[: counts[0]].contiguous(), cut[counts[0] :].contiguous())
        result |= {"model_bytes": reader.total, "layers": reader.config.num_hidden_layers}
        for name in ("streamed", "resident"):
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            started = time.perf_counter()
            if name == "streamed":
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    memory = int(asked.share * reader.total)
                    loaded = load_to_read(folder, device=device, memory=memory)
            else:
                loaded = load_model(folder, device=device)
            seconds = time.perf_counter() - started
            place = Path(temporary) / name
            result[name] = {"seconds_load": round(seconds, 2)}
            result[name] |= run(loaded, windows, options, place)
            shown = {k: v for k, v in result[name].items() if k != "levels"}
            print(json.dumps({name: shown}, indent=1), flush=True)
            del loaded
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
