"""`dejavu serve`: OpenAI's API, metrics and the page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dejavu.cli import options


def _config(context: typer.Context, value: Path | None) -> Path | None:
    """Keys of the TOML file become defaults: below flags and environment, above our own."""
    if value is not None:
        from dejavu.serve.settings import read_toml

        context.default_map = {**(context.default_map or {}), **read_toml(value)}
    return value


Model = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="As elsewhere; or name models in --config."),
]


def serve(
    context: typer.Context,
    model: Model = None,
    plan: options.Plan = None,
    level: options.Level = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What clients call it; default: MODEL.")
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also",
            metavar="NAME=MODEL[,PLAN]",
            help="A further model, or the same one with another plan; repeatable.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", envvar="DEJAVU_HOST", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", envvar="DEJAVU_PORT", help="0: a free one.")
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="DEJAVU_API_KEY", help="Ask clients for this key."),
    ] = None,
    max_batch: Annotated[
        int, typer.Option("--max-batch", envvar="DEJAVU_MAX_BATCH", help="Decoded together.")
    ] = 16,
    max_queue: Annotated[
        int,
        typer.Option("--max-queue", envvar="DEJAVU_MAX_QUEUE", help="Answers that may wait."),
    ] = 128,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len", envvar="DEJAVU_MAX_MODEL_LEN", help="Tokens of prompt and answer."
        ),
    ] = None,
    max_choices: Annotated[
        int, typer.Option("--max-choices", help="Answers of one request: prompts times n.")
    ] = 16,
    max_body: Annotated[int, typer.Option("--max-body", help="Bytes of one request.")] = 4_000_000,
    cache_memory: Annotated[
        float | None,
        typer.Option("--cache-memory", metavar="GB", help="For keys and values of all answers."),
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option("--prefill-chunk", help="Prompt tokens computed between two decode steps."),
    ] = None,
    grace: Annotated[
        float, typer.Option("--grace", help="Seconds that running answers get at shutdown.")
    ] = 30.0,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run replicas under Ray Serve; see --replicas.")
    ] = False,
    replicas: Annotated[
        int, typer.Option("--replicas", help="With --ray: at least so many; one that dies returns.")
    ] = 1,
    max_replicas: Annotated[
        int | None,
        typer.Option("--max-replicas", help="With --ray: at most; default: --replicas."),
    ] = None,
    target_ongoing: Annotated[
        float | None,
        typer.Option(
            "--target-ongoing",
            help="With --ray: open requests a replica that call for more; default: --max-batch.",
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address", help="With --ray: of a cluster that runs; default: this machine alone."
        ),
    ] = None,
    log_level: Annotated[
        str, typer.Option("--log-level", help="debug, info, warning or error.")
    ] = "info",
    device: Annotated[
        str,
        typer.Option(
            "--device",
            envvar="DEJAVU_DEVICE",
            help="Where the models are and compute: cpu, cuda or cuda:N.",
        ),
    ] = "cpu",
    lazy_kv: Annotated[
        bool,
        typer.Option(
            "--lazy-kv",
            envvar="DEJAVU_LAZY_KV",
            help="GPU: keys and values of unused heads are computed when the head is next used.",
        ),
    ] = False,
    whole_layers: options.WholeLayers = True,
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    memory_limit: options.MemoryLimit = None,
    bundle: options.Bundle = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE.toml",
            is_eager=True,
            callback=_config,
            help="Any of these as keys, and \\[\\[models]] with name, source, plan, level, dtype, "
            "bundle; see above.",
        ),
    ] = None,
) -> None:
    """Serve models to OpenAI's clients, with a page at / that shows what is active.

    Flags win over DEJAVU_* variables, those over the file of --config, for example:

      max_batch = 8
      device = "cuda"

      \\[\\[models]]
      name = "sparse"
      source = "facebook/opt-1.3b"
      plan = "org/opt-1.3b-plan"

    Examples:

      dejavu serve relu-30m --plan relu-30m

      dejavu serve facebook/opt-1.3b --also sparse=facebook/opt-1.3b,org/opt-1.3b-plan --port 9000

      dejavu serve facebook/opt-1.3b --plan org/opt-1.3b-plan --device cuda

      dejavu serve relu-30m --plan relu-30m --ray --replicas 2 --max-replicas 8
    """
    try:
        from dejavu.serve.logs import log_to_stderr
        from dejavu.serve.run import run
    except ModuleNotFoundError as error:
        from dejavu.errors import BackendError

        raise BackendError(
            f"the server needs {error.name}: pip install 'dejavu-llm[serve]'"
        ) from error
    from dejavu.serve.settings import settings

    log_to_stderr(log_level)
    file = dict(context.default_map or {})
    entries = list(file.pop("models", ()))
    misspelt = {key: value for key, value in file.items() if key not in context.params}
    if model is not None:
        first = {"name": name or model, "source": model, "plan": plan, "level": level}
        entries.insert(0, first | {"dtype": dtype, "bundle": bundle})
    entries += [_also(text, dtype) for text in also or ()]
    checked = settings(
        misspelt
        | {
            "models": entries,
            "host": host,
            "port": port,
            "api_key": api_key,
            "threads": threads,
            "max_batch": max_batch,
            "max_queue": max_queue,
            "max_model_len": max_model_len,
            "max_choices": max_choices,
            "max_body": max_body,
            "cache_memory": cache_memory,
            "prefill_chunk": prefill_chunk,
            "memory_limit": memory_limit,
            "grace": grace,
            "device": device,
            "lazy_kv": lazy_kv,
            "whole_layers": whole_layers,
            "ray": ray,
            "replicas": replicas,
            "max_replicas": max_replicas,
            "target_ongoing": target_ongoing,
            "ray_address": ray_address,
        }
    )
    if not checked.ray:
        run(checked)
        return
    try:
        from dejavu.serve import cluster
    except ModuleNotFoundError as error:
        from dejavu.errors import BackendError

        raise BackendError(f"--ray needs {error.name}: pip install 'dejavu-llm[ray]'") from error
    cluster.run(checked, log_level)


def _also(text: str, dtype: str) -> dict[str, Any]:
    from dejavu.errors import InputError

    name, found, rest = text.partition("=")
    source, _, plan = rest.partition(",")
    if not (name and found and source):
        raise InputError(f"--also: {text!r} is not of the form NAME=MODEL[,PLAN]")
    return {"name": name, "source": source, "plan": plan or None, "dtype": dtype}
