"""`dejavu chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dejavu.cli import options

if TYPE_CHECKING:
    from dejavu import Completion


def chat(
    model: options.Model,
    plan: options.Plan = None,
    level: options.Level = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = 0.7,
    top_k: options.TopK = 0,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    memory_limit: options.MemoryLimit = None,
    bundle: options.Bundle = None,
    whole_layers: options.WholeLayers = True,
) -> None:
    """Talk to a model that has a chat template; an empty line or Ctrl-D ends.

    Ctrl-C stops an answer and keeps the conversation.

    Example:

      dejavu chat HuggingFaceTB/SmolLM2-135M-Instruct --system "You are terse."
    """
    from dejavu import LLM
    from dejavu.cli.output import note_full_context
    from dejavu.engine.codec import Codec
    from dejavu.errors import InputError
    from dejavu.weights.checkpoint import open_checkpoint
    from dejavu.weights.tokenizer import load_tokenizer

    if not Codec(load_tokenizer(open_checkpoint(model))).can_chat:  # before weights are read
        raise InputError(
            f"{model} has no chat template, so it cannot chat: give a model that was tuned for it, "
            "or let `dejavu generate` continue a text"
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
        whole_layers=whole_layers,
    )
    params = options.sampling_params(
        max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, None
    )
    messages = [{"role": "system", "content": system}] if system else []
    interactive = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            break
        if not line:
            break
        messages.append({"role": "user", "content": line})
        answer = ""
        completions: list[Completion] = []
        try:
            for chunk in llm.chat(messages, params, stream=True):
                answer += chunk.text
                print(chunk.text, end="", flush=True)
                completions = [chunk.completion] if chunk.completion is not None else []
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        print()
        note_full_context(completions, max_tokens, llm.engine.max_model_len)
        messages.append({"role": "assistant", "content": answer})
