"""`dejavu verify`: are these files still what was written?"""

from __future__ import annotations

from typing import Annotated

import typer

from dejavu.cli import options


def verify(
    model: options.Model,
    plan: Annotated[
        str | None,
        typer.Option("--plan", "-p", metavar="PLAN", help="Also check a plan, and that they fit."),
    ] = None,
    json_file: options.Json = None,
) -> None:
    """Read every weight: hashes where they are known, tensors that are not finite, a plan's fit.

    Known are the hashes of int8 models and plans made by dejavu, and of models in the Hub's cache.
    Of a file of `dejavu pack` every block is compared with its checksum. A plan knows the identity
    of the model it was made for, which changes with any bit of it. Exit code 1 names the damaged
    file or tensor.

    Example:

      dejavu verify ./opt-1.3b-int8 --plan ./opt-1.3b-plan
    """
    from dejavu.cli.output import quiet, write_json
    from dejavu.errors import PlanError
    from dejavu.weights.bundle import is_bundle, open_bundle
    from dejavu.weights.checkpoint import open_checkpoint

    unknown: list[str] = []
    if bundled := is_bundle(model):
        from dejavu.cli.output import progress

        bundle = open_bundle(model)
        with progress("reading blocks") as update:
            bundle.verify(update)
        identity = bundle.identity
    else:
        checkpoint = open_checkpoint(model)
        unknown = checkpoint.verify()
        identity = checkpoint.identity()
    if plan is not None:
        from dejavu.predictor.plan import load_plan

        base = load_plan(plan).base
        if base.identity != identity:
            raise PlanError(
                f"plan {plan} was made for {base.name} (identity {base.identity[:12]}); {model} is "
                f"another model, or not what it was (identity {identity[:12]})"
            )
    if not quiet(json_file):
        found = "every tensor is finite" + ("" if unknown else ", every file has its hash")
        if bundled:
            found = "every block has its checksum"
        print(f"{model}: {found}, identity {identity[:12]}")
        if unknown:
            print(f"no hash is known of {', '.join(unknown)}, so that is all that was checked")
        if plan is not None:
            print(f"plan {plan}: undamaged, made for this model")
    write_json(
        {"model": model, "identity": identity, "without_hash": unknown, "plan": plan}, json_file
    )
