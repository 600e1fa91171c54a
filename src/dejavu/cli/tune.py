"""`dejavu tune`: measure how each kernel is best cut on this GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from dejavu.cli import options


def tune(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Local folder, .gguf file or Hub id."),
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--shape", help="In place of MODEL: a named shape, e.g. opt-6.7b.")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Of the weights: fp16, bf16 or fp32.")
    ] = "fp16",
    batches: Annotated[
        str, typer.Option("--batches", help="Rows of the steps to tune for; above 1 share one cut.")
    ] = "1,8",
    device: Annotated[str, typer.Option("--device", help="cuda or cuda:N.")] = "cuda",
    json_file: options.Json = None,
) -> None:
    """Measure this GPU's kernel configurations for a model's shapes, once; later runs use them.

    Each kernel's choice is kept as soon as it is measured: Ctrl-C loses nothing but the kernel at
    hand. No weights are read.

    Examples:

      dejavu tune --shape opt-6.7b

      dejavu tune facebook/opt-1.3b --batches 1
    """
    import torch

    from dejavu.cli.output import console, progress, quiet, write_json
    from dejavu.cli.sources import model_shape, numbers
    from dejavu.errors import InputError
    from dejavu.kernels.device import resolve_device
    from dejavu.kernels.matrix import WEIGHT_DTYPES

    config = model_shape(model, shape)
    target = resolve_device(device)
    if target.type != "cuda":
        raise InputError("--device cpu: its kernels have nothing to tune; use --device cuda")
    if dtype not in ("fp16", "bf16", "fp32"):
        raise InputError(f"--dtype {dtype}: GPU kernels take fp16, bf16 or fp32")
    rows = [int(n) for n in numbers("--batches", batches)]
    if not rows or not all(1 <= n <= 16 for n in rows):
        raise InputError(f"--batches {batches}: numbers from 1 to 16 are needed")

    from dejavu.kernels.gpu.tune import Shape, trials_of, tune, write_table
    from dejavu.kernels.gpu.tuning import Config, user_path

    name = torch.cuda.get_device_name(target)
    path = user_path(name)
    asked = Shape.of(config)
    total = sum(trials_of(asked) for _ in rows)
    found: dict[str, tuple[Config, float]] = {}
    interrupted = False
    with progress("tuning") as update:

        def keep(key: str, chosen: Config, microseconds: float) -> None:
            found[key] = chosen, microseconds
            write_table(path, name, {key: chosen})
            update(len(found), max(total, len(found)), key)

        try:
            for batch in rows:
                tune(asked, target, WEIGHT_DTYPES[dtype], batch=batch, progress=keep)
        except KeyboardInterrupt:
            interrupted = True
    if not quiet(json_file):
        for key, (chosen, microseconds) in found.items():
            console().print(f"{key}: {microseconds:.1f} us with {tuple(chosen)}", highlight=False)
        print(f"{path}: {len(found)} kernels{', interrupted' if interrupted else ''}")
    write_json(
        {
            "device": name,
            "table": str(path),
            "interrupted": interrupted,
            "kernels": {
                key: {"config": chosen._asdict(), "microseconds": microseconds}
                for key, (chosen, microseconds) in found.items()
            },
        },
        json_file,
    )
    if interrupted:
        raise typer.Exit(130)
