"""`LLM`: text in, text out."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from operator import index
from threading import RLock
from typing import Literal, overload

from dejavu.engine.backend import flash_ops
from dejavu.engine.codec import Codec, Message
from dejavu.engine.engine import Engine
from dejavu.engine.generation import Generation
from dejavu.engine.output import Chunk, Completion
from dejavu.engine.params import SamplingParams
from dejavu.errors import ConfigError, DejavuError, InputError
from dejavu.kernels.device import resolve_device
from dejavu.kernels.native import MAX_ROWS
from dejavu.kernels.ops import Ops
from dejavu.load import LoadedModel, load_model
from dejavu.sparsity.policy import Selector
from dejavu.weights.tokenizer import load_tokenizer

Prompt = str | Sequence[int]


class LLM:
    """A model ready to write.

        llm = LLM("facebook/opt-1.3b", plan="org/opt-1.3b-plan")
        llm.generate("The capital of France is", SamplingParams(max_tokens=20)).text

    Several threads may use one LLM; their requests are decoded together.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel,
        plan: str | os.PathLike[str] | None = None,
        *,
        level: str | None = None,
        policy: Selector | None = None,
        device: str | None = None,
        dtype: str = "auto",
        threads: int | None = None,
        max_model_len: int | None = None,
        memory_limit: str | int | None = None,
        bundle: str | os.PathLike[str] | None = None,
        lazy_kv: bool = False,
        whole_layers: bool = True,
    ) -> None:
        """Load a model, and its sparsity plan if one is given; without one it runs dense.

        model: folder, GGUF file, Hub id, or what `load_model` returned.
        plan, level: what `dejavu prepare` made (folder or Hub id), and which loss it may cost;
            default: the plan's own.
        policy: a selector of your own, in place of a plan.
        device: cpu (the default), cuda or cuda:N; of a loaded model: where it is.
        dtype: of the weights: auto (the file's), fp32, bf16, int8 (CPU) or fp16 (GPU).
        threads: of the CPU; default: all physical cores.
        max_model_len: tokens of prompt and answer at most; default: the model's context.
        memory_limit: of the whole process, `4GB` or bytes: the MLP weights stay in `bundle`, the
            file that `dejavu pack` made of this model, and come as they are needed (CPU only).
            Default: the one in the plan's folder or the model's.
        lazy_kv: on a GPU, leave out keys and values of unused heads too, see `Engine`.
        whole_layers: on a GPU, compute MLPs whole where a plan's choice would be slower, mostly
            under a batch; off, a text depends on the plan alone.

        Raises CheckpointError, ConfigError or PlanError for files that cannot be used, InputError
        for a bad option, BackendError for a device that does not exist or missing kernels.
        """
        if not isinstance(model, str | os.PathLike | LoadedModel):
            raise InputError(
                "model must be a folder, a file, a Hub id or what load_model returned, not "
                f"{model!r}"
            )
        for name, path in (("plan", plan), ("bundle", bundle)):
            if path is not None and not isinstance(path, str | os.PathLike):
                raise InputError(f"{name} must be a path or a Hub id, not {path!r}")
        for name, count in (("threads", threads), ("max_model_len", max_model_len)):
            if count is not None and not isinstance(count, Integral):
                raise InputError(f"{name} must be a whole number, not {count!r}")
        if plan is not None and policy is not None:
            raise InputError("give a plan or a policy, not both")
        if policy is not None and not isinstance(policy, Selector):
            raise InputError(f"policy must be a Selector, not {policy!r}")
        if plan is None and level is not None:
            raise InputError(f"level {level!r} is one of a plan's, and no plan is given")
        flash = None
        if bundle is not None and memory_limit is None:
            raise InputError("a bundle goes with a memory limit: give --memory-limit SIZE")
        if memory_limit is not None:
            if isinstance(model, LoadedModel) or resolve_device(device or "cpu").type != "cpu":
                raise InputError("a memory limit is for a model by name, on the CPU")
            from dejavu.flash.model import find_bundle, load_flash

            bundle = find_bundle(model, plan, dtype) if bundle is None else bundle
            flash = load_flash(model, bundle, dtype=dtype)
            model = flash.loaded
        elif not isinstance(model, LoadedModel):
            model = load_model(model, dtype=dtype, device=device or "cpu")
        elif dtype not in ("auto", model.dtype):
            raise InputError(f"dtype {dtype!r}: the model is loaded already, as {model.dtype}")
        elif device is not None and resolve_device(device) != model.model.device:
            raise InputError(
                f"device {device!r}: the model is loaded already, on {model.model.device}"
            )
        if plan is not None:
            from dejavu.predictor.plan import load_plan

            policy = load_plan(plan).selector(model, level)
        codec = Codec(load_tokenizer(model.checkpoint))
        ops: Ops | None = None
        prompt_ops: Ops | None = None
        cache_bytes = None
        if flash is not None and memory_limit is not None:
            from dejavu.flash.memory import parse_size

            store, cache_bytes = flash.within(
                parse_size(memory_limit), max_batch=MAX_ROWS, max_model_len=max_model_len
            )
            ops, prompt_ops = flash_ops(store, model.model, threads)
        self._connect(
            Engine(
                model,
                policy,
                threads=threads,
                max_model_len=max_model_len,
                ops=ops,
                prompt_ops=prompt_ops,
                cache_bytes=cache_bytes,
                lazy_kv=lazy_kv,
                whole_layers=whole_layers,
                vocab_size=codec.vocab_size,
                eos_token_ids=end_tokens(model, codec),
            ),
            codec,
        )

    @classmethod
    def around(cls, engine: Engine, codec: Codec) -> LLM:
        """An LLM over an engine of your own making."""
        llm = cls.__new__(cls)
        llm._connect(engine, codec)
        return llm

    def _connect(self, engine: Engine, codec: Codec) -> None:
        self.engine = engine
        self.codec = codec
        # Reentrant: a dropped stream may be collected, and then abort its request, in any call.
        self._lock = RLock()

    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: str | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
    ) -> Completion | list[Completion]:
        """Complete one prompt, or several at once; the answer has the shape of the question.

        prompts: texts or lists of token ids. params: for all, or one for each prompt; default:
        greedy up to the end of the context. Every answer is what the prompt alone would get (on a
        GPU up to rounding, and but for what `whole_layers` adds).
        Raises InputError before any work if one of the prompts or params cannot be used.
        """
        if isinstance(prompts, str):
            return self._run([prompts], params)[0]
        if not isinstance(prompts, Collection) or isinstance(prompts, bytes | Mapping):
            raise InputError(
                f"prompts must be a text, or a list of texts or of lists of ids, not {prompts!r}"
            )
        return self._run(prompts, params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one prompt (text or token ids), chunk by chunk, a token each.

        Stop iterating, or interrupt it, at any time: the engine drops the request.
        Raises InputError at once if the prompt or params cannot be used.
        """
        ids, (params,) = self._prompt_ids(prompt), _spread(params, 1)
        self.engine.check(ids, params)
        return self._chunks(ids, params)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        chat_template: str | None = None,
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        chat_template: str | None = None,
    ) -> Iterator[Chunk]: ...
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        chat_template: str | None = None,
    ) -> Completion | Iterator[Chunk]:
        """Answer a conversation: a list of `{"role": ..., "content": ...}`, oldest first.

        chat_template: Jinja source to use in place of the tokenizer's own. Raises InputError where
        there is neither, and for messages that the template refuses.
        """
        ids = self.codec.encode_chat(messages, chat_template)
        if stream:
            return self.stream(ids, params)
        return self._run([ids], params)[0]

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Completion]:
        jobs = [
            (self._prompt_ids(prompt), wanted)
            for prompt, wanted in zip(prompts, _spread(params, len(prompts)), strict=True)
        ]
        for ids, wanted in jobs:
            self.engine.check(ids, wanted)
        generations: list[Generation] = []
        try:
            for ids, wanted in jobs:
                generations.append(self._start(ids, wanted))
            pending = dict(enumerate(generations))
            while pending:
                self._advance(pending.values())
                for i, generation in list(pending.items()):
                    while generation.ready and generation.completion is None:
                        self._read(generation, f"prompts[{i}]: " if len(jobs) > 1 else "")
                    if generation.completion is not None:
                        del pending[i]
        finally:
            for generation in generations:
                self._abort(generation)
        return [g.completion for g in generations if g.completion is not None]

    def _chunks(self, ids: list[int], params: SamplingParams) -> Iterator[Chunk]:
        generation = self._start(ids, params)
        try:
            while generation.completion is None:
                self._advance([generation])
                if generation.ready:
                    yield self._read(generation)
        finally:
            self._abort(generation)

    def _start(self, ids: list[int], params: SamplingParams) -> Generation:
        with self._lock:
            return Generation(self.engine, self.engine.add(ids, params), params, self.codec)

    def _advance(self, generations: Collection[Generation]) -> None:
        """One step, unless another caller's has brought tokens for one of these already."""
        with self._lock:
            if not any(g.ready for g in generations):
                self.engine.step()

    def _read(self, generation: Generation, who: str = "") -> Chunk:
        """The next chunk of a ready generation. Raises its error, with `who` before the message."""
        with self._lock:
            try:
                chunk = generation.next_chunk()
            except DejavuError as error:
                raise type(error)(f"{who}{error}") from error
            if chunk.finish_reason is not None:
                self.engine.abort(generation.request)  # a stop string: the engine cannot know
            return chunk

    def _abort(self, generation: Generation) -> None:
        with self._lock:
            self.engine.abort(generation.request)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.codec.encode(prompt)
        if not isinstance(prompt, bytes):
            with suppress(TypeError):
                return [index(i) for i in prompt] or self.codec.start()
        raise InputError(f"a prompt is a text or a list of token ids, not {prompt!r}")


def _spread(
    params: SamplingParams | Sequence[SamplingParams] | None, prompts: int
) -> Sequence[SamplingParams]:
    """Params for each prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * prompts
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise InputError(f"params must be SamplingParams or a list of them, not {params!r}")
    if len(params) != prompts:
        raise InputError(f"{prompts} prompts and {len(params)} params; give one for each")
    return params


def end_tokens(loaded: LoadedModel, codec: Codec) -> set[int]:
    """What ends an answer: the tokens that config, generation config and tokenizer name."""
    generation = loaded.checkpoint.generation_config.get("eos_token_id")
    ids = {*loaded.model.config.eos_token_ids}
    listed = generation if isinstance(generation, list) else [generation]
    for entry in (codec.eos_token_id, *listed):
        if isinstance(entry, int):
            ids.add(entry)
        elif entry is not None:
            raise ConfigError(
                f"generation_config.json: eos_token_id must be an id or a list of ids, not "
                f"{generation!r}"
            )
    return ids
