"""`dejavu bench`: speed against peers and against what the memory allows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dejavu.cli import destination, options

if TYPE_CHECKING:
    from dejavu.bench.forced import Target


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
            "--densities",
            help="To force through real predictors: of neurons, or of neurons/heads, e.g. "
            "0.05,0.1,0.1/0.5; none for none.",
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            "--peers",
            help="transformers, transformers-generate, transformers-static (compiled), "
            "ctranslate2, with :dtype if wanted, or none.",
        ),
    ] = None,
    device: options.Device = "cpu",
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Time the MLP of one layer alone instead.")
    ] = False,
    batch: Annotated[int, typer.Option("--batch", min=1, max=16, help="Sequences at once.")] = 1,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--prompt-tokens",
            min=1,
            help="Of every sequence, not timed; default: 128, fewer where the context is short.",
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Timed steps.")] = 64,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Turns of every arm.")] = 5,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            min=1,
            help="Of forced predictors; default: prepare's on a CPU; on a GPU 128, 30B on 256.",
        ),
    ] = None,
    look_ahead: Annotated[
        float,
        typer.Option("--look-ahead", help="Blocks that forced plans predict ahead: 0, 0.5 or 1."),
    ] = 0.0,
    lazy_kv: options.LazyKV = False,
    isa: Annotated[
        str | None, typer.Option("--isa", help="portable, avx2 or avx512; default: the best.")
    ] = None,
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    memory_limit: options.MemoryLimit = None,
    bundle: options.Bundle = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="PNG",
            callback=destination.file,
            help="Plot ms/token against density of bytes.",
        ),
    ] = None,
    json_file: options.Json = None,
) -> None:
    """Time decoding: dense, the plan's levels, forced densities, and other programs, in turns.

    Whole steps are timed, sampling included; every arm gets the same prompts and threads.

    Examples:

      dejavu bench relu-30m --plan relu-30m --peers transformers,ctranslate2

      dejavu bench --shape opt-1.3b --densities 0.05,0.1,0.3 --json out.json --plot out.png

      dejavu bench --shape opt-1.3b --kernels --dtype bf16

      dejavu bench relu-30m --plan relu-30m --memory-limit 600MB --bundle relu-30m.flash

      dejavu bench --shape opt-1.3b --memory-limit 50% --look-ahead 1

      dejavu bench --shape opt-66b --device cuda --densities 0.1,0.1/0.5 --peers none
    """
    from dejavu.bench import decode
    from dejavu.bench.peers import check_peers
    from dejavu.bench.plots import check_plot, plot_density
    from dejavu.bench.subject import open_subject
    from dejavu.bench.table import decode_table
    from dejavu.cli.output import console, progress, quiet, write_json
    from dejavu.cli.sources import names
    from dejavu.errors import InputError
    from dejavu.kernels.device import resolve_device

    if (model is None) == (shape is None):
        raise InputError("give a MODEL or a --shape, one of the two")
    if memory_limit is not None or bundle is not None:
        from dejavu.cli.bench_flash import bench_flash, bench_flash_shape

        if memory_limit is None:
            raise InputError("--bundle needs a --memory-limit")
        options.refuse_without_effect(
            {"--densities": densities, "--peers": peers, "--plot": plot}, "not with --memory-limit"
        )
        if shape is not None:
            _check_shape(shape)
            options.refuse_without_effect({"--plan": plan, "--levels": levels}, "not of a shape")
            bench_flash_shape(
                shape,
                bundle,
                memory_limit,
                dtype,
                threads,
                new_tokens,
                look_ahead,
                rank,
                json_file,
            )
            return
        if model is None or plan is None:
            raise InputError("--memory-limit needs a --shape, or a MODEL and a --plan")
        bench_flash(
            model,
            plan,
            levels,
            bundle,
            memory_limit,
            dtype,
            threads,
            new_tokens,
            json_file,
        )
        return
    if kernels:
        options.refuse_without_effect(
            {"--plan": plan, "--levels": levels, "--peers": peers, "--plot": plot},
            "not with --kernels",
        )
        _kernels(
            shape or str(model), densities, dtype, device, threads, isa, repeats, rank, json_file
        )
        return
    from dejavu.embedded import HELDOUT_TEXT

    asked = decode.BenchOptions(
        densities=_targets(densities),
        peers=None if peers is None else () if peers == "none" else names("--peers", peers),
        threads=threads,
        isa=isa,
        batch=batch,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        rank=rank,
        look_ahead=look_ahead,
        lazy_kv=lazy_kv,
        text=HELDOUT_TEXT,
    )
    if plan is None and levels is not None:
        raise InputError("--levels are a plan's, and no --plan is given")
    if shape is not None:
        _check_shape(shape)
    check_peers(asked.peers or (), resolve_device(device))
    if plot is not None:
        check_plot(plot)
    with progress("turns") as update:
        if plan is None:
            result = decode.bench(
                shape or str(model),
                options=asked,
                dtype=dtype,
                device=device,
                progress=update,
                tell=console(stderr=True).print,
            )
        else:
            from dejavu.predictor.plan import load_plan

            subject = open_subject(shape or str(model), dtype=dtype, device=device)
            loaded = load_plan(plan)
            # The arm `exact` is there in any case, with or without a plan.
            wanted = [n for n in loaded.levels if n != "exact"]
            if levels is not None:
                wanted = names("--levels", levels)
            selectors = {f"plan {n}": loaded.selector(subject.loaded, n) for n in wanted}
            result = decode.bench_subject(subject, selectors, asked, progress=update)
    if not quiet(json_file):
        console().print(decode_table(result))
    write_json(result.to_json(), json_file)
    if plot is not None:
        plot_density(result, plot)
        console(stderr=True).print(f"wrote {plot}")


def _targets(densities: str | None) -> tuple[Target, ...] | None:
    from dejavu.bench.forced import Target
    from dejavu.cli.sources import names
    from dejavu.errors import InputError

    if densities is None:
        return None
    parts = names("--densities", densities)
    try:
        return tuple(Target.parse(part) for part in parts if part != "none")
    except InputError as error:
        raise InputError(f"--densities: {error}") from error


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
    device: str,
    threads: int | None,
    isa: str | None,
    repeats: int,
    rank: int | None,
    json_file: Path | None,
) -> None:
    from dejavu.bench.kernels import MLPShape, bench_mlp
    from dejavu.bench.shapes import SHAPES, hf_config
    from dejavu.bench.subject import shape_dtype
    from dejavu.bench.table import gpu_kernel_table, kernel_table
    from dejavu.cli.output import console, quiet, write_json
    from dejavu.cli.sources import numbers
    from dejavu.kernels.device import resolve_device
    from dejavu.registry import architecture
    from dejavu.weights.checkpoint import open_checkpoint

    target = resolve_device(device)
    raw = hf_config(source) if source in SHAPES else open_checkpoint(source).config
    config = architecture(raw.get("model_type")).config_from_hf(raw)
    shape = MLPShape(config.hidden_size, config.intermediate_size, config.gated_mlp)
    wanted = numbers("--densities", "0.05,0.1,0.2,0.5" if densities is None else densities)
    dtype = shape_dtype(dtype, target)
    if target.type == "cuda":
        from dejavu.bench.gpu_kernels import bench_mlp_on_gpu

        options.refuse_without_effect({"--threads": threads, "--isa": isa}, "of the CPU's kernels")
        on_gpu = bench_mlp_on_gpu(
            shape, wanted, device=target, dtype=dtype, rank=rank, repeats=repeats
        )
        table, told = gpu_kernel_table(on_gpu), on_gpu.to_json()
    else:
        options.refuse_without_effect({"--rank": rank}, "no predictor runs in --kernels on a CPU")
        result = bench_mlp(shape, wanted, dtype=dtype, threads=threads, isa=isa, repeats=repeats)
        table, told = kernel_table(result), result.to_json()
    if not quiet(json_file):
        console().print(table)
    write_json(told, json_file)
