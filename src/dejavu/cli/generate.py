"""`dejavu generate`: continue prompts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dejavu.cli import options

if TYPE_CHECKING:
    from dejavu import Completion


def generate(
    model: options.Model,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="Text to continue; repeatable. - reads standard input."),
    ] = None,
    plan: options.Plan = None,
    level: options.Level = None,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    memory_limit: options.MemoryLimit = None,
    bundle: options.Bundle = None,
    lazy_kv: options.LazyKV = False,
    whole_layers: options.WholeLayers = True,
    json_file: options.Json = None,
) -> None:
    """Continue one prompt (streamed) or several at once.

    Examples:

      dejavu generate relu-30m --prompt "Once upon a time" --plan relu-30m

      dejavu generate facebook/opt-1.3b --prompt "The capital of France" -n 20 --dtype int8

      dejavu generate ./my-llama --prompt "Hello" --prompt "Bonjour" --json out.json
    """
    from dejavu import LLM
    from dejavu.cli.output import note_full_context, write_json
    from dejavu.errors import InputError

    if not prompt:
        raise InputError("no prompt: give --prompt TEXT (or --prompt - to read standard input)")
    prompts = [sys.stdin.read() if text == "-" else text for text in prompt]
    params = options.sampling_params(
        max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop
    )
    llm = LLM(
        model,
        plan=plan,
        level=level,
        device=device,
        dtype=dtype,
        threads=threads,
        memory_limit=memory_limit,
        bundle=bundle,
        lazy_kv=lazy_kv,
        whole_layers=whole_layers,
    )
    quiet = json_file is not None and str(json_file) == "-"
    completions: list[Completion] = []
    if len(prompts) == 1 and json_file is None:
        for chunk in llm.stream(prompts[0], params):
            print(chunk.text, end="", flush=True)
            completions = [chunk.completion] if chunk.completion is not None else []
        print()
        note_full_context(completions, max_tokens, llm.engine.max_model_len)
        return
    completions = llm.generate(prompts, params)
    if not quiet:
        for text, completion in zip(prompts, completions, strict=True):
            print(f"{text}{completion.text}\n" if len(prompts) > 1 else completion.text)
    note_full_context(completions, max_tokens, llm.engine.max_model_len)
    write_json(
        {
            "model": model,
            "plan": plan,
            "whole_layers": llm.engine.whole_share(),
            "completions": [c.to_json() for c in completions],
        },
        json_file,
    )
