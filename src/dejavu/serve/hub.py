"""What the routes share: models by name, the worker, and the way from a request to its jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from uuid import uuid4

from dejavu.engine.codec import Codec
from dejavu.engine.params import SamplingParams
from dejavu.serve.answers import Answers
from dejavu.serve.errors import ApiError
from dejavu.serve.mailbox import Mailbox
from dejavu.serve.metrics import Metrics
from dejavu.serve.models import ServedModel
from dejavu.serve.requests import ChatRequest, CompletionRequest, Sampling
from dejavu.serve.settings import Settings
from dejavu.serve.worker import Event, Job, Worker


@dataclass(frozen=True, eq=False)
class Hub:
    """One a server."""

    settings: Settings
    served: Mapping[str, ServedModel]
    metrics: Metrics
    worker: Worker

    @classmethod
    def over(cls, settings: Settings, served: Mapping[str, ServedModel]) -> Hub:
        """With metrics and a worker of its own, which is not started yet."""
        models = list(served.values())
        metrics = Metrics(models)
        return cls(settings, served, metrics, Worker(models, metrics, max_queue=settings.max_queue))

    def model(self, name: str) -> ServedModel:
        """Raises ApiError, 404, for one that is not served."""
        if name not in self.served:
            raise ApiError(
                f"the model {name!r} is not served here; there are: {', '.join(self.served)}",
                404,
                param="model",
                code="model_not_found",
            )
        return self.served[name]

    async def ask_text(
        self, body: CompletionRequest, client: str, request_id: str | None = None
    ) -> Answers:
        """Submit a text completion. Raises DejavuError, before any work, where it cannot be.

        client: whose turn it takes. request_id: made up where not given.
        """
        served = self.model(body.model)
        body.warnings()
        asked = body.prompts()
        self._check_choices(len(asked) * (body.n or 1))
        prompts = [await self._encode(served, p) if isinstance(p, str) else list(p) for p in asked]
        return self._submit(body, served, prompts, body.params, client, request_id)

    async def ask_chat(
        self, body: ChatRequest, client: str, request_id: str | None = None
    ) -> Answers:
        """Submit a chat completion; all else as `ask_text`."""
        served = self.model(body.model)
        body.warnings()
        self._check_choices(body.n or 1)
        prompt = await asyncio.to_thread(served.codec.encode_chat, body.conversation())
        return self._submit(body, served, [prompt], body.params, client, request_id)

    async def _encode(self, served: ServedModel, text: str) -> list[int]:
        """Off the event loop: a long text takes its time."""
        check_length(text, served.codec, served.engine.max_model_len)
        return await asyncio.to_thread(served.codec.encode, text)

    def _submit(
        self,
        body: Sampling,
        served: ServedModel,
        prompts: list[list[int]],
        params: Callable[[int], SamplingParams],
        client: str,
        request_id: str | None,
    ) -> Answers:
        arm = served.arm(body.sparsity)
        mail: Mailbox[tuple[int, Event]] = Mailbox()
        choices = body.n or 1
        wanted = [params(choice) for choice in range(choices)]
        for prompt in prompts:
            served.engine.check(prompt, wanted[0])
        jobs = [
            Job(
                served,
                prompt,
                wanted[choice],
                arm,
                client,
                bool(body.activity),
                i * choices + choice,
                mail,
            )
            for i, prompt in enumerate(prompts)
            for choice in range(choices)
        ]
        return Answers(self.worker, jobs, request_id=request_id or uuid4().hex, user=body.user)

    def _check_choices(self, choices: int) -> None:
        limit = self.settings.max_choices
        if choices > limit:
            raise ApiError(
                f"n: {choices} answers are asked for at once (prompts times n), the limit is "
                f"{limit}",
                param="n",
            )


def check_length(text: str, codec: Codec, max_model_len: int) -> None:
    """Raises ApiError for a text that cannot fit whatever its tokens are, before tokenising it."""
    least = -(-len(text) // codec.longest_token)
    if least >= max_model_len:
        raise ApiError(
            f"the prompt has {len(text)} characters, at least {least} tokens, and the context is "
            f"{max_model_len} tokens long, the answer included: shorten the prompt",
            param="prompt",
        )
