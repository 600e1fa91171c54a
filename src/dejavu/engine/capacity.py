"""How much an engine holds: settled before anything of it is made."""

from __future__ import annotations

from dataclasses import dataclass

from dejavu.errors import InputError
from dejavu.kernels.native import MAX_ROWS
from dejavu.models.base import DecoderLM
from dejavu.models.kv_cache import BLOCK_SIZE, KVCache, blocks_for, cache_budget

PREFILL_CHUNK = 128  # tokens; of relu-30m on 2 cores 0.1 s, where one token takes 0.03 s
GPU_PREFILL_CHUNK = 2048  # tokens: products this long are bound by arithmetic, not by weights


@dataclass(frozen=True)
class Capacity:
    """rows: sequences that run at a time. length: tokens of prompt and answer at most. blocks: of
    the cache, `BLOCK_SIZE` tokens each. chunk: tokens of a piece of a prompt, and of all pieces
    between two decode steps."""

    rows: int
    length: int
    blocks: int
    chunk: int

    @staticmethod
    def of(
        model: DecoderLM,
        *,
        rows: int = MAX_ROWS,
        length: int | None = None,
        memory: int | None = None,
        chunk: int | None = None,
    ) -> Capacity:
        """Of an engine for a model.

        length: default, the model's context, or what the cache holds of it. memory: bytes of the
        cache at most; default, `cache_budget`. chunk: default, by the model's device.

        Raises InputError that names the option of `Engine` which cannot be had.
        """
        if not 1 <= rows <= MAX_ROWS:
            raise InputError(f"max_batch must lie in 1..{MAX_ROWS}, not {rows}")
        if chunk is None:
            chunk = PREFILL_CHUNK if model.device.type == "cpu" else GPU_PREFILL_CHUNK
        if chunk < 1:
            raise InputError(f"prefill_chunk must be at least 1, not {chunk}")
        if memory is None:
            memory = cache_budget(model.device)
        token_bytes = KVCache.token_bytes(model.config, model.cache_dtype)
        affordable = memory // token_bytes // BLOCK_SIZE
        if affordable < 1:
            raise InputError(
                f"a cache of {memory} bytes does not hold one block of {BLOCK_SIZE} tokens, which "
                f"takes {BLOCK_SIZE * token_bytes}: allow more memory"
            )
        tokens, context = affordable * BLOCK_SIZE, model.config.context_length
        if length is None:
            length = min(context, tokens)
        elif not 2 <= length <= context:
            raise InputError(
                f"max_model_len must lie in 2..{context}, the context of this model, not {length}"
            )
        elif length > tokens:
            raise InputError(
                f"max_model_len {length} needs a cache of {length * token_bytes / 1e9:.1f} GB; "
                f"{tokens} tokens fit into {memory / 1e9:.1f} GB"
            )
        return Capacity(rows, length, min(rows * blocks_for(length), affordable), chunk)
