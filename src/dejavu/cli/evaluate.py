"""`dejavu eval`: perplexity or a suite of tasks, and what a plan changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dejavu.cli import destination, options

if TYPE_CHECKING:
    from dejavu.eval.compare import Comparison
    from dejavu.eval.perplexity import Perplexity
    from dejavu.eval.text import EvalText
    from dejavu.flash.model import FlashModel
    from dejavu.kernels.ops import Ops

_COPIES_OF_LOGITS = 3


def evaluate(
    model: options.Model,
    plan: options.Plan = None,
    level: options.Level = None,
    policy: options.Policy = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            exists=True,
            dir_okay=False,
            help="Text to score (.txt or .jsonl, also .xz). Default: the embedded held-out books.",
        ),
    ] = None,
    preset: Annotated[
        str,
        typer.Option("--preset", help="documents (end token between them), whole, or wikitext2."),
    ] = "documents",
    window: Annotated[
        int | None,
        typer.Option("--window", min=1, help="Tokens a forward reads; default: context."),
    ] = None,
    stride: Annotated[
        int | None, typer.Option("--stride", min=1, help="Default: the window.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", "-n", "--max-tokens", min=1, help="Tokens to score at most, of each text."
        ),
    ] = None,
    through: Annotated[
        str,
        typer.Option("--through", help="prefill (whole windows) or decode (token by token)."),
    ] = "prefill",
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            help="paper: WikiText-2, C4, LAMBADA, HellaSwag, PIQA, WinoGrande, OpenBookQA, COPA, "
            "RTE, ARC; dense and sparse, with the error of the difference.",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", file_okay=False, help="Suite: folder of its files.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            callback=destination.folder_of_files,
            help="Suite: keep its state here, and go on from it.",
        ),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", metavar="A,B", help="Suite: only these tasks.")
    ] = None,
    shots: Annotated[
        int, typer.Option("--shots", min=0, help="Suite: examples before every question.")
    ] = 0,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Suite: items a task at most; default all.")
    ] = None,
    prompts: Annotated[
        str,
        typer.Option(
            "--prompts", help="Suite: questions read dense, as in serving, or sparse like answers."
        ),
    ] = "dense",
    generations: Annotated[
        int, typer.Option("--generations", min=0, help="Suite: prompts written on from; 0: none.")
    ] = 64,
    seed: options.Seed = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    memory_limit: options.MemoryLimit = None,
    bundle: options.Bundle = None,
    json_file: options.Json = None,
) -> None:
    """Perplexity of a model on a text; with a plan or policy, dense and sparse side by side.

    Every token is scored once and chooses for itself: no figure comes from a union of tokens.
    With --suite, the tasks of the field in place of one text; needs a plan or a policy.

    Examples:

      dejavu eval relu-30m --plan relu-30m --tokens 20000

      dejavu eval facebook/opt-1.3b --text wiki.test.raw --preset wikitext2 --json out.json

      dejavu eval relu-30m --plan relu-30m --level fast --through decode -n 4096

      dejavu eval relu-30m --plan relu-30m --memory-limit 600MB --bundle relu-30m.flash

      dejavu eval relu-30m --plan relu-30m --suite paper --data evaldata --out suite-run
    """
    of_suite = {
        "--data": data, "--out": out, "--tasks": tasks, "--limit": limit, "--seed": seed,
        "--shots": shots or None,
        "--prompts": None if prompts == "dense" else prompts,
        "--generations": None if generations == 64 else generations,
    }  # fmt: skip
    of_text = {
        "--text": text, "--window": window, "--stride": stride,
        "--preset": None if preset == "documents" else preset,
        "--through": None if through == "prefill" else through,
        "--memory-limit": memory_limit, "--bundle": bundle,
    }  # fmt: skip
    options.refuse_without_effect(
        of_suite if suite is None else of_text,
        "needs --suite" if suite is None else "not of a suite",
    )
    if suite is not None:
        from dejavu.cli.suite import run_suite

        run_suite(
            suite,
            model,
            plan=plan,
            level=level,
            policy=policy,
            data=data,
            out=out,
            tasks=tasks,
            shots=shots,
            limit=limit,
            seed=seed or 0,
            prompts=prompts,
            max_tokens=max_tokens,
            generations=generations,
            device=device,
            dtype=dtype,
            threads=threads,
            json_file=json_file,
        )
        return
    from dejavu.cli.output import console, progress, quiet, write_json
    from dejavu.cli.sources import load, selector
    from dejavu.embedded import HELDOUT_TEXT
    from dejavu.eval.compare import compare
    from dejavu.eval.perplexity import evaluate as perplexity_of
    from dejavu.eval.text import read_text
    from dejavu.weights.tokenizer import load_tokenizer

    if bundle is not None and memory_limit is None:
        options.refuse_without_effect({"--bundle": bundle}, "goes with a --memory-limit")
    flash = None
    if memory_limit is None:
        loaded = load(model, dtype, threads, device, to_read=through == "prefill")
    else:
        from dejavu.flash.model import find_bundle, load_flash

        why = "not with a --memory-limit"
        options.refuse_without_effect({"--policy": policy}, why)
        options.refuse_without_effect({"--device": None if device == "cpu" else device}, why)
        flash = load_flash(model, bundle or find_bundle(model, plan, dtype), dtype=dtype)
        loaded = flash.loaded
    chosen, level, _ = selector(loaded, plan, level, policy)
    scored = read_text(
        text or HELDOUT_TEXT,
        load_tokenizer(loaded.checkpoint),
        loaded.model.config.context_length,
        preset,
        window=window,
        stride=stride,
        max_tokens=max_tokens,
    )
    what: dict[str, Any] = {"model": model, "dtype": loaded.dtype, "plan": plan, "policy": policy}
    ops = None
    if flash is not None and memory_limit is not None:
        ops = _within(flash, memory_limit, through, scored, threads)
        what["memory_limit"] = memory_limit
    with progress("scoring") as update:
        result: Perplexity | Comparison
        if chosen is None:
            result = perplexity_of(loaded.model, scored, through=through, ops=ops, progress=update)
        else:
            result = compare(
                loaded.model, scored, chosen, through=through, ops=ops, progress=update
            )
            what["level"] = level
    if not quiet(json_file):
        console().print(_table(result))
    write_json(what | result.to_json(), json_file)


def _within(
    flash: FlashModel, memory_limit: str, through: str, text: EvalText, threads: int | None
) -> Ops:
    """Ops of a path that keep the process within a limit."""
    from dejavu.flash.memory import parse_size
    from dejavu.flash.ops import FlashOps, WindowOps
    from dejavu.kernels.native import MAX_ROWS

    longest = max(len(window.ids) - 1 for window in text.windows)
    prefill = through == "prefill"
    store, _ = flash.within(
        parse_size(memory_limit),
        max_batch=1 if prefill else MAX_ROWS,
        max_model_len=longest,
        # Logits of both arms, and what comparing them makes of them.
        rows=_COPIES_OF_LOGITS * (longest if prefill else MAX_ROWS),
    )
    return WindowOps(store) if prefill else FlashOps(store, threads)


def _table(result: Perplexity | Comparison) -> Any:
    from rich.table import Table

    from dejavu.eval.perplexity import Perplexity

    dense = result if isinstance(result, Perplexity) else result.dense
    setting = dense.setting
    table = Table(
        title=f"{setting.dataset}: {dense.tokens} tokens, window {setting.window}, "
        f"stride {setting.stride}, through {dense.through}"
    )
    table.add_column("")
    table.add_column("dense", justify="right")
    rows = [
        ("perplexity", _with_error(dense.perplexity, dense.perplexity_error)),
        ("nats per token", _with_error(dense.loss, dense.loss_error)),
        ("bits per byte", f"{dense.bits_per_byte:.4f}"),
        ("perplexity per word", f"{dense.word_perplexity:.2f}"),
    ]
    if isinstance(result, Perplexity):
        for row in rows:
            table.add_row(*row)
        return table
    sparse = result.sparse
    table.add_column("sparse", justify="right")
    values = [
        _with_error(sparse.perplexity, sparse.perplexity_error),
        _with_error(sparse.loss, sparse.loss_error),
        f"{sparse.bits_per_byte:.4f}",
        f"{sparse.word_perplexity:.2f}",
    ]
    for row, value in zip(rows, values, strict=True):
        table.add_row(*row, value)
    table.add_row("perplexity, sparse / dense", "", _with_error(result.ratio, result.ratio_error))
    table.add_row("KL(dense || sparse), nats", "", _with_error(result.kl, result.kl_error))
    table.add_row("same top token", "", f"{result.agreement:.2%}")
    if result.reads is not None:
        reads = result.reads
        beside = f" by {reads.rows:g} rows together" if reads.rows > 1 else ""
        table.add_row(f"neurons read{beside}", "100.0%", f"{reads.neuron_density:.1%}")
        table.add_row(f"heads read{beside}", "100.0%", f"{reads.head_density:.1%}")
        if reads.weight_bytes is not None:
            share = "weight bytes read" if reads.rows == 1 else "weight bytes read, a row's share"
            table.add_row(share, "100.0%", f"{reads.weight_bytes:.1%}")
    return table


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
