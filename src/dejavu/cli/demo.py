"""`dejavu demo`: the whole idea on the model inside the package, in under two minutes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dejavu.cli import options

if TYPE_CHECKING:
    from rich.table import Table

    from dejavu.bench.result import BenchResult
    from dejavu.eval.compare import Comparison

PROMPT = "The storm came up suddenly from the west. The ship"
_REPETITION = 1.15  # a model this small, always at its likeliest word, soon says the same again


def demo(
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Held-out tokens for the perplexities.")
    ] = 16_384,
    prompt: Annotated[
        str, typer.Option("--prompt", help="Text that both continue, repeating little.")
    ] = PROMPT,
    max_tokens: options.MaxTokens = 48,
    threads: options.Threads = None,
    json_file: options.Json = None,
) -> None:
    """Load the embedded model and its plan; compare quality, bytes, speed and text with dense.

    Example:

      dejavu demo --json demo.json
    """
    from dejavu import LLM, SamplingParams
    from dejavu.bench.decode import BenchOptions, bench_subject
    from dejavu.bench.subject import open_subject
    from dejavu.cli.output import console, progress, quiet, write_json
    from dejavu.cli.sources import load
    from dejavu.embedded import HELDOUT_TEXT, NAME
    from dejavu.eval.compare import compare
    from dejavu.eval.text import read_text
    from dejavu.predictor.plan import load_plan
    from dejavu.weights.tokenizer import load_tokenizer

    _tell(f"loading {NAME} and its plan")
    loaded = load(NAME, "auto", threads)
    plan = load_plan(NAME)
    selector = plan.selector(loaded)
    text = read_text(
        HELDOUT_TEXT,
        load_tokenizer(loaded.checkpoint),
        loaded.model.config.context_length,
        max_tokens=tokens,
    )
    _tell(f"reading {tokens} tokens of held-out text, dense and sparse")
    with progress("reading held-out text, dense and sparse") as update:
        quality = compare(loaded.model, text, selector, progress=update)
    asked = BenchOptions(exact=False, peers=("transformers",), threads=threads, text=HELDOUT_TEXT)
    _tell("timing dense, sparse and transformers in turns")
    with progress("timing dense, sparse and transformers in turns") as update:
        speed = bench_subject(open_subject(loaded), {"sparse": selector}, asked, progress=update)
    _tell("writing on, dense and sparse")
    params = SamplingParams(max_tokens=max_tokens, repetition_penalty=_REPETITION)
    dense_text = LLM(loaded, threads=threads).generate(prompt, params).text
    sparse_text = LLM(loaded, NAME, threads=threads).generate(prompt, params).text
    result = _result(quality, speed) | {
        "level": plan.default_level,
        "prompt": prompt,
        "text": {"dense": dense_text, "sparse": sparse_text},
    }
    if not quiet(json_file):
        out = console()
        out.print(_table(quality, speed, result))
        for name, continued in (("dense", dense_text), ("sparse", sparse_text)):
            out.print(f"[bold]{name}[/bold]: {prompt}[italic]{continued}[/italic]\n")
    write_json(result, json_file)


def _tell(stage: str) -> None:
    """Where stderr is no terminal, and so has no bar, a line as each stage begins."""
    if not sys.stderr.isatty():
        print(f"{stage} ...", file=sys.stderr, flush=True)


def _result(quality: Comparison, speed: BenchResult) -> dict[str, Any]:
    """What `--json` holds: the table's figures by name, then both results whole."""
    arms = {"dense": "dense", "sparse": "sparse"}
    for arm in speed.arms:
        if arm.name.startswith("transformers"):
            arms["transformers"] = arm.name
    reads = quality.reads
    assert reads is not None
    return {
        "perplexity": {
            "dense": quality.dense.perplexity,
            "sparse": quality.sparse.perplexity,
            "ratio": quality.ratio,
            "ratio_error": quality.ratio_error,
            "tokens": quality.dense.tokens,
        },
        "density": {"neurons": reads.neuron_density, "heads": reads.head_density},
        "bytes_read_ratio": reads.weight_bytes,
        "tokens_per_second": {name: speed.arm(arm).tokens_per_second for name, arm in arms.items()},
        "quality": quality.to_json(),
        "bench": speed.to_json(),
    }


def _table(quality: Comparison, speed: BenchResult, result: dict[str, Any]) -> Table:
    from rich.table import Table

    rates = result["tokens_per_second"]
    peer = next((arm.name for arm in speed.arms if arm.name.startswith("transformers")), None)
    table = Table(
        title=f"relu-30m, int8, its plan at level {result['level']}, {speed.conditions.runs_on}",
        caption=f"Perplexity on the first {quality.dense.tokens:,} tokens of the held-out books, "
        "each choosing for itself. Bytes: weights read for a token, predictors included.",
    )
    table.add_column("")
    for name in ("dense", "sparse", peer or "transformers"):
        table.add_column(name, justify="right")
    perplexity = result["perplexity"]
    table.add_row("perplexity", f"{perplexity['dense']:.3f}", f"{perplexity['sparse']:.3f}", "")
    table.add_row("neurons read", "100%", f"{result['density']['neurons']:.1%}", "100%")
    table.add_row("weight bytes read", "100%", f"{result['bytes_read_ratio']:.1%}", "")
    table.add_row("tokens/s", *(f"{rates[n]:.0f}" if n in rates else "-" for n in _ARMS))
    table.add_row(
        "speed against dense",
        *(f"{rates[n] / rates['dense']:.2f}x" if n in rates else "-" for n in _ARMS),
    )
    return table


_ARMS = ("dense", "sparse", "transformers")
