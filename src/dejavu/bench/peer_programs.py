"""What runs inside a peer's process: another program on a Hugging Face checkpoint, or on random
weights in the shape of one."""

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
Source = Path | dict[str, Any]
"""A folder with a checkpoint, or a `config.json` for random weights."""


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

    def __init__(
        self, source: Source, dtype: str, threads: int | None, device: str = "cpu"
    ) -> None:
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        self._device = torch.device(device)
        self._model: Any = _load(source, kind, self._device)
        self._model.eval()
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
            token = self._next(torch.tensor(prompts, device=self._device), cache)
            sampled.append(int(token[0]))
            for done in range(steps):
                if fed is not None:
                    token = torch.tensor([[ids[done]] for ids in fed], device=self._device)
                started = perf_counter()
                token = self._next(token, cache)
                sampled.append(int(token[0]))  # waits for the device
                seconds.append(perf_counter() - started)
        return Turn(seconds, sampled)

    def _next(self, ids: Any, cache: Any) -> Any:
        """int64 `[B, 1]`: the likeliest tokens after ids `[B, T]`."""
        logits = self._model(ids, use_cache=True, **{self._cache_argument: cache}).logits
        return logits[:, -1].argmax(dim=-1, keepdim=True)


class Generate(Transformers):
    """`generate` as its users call it, timed through its streamer, which waits for every token.

    It reads the tokens that it has sampled, whatever it is fed; dense as it is, that does not
    change its time.
    """

    label = "transformers generate, eager"
    _cache: str | None = None  # its own default

    def decode(self, prompts: Sequence[Prompt], steps: int, fed: Sequence[Prompt] | None) -> Turn:
        """See `Program.decode`."""
        import torch

        clock = _Clock()
        defaults = self._model.generation_config
        defaults.eos_token_id, defaults.pad_token_id = None, 0  # so that no end token ends it
        ids = torch.tensor(prompts, device=self._device)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1 + steps,
            do_sample=False,
            cache_implementation=self._cache,
            streamer=clock,
        )
        if len(clock.times) != 2 + steps:
            made = len(clock.times) - 1
            raise BackendError(f"generate made {made} tokens, asked for were {1 + steps}")
        return Turn([b - a for a, b in pairwise(clock.times[1:])], clock.tokens[1:])


class Static(Generate):
    """`generate` over a static cache, for which it compiles the decoding forward by itself."""

    label = "transformers generate, static cache, compiled"
    _cache = "static"


class _Clock:
    """A streamer: the time of each token, of the prompt first, and the first sequence's tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []

    def put(self, ids: Any) -> None:
        self.tokens.append(int(ids.flatten()[0]))
        self.times.append(perf_counter())

    def end(self) -> None:
        pass


def _load(source: Source, dtype: Any, device: Any) -> Any:
    """A causal LM in eager transformers on a device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if isinstance(source, dict):
        config = AutoConfig.for_model(**source)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=True)
    for parameter in model.parameters():
        # Out of the mapped file, whose pages are small: ours lie in ordinary memory too.
        parameter.data = parameter.data.clone()
    return model.to(device)


class CTranslate2:
    """CTranslate2's generator, timed through its callback for each token.

    The first callback comes after the prompt and its first token, so the differences between
    callbacks are decoding alone. It reads the tokens that it has sampled, whatever it is fed; dense
    as it is, that does not change its time.
    """

    def __init__(
        self, source: Source, dtype: str, threads: int | None, device: str = "cpu"
    ) -> None:
        assert isinstance(source, Path)
        assert device == "cpu"
        ctranslate2: Any = import_module("ctranslate2")
        kind = {"int8": "int8", "fp32": "float32", "bf16": "bfloat16"}[dtype]
        if kind not in ctranslate2.get_supported_compute_types("cpu"):
            raise BackendError(f"CTranslate2 does not compute in {kind} on this CPU")
        with tempfile.TemporaryDirectory(prefix="converted-", dir=source) as converted:
            _convert(source, converted, kind)
            self._generator = ctranslate2.Generator(
                converted, device="cpu", compute_type=kind, intra_threads=threads or 0
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


PROGRAMS: dict[str, Callable[[Source, str, int | None, str], Program]] = {
    "transformers": Transformers,
    "transformers-generate": Generate,
    "transformers-static": Static,
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
