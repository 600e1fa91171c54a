"""The dense model in lm-evaluation-harness, by dejavu and by transformers, on the same items.

Usage: python recipes/harness_check.py MODEL EVALUATION_FOLDER RESULT.json [ITEMS] [TASKS]

MODEL: a folder that transformers reads as well. Both run in fp32 through the harness's own
`simple_evaluate`, `--model dejavu` and `--model hf`; every log-likelihood is compared, and every
score of every item.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import dejavu.eval.harness  # registers the model
from dejavu.bench.machine import origin
from dejavu.eval.harness_data import FOLDER
from dejavu.eval.tasks import TASKS
from dejavu.weights.files import atomic_write

QUESTIONS = [name for name, task in TASKS.items() if task.kind != "text"]
MODELS = {"dejavu": "dtype=fp32", "hf": "dtype=float32"}


def evaluated(model: str, source: str, tasks: list[str], data: str, items: int) -> dict[str, Any]:
    """The harness's answer, samples included."""
    found: dict[str, Any] = simple_evaluate(
        model=model,
        model_args=f"pretrained={source},{MODELS[model]}",
        tasks=tasks,
        limit=items,
        batch_size=1,
        device="cpu",
        bootstrap_iters=0,
        log_samples=True,
        metadata={"data": data},
        task_manager=TaskManager(include_path=str(FOLDER), metadata={"data": data}),
    )
    return found


def compared(ours: dict[str, Any], theirs: dict[str, Any], task: str) -> dict[str, Any]:
    """Metrics of both, and the largest difference of a log-likelihood."""
    metrics = {
        name.removesuffix(",none"): [ours["results"][task][name], theirs["results"][task][name]]
        for name in ours["results"][task]
        if name.endswith(",none") and "stderr" not in name
    }
    worst, unequal = 0.0, 0
    pairs = zip(ours["samples"][task], theirs["samples"][task], strict=True)
    for one, other in pairs:
        assert one["doc_id"] == other["doc_id"]
        scores = [[float(r[0]) for r in sample["filtered_resps"]] for sample in (one, other)]
        worst = max(worst, *(abs(a - b) for a, b in zip(*scores, strict=True)))
        unequal += any(one[m] != other[m] for m in one["metrics"] if not m.startswith("perp"))
    return {
        "task": task.removeprefix("dejavu_"),
        "items": len(ours["samples"][task]),
        "metrics": metrics,
        "largest_difference_nats": worst,
        "items_scored_differently": unequal,
    }


def main() -> None:
    """Run both, compare, write."""
    source, data, result = sys.argv[1:4]
    items = int(sys.argv[4]) if sys.argv[4:] else 25
    names = sys.argv[5].split(",") if sys.argv[5:] else QUESTIONS
    tasks = [f"dejavu_{name}" for name in names]
    ours, theirs = (evaluated(model, source, tasks, data, items) for model in MODELS)
    found = [compared(ours, theirs, task) for task in tasks]
    for entry in found:
        print(entry, flush=True)
    content = {
        "model": Path(source).name,
        "registered_by": dejavu.eval.harness.__name__,
        "origin": vars(origin()),
        "tasks": found,
    }
    with atomic_write(Path(result)) as aside:
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
