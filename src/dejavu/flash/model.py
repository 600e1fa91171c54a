"""From a checkpoint and its bundle to a model whose neurons come when they are needed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dejavu.embedded import plan_path
from dejavu.errors import DejavuError, InputError
from dejavu.flash.memory import Need, resident_bytes
from dejavu.flash.store import FlashStore, buffer_bytes, least_slots, placeholders
from dejavu.kernels.matrix import Matrix
from dejavu.load import CheckpointNeurons, LoadedModel, load_model
from dejavu.models.base import DecoderLM
from dejavu.models.kv_cache import KVCache
from dejavu.weights.bundle import Bundle, is_bundle, open_bundle

__all__ = ["FlashModel", "find_bundle", "load_flash", "need_of"]

_PROMPT_ROWS = 128  # tokens of a prompt that pass a layer together


@dataclass(frozen=True, eq=False)
class FlashModel:
    """A loaded model without its MLP weights, and where those are."""

    loaded: LoadedModel
    bundle: Bundle
    matrices: dict[str, Matrix]

    def store(self, slots: int) -> FlashStore:
        """The neurons, with so many of them in memory; one store for a model."""
        return FlashStore(self.bundle, slots, self.matrices)

    def within(
        self,
        limit: int,
        *,
        max_batch: int,
        max_model_len: int | None,
        rows: int = _PROMPT_ROWS,
    ) -> tuple[FlashStore, int]:
        """The store that a limit in bytes on the whole process allows, and the bytes of the cache
        of keys and values. To be called when everything else is loaded. rows: tokens that pass a
        layer together, or have logits at a time.

        Raises InputError naming the least limit where this one is too small.
        """
        resident, model = resident_bytes(), self.loaded.model
        length = max_model_len or model.config.context_length
        one = length * KVCache.token_bytes(model.config, model.cache_dtype)
        least = least_slots(self.bundle)
        # One sequence always; more where they take no more than an eighth of the limit, and fit.
        sequences = max(1, min(max_batch, limit // 8 // one))
        while True:
            keys = sequences * one
            need = need_of(model, self.bundle, resident, keys, rows=rows)
            if sequences == 1 or need.fits(limit, self.bundle.record_bytes, least):
                break
            sequences -= 1
        slots = need.slots(limit, self.bundle.record_bytes, least)
        return self.store(slots), keys


def need_of(
    model: DecoderLM, bundle: Bundle, resident: int, keys: int, *, rows: int = _PROMPT_ROWS
) -> Need:
    """What a model takes beside its neurons. resident: bytes of the process with all but those and
    the keys and values loaded. keys: bytes of those. rows: see `within`."""
    config = model.config
    neurons, width = max(bundle.neurons), config.hidden_size
    layer = neurons * bundle.record_bytes
    wide = max(neurons, config.vocab_size, 8 * width)
    prompt = layer + 4 * (neurons * width + rows * 2 * wide)
    return Need(resident, keys, prompt, buffer_bytes(bundle))


def find_bundle(
    source: str | os.PathLike[str], plan: str | os.PathLike[str] | None, dtype: str = "auto"
) -> Path:
    """The bundle of a model that lies in its plan's folder or its own (`*.flash`).

    A plan that is not a folder here (a Hub id) has none beside it.

    Raises InputError telling where it was looked for, and which bundles there are damaged.
    """
    wanted = CheckpointNeurons(source, dtype=dtype)
    folders = [Path(wanted.checkpoint.path)]
    if plan is not None:
        folders.insert(0, Path(plan_path(os.fspath(plan))))
    folders = [path if path.is_dir() else path.parent for path in folders if path.exists()]
    damaged = []
    for folder in folders:
        for path in sorted(folder.glob("*.flash")):
            if not is_bundle(path):
                continue
            try:
                found = open_bundle(path)
            except DejavuError as error:
                damaged.append(str(error))
                continue
            if (found.identity, found.dtype) == (wanted.identity(), wanted.dtype):
                return path
    looked = " nor ".join(str(folder) for folder in dict.fromkeys(folders))
    raise InputError(
        f"a memory limit needs a bundle of {source} in {wanted.dtype}, and neither {looked} has "
        "one: make it with dejavu pack MODEL --out FILE.flash, and leave it there or give --bundle"
        + "".join(f"; {one}" for one in damaged)
    )


def load_flash(
    source: str | os.PathLike[str],
    bundle: str | os.PathLike[str],
    *,
    dtype: str = "auto",
) -> FlashModel:
    """Load all but the MLP weights, and open the bundle that `dejavu pack` made of the same model.

    Raises InputError for a bundle of another model, shape or dtype, and what `load_model` and
    `open_bundle` raise.
    """
    opened = open_bundle(bundle)
    wanted = CheckpointNeurons(source, dtype=dtype)
    if opened.identity != wanted.identity():
        raise InputError(
            f"{bundle} was packed from another model (identity {opened.identity[:12]}) than "
            f"{source} ({wanted.identity()[:12]}): pack this one (dejavu pack)"
        )
    have = opened.neurons, opened.hidden_size, opened.gated, opened.dtype
    want = wanted.neurons, wanted.hidden_size, wanted.gated, wanted.dtype
    if have != want:
        raise InputError(
            f"{bundle} holds {opened.dtype} weights and {wanted.dtype} is asked for: pack again "
            f"with --dtype {wanted.dtype}, or give --dtype {opened.dtype}"
        )
    matrices = placeholders(opened)
    loaded = load_model(source, dtype=dtype, elsewhere=matrices)
    return FlashModel(loaded, opened, matrices)
