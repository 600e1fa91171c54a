"""`dejavu tune`: measure how each kernel is best cut on this GPU, and what an MLP costs."""

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
    only: Annotated[
        str, typer.Option("--only", help="Kernels with this in their key, e.g. up-listed/n.")
    ] = "",
    device: Annotated[str, typer.Option("--device", help="cuda or cuda:N.")] = "cuda",
    json_file: options.Json = None,
) -> None:
    """Measure this GPU's kernel configurations for a model's shapes, once; later runs use them.

    Then the costs of an MLP, by rows and by the share of its neurons that is selected: from a
    measured share on, steps of a plan read a layer whole. They hold for this GPU, driver and
    versions of PyTorch and Triton.

    Each figure is kept as soon as it is measured: Ctrl-C loses nothing but the one at hand. No
    weights are read.

    Examples:

      dejavu tune --shape opt-6.7b

      dejavu tune facebook/opt-1.3b --batches 1
    """
    from dataclasses import asdict

    import torch

    from dejavu.bench.forced import gpu_rank
    from dejavu.cli.output import console, progress, quiet, write_json
    from dejavu.cli.sources import model_shape, whole_numbers
    from dejavu.errors import BackendError, InputError
    from dejavu.kernels.device import resolve_device
    from dejavu.kernels.matrix import WEIGHT_DTYPES

    config = model_shape(model, shape)
    if device == "cpu":
        raise InputError("--device cpu: only a GPU's kernels are tuned; on a CPU nothing is to do")
    if not torch.cuda.is_available():
        raise BackendError(
            "PyTorch finds no GPU here, and only a GPU's kernels are tuned: on a CPU there is "
            "nothing to do"
        )
    target = resolve_device(device)
    if dtype not in ("fp16", "bf16", "fp32"):
        raise InputError(f"--dtype {dtype}: GPU kernels take fp16, bf16 or fp32")
    rows = whole_numbers("--batches", batches)
    if max(rows) > 16:
        raise InputError(f"--batches {batches}: numbers from 1 to 16 are needed")

    from dejavu.kernels.gpu.costs import BUCKETS, MLPCost, Platform, costs_path, write_costs
    from dejavu.kernels.gpu.measure_costs import measure_costs
    from dejavu.kernels.gpu.ops import TritonOps
    from dejavu.kernels.gpu.tune import Shape, trials_of, tune, write_table
    from dejavu.kernels.gpu.tuning import Config, user_path

    name = torch.cuda.get_device_name(target)
    path = user_path(name)
    asked = Shape.of(config)
    total = sum(trials_of(asked) for _ in rows)
    found: dict[str, tuple[Config, float]] = {}
    platform, prices = Platform.of(target), costs_path(name)
    costs: dict[str, MLPCost] = {}
    interrupted = False
    with progress("tuning") as update:

        def keep(key: str, chosen: Config, microseconds: float) -> None:
            found[key] = chosen, microseconds
            write_table(path, name, {key: chosen})
            update(len(found), max(total, len(found)), key)

        def keep_cost(key: str, cost: MLPCost) -> None:
            costs[key] = cost
            write_costs(prices, platform, {key: cost})
            update(len(costs), len(BUCKETS), key)

        try:
            for batch in rows:
                tune(asked, target, WEIGHT_DTYPES[dtype], batch=batch, only=only, progress=keep)
            ops = TritonOps(target, WEIGHT_DTYPES[dtype])
            rank = gpu_rank(asked.hidden_size)
            measure_costs(asked, ops, WEIGHT_DTYPES[dtype], rank=rank, progress=keep_cost)
        except KeyboardInterrupt:
            interrupted = True
    if not quiet(json_file):
        for key, (chosen, microseconds) in found.items():
            console().print(f"{key}: {microseconds:.1f} us with {tuple(chosen)}", highlight=False)
        for key, cost in costs.items():
            listed = ", ".join(f"{share:.0%} {time:.0f}" for share, time in cost.listed)
            console().print(
                f"{key}: whole {cost.whole:.0f} us; listed {listed}; choosing "
                f"{cost.choosing:.0f}; whole is cheaper from "
                f"{cost.limit:.0%} on",
                highlight=False,
            )
        stopped = ", interrupted" if interrupted else ""
        print(f"{path}: {len(found)} kernels; {prices}: {len(costs)} costs{stopped}")
    write_json(
        {
            "device": name,
            "table": str(path),
            "interrupted": interrupted,
            "platform": asdict(platform),
            "costs": {key: cost._asdict() | {"limit": cost.limit} for key, cost in costs.items()},
            "kernels": {
                key: {"config": chosen._asdict(), "microseconds": microseconds}
                for key, (chosen, microseconds) in found.items()
            },
        },
        json_file,
    )
    if interrupted:
        raise typer.Exit(130)
