"""`dejavu measure`: how sparse a model is, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dejavu.cli import destination, options


def measure(
    model: options.Model,
    text: options.Texts = None,
    other_text: Annotated[
        Path | None,
        typer.Option(
            "--other-text",
            exists=True,
            dir_okay=False,
            help="Text on which static pruning chooses. Default: the embedded calibration text.",
        ),
    ] = None,
    windows: Annotated[int, typer.Option("--windows", min=1, help="Windows of text.")] = 4,
    window: Annotated[
        int | None, typer.Option("--window", min=2, help="Tokens a window; default: context, 512.")
    ] = None,
    densities: Annotated[
        str, typer.Option("--densities", help="Shares of neurons and heads to keep, in turn.")
    ] = "0.8,0.5,0.3,0.2,0.1,0.05",
    plots: Annotated[
        Path | None,
        typer.Option(
            "--plots",
            metavar="FOLDER",
            callback=destination.folder_of_files,
            help="Write PNG plots here.",
        ),
    ] = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    json_file: options.Json = None,
) -> None:
    """Measure contextual sparsity: run a model in full, then again with only what mattered.

    Reports active neurons and heads by layer, the perplexity of keeping only the top share of them
    (by token, and statically for all tokens), overlap of active sets, and how fast the residual
    stream changes. The same input gives the same JSON.

    Examples:

      dejavu measure relu-30m --windows 4 --plots out/

      dejavu measure facebook/opt-1.3b --text wiki.txt --densities 0.5,0.2,0.1 --json sparsity.json
    """
    from importlib.util import find_spec

    from dejavu.cli.output import console, progress, quiet, write_json
    from dejavu.cli.sources import load, numbers, text_windows, texts
    from dejavu.embedded import CALIBRATION_TEXT, HELDOUT_TEXT
    from dejavu.errors import BackendError
    from dejavu.sparsity.measure import measure as run
    from dejavu.sparsity.measure_tables import tables
    from dejavu.sparsity.measurement import MeasureOptions

    asked = MeasureOptions(densities=numbers("--densities", densities))
    if plots is not None and find_spec("matplotlib") is None:
        raise BackendError("--plots needs matplotlib: pip install 'dejavu-llm[plots]'")
    loaded = load(model, dtype, threads, device, to_read=True)
    tested = text_windows(loaded, texts(text, HELDOUT_TEXT), window, windows)
    other = text_windows(loaded, [other_text or CALIBRATION_TEXT], window, windows)
    with progress("forwards") as update:
        found = run(loaded.model, tested, other, asked, update)
    if not quiet(json_file):
        for table in tables(found):
            console().print(table)
    write_json({"model": model, "dtype": loaded.dtype} | found.to_json(), json_file)
    if plots is not None:
        from dejavu.sparsity.measure_plots import save_plots

        for path in save_plots(found, plots):
            console(stderr=True).print(f"wrote {path}")
