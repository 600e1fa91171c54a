"""What a decode step's parts take on this CPU, put into the result of `predictor_study.py`.

Usage: python recipes/predictor_speed.py docs/results/predictor-study.json

To be run on an idle machine. `predictor_page.py` makes tokens/s of it: of the whole model, had
every layer the predictor and the density of an arm.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path

from dejavu.bench.machine import this_machine
from dejavu.embedded import model_path
from dejavu.errors import InputError
from dejavu.load import load_model
from dejavu.predictor.cost import StepTimes, measured_times
from dejavu.sparsity.accounting import neuron_bytes
from dejavu.weights.files import atomic_write

BITS = (4, 8)
ATTEMPTS = 8
MIDDLE = 150_000  # bytes of a predictor, at which runs are compared


def main() -> None:
    """Measure, and add to the file."""
    path = Path(sys.argv[1])
    content = json.loads(path.read_text(encoding="utf-8"))
    model = load_model(model_path(content["model"])).model
    found: dict[int, list[StepTimes]] = {}
    for bits in BITS:
        tried = [measured_times(model, bits) for _ in range(ATTEMPTS)]
        found[bits] = [times for times in tried if isinstance(times, StepTimes)]
        if not found[bits]:
            raise InputError(f"{tried[-1]}; run this again on an idle machine")
    quiet = min(itertools.chain(*found.values()), key=lambda times: times.step)
    content["cpu"] = {
        "machine": this_machine().to_json(),
        "layers": len(model.weights.blocks),
        "down_bytes": neuron_bytes(model.weights.blocks[0].mlp)[1],
        "step_ns": quiet.step,
        "mlp_ns": quiet.mlp,
        "rows_ns": asdict(quiet.rows),
        "predictor_ns": {
            bits: asdict(min(runs, key=lambda times: times.predictor.at(MIDDLE)).predictor)
            for bits, runs in found.items()
        },
    }
    with atomic_write(path) as aside:
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
