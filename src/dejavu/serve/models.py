"""A model that clients can name: engine, tokenizer and the selectors of its plan."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch

from dejavu.engine.activity import block_size
from dejavu.engine.backend import flash_ops
from dejavu.engine.codec import Codec
from dejavu.engine.engine import Engine
from dejavu.engine.llm import end_tokens
from dejavu.flash.memory import parse_size
from dejavu.flash.model import FlashModel, find_bundle, load_flash
from dejavu.kernels.ops import Ops
from dejavu.load import LoadedModel, load_model
from dejavu.models.kv_cache import cache_budget
from dejavu.predictor.plan import Plan, load_plan
from dejavu.serve.errors import ApiError
from dejavu.serve.responses import ModelCard, ModelShape
from dejavu.serve.settings import ModelEntry, Settings
from dejavu.sparsity.policy import Dense, Selector
from dejavu.weights.tokenizer import load_tokenizer

DENSE = "dense"
PLAN = "plan"

# Bytes of a cache that are taken at the start, not as ever more of its blocks are used: a server
# is then about as large after a day as after a minute.
_TAKEN = 1 << 28


@dataclass(frozen=True, eq=False)
class ServedModel:
    """level: what `plan` means; dense without one."""

    name: str
    loaded: LoadedModel
    codec: Codec
    engine: Engine
    level: str
    plan: Plan | None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def choices(self) -> list[str]:
        """Values of a request's field `sparsity`."""
        return [DENSE] if self.plan is None else [PLAN, DENSE, *self.plan.levels]

    def arm(self, sparsity: str | None) -> str:
        """The engine's arm for that value. Raises ApiError listing those that exist."""
        if sparsity is None:
            return self.level
        if sparsity not in self.choices:
            raise ApiError(
                f"sparsity must be one of {', '.join(self.choices)} for the model {self.name}, "
                f"not {sparsity!r}",
                param="sparsity",
            )
        return self.level if sparsity == PLAN else sparsity

    def card(self) -> ModelCard:
        """What /v1/models tells of it."""
        c = self.loaded.model.config
        return ModelCard(
            id=self.name,
            created=self.created,
            max_model_len=self.engine.max_model_len,
            chat=self.codec.can_chat,
            sparsity=self.choices,
            level=self.level,
            shape=ModelShape(
                layers=c.num_hidden_layers,
                neurons=c.intermediate_size,
                blocks=-(-c.intermediate_size // block_size(c.intermediate_size)),
                heads=c.num_key_value_heads,
            ),
        )


def serve_models(settings: Settings) -> dict[str, ServedModel]:
    """Load all models of the settings, each source once. Raises DejavuError like `load_model`."""
    if settings.memory_limit is not None:
        (entry,) = settings.models
        bundle = entry.bundle or find_bundle(entry.source, entry.plan, entry.dtype)
        flash = load_flash(entry.source, bundle, dtype=entry.dtype)
        return {entry.name: serve_model(entry, flash.loaded, settings, flash)}
    # All before the first cache, which takes most of what a GPU then has left.
    sources = {
        key: load_model(key[0], dtype=key[1], device=settings.device)
        for key in dict.fromkeys((entry.source, entry.dtype) for entry in settings.models)
    }
    return {
        entry.name: serve_model(
            entry,
            sources[entry.source, entry.dtype],
            settings,
            sharing=len(settings.models) - place,
        )
        for place, entry in enumerate(settings.models)
    }


def serve_model(
    entry: ModelEntry,
    loaded: LoadedModel,
    settings: Settings,
    flash: FlashModel | None = None,
    *,
    sharing: int = 1,
) -> ServedModel:
    """One model that is loaded already. flash: where its neurons are, under a memory limit.
    sharing: models that have no cache yet, this one included; they share what a GPU has left."""
    plan = None if entry.plan is None else load_plan(entry.plan)
    if plan is not None and settings.on_gpu:
        plan = _on_gpu(plan, entry.level, loaded.model.device)
    arms: dict[str, Selector] = {DENSE: Dense()}
    if plan is not None:
        plan.level(entry.level)
        arms |= {name: plan.selector(loaded, name) for name in plan.levels}
    codec = Codec(load_tokenizer(loaded.checkpoint))
    ops: Ops | None = None
    prompt_ops: Ops | None = None
    cache_bytes = settings.cache_bytes
    if cache_bytes is None and settings.on_gpu:
        cache_bytes = cache_budget(loaded.model.device) // sharing
    if flash is not None and settings.memory_limit is not None:
        store, cache_bytes = flash.within(
            parse_size(settings.memory_limit),
            max_batch=settings.max_batch,
            max_model_len=settings.max_model_len,
        )
        ops, prompt_ops = flash_ops(store, loaded.model, settings.threads)
    engine = Engine(
        loaded,
        ops=ops,
        prompt_ops=prompt_ops,
        threads=settings.threads,
        max_batch=settings.max_batch,
        max_model_len=settings.max_model_len,
        vocab_size=codec.vocab_size,
        eos_token_ids=end_tokens(loaded, codec),
        arms=arms,
        cache_bytes=cache_bytes,
        prefill_chunk=settings.prefill_chunk,
        # Dense answers use all heads.
        lazy_kv=tuple(plan.levels) if settings.lazy_kv and plan is not None else (),
        whole_layers=settings.whole_layers,
    )
    if not settings.on_gpu:  # which takes it all at once
        engine.take_memory(_TAKEN)
    level = DENSE if plan is None else entry.level or plan.default_level
    return ServedModel(entry.name, loaded, codec, engine, level, plan)


def _on_gpu(plan: Plan, level: str | None, device: torch.device) -> Plan:
    """A plan with its predictors on a GPU, once for all levels, and the levels that run there; one
    that will be asked for stays, to be refused with its reason."""
    wanted = level or plan.default_level
    levels = {name: one for name, one in plan.levels.items() if not one.inputs or name == wanted}
    predictors = {
        key: replace(source, predictor=source.predictor.to(device))
        for key, source in plan.predictors.items()
    }
    return replace(plan, levels=levels, predictors=predictors)
