"""What runs inside a peer's process: another program on a Hugging Face checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import signature
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from dejavu.errors import BackendError

Prompt = Sequence[int]


class Turn(NamedTuple):
    """Times of all steps after the prompt, skipped ones included, and the first sequence's tokens.

    seconds: of each step. token_ids: sampled, from the first token after the prompt on.
    """

    seconds: list[float]
    token_ids: list[int]


class Program(Protocol):
    """A peer with a model loaded."""

    label: str

    def decode(self, prompts: Sequence[Prompt], steps: int, fed: Sequence[Prompt] | None) -> Turn:
        """`steps` greedy steps after the prompts; see `Arm.decode`."""
        ...


class Transformers:
    """Hugging Face transformers without compilation: the loop of `generate` over its dynamic cache,
    without what `generate` adds around it."""

    label = "transformers eager"

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=kind, local_files_only=True
        )
        self._model.eval()  # type: ignore[no-untyped-call]
        for parameter in self._model.parameters():
            # Out of the mapped file, whose pages are small: ours lie in ordinary memory too.
            parameter.data = parameter.data.clone()
        # Its name has changed within a major version.
        known = signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"

    def decode(self, prompts: Sequence[Prompt], steps: int, fed: Sequence[Prompt] | None) -> Turn:
        """See `Program.decode`."""
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        seconds, sampled = [], []
        with torch.inference_mode():
            token = self._next(torch.tensor(prompts), cache)
            for done in range(steps):
                sampled.append(int(token[0]))
                if fed is not None:
                    token = torch.tensor([[ids[done]] for ids in fed])
                started = perf_counter()
                token = self._next(token, cache)
                seconds.append(perf_counter() - started)
        return Turn(seconds, [*sampled, int(token[0])])

    def _next(self, ids: Any, cache: Any) -> Any:
        """int64 `[B, 1]`: the likeliest tokens after ids `[B, T]`."""
        logits = self._model(ids, use_cache=True, **{self._cache_argument: cache}).logits
        return logits[:, -1].argmax(dim=-1, keepdim=True)


class CTranslate2:
    """CTranslate2's generator, timed through its callback for each token.

    The first callback comes after the prompt and its first token, so the differences between
    callbacks are decoding alone. It reads the tokens that it has sampled, whatever it is fed; dense
    as it is, that does not change its time.
    """

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        ctranslate2: Any = import_module("ctranslate2")
        kind = {"int8": "int8", "fp32": "float32", "bf16": "bfloat16"}[dtype]
        if kind not in ctranslate2.get_supported_compute_types("cpu"):
            raise BackendError(f"CTranslate2 does not compute in {kind} on this CPU")
        with tempfile.TemporaryDirectory(prefix="converted-", dir=folder) as converted:
            _convert(folder, converted, kind)
            self._generator = ctranslate2.Generator(
                converted, device="cpu", compute_type=kind, intra_threads=threads
            )
        self.label = f"CTranslate2 {self._generator.compute_type}"

    def decode(self, prompts: Sequence[Prompt], steps: int, fed: Sequence[Prompt] | None) -> Turn:
        """See `Program.decode`."""
        times: list[float] = []
        sampled: list[int] = []

        def note(step: Any) -> bool:
            if step.batch_id == 0:
                times.append(perf_counter())
                sampled.append(int(step.token_id))
            return False  # go on

        self._generator.generate_batch(
            [[str(token) for token in prompt] for prompt in prompts],
            max_length=1 + steps,
            min_length=1 + steps,
            end_token=[],
            beam_size=1,
            include_prompt_in_result=False,
            callback=note,
        )
        if len(times) != 1 + steps:
            raise BackendError(f"CTranslate2 made {len(times)} tokens, asked for were {1 + steps}")
        return Turn([b - a for a, b in pairwise(times)], sampled)


PROGRAMS: dict[str, Callable[[Path, str, int], Program]] = {
    "transformers": Transformers,
    "ctranslate2": CTranslate2,
}


def _convert(folder: Path, converted: str, kind: str) -> None:
    """Write a CTranslate2 model whose tokens are named by their ids."""
    from ctranslate2.converters import TransformersConverter

    class Numbered(TransformersConverter):  # type: ignore[misc]
        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            self._loaded = super().load_model(*args, **kwargs)
            return self._loaded

        def load_tokenizer(self, *_: Any, **__: Any) -> _Numbers:
            return _Numbers(self._loaded.config.vocab_size)

    try:
        Numbered(str(folder)).convert(converted, quantization=kind, force=True)
    except (ValueError, NotImplementedError, KeyError, AttributeError) as error:
        raise BackendError(f"CTranslate2 does not convert this model: {error}") from error


class _Numbers:
    """A tokenizer whose tokens are the ids themselves, so that a model needs none of its own."""

    bos_token = eos_token = unk_token = "0"

    def __init__(self, size: int) -> None:
        self._size = size

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self._size)}
