"""Fields of OpenAI's schema that this server does not implement, with what asks for nothing.

A request may carry them as null or with one of these values; any other value is refused, so that no
client believes in an effect that is not there.
"""

from __future__ import annotations

from typing import Any

CHAT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),  # says how tools are called, and there are none
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
TEXT: dict[str, tuple[Any, ...]] = {"best_of": (1,), "suffix": ("",)}
