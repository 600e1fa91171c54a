"""`dejavu plan`: look at plans and move them to and from the Hub."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dejavu.cli import options
from dejavu.cli.group import Group
from dejavu.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from dejavu.predictor.plan import Plan

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Look at sparsity plans, make levels of them, push and pull them.\n\n"
    "Examples:\n\n"
    "  dejavu plan show relu-30m\n\n"
    "  dejavu plan level relu-30m relu-30m --name mine --max-loss 2% --out my-plan",
)

_PlanArgument = Annotated[
    str, typer.Argument(metavar="PLAN", help="Folder, Hub id, or relu-30m (embedded).")
]


@app.command()
def show(plan: _PlanArgument, json_file: options.Json = None) -> None:
    """Print what a plan does, layer by layer, and what it was measured to cost.

    Example:

      dejavu plan show relu-30m
    """
    from dataclasses import asdict

    from dejavu.cli.output import console, quiet, write_json
    from dejavu.predictor.plan import load_plan

    loaded = load_plan(plan)
    if not quiet(json_file):
        base = loaded.base
        out = console()
        out.print(
            f"plan for [bold]{base.name}[/bold] ({base.model_type}, {base.dtype}, "
            f"identity {base.identity[:12]})"
        )
        out.print(levels_table(loaded))
        for name in loaded.levels:
            out.print(_layers_table(loaded, name))
    write_json(
        {
            "base_model": asdict(loaded.base),
            "default_level": loaded.default_level,
            "levels": {name: asdict(level) for name, level in loaded.levels.items()},
            "calibration": loaded.calibration,
            "report": loaded.report,
        },
        json_file,
    )


@app.command()
def level(
    model: options.Model,
    plan: _PlanArgument,
    name: Annotated[
        str, typer.Option("--name", help="Of the level; an existing one is made anew.")
    ],
    max_loss: Annotated[str, typer.Option("--max-loss", help="Perplexity that it may cost.")],
    out: options.OutPlan,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", exists=True, dir_okay=False, help="To try it on: .txt, .jsonl, .xz."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Tokens that each trial reads, at most.")
    ] = 16_384,
    default: Annotated[
        bool, typer.Option("--default", help="Let it be what runs where no level is asked for.")
    ] = False,
    threads: options.Threads = None,
    json_file: options.Json = None,
) -> None:
    """Add a level for another loss to a plan; nothing is trained.

    Thresholds are tried on text until the loss is kept, best on text that the plan was not made
    from. Default: the embedded calibration text. Then all levels are timed on this machine.

    Example:

      dejavu plan level relu-30m relu-30m --name careful --max-loss 0.5% --text new.txt --out plan
    """
    from dataclasses import asdict, replace

    from dejavu.bench.level_speed import timed
    from dejavu.cli.output import console, quiet, stages, write_json
    from dejavu.cli.sources import load, share
    from dejavu.embedded import CALIBRATION_TEXT, HELDOUT_TEXT
    from dejavu.eval.relevel import add_level
    from dejavu.eval.text import read_text
    from dejavu.predictor.plan import load_plan
    from dejavu.weights.tokenizer import load_tokenizer

    found = load_plan(plan)
    loaded = load(model, found.base.dtype, threads)
    context = loaded.model.config.context_length
    tried_on = read_text(
        text or CALIBRATION_TEXT,
        load_tokenizer(loaded.checkpoint),
        context,
        window=min(context, 512),
        max_tokens=tokens,
    )
    with stages() as update:
        loss = share("--max-loss", max_loss)
        made = add_level(loaded, found, name, loss, tried_on, update)
        made = timed(loaded, made, HELDOUT_TEXT, threads=threads, progress=update)
    if default:
        made = replace(made, default_level=name)
    made.save(out)
    if not quiet(json_file):
        console().print(levels_table(made))
        print(out)
    write_json({"level": name, **asdict(made.level(name))}, json_file)


@app.command()
def count(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Its config is read, no weights.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--shape", help="A named shape, as of `dejavu bench`.")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Of the weights: fp32, bf16, fp16 or int8.")
    ] = "int8",
    bits: Annotated[int, typer.Option("--bits", help="Of the predictors: 4, or 8 on a GPU.")] = 4,
    json_file: options.Json = None,
) -> None:
    """Count what predictors of the default recipe would read, against the whole model.

    Every layer at the largest rank that `prepare` would try; nothing is loaded or trained.

    Example:

      dejavu plan count --shape opt-6.7b
    """
    from dataclasses import asdict

    from dejavu.cli.output import quiet, write_json
    from dejavu.cli.sources import model_shape
    from dejavu.kernels.matrix import WEIGHT_DTYPES
    from dejavu.predictor.counting import predictor_share
    from dejavu.predictor.options import PrepareOptions
    from dejavu.registry import unknown

    if dtype not in WEIGHT_DTYPES:
        raise unknown("dtype", dtype, WEIGHT_DTYPES, InputError)
    found = predictor_share(model_shape(model, shape), PrepareOptions(bits=bits), dtype)
    if not quiet(json_file):
        print(
            f"predictors of rank {found.ranks[-1]} in {bits} bits: "
            f"{found.predictor_bytes / 1e6:.1f} MB, {found.share:.2%} of the "
            f"{found.dense_bytes / 1e6:.0f} MB that a dense step reads in {dtype}"
        )
    what = {"model": model, "shape": shape, "dtype": dtype, "bits": bits}
    write_json(what | asdict(found) | {"share": found.share}, json_file)


@app.command()
def push(
    plan: Annotated[Path, typer.Argument(metavar="FOLDER", help="A plan's folder.")],
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Repository on the Hub.")],
    private: Annotated[bool, typer.Option("--private", help="Create it as private.")] = False,
) -> None:
    """Upload a plan to the Hugging Face Hub.

    Example:

      dejavu plan push ./opt-1.3b-plan my-org/opt-1.3b-plan
    """
    from dejavu.predictor.hub import push_plan

    print(push_plan(plan, repo, private=private))


@app.command()
def pull(
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Repository on the Hub.")],
    out: options.OutPlan,
) -> None:
    """Download a plan from the Hugging Face Hub into a folder.

    Example:

      dejavu plan pull my-org/opt-1.3b-plan --out opt-1.3b-plan
    """
    from dejavu.predictor.hub import FILES, pull_plan
    from dejavu.predictor.plan import load_plan
    from dejavu.weights.files import atomic_folder

    folder = pull_plan(repo)
    load_plan(folder)
    with atomic_folder(out) as target:
        for name in FILES:
            shutil.copyfile(folder / name, target / name)
    print(out)


def levels_table(plan: Plan) -> Table:
    """One row a level: what it costs and what it saves."""
    from rich.table import Table

    table = Table(title="levels", caption=f"default: {plan.default_level}")
    columns: list[tuple[str, str, Callable[[Any], str]]] = [
        ("level", "level", str),
        ("loss\nallowed", "max_loss", _percent),
        ("perplexity\n/ dense", "perplexity_ratio", "{:.4f}".format),
        ("neurons", "neuron_density", _percent),
        ("heads", "head_density", _percent),
        ("inputs", "input_density", _percent),
        ("bytes", "weight_bytes", _percent),
        ("tokens/s", "tokens_per_second", "{:.0f}".format),
    ]
    known: list[dict[str, Any]] = [
        {"level": name, "max_loss": level.max_loss} | level.report
        for name, level in plan.levels.items()
    ]
    columns = [c for c in columns if any(level.get(c[1]) is not None for level in known)]
    for title, key, _ in columns:
        table.add_column(title, justify="left" if key == "level" else "right")
    for level in known:
        table.add_row(
            *("-" if level.get(key) is None else form(level[key]) for _, key, form in columns)
        )
    return table


def _layers_table(plan: Plan, name: str) -> Table:
    from rich.table import Table

    from dejavu.sparsity.policy import Site

    level = plan.levels[name]
    table = Table(title=f"level {name}")
    if level.inputs:
        sites = list(level.inputs[0])
        for title in ("layer", *sites):
            table.add_column(title, justify="right")
        for layer, thresholds in enumerate(level.inputs):
            values = (thresholds.get(site, 0.0) for site in sites)
            table.add_row(str(layer), *(f"{value:.4g}" if value else "dense" for value in values))
        return table
    for title in ("layer", "heads", "neurons"):
        table.add_column(title, justify="right" if title == "layer" else "left")
    for layer in range(plan.base.num_hidden_layers):
        cells = []
        for site in (Site.HEADS, Site.NEURONS):
            policy = level.policies(site)[layer]
            text: str = policy.kind
            if policy.kind == "predictor":
                source = plan.predictors[site, layer]
                text = f"rank {source.predictor.rank}, threshold {policy.threshold:.3f}"
                if source.distance:
                    text += f", {source.distance:g} block ahead"
            cells.append(text)
        table.add_row(str(layer), *cells)
    return table


def _percent(value: float) -> str:
    return f"{value:.1%}"
