"""`dejavu eval`: perplexity, and what a plan changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dejavu.cli import options

if TYPE_CHECKING:
    from dejavu.eval.compare import Comparison
    from dejavu.eval.perplexity import Perplexity


def evaluate(
    model: options.Model,
    plan: options.Plan = None,
    level: options.Level = "balanced",
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
        int | None, typer.Option("--max-tokens", "-n", min=1, help="Tokens to score at most.")
    ] = None,
    through: Annotated[
        str,
        typer.Option("--through", help="prefill (whole windows) or decode (token by token)."),
    ] = "prefill",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    json_file: options.Json = None,
) -> None:
    """Perplexity of a model on a text; with a plan or policy, dense and sparse side by side.

    Every token is scored once and chooses for itself: no figure comes from a union of tokens.

    Examples:

      dejavu eval relu-30m --plan relu-30m --max-tokens 20000

      dejavu eval facebook/opt-1.3b --text wiki.test.raw --preset wikitext2 --json out.json

      dejavu eval relu-30m --plan relu-30m --level fast --through decode -n 4096
    """
    from dejavu.cli.output import console, progress, quiet, write_json
    from dejavu.cli.sources import load, selector
    from dejavu.embedded import HELDOUT_TEXT
    from dejavu.eval.compare import compare
    from dejavu.eval.perplexity import evaluate as perplexity_of
    from dejavu.eval.text import read_text
    from dejavu.weights.tokenizer import load_tokenizer

    loaded = load(model, dtype, threads)
    chosen = selector(loaded, plan, level, policy)
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
    with progress("scoring") as update:
        result: Perplexity | Comparison
        if chosen is None:
            result = perplexity_of(loaded.model, scored, through=through, progress=update)
        else:
            result = compare(loaded.model, scored, chosen, through=through, progress=update)
            what["level"] = level if plan is not None else None
    if not quiet(json_file):
        console().print(_table(result))
    write_json(what | result.to_json(), json_file)


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
        table.add_row("neurons read", "100.0%", f"{result.reads.neuron_density:.1%}")
        table.add_row("heads read", "100.0%", f"{result.reads.head_density:.1%}")
        if result.reads.weight_bytes is not None:
            table.add_row("weight bytes read", "100.0%", f"{result.reads.weight_bytes:.1%}")
    return table


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
