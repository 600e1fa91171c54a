"""`dejavu eval --suite`: the field's tasks, dense and sparse side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dejavu.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from dejavu.predictor.plan import Plan


def run_suite(
    suite: str,
    model: str,
    *,
    plan: str | None,
    level: str | None,
    policy: str | None,
    data: Path | None,
    out: Path | None,
    tasks: str | None,
    shots: int,
    limit: int | None,
    seed: int,
    prompts: str,
    max_tokens: int | None,
    generations: int,
    device: str,
    dtype: str,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """The options are those of `dejavu eval`. Raises InputError for what cannot be used."""
    from dejavu.cli.output import console, quiet, stages, write_json
    from dejavu.cli.sources import load, names, selector
    from dejavu.eval.suite import Suite, SuiteOptions
    from dejavu.eval.tasks import SUITES
    from dejavu.registry import unknown

    if suite not in SUITES:
        raise unknown("suite", suite, SUITES, InputError)
    if data is None:
        raise InputError("--suite needs --data, the folder of the evaluation data")
    if plan is None and policy is None:
        raise InputError("--suite compares with a dense model: give --plan or --policy")
    options = SuiteOptions(
        data,
        tuple(names("--tasks", tasks)) if tasks is not None else SUITES[suite],
        shots=shots,
        limit=limit,
        seed=seed,
        prompts=prompts,
        max_tokens=max_tokens,
        generations=generations,
    )
    loaded = load(model, dtype, threads, device)
    chosen, level, read = selector(loaded, plan, level, policy)
    assert chosen is not None
    with stages() as update:
        result = Suite(
            loaded,
            chosen,
            options,
            selection={"policy": policy} if read is None else _selection(plan, level, read),
            folder=out,
            progress=update,
        ).run()
    if not quiet(json_file):
        show = console()
        if result["tasks"]:
            show.print(_tasks_table(result))
        if result["texts"]:
            show.print(_texts_table(result["texts"]))
        if (free := result["free_run"]) is not None:
            show.print(
                f"free run: {free['identical']:.1%} of {free['prompts']} answers of "
                f"{free['new_tokens']} tokens are identical; together for "
                f"{_share(free['together'], free['together_error'])} of their length"
            )
        for line in _unfit(result["tasks"]):
            show.print(line)
    write_json({"suite": suite, "model": model, **result}, json_file)


def _selection(name: str | None, level: str | None, plan: Plan) -> dict[str, Any]:
    """What a plan selects with, so that a journal can tell runs apart."""
    import hashlib
    from dataclasses import asdict

    content = hashlib.sha256(json.dumps(asdict(plan.level(level))).encode())
    for _, source in sorted(plan.predictors.items()):
        for matrix in (source.predictor.first, source.predictor.second):
            content.update(matrix.data.float().numpy().tobytes())
        content.update(source.predictor.bias.numpy().tobytes())
    return {"plan": name, "level": level, "sha256": content.hexdigest()}


def _tasks_table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    options = result["options"]
    table = Table(title=f"{options['shots']}-shot, questions read {options['prompts']}")
    for title in (
        "task",
        "metric",
        "items",
        "dense",
        "sparse",
        "difference",
        "same",
        "KL",
        "top 1",
    ):
        table.add_column(title, justify="left" if title in ("task", "metric") else "right")
    for task in result["tasks"]:
        metric = task["metric"]
        if "difference" not in task:
            table.add_row(task["task"], metric, "0", *["-"] * 6)
            continue
        dense, sparse = task["dense"], task["sparse"]
        table.add_row(
            task["task"],
            metric,
            str(task["items"]),
            _share(dense[metric], dense[f"{metric}_error"]),
            _share(sparse[metric], sparse[f"{metric}_error"]),
            _points(task["difference"][metric]),
            f"{task['same_answer']:.1%}",
            f"{task['kl']:.4f}",
            f"{task['agreement']:.1%}",
        )
    mean = result["mean"]
    if mean is not None:
        found = mean["difference"]
        table.add_section()
        table.add_row(
            "mean", "", "", f"{mean['dense']:.1%}", f"{mean['sparse']:.1%}", _points(found)
        )
        if found["low"] is not None:
            table.caption = (
                f"95 % interval of the mean difference: {100 * found['low']:+.2f} to "
                f"{100 * found['high']:+.2f} points; beyond two standard errors: "
                f"{', '.join(mean['beyond_two_errors']) or 'no task'}"
            )
    return table


def _texts_table(texts: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title="texts")
    columns = ("text", "tokens", "dense", "sparse", "ratio", "KL", "top 1", "neurons", "bytes")
    for title in columns:
        table.add_column(title, justify="left" if title == "text" else "right")
    for text in texts:
        reads = text["reads"] or {}
        table.add_row(
            text["task"],
            str(text["dense"]["tokens"]),
            f"{text['dense']['perplexity']:.3f}",
            f"{text['sparse']['perplexity']:.3f}",
            _number(text["ratio"], text["ratio_error"]),
            _number(text["kl"], text["kl_error"]),
            f"{text['agreement']:.1%}",
            *("-" if reads.get(k) is None else f"{reads[k]:.1%}" for k in _READS),
        )
    return table


_READS = ("neuron_density", "weight_bytes")


def _unfit(tasks: list[dict[str, Any]]) -> list[str]:
    """What was not scored, and why."""
    lines = []
    for task in tasks:
        found = task["unfit"]
        if found["count"]:
            more = ", ..." if found["count"] > len(found["names"]) else ""
            lines.append(
                f"{task['task']}: {found['count']} items do not fit the context (the longest has "
                f"{found['longest']} tokens) and were not scored: {', '.join(found['names'])}{more}"
            )
    return lines


def _share(value: float, error: float | None) -> str:
    return f"{value:.1%}" if error is None else f"{value:.1%} ± {100 * error:.1f}"


def _points(found: dict[str, Any]) -> str:
    """Percentage points."""
    text = f"{100 * found['value']:+.2f}"
    return text if found["error"] is None else f"{text} ± {100 * found['error']:.2f}"


def _number(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
