"""The commands, each in a module of its own that imports heavy things only when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from dejavu import __version__
from dejavu.cli import (
    batch,
    bench,
    chat,
    demo,
    evaluate,
    generate,
    measure,
    pack,
    plan,
    prepare,
    quantize,
    serve,
    tune,
    verify,
)
from dejavu.cli.group import Group

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Decode language models with only the heads and neurons that each token needs.\n\n"
    "MODEL is a local folder, a .gguf file, a Hugging Face Hub id, or [bold]relu-30m[/bold], "
    "the model inside this package.",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"dejavu {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("measure")(measure.measure)
app.command("prepare")(prepare.prepare)
app.add_typer(plan.app, name="plan")
app.command("quantize")(quantize.quantize)
app.command("pack")(pack.pack)
app.command("verify")(verify.verify)
app.command("serve")(serve.serve)
app.command("batch")(batch.batch)
app.command("eval")(evaluate.evaluate)
app.command("bench")(bench.bench)
app.command("tune")(tune.tune)
