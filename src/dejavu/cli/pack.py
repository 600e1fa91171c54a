"""`dejavu pack`: bundle a model's neurons into one file, to be read from flash as needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dejavu.cli import destination, options


def pack(
    model: options.Model,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FILE", callback=destination.file, help="File to write."
        ),
    ],
    plan: options.Plan = None,
    dtype: Annotated[
        str,
        typer.Option("--dtype", help="Weights as auto (the model's own), fp32, bf16 or int8."),
    ] = "auto",
    block: Annotated[
        int,
        typer.Option("--block", help="Logical block of the disk in bytes: 512 or 4096."),
    ] = 512,
    json_file: options.Json = None,
) -> None:
    """Store the up row, gate row and down column of every neuron side by side in one file.

    A neuron then costs one read, and a model whose MLPs do not fit into memory can run with those
    that a token needs. Every block has a checksum. The file appears when it is complete; Ctrl-C
    keeps what is done in FILE.partial, and the same command continues there. With a plan it is
    checked that both belong to the same model.

    Examples:

      dejavu pack relu-30m --out relu-30m.flash

      dejavu pack facebook/opt-1.3b --plan opt-1.3b-plan --dtype int8 --out opt-1.3b.flash
    """
    from dejavu.cli.output import progress, quiet, write_json
    from dejavu.errors import PlanError
    from dejavu.load import CheckpointNeurons
    from dejavu.weights.bundle import open_bundle, write_bundle

    source = CheckpointNeurons(model, dtype=dtype)
    if plan is not None:
        from dejavu.predictor.plan import load_plan

        base = load_plan(plan).base
        if base.identity != source.identity():
            raise PlanError(
                f"plan {plan} was made for {base.name} (identity {base.identity[:12]}); {model} is "
                f"another model (identity {source.identity()[:12]})"
            )
    with progress("packing layers") as update:
        write_bundle(out, source, block=block, progress=update)
    bundle = open_bundle(out)
    size = bundle.description.size
    if not quiet(json_file):
        print(
            f"{out}: {bundle.layers} layers, {sum(bundle.neurons)} neurons of "
            f"{bundle.record_bytes} bytes in {bundle.dtype}, {size / 1e6:.1f} MB; "
            f"{bundle.resident_bytes / 1e6:.1f} MB of tables stay in memory"
        )
    write_json(
        {
            "model": model,
            "plan": plan,
            "out": str(out),
            "identity": bundle.identity,
            "dtype": bundle.dtype,
            "layers": bundle.layers,
            "neurons": list(bundle.neurons),
            "record_bytes": bundle.record_bytes,
            "block_bytes": bundle.block_bytes,
            "mlp_bytes": bundle.mlp_bytes,
            "resident_bytes": bundle.resident_bytes,
            "bytes": size,
        },
        json_file,
    )
