"""One request on its way from token ids to text."""

from __future__ import annotations

from dejavu.engine.codec import Codec
from dejavu.engine.detokenize import Detokenizer, StopMatcher
from dejavu.engine.engine import Engine
from dejavu.engine.output import Chunk, Completion
from dejavu.engine.params import SamplingParams
from dejavu.engine.scheduler import FinishReason, Request


class Generation:
    """Turns the tokens of a running request into chunks, and ends at a stop string.

    completion: the whole answer once it has ended, else None.
    """

    def __init__(
        self, engine: Engine, request: Request, params: SamplingParams, codec: Codec
    ) -> None:
        self.request = request
        self.completion: Completion | None = None
        self._detokenizer = Detokenizer(codec.decode, skip=codec.special_ids, prompt=request.prompt)
        self._engine = engine
        self._matcher = StopMatcher(params.stop_strings)
        self._taken = 0  # tokens turned into chunks
        self._text: list[str] = []

    @property
    def ready(self) -> bool:
        """Whether `next_chunk` has something to give."""
        return self._taken < len(self.request.token_ids) or self.request.done

    def next_chunk(self) -> Chunk:
        """The next token's chunk. Raises the request's error, if that is what is next."""
        assert self.ready
        assert self.completion is None
        request = self.request
        if self._taken == len(request.token_ids):
            assert request.error is not None, "an aborted request is not read on"
            raise request.error
        token = request.token_ids[self._taken]
        self._taken += 1
        last = request.done and self._taken == len(request.token_ids) and request.error is None
        text = ""
        # The end token says that the answer is over; it is no part of the text.
        if not (last and request.finish_reason == "stop"):
            text = self._matcher.push(self._detokenizer.push(token))
        if last and self._matcher.matched is None:
            text += self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()
        self._text.append(text)
        reason: FinishReason | None = request.finish_reason if last else None
        if self._matcher.matched is not None:
            reason = "stop"
        if reason is not None:
            self._complete(reason)
        place = self._taken - 1
        return Chunk(
            text,
            (token,),
            reason,
            self.completion,
            logprob=request.logprobs[place] if request.logprobs else None,
            prompt_logprobs=() if place else request.prompt_logprobs,
            # The first token came from the prompt and has none.
            activity=request.activity[place - 1] if request.activity and place else None,
        )

    def _complete(self, reason: FinishReason) -> None:
        request = self.request
        self.completion = Completion(
            text="".join(self._text),
            token_ids=tuple(request.token_ids[: self._taken]),
            finish_reason=reason,
            prompt_token_ids=request.prompt,
            prefill_seconds=request.prefill_seconds,
            decode_seconds=request.decode_seconds,
            density=self._engine.density_of(request.arm) if self._taken > 1 else None,
        )
