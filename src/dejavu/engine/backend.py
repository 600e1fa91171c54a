"""What reads a model's prompts and what decodes: by the device and the dtype of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dejavu.engine.decode_step import DecodeStep
from dejavu.engine.graph_step import GraphStep
from dejavu.engine.prompt_pass import PromptPass
from dejavu.engine.prompt_step import Piece, PromptStep
from dejavu.engine.sampling import Picked, Sampler
from dejavu.engine.scheduler import Request
from dejavu.engine.whole_layers import WholeLayers
from dejavu.errors import BackendError, InputError
from dejavu.kernels.native import NativeOps
from dejavu.kernels.ops import Ops
from dejavu.kernels.prompt_rows import PromptRows
from dejavu.kernels.reference import TorchOps
from dejavu.models.base import DecoderLM
from dejavu.models.deferred_kv import obstacle
from dejavu.models.kv_cache import KVCache
from dejavu.predictor.selector import PlanSelector
from dejavu.sparsity.policy import Selector, Site

if TYPE_CHECKING:
    from dejavu.flash.store import FlashStore
    from dejavu.kernels.gpu.costs import CostTable


class Step(Protocol):
    """Decode steps over fixed buffers: `DecodeStep` on the CPU, `GraphStep` on a GPU."""

    def run(self, requests: Sequence[Request]) -> Tensor:
        """Logits fp32 `[B, vocab_size]` after each request's latest token, which enters the cache;
        on the model's device, where they may still be on their way. Good until the next call."""
        ...

    def pick(self, samplers: Sequence[Sampler | None]) -> list[Picked]:
        """The next id of each row of the latest `run`, once; None also where it has no sampler."""
        ...

    def row(self, row: int) -> NDArray[np.float32]:
        """Logits `[vocab_size]` of one row of the latest `run`, on the host."""
        ...

    def width(self, rows: int) -> int:
        """Rows of the step that so many requests take, padding included."""
        ...


class PromptReader(Protocol):
    """Computes prompts piece by piece: `PromptStep` for int8 models on the CPU, else `PromptPass`.

    together: whether it gains by pieces of several prompts at once. least: tokens that a shorter
    piece costs as much time as.
    """

    together: bool
    least: int

    def run(self, pieces: Sequence[Piece]) -> list[NDArray[np.float32]]:
        """Compute them; keys and values enter the cache. Of each piece logits fp32
        `[n, vocab_size]`: of all its tokens where they are wanted, else of the prompt's last one,
        or of none or one before that."""
        ...


@runtime_checkable
class Priced(Protocol):
    """Ops that know what an MLP costs on their device (`TritonOps`)."""

    @property
    def costs(self) -> CostTable:
        """As measured, or guessed."""
        ...


def decode_ops(model: DecoderLM, threads: int | None = None) -> Ops:
    """The fastest kernels for a model's decode steps. threads: of the CPU.

    Raises BackendError where this installation does not have them.
    """
    if model.device.type == "cpu":
        return NativeOps(threads)
    try:
        from dejavu.kernels.gpu.ops import TritonOps
    except ImportError as error:
        raise BackendError(
            f"decoding on {model.device} needs Triton, which comes with PyTorch for CUDA "
            f"(pip install triton): {error}"
        ) from error
    return TritonOps(model.device, model.cache_dtype)


def flash_ops(store: FlashStore, model: DecoderLM, threads: int | None) -> tuple[Ops, Ops]:
    """Of decode steps and of prompts, for a model whose neurons lie in a file; the bits are those
    of the model in memory, so prompts go on the same kernels."""
    from dejavu.flash.ops import FlashOps, PromptOps, WholeOps

    prompts = WholeOps if PromptStep.suits(model) else PromptOps
    return FlashOps(store, threads), prompts(store, threads)


def prompt_reader(
    model: DecoderLM,
    cache: KVCache,
    ops: Ops | None,
    *,
    threads: int | None,
    max_length: int,
    vocab_size: int,
) -> PromptReader:
    """For prompts of up to `max_length` tokens; logits end at `vocab_size`.

    ops: None, the fastest there are; others run as they are, a step not recorded.
    """
    recorded = ops is None
    if ops is None:
        ops = _prompt_ops(model, threads)
    if isinstance(ops, NativeOps) and PromptStep.suits(model):
        return PromptStep(
            model, cache, ops, max_length=max_length, vocab_size=vocab_size, recorded=recorded
        )
    return PromptPass(model, cache, ops, threads=threads, vocab_size=vocab_size)


def _prompt_ops(model: DecoderLM, threads: int | None) -> Ops:
    if model.device.type != "cpu":
        return TorchOps()
    return NativeOps(threads) if PromptStep.suits(model) else PromptRows(threads)


def decode_step(
    model: DecoderLM,
    cache: KVCache,
    selector: Selector,
    ops: Ops,
    *,
    max_rows: int,
    max_length: int,
    vocab_size: int | None = None,
    lazy_kv: bool = False,
    whole_layers: bool = True,
) -> Step:
    """Steps of up to `max_rows` sequences of up to `max_length` tokens.

    vocab_size: logits and ids end there; default: the model's. lazy_kv: see `kernels.lazy`.
    whole_layers: on a GPU, compute MLPs whole where that is faster than what a plan chooses.
    Raises InputError where the device or the model does not allow lazy-kv.
    """
    if model.streamed:
        raise InputError(
            f"this model does not fit into the memory of {model.device}, and one that is read "
            "block by block cannot decode; take a larger GPU, or run on --device cpu"
        )
    if lazy_kv and model.device.type == "cpu":
        raise InputError("lazy-kv is for --device cuda")
    if lazy_kv and (why := obstacle(model.config)) is not None:
        raise InputError(f"lazy-kv is not for this model: {why}")
    if model.device.type == "cpu":
        return DecodeStep(
            model,
            cache,
            selector,
            ops,
            max_rows=max_rows,
            max_length=max_length,
            vocab_size=vocab_size,
        )
    neurons, heads = whole_choices(model, selector, ops) if whole_layers else (None, None)
    return GraphStep(
        model,
        cache,
        selector,
        ops,
        max_rows=max_rows,
        max_length=max_length,
        vocab_size=vocab_size,
        lazy_kv=lazy_kv,
        whole_layers=neurons,
        whole_heads=heads,
    )


def whole_choices(
    model: DecoderLM, selector: Selector, ops: Ops
) -> tuple[WholeLayers | None, WholeLayers | None]:
    """What chooses layers to compute whole: by the costs of MLPs, and by those of reading query and
    output projections. None where there is nothing to choose, or no costs are known."""
    if not isinstance(ops, Priced) or not isinstance(selector, PlanSelector):
        return None, None
    table: CostTable = ops.costs
    c, block = model.config, model.weights.blocks[0]
    up, q = block.mlp.up.weight, block.attention.q.weight
    itemsize = up.data.element_size()
    projections = 2 * q.rows * q.columns * q.data.element_size()
    neurons = WholeLayers(
        lambda rows: table.mlp(
            rows, c.intermediate_size, c.hidden_size, itemsize, gated=c.gated_mlp
        ),
        c.intermediate_size,
        selector.predicted(Site.NEURONS),
    )
    heads = WholeLayers(
        lambda rows: table.heads(rows, projections),
        c.num_key_value_heads,
        selector.predicted(Site.HEADS),
    )
    return neurons, heads
