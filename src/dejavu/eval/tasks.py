"""The tasks of the paper's evaluation over local files: what is asked, and which answer is right.

Prompts are those of lm-evaluation-harness (its task folders, version 0.4), with two exceptions that
the data force: HellaSwag's context comes joined, its second half in lower case; and COPA's choices
follow their connector after one space, where the harness has two.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dejavu.errors import InputError
from dejavu.registry import unknown
from dejavu.weights.files import sha256_file

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Item:
    """One question: texts to score after a context each, of which `gold` is right.

    name: its place in the file. sizes: characters of each choice, for scores by length.
    """

    name: str
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int = 0
    sizes: tuple[int, ...] = (1,)

    @property
    def example(self) -> str:
        """The item as an example of its own: context and right answer."""
        return self.contexts[self.gold] + self.continuations[self.gold]


@dataclass(frozen=True)
class Task:
    """file: of the data folder. kind: `choice` among answers, `word` to be predicted exactly, or
    `text` (perplexity by the preset). metric: the headline, `acc` or `acc_norm` (scores divided by
    the answer's characters); texts have none."""

    name: str
    file: str
    kind: Literal["choice", "word", "text"]
    make: Callable[[str, Record], Item] | None = None
    metric: str = "acc"
    preset: str = ""

    def items(self, folder: Path) -> list[Item]:
        """All items of the file, in its order.

        Raises InputError naming the file, and the line that is no item.
        """
        assert self.make is not None
        path = self.path(folder)
        found = []
        try:
            # Not splitlines, which would also split at rare characters inside of a JSON string.
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read as UTF-8 text: {error}") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found.append(self.make(str(number), json.loads(line)))
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise InputError(
                    f"{path}, line {number} is no item of {self.name}: {error!r}"
                ) from error
        return found

    def path(self, folder: Path) -> Path:
        """The data file. Raises InputError where it is absent."""
        path = folder / self.file
        if not path.is_file():
            raise InputError(f"{path} is absent; --data is the folder of the evaluation data")
        return path

    def sha256(self, folder: Path) -> str:
        """Hash of the data file."""
        return sha256_file(self.path(folder))


@dataclass(frozen=True)
class Sample:
    """What is scored of a task, and the text of the examples that stands before every context."""

    items: list[Item]
    examples: str


def sample(items: list[Item], shots: int, limit: int | None, seed: int) -> Sample:
    """A draw of items and of examples that are not among them; the same for the same seed.

    shots: examples before every context, the same ones for all items, so that their computation is
    shared. limit: items scored at most, default all that are no example, in the order of the file.
    Raises InputError where nothing is left to score.
    """
    order = list(range(len(items)))
    random.Random(seed).shuffle(order)
    if shots >= len(order):
        raise InputError(f"{shots} examples of {len(order)} items leave nothing to score")
    shown, rest = order[len(order) - shots :], order[: len(order) - shots]
    scored = sorted(rest[:limit])
    examples = "".join(f"{items[number].example}\n\n" for number in shown)
    return Sample([items[number] for number in scored], examples)


def _choices(name: str, context: str, answers: list[str], gold: int) -> Item:
    """Answers after one context, each after a space."""
    if not 0 <= gold < len(answers):
        raise ValueError(f"label {gold} of {len(answers)} answers")
    return Item(
        name,
        (context,) * len(answers),
        tuple(f" {answer}" for answer in answers),
        gold,
        tuple(max(len(answer), 1) for answer in answers),
    )


def _lambada(name: str, record: Record) -> Item:
    context, _, word = record["text"].rpartition(" ")
    if not context or not word:
        raise ValueError("a text of at least two words is needed")
    return Item(name, (context,), (f" {word}",), 0, (len(word),))


def _hellaswag(name: str, record: Record) -> Item:
    def clean(text: str) -> str:
        """Without the traces of the WikiHow pages that some items come from."""
        text = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

    answers = [clean(ending) for ending in record["endings"]]
    return _choices(name, clean(record["context"]), answers, record["label"])


def _piqa(name: str, record: Record) -> Item:
    context = f"Question: {record['goal']}\nAnswer:"
    return _choices(name, context, [record["sol1"], record["sol2"]], record["label"])


def _winogrande(name: str, record: Record) -> Item:
    """The two candidates are put into the sentence; what follows them is scored, not they."""
    before, gap, after = record["sentence"].partition("_")
    if not gap:
        raise ValueError("no gap in the sentence")
    gold = int(record["answer"]) - 1
    if gold not in (0, 1):
        raise ValueError(f"answer {record['answer']}")
    rest = f" {after.strip()}"
    contexts = (before + record["option1"], before + record["option2"])
    return Item(name, contexts, (rest, rest), gold, (len(rest), len(rest)))


def _openbookqa(name: str, record: Record) -> Item:
    return _choices(name, record["question"], record["choices"], record["label"])


def _arc(name: str, record: Record) -> Item:
    context = f"Question: {record['question']}\nAnswer:"
    return _choices(name, context, record["choices"], record["label"])


def _copa(name: str, record: Record) -> Item:
    link = {"cause": "because", "effect": "therefore"}[record["question"]]
    answers = [text[:1].lower() + text[1:] for text in (record["choice1"], record["choice2"])]
    return _choices(name, f"{record['premise'].strip()[:-1]} {link}", answers, record["label"])


def _rte(name: str, record: Record) -> Item:
    context = f"{record['premise']}\nQuestion: {record['hypothesis']} True or False?\nAnswer:"
    gold = ("entailment", "not_entailment").index(record["label"])
    return _choices(name, context, ["True", "False"], gold)


TASKS = {
    task.name: task
    for task in (
        Task("wikitext2", "wikitext2.test.raw.txt", "text", preset="wikitext2"),
        Task("c4", "c4.sample1480.jsonl", "text", preset="documents"),
        Task("lambada", "lambada_openai.test.jsonl", "word", _lambada),
        Task("hellaswag", "hellaswag.val1000.jsonl", "choice", _hellaswag, "acc_norm"),
        Task("piqa", "piqa.valid1000.jsonl", "choice", _piqa),
        Task("winogrande", "winogrande.dev.jsonl", "choice", _winogrande),
        Task("openbookqa", "openbookqa.test.jsonl", "choice", _openbookqa, "acc_norm"),
        Task("copa", "copa.dev500.jsonl", "choice", _copa),
        Task("rte", "rte.dev.jsonl", "choice", _rte),
        Task("arc_easy", "arc_easy.test1000.jsonl", "choice", _arc),
        Task("arc_challenge", "arc_challenge.test.jsonl", "choice", _arc, "acc_norm"),
    )
}
SUITES = {"paper": tuple(TASKS)}


def task(name: str) -> Task:
    """A task by name. Raises InputError listing those that exist."""
    if name not in TASKS:
        raise unknown("task", name, TASKS, InputError)
    return TASKS[name]
