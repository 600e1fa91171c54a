"""The field's tasks on a dense and a sparse model side by side: accuracies, their paired
differences, KL and agreement, perplexities, and agreement of free-running text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dejavu.errors import InputError
from dejavu.eval.compare import compare, divergence
from dejavu.eval.freerun import draw_prompts, free_run
from dejavu.eval.journal import Journal
from dejavu.eval.pairs import Pair, PairEncoder
from dejavu.eval.report import summary, task_result
from dejavu.eval.scoring import Scored, Scorer
from dejavu.eval.tasks import SUITES, Item, Task, sample, task
from dejavu.eval.text import read_text
from dejavu.load import LoadedModel
from dejavu.sparsity.policy import Dense, Selector
from dejavu.weights.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[str, int, int], None]  # stage, done, in all
VERSION = 1  # of prompts and scores: journals of another version are not continued
PROMPT_TOKENS = 32


@dataclass(frozen=True)
class SuiteOptions:
    """data: folder of the task files. tasks: by name. shots: examples before every context.

    limit: items a task, drawn by `seed`; default all. prompts: how contexts are read, see
    `scoring`. max_tokens: scored of each text, default all. generations: prompts of the free run
    (0: none), each continued for new_tokens.
    """

    data: Path
    tasks: tuple[str, ...] = SUITES["paper"]
    shots: int = 0
    limit: int | None = None
    seed: int = 0
    prompts: str = "dense"
    max_tokens: int | None = None
    generations: int = 64
    new_tokens: int = 64

    def __post_init__(self) -> None:
        for name, least in (("shots", 0), ("generations", 0), ("new_tokens", 1), ("limit", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name}: {value} is not usable, it is at least {least}")
        for name in self.tasks:
            task(name).path(self.data)


class Suite:
    """A suite on one model and selector. Each task is journalled; a run that was interrupted goes
    on, and a finished one is only read again."""

    def __init__(
        self,
        loaded: LoadedModel,
        selector: Selector,
        options: SuiteOptions,
        *,
        selection: Mapping[str, Any],
        folder: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        """selection: what the selector is, in plain values. folder: of the journals; None: none."""
        self._loaded = loaded
        self._selector = selector
        self._options = options
        self._folder = folder
        self._progress = progress or (lambda stage, done, total: None)
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(loaded.checkpoint)
        self._encoder = PairEncoder(self._tokenizer)
        self._scorer = Scorer(
            loaded.model, {"dense": Dense(), "sparse": selector}, prompts=options.prompts
        )
        self._about = {
            "version": VERSION,
            "identity": loaded.checkpoint.identity(),
            "dtype": loaded.dtype,
            "selection": dict(selection),
            "tokenizer": type(self._tokenizer).__name__,
        }

    def run(self) -> dict[str, Any]:
        """Everything; plain values. Raises InputError for a journal of another run."""
        options = self._options
        questions, texts = [], []
        for name in options.tasks:
            found = task(name)
            if found.kind == "text":
                texts.append(self._text(found))
            else:
                questions.append(self._task(found))
        free = self._free_run() if options.generations else None
        setting = asdict(options) | {"data": str(options.data), "tasks": list(options.tasks)}
        return {
            **self._about,
            "options": setting,
            "tasks": questions,
            "mean": summary(questions),
            "texts": texts,
            "free_run": free,
        }

    def _journal(self, name: str, **setting: Any) -> Journal:
        path = None if self._folder is None else self._folder / f"{name}.jsonl"
        return Journal(path, self._about | setting)

    def _task(self, found: Task) -> dict[str, Any]:
        o = self._options
        drawn = sample(found.items(o.data), o.shots, o.limit, o.seed)
        setting: dict[str, Any] = {
            "task": found.name,
            "sha256": found.sha256(o.data),
            "shots": o.shots,
            "seed": o.seed,
            "prompts": o.prompts,
        }
        # The limit is no part of it: a draw of more items holds those of fewer.
        with self._journal(f"{found.name}-{o.shots}shot", **setting) as journal:
            for done, item in enumerate(drawn.items):
                self._progress(found.name, done, len(drawn.items))
                if item.name not in journal.records:
                    journal.add(item.name, self._score(item, drawn.examples))
            self._progress(found.name, len(drawn.items), len(drawn.items))
            records = [journal.records[item.name] for item in drawn.items]
        return task_result(found, drawn.items, records) | setting | {"limit": o.limit}

    def _score(self, item: Item, examples: str) -> dict[str, Any]:
        pairs = [
            self._encoder.pair(examples + context, continuation)
            for context, continuation in zip(item.contexts, item.continuations, strict=True)
        ]
        longest = max(pair.fed for pair in pairs)
        if longest > self._scorer.window:
            return {"unfit": longest}
        arms = self._scorer.score(pairs)
        record: dict[str, Any] = {
            name: {
                "logprobs": [one.logprob for one in scored],
                "greedy": [one.greedy for one in scored],
            }
            for name, scored in arms.items()
        }
        return record | _nearness(arms, pairs, item.gold)

    def _text(self, found: Task) -> dict[str, Any]:
        o = self._options
        path = found.path(o.data)
        setting = {"task": found.name, "sha256": found.sha256(o.data), "max_tokens": o.max_tokens}
        with self._journal(found.name, **setting) as journal:
            if "all" not in journal.records:
                text = read_text(
                    path,
                    self._tokenizer,
                    self._loaded.model.config.context_length,
                    found.preset,
                    max_tokens=o.max_tokens,
                    dataset=found.name,
                )
                result = compare(
                    self._loaded.model,
                    text,
                    self._selector,
                    progress=lambda done, total: self._progress(found.name, done, total),
                )
                journal.add("all", {"comparison": result.to_json()})
            return {"task": found.name, **journal.records["all"]["comparison"]}

    def _free_run(self) -> dict[str, Any]:
        """From the beginnings of the C4 sample, on the decode path that serves."""
        from dejavu.engine.llm import LLM

        o = self._options
        source = task("c4")
        setting = {
            "sha256": source.sha256(o.data),
            "seed": o.seed,
            "generations": o.generations,
            "new_tokens": o.new_tokens,
        }
        with self._journal("free-run", **setting) as journal:
            if "all" not in journal.records:
                lines = source.path(o.data).read_text(encoding="utf-8").split("\n")
                documents = [json.loads(line)["text"] for line in lines if line.strip()]
                ids = [self._encoder.encode(document) for document in documents]
                result = free_run(
                    LLM(self._loaded),
                    LLM(self._loaded, policy=self._selector),
                    draw_prompts(ids, o.generations, PROMPT_TOKENS, o.seed),
                    o.new_tokens,
                    lambda done, total: self._progress("free run", done, total),
                )
                journal.add("all", result.to_json())
            record = dict(journal.records["all"])
            record.pop("item")
            return record


def _nearness(arms: Mapping[str, list[Scored]], pairs: Sequence[Pair], gold: int) -> dict[str, Any]:
    """KL(dense || sparse) in nats and equal likeliest tokens, summed over the right answer."""
    dense, sparse = arms["dense"][gold].logits, arms["sparse"][gold].logits
    return {
        "tokens": len(pairs[gold].continuation),
        "kl": float(divergence(dense, sparse).double().sum()),
        "same": int((dense.argmax(dim=1) == sparse.argmax(dim=1)).sum()),
    }
