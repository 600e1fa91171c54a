"""`dejavu quantize`: write an int8 checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dejavu.cli import destination, options


def quantize(
    model: options.Model,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FOLDER", callback=destination.folder, help="Folder to write."
        ),
    ],
    json_file: options.Json = None,
) -> None:
    """Store a model's matrices as int8 with one scale a row; a quarter of fp32, half of bf16.

    The folder appears when it is complete. Plans made for the original fit the int8 copy.

    Example:

      dejavu quantize facebook/opt-1.3b --out opt-1.3b-int8
    """
    from dejavu.cli.output import progress, write_json
    from dejavu.weights.quantize import quantize_checkpoint

    with progress("quantizing") as update:
        quantize_checkpoint(model, out, progress=update)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    if json_file is None or str(json_file) != "-":
        print(f"{out}: {size / 1e6:.1f} MB")
    write_json({"model": model, "out": str(out), "bytes": size}, json_file)
