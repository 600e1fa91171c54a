"""`dejavu bench`: speed against peers and against what the memory allows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dejavu.cli import options


def bench(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Local folder, .gguf file, Hub id, or relu-30m."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option("--shape", help="In place of MODEL: a named shape with random weights."),
    ] = None,
    plan: options.Plan = None,
    levels: Annotated[
        str | None, typer.Option("--levels", help="Levels of the plan to time; default: all.")
    ] = None,
    densities: Annotated[
        str | None,
        typer.Option(
            "--densities", help="Neuron densities to force through real predictors, e.g. 0.05,0.1."
        ),
    ] = None,
    peers: Annotated[
        str,
        typer.Option("--peers", help="transformers, ctranslate2, with :dtype if wanted, or none."),
    ] = "transformers",
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Time the MLP of one layer alone instead.")
    ] = False,
    batch: Annotated[int, typer.Option("--batch", min=1, max=16, help="Sequences at once.")] = 1,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1)] = 128,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Timed steps.")] = 64,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Turns of every arm.")] = 5,
    isa: Annotated[
        str | None, typer.Option("--isa", help="portable, avx2 or avx512; default: the best.")
    ] = None,
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PNG", help="Plot ms/token against density of bytes."),
    ] = None,
    json_file: options.Json = None,
) -> None:
    """Time decoding: dense, the plan's levels, forced densities, and other programs, in turns.

    Whole steps are timed, sampling included; every arm gets the same prompts and threads.

    Examples:

      dejavu bench relu-30m --plan relu-30m --peers transformers,ctranslate2

      dejavu bench --shape opt-1.3b --densities 0.05,0.1,0.3 --json out.json --plot out.png

      dejavu bench --shape opt-1.3b --kernels --dtype bf16
    """
    from dejavu.bench.decode import BenchOptions, bench_subject
    from dejavu.bench.plots import plot_density
    from dejavu.bench.subject import open_subject
    from dejavu.bench.table import decode_table
    from dejavu.cli.output import console, progress, quiet, write_json
    from dejavu.cli.sources import names, numbers
    from dejavu.errors import InputError

    if (model is None) == (shape is None):
        raise InputError("give a MODEL or a --shape, one of the two")
    if kernels:
        _kernels(shape or str(model), densities, dtype, threads, isa, repeats, json_file)
        return
    from dejavu.embedded import HELDOUT_TEXT

    asked = BenchOptions(
        densities=None if densities is None else numbers("--densities", densities),
        peers=() if peers == "none" else names(peers),
        threads=threads,
        isa=isa,
        batch=batch,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        text=HELDOUT_TEXT,
    )
    if shape is not None:
        _check_shape(shape)
    subject = open_subject(shape or str(model), dtype=dtype)
    selectors = {}
    if plan is not None:
        from dejavu.predictor.plan import load_plan

        loaded = load_plan(plan)
        # The arm `exact` is there in any case, with or without a plan.
        wanted = names(levels) if levels else [n for n in loaded.levels if n != "exact"]
        selectors = {f"plan {n}": loaded.selector(subject.loaded, n) for n in wanted}
    elif levels is not None:
        raise InputError("--levels are a plan's, and no --plan is given")
    with progress("turns") as update:
        result = bench_subject(subject, selectors, asked, progress=update)
    if not quiet(json_file):
        console().print(decode_table(result))
    if plot is not None:
        plot_density(result, plot)
        console(stderr=True).print(f"wrote {plot}")
    write_json(result.to_json(), json_file)


def _check_shape(shape: str) -> None:
    from dejavu.bench.shapes import SHAPES
    from dejavu.errors import InputError
    from dejavu.registry import unknown

    if shape not in SHAPES:
        raise unknown("--shape", shape, SHAPES, InputError)


def _kernels(
    source: str,
    densities: str | None,
    dtype: str,
    threads: int | None,
    isa: str | None,
    repeats: int,
    json_file: Path | None,
) -> None:
    from dejavu.bench.kernels import MLPShape, bench_mlp
    from dejavu.bench.shapes import SHAPES, hf_config
    from dejavu.bench.table import kernel_table
    from dejavu.cli.output import console, quiet, write_json
    from dejavu.cli.sources import numbers
    from dejavu.registry import architecture
    from dejavu.weights.checkpoint import open_checkpoint

    raw = hf_config(source) if source in SHAPES else open_checkpoint(source).config
    config = architecture(raw.get("model_type")).config_from_hf(raw)
    result = bench_mlp(
        MLPShape(config.hidden_size, config.intermediate_size, config.gated_mlp),
        numbers("--densities", densities or "0.05,0.1,0.2,0.5"),
        dtype="bf16" if dtype == "auto" else dtype,
        threads=threads,
        isa=isa,
        repeats=repeats,
    )
    if not quiet(json_file):
        console().print(kernel_table(result))
    write_json(result.to_json(), json_file)
