"""`dejavu batch`: answer a file of requests."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dejavu.cli import options


def batch(
    source: Annotated[
        Path,
        typer.Argument(metavar="IN.jsonl", help="Requests, one a line, as OpenAI's batches."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Answers, in the same order.")],
    model: options.Model,
    plan: options.Plan = None,
    level: options.Level = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="What the requests call the model; default: MODEL."),
    ] = None,
    max_batch: Annotated[int, typer.Option("--max-batch", help="Answers decoded together.")] = 16,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Tokens of prompt and answer.")
    ] = None,
    max_choices: Annotated[
        int, typer.Option("--max-choices", help="Answers to one line: prompts times n.")
    ] = 128,
    cache_memory: Annotated[
        float | None,
        typer.Option("--cache-memory", metavar="GB", help="For keys and values of all answers."),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Spread the lines over actors with Ray Data.")
    ] = False,
    replicas: Annotated[int, typer.Option("--replicas", help="With --ray: actors.")] = 1,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address", help="With --ray: of a cluster that runs; default: this machine alone."
        ),
    ] = None,
    device: options.Device = "cpu",
    lazy_kv: options.LazyKV = False,
    whole_layers: options.WholeLayers = True,
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    memory_limit: options.MemoryLimit = None,
    bundle: options.Bundle = None,
    json_file: options.Json = None,
) -> None:
    """Answer the requests of a file in the format of OpenAI's batch API, many at once.

    A line is {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions" or
    "/v1/completions", "body": {...}}, the body as for dejavu serve, without stream. A line that
    cannot be answered becomes an error in its place. OUT.jsonl appears when all lines are done;
    until then they are in OUT.jsonl.partial, and after Ctrl-C, a kill or a full disk the same
    command goes on from there.

    Examples:

      dejavu batch in.jsonl out.jsonl relu-30m --plan relu-30m

      dejavu batch in.jsonl out.jsonl ./my-llama --name gpt-4o-mini --max-batch 8 --json -

      dejavu batch in.jsonl out.jsonl relu-30m --plan relu-30m --ray --replicas 4
    """
    try:
        from dejavu.serve.batch import Answering, run_batch
    except ModuleNotFoundError as error:
        from dejavu.errors import BackendError

        raise BackendError(f"batches need {error.name}: pip install 'dejavu-llm[serve]'") from error
    from dejavu.cli.output import progress, quiet, write_json
    from dejavu.cli.sources import level_name
    from dejavu.serve.settings import settings

    entry = {"name": name or model, "source": model, "plan": plan, "level": level}
    checked = settings(
        {
            "models": [entry | {"dtype": dtype, "bundle": bundle}],
            "max_batch": max_batch,
            "max_model_len": max_model_len,
            "max_choices": max_choices,
            "cache_memory": cache_memory,
            "threads": threads,
            "memory_limit": memory_limit,
            "device": device,
            "lazy_kv": lazy_kv,
            "whole_layers": whole_layers,
            "ray": ray,
            "replicas": replicas,
            "ray_address": ray_address,
        }
    )
    answering: Answering | None = None
    if ray:
        try:
            from dejavu.serve.batch_cluster import answer_on_cluster
        except ModuleNotFoundError as error:
            from dejavu.errors import BackendError

            raise BackendError(
                f"--ray needs {error.name}: pip install 'dejavu-llm[ray]'"
            ) from error
        answering = answer_on_cluster
    done, total = 0, 0
    try:
        with progress("lines") as bar:

            def update(now: int, of: int) -> None:
                nonlocal done, total
                done, total = now, of
                bar(now, of)

            summary = run_batch(checked, source, out, update, answering)
    except KeyboardInterrupt:
        print(
            f"interrupted: {done} of {total} lines are done; the same command goes on from there",
            file=sys.stderr,
        )
        raise
    if not quiet(json_file):
        earlier = f" ({summary.kept} by earlier runs)" if summary.kept else ""
        print(
            f"{out}: {summary.lines} lines{earlier}, {summary.errors} of them errors; "
            f"{summary.tokens} tokens in {summary.seconds:.1f} s, "
            f"{summary.tokens_per_second:.1f} a second"
        )
    what = {"model": model, "plan": plan, "level": level_name(plan, level)}
    what |= {"input": str(source), "out": str(out)}
    write_json(what | asdict(summary) | {"tokens_per_second": summary.tokens_per_second}, json_file)
