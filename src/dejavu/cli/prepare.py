"""`dejavu prepare`: from a checkpoint to a sparsity plan."""

from __future__ import annotations

from typing import Annotated

import typer

from dejavu.cli import options


def prepare(
    model: options.Model,
    out: options.OutPlan,
    text: options.Texts = None,
    max_loss: Annotated[
        str | None,
        typer.Option(
            "--max-loss",
            help="Perplexity that the level balanced may cost, which is the plan's default then. "
            "Without: 1%, and the default is careful, at half of it.",
        ),
    ] = None,
    fast_loss: Annotated[
        str | None,
        typer.Option(
            "--fast-loss",
            help="Perplexity that the level fast may cost; default: 3%, or --max-loss if larger.",
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Tokens to train predictors on, at most.")
    ] = None,
    predictor: Annotated[
        str, typer.Option("--predictor", help="svd, or paper for the baseline of Deja Vu.")
    ] = "svd",
    ranks: Annotated[
        str | None, typer.Option("--ranks", help="Ranks to try, e.g. 32,64; default: by shape.")
    ] = None,
    heads: Annotated[
        bool, typer.Option("--heads/--no-heads", help="Look for attention heads to skip.")
    ] = True,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    seed: Annotated[int, typer.Option("--seed", help="Same seed and threads, same plan.")] = 0,
    json_file: options.Json = None,
) -> None:
    """Train and calibrate predictors on text, and choose what every layer may skip for a loss.

    Writes the levels exact, careful, balanced and fast with a report. Ctrl-C keeps what is done in
    PLAN.partial; the same command continues there.

    Examples:

      dejavu prepare relu-30m --out my-plan --text books.txt

      dejavu prepare facebook/opt-1.3b --text c4.txt --out opt-1.3b-plan --max-loss 0.5%

      dejavu prepare ./opt-1.3b-int8 --text c4.txt --out plan --tokens 500000 --no-heads
    """
    from dataclasses import asdict, replace

    from dejavu.bench.level_speed import timed
    from dejavu.cli.output import console, quiet, stages, write_json
    from dejavu.cli.plan import levels_table
    from dejavu.cli.sources import load, share, texts, whole_numbers
    from dejavu.embedded import CALIBRATION_TEXT, HELDOUT_TEXT
    from dejavu.errors import InputError
    from dejavu.predictor.options import BALANCED, CAREFUL, PrepareOptions
    from dejavu.predictor.prepare import prepare as run
    from dejavu.weights.tokenizer import load_tokenizer

    typed = "1%" if max_loss is None else max_loss
    balanced = share("--max-loss", typed)
    fast = (
        max(PrepareOptions.fast_loss, balanced)
        if fast_loss is None
        else share("--fast-loss", fast_loss)
    )
    if fast < balanced:
        raise InputError(
            f"--fast-loss {fast_loss} is below --max-loss {typed}: the level fast may lose more "
            "than balanced; give a larger --fast-loss"
        )
    asked = PrepareOptions(
        max_loss=balanced,
        default_level=CAREFUL if max_loss is None else BALANCED,
        fast_loss=fast,
        ranks=None if ranks is None else whole_numbers("--ranks", ranks),
        heads=heads,
        kind=predictor,
        seed=seed,
        threads=threads,
    )
    if tokens is not None:
        asked = replace(asked, tokens=tokens)
    loaded = load(model, dtype, threads, device, to_read=True)
    with stages() as update:
        plan = run(
            loaded,
            texts(text, CALIBRATION_TEXT),
            out,
            tokenizer=load_tokenizer(loaded.checkpoint),
            options=asked,
            name=model,
            progress=update,
        )
        if loaded.model.device.type == "cpu":  # elsewhere a model may not fit whole
            plan = timed(loaded, plan, HELDOUT_TEXT, threads=threads, progress=update)
            plan.save(out)
    if not quiet(json_file):
        console().print(levels_table(plan))
        print(out)
    write_json(
        {
            "base_model": asdict(plan.base),
            "levels": {name: asdict(level) for name, level in plan.levels.items()},
            "calibration": plan.calibration,
            "report": plan.report,
        },
        json_file,
    )
