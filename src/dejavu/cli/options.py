"""Arguments and options that several commands share, with one wording each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dejavu.cli import destination

if TYPE_CHECKING:
    from dejavu.engine.sampling import SamplingParams

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Local folder, .gguf file, Hub id, or relu-30m (embedded)."
    ),
]
Plan = Annotated[
    str | None,
    typer.Option("--plan", "-p", metavar="PLAN", help="Sparsity plan: folder, Hub id or relu-30m."),
]
Level = Annotated[
    str | None,
    typer.Option(
        "--level",
        help="Level of the plan: exact, careful, balanced, fast, ...; default: the plan's own.",
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME[:OPTION=VALUE,...]",
        help="A policy that needs no plan, e.g. oracle, threshold:value=0.1, topk:keep=0.1, signs.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="Weights as auto (the file's own), fp32, bf16, int8 (CPU only) or fp16 (GPU only).",
    ),
]
Device = Annotated[
    str, typer.Option("--device", help="Where the model is and computes: cpu, cuda or cuda:N.")
]
LazyKV = Annotated[
    bool,
    typer.Option(
        "--lazy-kv",
        help="GPU: keys and values of unused heads are computed when the head is next used.",
    ),
]
WholeLayers = Annotated[
    bool,
    typer.Option(
        "--whole-layers/--no-whole-layers",
        help="GPU: compute MLPs whole where a plan's choice would be slower, mostly of several "
        "prompts at once. Off, a text depends on the plan alone.",
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", "-t", min=1, help="Threads; default: all cores.")
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="Of the whole process, e.g. 4GB: neurons come from --bundle as they are needed.",
    ),
]
Bundle = Annotated[
    str | None,
    typer.Option(
        "--bundle",
        metavar="FILE",
        help="What dejavu pack made of this model; default: the *.flash file of it beside the plan "
        "or model.",
    ),
]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        callback=destination.file,
        help="Write the result as JSON; - prints it.",
    ),
]
OutPlan = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        metavar="PLAN",
        callback=destination.plan_folder,
        help="Folder to write, a new one or an older plan.",
    ),
]
Texts = Annotated[
    list[Path] | None,
    typer.Option(
        "--text",
        exists=True,
        dir_okay=False,
        help="Text file (.txt or .xz; documents separated by <|endoftext|> lines); repeatable. "
        "Default: the embedded sample.",
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of random choices.")]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", "-n", min=1, help="New tokens at most.")
]
Temperature = Annotated[float, typer.Option("--temperature", help="0: always the likeliest token.")]
TopK = Annotated[int, typer.Option("--top-k", help="Sample among the k likeliest; 0: all.")]
TopP = Annotated[
    float, typer.Option("--top-p", help="Sample within this probability mass; 1: all.")
]
MinP = Annotated[float, typer.Option("--min-p", help="Drop tokens under this share of the best.")]
RepetitionPenalty = Annotated[
    float, typer.Option("--repetition-penalty", help="Above 1 discourages repeating; 1: off.")
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Stop before this string; repeatable.")
]


def refuse_without_effect(given: Mapping[str, object], why: str) -> None:
    """Raises InputError naming the options that were given (are not None) and would do nothing."""
    from dejavu.errors import InputError

    found = [name for name, value in given.items() if value is not None]
    if found:
        raise InputError(f"{', '.join(found)}: {why}")


def sampling_params(
    max_tokens: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    seed: int | None,
    stop: list[str] | None,
) -> SamplingParams:
    """The sampling options as the engine takes them; it checks them and names a bad one.

    Raises InputError for an empty stop string too: of an API's client it is a form left empty, of
    somebody who typed it a mistake.
    """
    from dejavu.engine.sampling import SamplingParams
    from dejavu.errors import InputError

    if stop and "" in stop:
        raise InputError("--stop '': an empty string stops nothing; leave it out")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or None,
    )
