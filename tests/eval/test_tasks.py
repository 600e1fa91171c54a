"""What is asked: prompts as the field has them, draws that never show what they score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dejavu.errors import InputError
from dejavu.eval.tasks import SUITES, TASKS, Item, sample, task

# One record a task, as in the files, with the context, the continuations and the right one.
CASES: list[tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...], int]] = [
    ("lambada", {"text": 'He said "hi Bob'}, ('He said "hi',), (" Bob",), 0),
    (
        "hellaswag",
        {"context": "Baking: [step] Mix  it. [title] A cook", "endings": ["[x]eats.", "goes"],
         "label": 1},
        ("Baking: Mix it.. A cook",) * 2,
        (" eats.", " goes"),
        1,
    ),
    (
        "piqa",
        {"goal": "Open it", "sol1": "push", "sol2": "pull", "label": 0},
        ("Question: Open it\nAnswer:",) * 2,
        (" push", " pull"),
        0,
    ),
    (
        "winogrande",
        {"sentence": "Ann told Bea that _ won.", "option1": "Ann", "option2": "Bea", "answer": 2},
        ("Ann told Bea that Ann", "Ann told Bea that Bea"),
        (" won.", " won."),
        1,
    ),
    (
        "openbookqa",
        {"question": "Predators eat", "choices": ["lions", "bunnies", "grass"], "label": 1},
        ("Predators eat",) * 3,
        (" lions", " bunnies", " grass"),
        1,
    ),
    (
        "copa",
        {"premise": "It rained. ", "question": "effect", "choice1": "I got wet.", "choice2": "No.",
         "label": 0},
        ("It rained therefore",) * 2,
        (" i got wet.", " no."),
        0,
    ),
    (
        "rte",
        {"premise": "A is.", "hypothesis": "B is.", "label": "not_entailment"},
        ("A is.\nQuestion: B is. True or False?\nAnswer:",) * 2,
        (" True", " False"),
        1,
    ),
    (
        "arc_easy",
        {"question": "Why?", "choices": ["a", "b", "c"], "label": 2},
        ("Question: Why?\nAnswer:",) * 3,
        (" a", " b", " c"),
        2,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "record", "contexts", "answers", "gold"), CASES)
def test_prompts(
    name: str,
    record: dict[str, Any],
    contexts: tuple[str, ...],
    answers: tuple[str, ...],
    gold: int,
    tmp_path: Path,
) -> None:
    found = task(name)
    (tmp_path / found.file).write_text(json.dumps(record) + "\n\n", encoding="utf-8")
    (item,) = found.items(tmp_path)
    assert (item.name, item.contexts, item.continuations, item.gold) == (
        "1",
        contexts,
        answers,
        gold,
    )
    assert item.example == contexts[gold] + answers[gold]
    if name not in ("winogrande", "lambada"):
        assert item.sizes == tuple(len(answer) - 1 for answer in answers)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("copa", "no JSON"),
        ("copa", '{"premise": "A."}'),
        ("copa", "[1]"),
        ("piqa", '{"goal": "a", "sol1": "b", "sol2": "c", "label": 2}'),
        ("winogrande", '{"sentence": "none", "option1": "b", "option2": "c", "answer": 1}'),
        ("winogrande", '{"sentence": "a _", "option1": "b", "option2": "c", "answer": 3}'),
        ("lambada", '{"text": "word"}'),
        ("rte", '{"premise": "a", "hypothesis": "b", "label": "perhaps"}'),
    ],
)
def test_a_line_that_is_no_item_is_named(tmp_path: Path, name: str, line: str) -> None:
    good = next(json.dumps(record) for n, record, *_ in CASES if n == name)
    (tmp_path / task(name).file).write_text(f"{good}\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError, match=rf"line 2 is no item of {name}"):
        task(name).items(tmp_path)


def test_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'hellaswag'"):
        task("helaswag")
    with pytest.raises(InputError, match=r"copa\.dev500\.jsonl is absent; --data"):
        task("copa").path(tmp_path)


def items(count: int) -> list[Item]:
    return [Item(str(n), (f"q{n}",), (f" a{n}",)) for n in range(count)]


def test_a_draw_is_a_draw() -> None:
    every = items(40)
    whole = sample(every, 0, None, seed=0)
    assert whole.items == every
    assert whole.examples == ""
    few = sample(every, 3, 10, seed=1)
    assert few == sample(every, 3, 10, seed=1)
    assert few.items != sample(every, 3, 10, seed=2).items
    assert [int(i.name) for i in few.items] == sorted(int(i.name) for i in few.items)
    shown = few.examples.split("\n\n")
    assert shown.pop() == ""
    assert len(shown) == 3
    assert {item.example for item in few.items}.isdisjoint(shown)
    most = sample(every, 3, None, seed=1)
    assert len(most.items) == 37, "all that are no example"
    assert most.examples == few.examples, "a limit changes nothing but the number"
    assert set(few.items) <= set(sample(every, 3, 20, seed=1).items)
    with pytest.raises(InputError, match="40 examples of 40 items"):
        sample(every, 40, None, seed=0)


def test_the_real_files_are_whole(shared: Path) -> None:
    counts = {
        name: len(TASKS[name].items(shared / "evaldata"))
        for name in SUITES["paper"]
        if TASKS[name].kind != "text"
    }
    assert counts == {
        "lambada": 5153,
        "hellaswag": 1000,
        "piqa": 1000,
        "winogrande": 1267,
        "openbookqa": 500,
        "copa": 500,
        "rte": 277,
        "arc_easy": 1000,
        "arc_challenge": 1172,
    }
