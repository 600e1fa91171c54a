"""The suite's tasks for lm-evaluation-harness, over the same local files and with the same prompts.

    python -m dejavu.eval.harness --model dejavu --model_args pretrained=relu-30m \\
        --include_path "$(python -m dejavu.eval.harness_data)" --tasks dejavu_copa \\
        --metadata '{"data": "evaldata"}'

works with any model of the harness, `--model hf` too. The YAML files in `lm_eval_tasks` name the
functions here, which need the harness's own library for data, nothing else of it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from dejavu.errors import InputError
from dejavu.eval.tasks import task

FOLDER = Path(__file__).parent / "lm_eval_tasks"
_HELD_OUT = 5  # items at the end of each file: examples for few-shot prompts, never scored


def _rows(name: str, folder: Path) -> list[dict[str, Any]]:
    found = task(name)
    if found.kind == "text":
        return [{"text": text} for text in _documents(found.path(folder))]
    return [
        {
            "contexts": list(item.contexts),
            "context": item.contexts[0],
            "continuations": list(item.continuations),
            # The harness's scores by length count the characters of a choice; ours have a space.
            "choices": [text[1:] for text in item.continuations],
            "gold": item.gold,
        }
        for item in found.items(folder)
    ]


def _documents(path: Path) -> list[str]:
    """WikiText's articles, or the lines' texts."""
    import json
    import re

    content = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line)["text"] for line in content.split("\n") if line.strip()]
    found = re.split(r"(?m)^(?= = [^=].*[^=] = $)", content)
    return [text for text in found if text.strip()]


def _load(name: str, data: str | None = None, **_: Any) -> dict[str, Any]:
    """The splits of a task. data: from the harness's `--metadata`; what else it passes is not for
    us. Raises InputError without it."""
    import datasets

    if data is None:
        raise InputError(f'the task of {name} needs --metadata \'{{"data": "FOLDER"}}\'')
    rows = _rows(name, Path(data))
    if task(name).kind == "text":
        return {"test": datasets.Dataset.from_list(rows)}
    return {
        "test": datasets.Dataset.from_list(rows[:-_HELD_OUT]),
        "examples": datasets.Dataset.from_list(rows[-_HELD_OUT:]),
    }


arc_challenge = partial(_load, "arc_challenge")
arc_easy = partial(_load, "arc_easy")
c4 = partial(_load, "c4")
copa = partial(_load, "copa")
hellaswag = partial(_load, "hellaswag")
lambada = partial(_load, "lambada")
openbookqa = partial(_load, "openbookqa")
piqa = partial(_load, "piqa")
rte = partial(_load, "rte")
wikitext2 = partial(_load, "wikitext2")
winogrande = partial(_load, "winogrande")


def winogrande_target(doc: dict[str, Any]) -> str:
    """What follows the gap; scored after each candidate."""
    return str(doc["choices"][0])


if __name__ == "__main__":
    print(FOLDER)
