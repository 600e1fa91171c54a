"""From the scores of single items to the figures of a task and of all tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dejavu.eval.paired import Difference, difference, mean, mean_difference
from dejavu.eval.tasks import Item, Task
from dejavu.sparsity.losses import block_mean

_ARMS = ("dense", "sparse")
_NAMED = 20  # items that do not fit are named up to here; all are in the journal


def task_result(
    task: Task, items: Sequence[Item], records: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Figures of a task: for each arm every metric with its standard error, their paired
    differences, and how near the arms are on the right answers.

    unfit: items longer than the context; they are in no figure.
    """
    pairs = list(zip(items, records, strict=True))
    unfit = {item.name: record["unfit"] for item, record in pairs if "unfit" in record}
    fit = [(item, record) for item, record in pairs if "unfit" not in record]
    result: dict[str, Any] = {
        "task": task.name,
        "metric": task.metric,
        "items": len(fit),
        "unfit": {
            "count": len(unfit),
            "longest": max(unfit.values(), default=0),
            "names": list(unfit)[:_NAMED],
        },
    }
    if not fit:
        return result
    scores = {arm: _scores(task, fit, arm) for arm in _ARMS}
    for arm in _ARMS:
        result[arm] = {}
        for metric, values in scores[arm].items():
            found = mean(values)
            result[arm] |= {metric: found.value, f"{metric}_error": found.error}
    result["difference"] = {
        metric: difference(scores["dense"][metric], scores["sparse"][metric]).to_json()
        for metric in scores["dense"]
    }
    tokens = [record["tokens"] for _, record in fit]
    kl = block_mean([record["kl"] for _, record in fit], tokens)
    same = block_mean([record["same"] for _, record in fit], tokens)
    answers = [float(_answer(r, "dense") == _answer(r, "sparse")) for _, r in fit]
    return result | {
        "kl": kl.value,
        "kl_error": kl.error,
        "agreement": same.value,
        "agreement_error": same.error,
        "same_answer": mean(answers).value,
    }


def summary(tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Mean over tasks of their headline metrics; None where nothing was scored."""
    scored = [task for task in tasks if "difference" in task]
    if not scored:
        return None
    differences = [_difference(task) for task in scored]
    values = {arm: [task[arm][task["metric"]] for task in scored] for arm in _ARMS}
    return {
        "tasks": [task["task"] for task in scored],
        "dense": sum(values["dense"]) / len(scored),
        "sparse": sum(values["sparse"]) / len(scored),
        "difference": mean_difference(differences).to_json(),
        "beyond_two_errors": [
            task["task"]
            for task, found in zip(scored, differences, strict=True)
            if found.errors is not None and abs(found.errors) > 2
        ],
    }


def _difference(task: Mapping[str, Any]) -> Difference:
    found = task["difference"][task["metric"]]
    return Difference(*(found[key] for key in ("value", "error", "low", "high")))


def _scores(
    task: Task, fit: Sequence[tuple[Item, Mapping[str, Any]]], arm: str
) -> dict[str, list[float]]:
    """Of every item: whether it is right, by each metric. A word is right if it is the greedy
    continuation; its loss is beside, in nats."""
    if task.kind == "word":
        return {
            "acc": [float(record[arm]["greedy"][item.gold]) for item, record in fit],
            "loss": [-record[arm]["logprobs"][item.gold] for item, record in fit],
        }
    return {
        "acc": [float(_best(record[arm]["logprobs"]) == item.gold) for item, record in fit],
        "acc_norm": [
            float(_best(_by_size(record[arm]["logprobs"], item)) == item.gold)
            for item, record in fit
        ],
    }


def _by_size(logprobs: Sequence[float], item: Item) -> list[float]:
    return [value / size for value, size in zip(logprobs, item.sizes, strict=True)]


def _answer(record: Mapping[str, Any], arm: str) -> int | bool:
    """The choice taken; of a single one, whether it is the greedy continuation."""
    logprobs = record[arm]["logprobs"]
    return _best(logprobs) if len(logprobs) > 1 else bool(record[arm]["greedy"][0])


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
