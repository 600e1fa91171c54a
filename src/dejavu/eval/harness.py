"""dejavu as a model of lm-evaluation-harness: any of its tasks, dense or with a plan.

    python -m dejavu.eval.harness --model dejavu \\
        --model_args pretrained=relu-30m,plan=relu-30m --tasks lambada_openai

takes everything that `lm_eval` takes: the harness finds models outside of it by their import, so
this module registers `dejavu` and hands over to the harness's own command. In Python, import it and
call `lm_eval.simple_evaluate(model="dejavu", model_args=...)`. (Documented by the harness under
"External Library Usage".) Needs `pip install dejavu-llm[eval]`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from dejavu.embedded import CALIBRATION_TEXT
from dejavu.engine.llm import LLM
from dejavu.engine.params import SamplingParams
from dejavu.errors import InputError
from dejavu.eval.pairs import Pair, PairEncoder, cut, rolling
from dejavu.eval.scoring import Scorer
from dejavu.eval.text import read_text
from dejavu.load import load_model
from dejavu.predictor.plan import load_plan
from dejavu.sparsity.policies import parse_policy
from dejavu.sparsity.policy import Dense, Selector
from dejavu.weights.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from torch import Tensor

_log = logging.getLogger(__name__)
_ARM = "model"


@register_model("dejavu")
class DejavuLM(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """The harness's model: loglikelihoods teacher-forced, generation through the engine."""

    def __init__(
        self,
        pretrained: str,
        plan: str | None = None,
        level: str | None = None,
        policy: str | None = None,
        prompts: str = "dense",
        dtype: str = "auto",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        threads: int | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        """pretrained: folder, .gguf file, Hub id or `relu-30m`. plan, level, policy: what selects;
        without one of them the model is dense. prompts: how contexts are read, see `scoring`.

        max_length: tokens at most, default the model's context. add_bos_token: default, what the
        tokenizer does. device, batch_size, max_batch_size come from the harness with every call:
        scoring runs on the CPU, one request at a time, and shares contexts instead of batching.
        """
        super().__init__()
        if plan is not None and policy is not None:
            raise InputError("give a plan or a policy, not both")
        if plan is None and level is not None:
            raise InputError(f"level {level!r} is one of a plan's, and no plan is given")
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        if device not in (None, "cpu"):
            _log.info("device %s is not used: scoring runs on the CPU", device)
        self._loaded = load_model(pretrained, dtype=dtype)
        self._plan, self._level, self._policy = plan, level, policy
        self._threads = threads
        self.tokenizer = load_tokenizer(self._loaded.checkpoint)
        self._encoder = PairEncoder(self.tokenizer, add_special_tokens=add_bos_token)
        self._scorer = Scorer(
            self._loaded.model, {_ARM: self._selector()}, prompts=prompts, window=max_length
        )
        self.max_length = self._scorer.window
        self.max_gen_toks = max_gen_toks

    def _selector(self) -> Selector:
        if self._plan is not None:
            return load_plan(self._plan).selector(self._loaded, self._level)
        if self._policy is not None:
            return parse_policy(self._policy, self._loaded.model, self._calibration)
        return Dense()

    def _calibration(self) -> list[Tensor]:
        """Windows of the embedded text, for policies that choose before they run."""
        text = read_text(CALIBRATION_TEXT, self.tokenizer, self._loaded.model.config.context_length)
        return [window.ids[:-1] for window in text.windows[:16]]

    @cached_property
    def _llm(self) -> LLM:
        """The engine, with a selector of its own: its buffers are those of decode steps."""
        policy = None if self._plan is None and self._policy is None else self._selector()
        return LLM(
            self._loaded, policy=policy, threads=self._threads, max_model_len=self.max_length
        )

    @property
    def eot_token_id(self) -> int:
        """The end token; the start token where there is none."""
        found = self.tokenizer.eos_token_id
        return found if isinstance(found, int) else self._encoder.prefix

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        return self._encoder.prefix

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results."""
        return {
            "model_identity": self._loaded.checkpoint.identity(),
            "model_dtype": self._loaded.dtype,
            "plan": self._plan,
            "level": self._level if self._plan is not None else None,
            "policy": self._policy,
            "prompts": self._scorer.prompts,
        }

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        return self._encoder.encode(string, special=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the tokenizer's template writes it."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        texts = [request.args for request in requests]
        pairs = [self._encoder.pair(context, text) for context, text in texts]
        named = [
            ((context, text), pair.context, pair.continuation)
            for (context, text), pair in zip(texts, pairs, strict=True)
        ]
        return self._loglikelihood_tokens(named, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Too long contexts are cut from the left as the harness does it; they are counted and the
        longest is named. A continuation that is itself too long is scored window by window."""
        pairs = [Pair(tuple(context), tuple(rest)) for _, context, rest in requests]
        self._report_cuts([pair.fed for pair in pairs], [text for text, _, _ in requests])
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        # Neighbours share what their contexts have in common.
        order = sorted(range(len(pairs)), key=lambda n: (pairs[n].context, pairs[n].continuation))
        for number in tqdm(order, disable=disable_tqdm, desc="Running loglikelihood requests"):
            shorter = cut(pairs[number], self.max_length)
            windows = [shorter] if shorter is not None else self._windows(pairs[number])
            scored = self._scorer.score(windows)[_ARM]
            found[number] = (
                sum(one.logprob for one in scored),
                all(one.greedy for one in scored),
            )
            self.cache_hook.add_partial("loglikelihood", requests[number][0], found[number])
        return found

    def _windows(self, pair: Pair) -> list[Pair]:
        return list(rolling(pair.continuation, pair.context[-1], self.max_length))

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        found = []
        for request in tqdm(requests, disable=disable_tqdm, desc="Running rolling requests"):
            (text,) = request.args
            ids = self._encoder.encode(text)
            windows = list(rolling(ids, self._encoder.prefix, self.max_length))
            scored = [self._scorer.score([window])[_ARM][0].logprob for window in windows]
            found.append(float(sum(scored)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Through the engine: decode steps with the plan, prompts prefilled densely."""
        prompts, params = [], []
        lengths = []
        for context, options in (request.args for request in requests):
            wanted = self._params(options)
            room = self.max_length - (wanted.max_tokens or 0)
            if room < 1:
                raise InputError(
                    f"max_gen_toks: {wanted.max_tokens} new tokens leave no room for a prompt in "
                    f"{self.max_length}"
                )
            ids = self._encoder.encode(context) or [self._encoder.prefix]
            lengths.append(len(ids) + (wanted.max_tokens or 0))
            prompts.append(ids[-room:])
            params.append(wanted)
        self._report_cuts(lengths, [request.args for request in requests])
        texts = [answer.text for answer in self._llm.generate(prompts, params)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _params(self, options: dict[str, Any]) -> SamplingParams:
        given = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        sampled = bool(given.pop("do_sample", False))
        temperature = float(given.pop("temperature", 1.0))
        params = SamplingParams(
            max_tokens=int(given.pop("max_gen_toks")),
            stop=given.pop("until") or None,
            temperature=temperature if sampled else 0.0,
            top_k=int(given.pop("top_k", 0)),
            top_p=float(given.pop("top_p", 1.0)),
            min_p=float(given.pop("min_p", 0.0)),
            repetition_penalty=float(given.pop("repetition_penalty", 1.0)),
            seed=given.pop("seed", None),
        )
        if given:
            raise InputError(f"generation options that have no effect here: {', '.join(given)}")
        return params

    def _report_cuts(self, lengths: Sequence[int], texts: Sequence[Any]) -> None:
        """One warning a call: how many requests do not fit, and which is the longest."""
        long = [n for n, length in enumerate(lengths) if length > self.max_length]
        if long:
            worst = max(long, key=lambda n: lengths[n])
            _log.warning(
                "%d of %d requests do not fit %d tokens and lose the beginning of their context; "
                "the longest has %d and begins %r",
                len(long),
                len(lengths),
                self.max_length,
                lengths[worst],
                str(texts[worst][0])[:60],
            )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
