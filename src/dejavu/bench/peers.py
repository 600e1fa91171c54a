"""Other programs on the same weights, prompts and threads, and, where they can, the same dtype.

Both get the very weights of our `DecoderLM`, converted in memory. So any checkpoint that we read
can be compared, and a named shape with random weights too.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dejavu.bench.arms import Arm, ArmInfo, Decoded, Prompt
from dejavu.bench.hf_model import hf_model, shape_config
from dejavu.bench.subject import Subject
from dejavu.errors import BackendError, InputError
from dejavu.registry import unknown
from dejavu.sparsity.accounting import dense_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersArm:
    """Hugging Face transformers without compilation: the loop of `generate` over its dynamic cache,
    without what `generate` adds around it."""

    def __init__(self, subject: Subject, *, dtype: str, threads: int) -> None:
        """dtype: fp32 or bf16."""
        model = subject.loaded.model
        self._model = hf_model(model, subject.hf_config, dtype)
        self._bytes = dense_bytes(model.weights, dtype)
        # Its name has changed within a major version.
        known = signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"
        self.info = ArmInfo(f"transformers {dtype}", "transformers eager", dtype, threads)

    @torch.inference_mode()
    def decode(
        self, prompts: Sequence[Prompt], steps: int, *, skip: int, fed: Sequence[Prompt] | None
    ) -> Decoded:
        """See `Arm.decode`."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        seconds, sampled = [], []
        with torch_threads(self.info.threads):
            token = self._next(torch.tensor(prompts), cache)
            for done in range(skip + steps):
                sampled.append(int(token[0]))
                if fed is not None:
                    token = torch.tensor([[ids[done]] for ids in fed])
                started = perf_counter()
                token = self._next(token, cache)
                if done >= skip:
                    seconds.append(perf_counter() - started)
        return Decoded(seconds, sampled, self._bytes)

    def _next(self, ids: Tensor, cache: Any) -> Tensor:
        """int64 `[B, 1]`: the likeliest tokens after ids `[B, T]`."""
        logits: Tensor = self._model(ids, use_cache=True, **{self._cache_argument: cache}).logits
        return logits[:, -1].argmax(dim=-1, keepdim=True)


class CTranslate2Arm:
    """CTranslate2's generator, timed through its callback for each token.

    The first callback comes after the prompt and its first token, so the differences between
    callbacks are decoding alone. It reads the tokens that it has sampled, whatever is asked: dense
    as it is, that does not change its time.
    """

    def __init__(self, subject: Subject, *, dtype: str, threads: int) -> None:
        """dtype: int8, fp32, or bf16 where the CPU supports it.

        Raises BackendError for a dtype or a model that it does not support.
        """
        ctranslate2 = _package("ctranslate2", "peers")
        kind = _CTRANSLATE2_DTYPES[dtype]
        if kind not in ctranslate2.get_supported_compute_types("cpu"):
            raise BackendError(f"CTranslate2 does not compute in {kind} on this CPU")
        model = subject.loaded.model
        with tempfile.TemporaryDirectory(prefix="dejavu-bench-") as folder:
            converted = Path(folder) / "converted"
            _convert(subject, Path(folder), converted, kind)
            self._generator = ctranslate2.Generator(
                str(converted), device="cpu", compute_type=kind, intra_threads=threads
            )
        self._bytes = dense_bytes(model.weights, dtype)
        self.info = ArmInfo(
            f"CTranslate2 {dtype}",
            f"CTranslate2 {self._generator.compute_type}",
            dtype,
            threads,
            notes=["reads its own tokens"],
        )

    def decode(
        self, prompts: Sequence[Prompt], steps: int, *, skip: int, fed: Sequence[Prompt] | None
    ) -> Decoded:
        """See `Arm.decode`."""
        times: list[float] = []
        sampled: list[int] = []

        def note(step: Any) -> bool:
            if step.batch_id == 0:
                times.append(perf_counter())
                sampled.append(int(step.token_id))
            return False  # go on

        length = 1 + skip + steps
        self._generator.generate_batch(
            [[_token(i) for i in prompt] for prompt in prompts],
            max_length=length,
            min_length=length,
            end_token=[],
            beam_size=1,
            include_prompt_in_result=False,
            callback=note,
        )
        if len(times) != length:
            raise BackendError(f"CTranslate2 made {len(times)} tokens, asked for were {length}")
        seconds = [later - sooner for sooner, later in pairwise(times)]
        return Decoded(seconds[skip:], sampled, self._bytes)


_CTRANSLATE2_DTYPES = {"int8": "int8", "fp32": "float32", "bf16": "bfloat16"}


class Peer(NamedTuple):
    """open: makes its arm. nearest: the best it can do where our weights are of a dtype."""

    open: Callable[..., Arm]
    nearest: dict[str, str]


PEERS = {
    "transformers": Peer(TransformersArm, {"fp32": "fp32", "bf16": "bf16", "int8": "bf16"}),
    "ctranslate2": Peer(CTranslate2Arm, {"fp32": "fp32", "bf16": "int8", "int8": "int8"}),
}


def parse_peer(name: str) -> tuple[str, str | None]:
    """Program and dtype of `name` or `name:dtype`. Raises InputError for an unknown one."""
    program, _, dtype = name.partition(":")
    if program not in PEERS:
        raise unknown("peer", program, PEERS, InputError)
    known = sorted({*PEERS[program].nearest.values(), "fp32", "bf16"})
    if dtype and dtype not in known:
        raise unknown(f"dtype of {program}", dtype, known, InputError)
    return program, dtype or None


def open_peer(name: str, subject: Subject, *, threads: int) -> Arm:
    """A peer as `parse_peer` takes it; without a dtype, in the one nearest to the subject's.

    Raises InputError for an unknown name or dtype, BackendError where the peer cannot run here.
    """
    program, dtype = parse_peer(name)
    peer = PEERS[program]
    return peer.open(subject, dtype=dtype or peer.nearest[subject.loaded.dtype], threads=threads)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """So many threads for torch's operators; the number is the process's, so it is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _convert(subject: Subject, folder: Path, converted: Path, kind: str) -> None:
    """Write a CTranslate2 model; its converter reads the config from disk, the weights from us."""
    from ctranslate2.converters import TransformersConverter

    class InMemory(TransformersConverter):  # type: ignore[misc]
        def load_model(self, *_: Any, **__: Any) -> PreTrainedModel:
            # bf16 halves what the conversion holds at a time; only fp32 weights lose by it.
            dtype = "fp32" if subject.loaded.dtype == "fp32" else "bf16"
            return hf_model(subject.loaded.model, subject.hf_config, dtype)

        def load_tokenizer(self, *_: Any, **__: Any) -> _Numbers:
            return _Numbers(subject.loaded.model.config.vocab_size)

    config = json.dumps(shape_config(subject.hf_config))
    (folder / "config.json").write_text(config, encoding="utf-8")
    try:
        InMemory(str(folder)).convert(str(converted), quantization=kind)
    except (ValueError, NotImplementedError, KeyError, AttributeError) as error:
        raise BackendError(f"CTranslate2 does not convert this model: {error}") from error


class _Numbers:
    """A tokenizer whose tokens are the ids themselves."""

    bos_token = eos_token = unk_token = "0"

    def __init__(self, size: int) -> None:
        self._size = size

    def get_vocab(self) -> dict[str, int]:
        return {_token(i): i for i in range(self._size)}


def _token(number: int) -> str:
    return str(number)


def _package(name: str, extra: str) -> Any:
    """An optional package. Raises BackendError that says how to get it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise BackendError(f"{name} is not installed: pip install 'dejavu-llm[{extra}]'") from error
