"""A model that clients can name: engine, tokenizer and the selectors of its plan."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dejavu.engine.activity import block_size
from dejavu.engine.codec import Codec
from dejavu.engine.engine import Engine
from dejavu.engine.llm import end_tokens
from dejavu.engine.prompt_step import PromptStep
from dejavu.flash.memory import parse_size
from dejavu.flash.model import FlashModel, find_bundle, load_flash
from dejavu.flash.ops import FlashOps, PromptOps, WholeOps
from dejavu.kernels.ops import Ops
from dejavu.load import LoadedModel, load_model
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
    sources: dict[tuple[str, str], LoadedModel] = {}
    served = {}
    for entry in settings.models:
        if settings.memory_limit is not None:
            bundle = entry.bundle or find_bundle(entry.source, entry.plan, entry.dtype)
            flash = load_flash(entry.source, bundle, dtype=entry.dtype)
            served[entry.name] = serve_model(entry, flash.loaded, settings, flash)
            continue
        key = entry.source, entry.dtype
        if key not in sources:
            sources[key] = load_model(entry.source, dtype=entry.dtype)
        served[entry.name] = serve_model(entry, sources[key], settings)
    return served


def serve_model(
    entry: ModelEntry, loaded: LoadedModel, settings: Settings, flash: FlashModel | None = None
) -> ServedModel:
    """One model that is loaded already. flash: where its neurons are, under a memory limit."""
    plan = None if entry.plan is None else load_plan(entry.plan)
    arms: dict[str, Selector] = {DENSE: Dense()}
    if plan is not None:
        plan.level(entry.level)
        arms |= {name: plan.selector(loaded, name) for name in plan.levels}
    codec = Codec(load_tokenizer(loaded.checkpoint))
    ops: Ops | None = None
    prompt_ops: Ops | None = None
    cache_bytes = settings.cache_bytes
    if flash is not None and settings.memory_limit is not None:
        store, cache_bytes = flash.within(
            parse_size(settings.memory_limit),
            max_batch=settings.max_batch,
            max_model_len=settings.max_model_len,
        )
        ops, prompt_ops = FlashOps(store, settings.threads), PromptOps(store, settings.threads)
        if PromptStep.suits(loaded.model):
            prompt_ops = WholeOps(store, settings.threads)
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
    )
    engine.take_memory(_TAKEN)
    level = DENSE if plan is None else entry.level or plan.default_level
    return ServedModel(entry.name, loaded, codec, engine, level, plan)
