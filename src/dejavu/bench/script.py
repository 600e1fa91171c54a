"""What the arms of a benchmark read."""

from __future__ import annotations

from dejavu.bench.arms import Arm, Decoded, Prompt
from dejavu.bench.options import BenchOptions
from dejavu.bench.subject import random_ids, text_ids
from dejavu.config import ModelConfig
from dejavu.errors import InputError
from dejavu.weights.checkpoint import Checkpoint

_PROMPT_TOKENS = 128


class Script:
    """What the arms read: the same in every arm, other tokens in every repeat.

    Trained weights continue prompts of a text, each repeat its own. Random ones are fed random
    tokens after a prompt that stays (see `Arm.decode`): attention spreads a common part over the
    whole answer, and densities would follow the prompt.
    """

    def __init__(
        self, config: ModelConfig, options: BenchOptions, trained: Checkpoint | None
    ) -> None:
        """trained: where a trained model and its tokenizer came from; None: random weights."""
        self._options = options
        steps = options.skipped + options.new_tokens
        room = config.context_length - steps - 3
        asked = options.prompt_tokens
        if room < 1:
            raise InputError(
                f"new_tokens {options.new_tokens} does not fit into the context of "
                f"{config.context_length} tokens together with a prompt"
            )
        if asked is not None and asked > room:
            raise InputError(
                f"prompt_tokens {asked} and new_tokens {options.new_tokens} do not fit into the "
                f"context of {config.context_length} tokens together: at most prompt_tokens {room}"
            )
        self.prompt_tokens = min(_PROMPT_TOKENS, room) if asked is None else asked
        self.max_model_len = self.prompt_tokens + steps + 3
        batch, repeats, seed = options.batch, options.repeats, options.seed
        vocab_size, length = config.vocab_size, self.prompt_tokens
        self.fed: list[list[list[int]]] | None = None
        if trained is None:
            self._prompts = [random_ids(vocab_size, batch, length, seed=seed)] * repeats
            self.fed = [
                random_ids(vocab_size, batch, steps, seed=seed + 1 + repeat)
                for repeat in range(repeats)
            ]
            return
        if options.text is None:
            ids = random_ids(vocab_size, batch * repeats, length)
        else:
            ids = text_ids(trained, options.text, batch * repeats, length)
        self._prompts = [ids[i * batch : (i + 1) * batch] for i in range(repeats)]

    @property
    def first_prompt(self) -> Prompt:
        """Of the first sequence in the first repeat."""
        return self._prompts[0][0]

    def play(self, arm: Arm, repeat: int) -> Decoded:
        """One turn of an arm."""
        return arm.decode(
            self._prompts[repeat],
            self._options.new_tokens,
            skip=self._options.skipped,
            fed=None if self.fed is None else self.fed[repeat],
        )
