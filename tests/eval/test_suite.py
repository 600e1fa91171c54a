"""A whole suite on a tiny model: figures by hand, interruption, and items that do not fit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dejavu.cli import main
from dejavu.errors import InputError
from dejavu.eval import suite as suite_module
from dejavu.eval.report import summary, task_result
from dejavu.eval.suite import Suite, SuiteOptions
from dejavu.eval.tasks import Item, Task, task
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel
from dejavu.sparsity.policy import Dense
from dejavu.weights.tokenizer import load_tokenizer

from .conftest import TEXT
from .tiny import CONTEXT, Guess

TASKS = ("copa", "lambada", "c4")
WORDS = TEXT.split()[:16]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twelve questions; the fifth, and the ninth word, are longer than the context."""
    folder = tmp_path / "data"
    folder.mkdir()
    generator = torch.Generator().manual_seed(5)

    def words(count: int) -> str:
        places = torch.randint(len(WORDS), (count,), generator=generator).tolist()
        return " ".join(WORDS[place] for place in places)

    copa = [
        {
            "premise": f"{words(200 if n == 4 else 5)}.",
            "question": "cause" if n % 2 else "effect",
            "choice1": words(2),
            "choice2": words(3),
            "label": n % 2,
        }
        for n in range(12)
    ]
    lambada = [{"text": words(300 if n == 8 else 9)} for n in range(12)]
    c4 = [{"text": words(60)} for _ in range(5)]
    for name, records in (("copa", copa), ("lambada", lambada), ("c4", c4)):
        path = folder / task(name).file
        path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return folder


def make(loaded: LoadedModel, data: Path, out: Path | None = None, **fields: Any) -> Suite:
    options = {"tasks": TASKS, "generations": 3, "new_tokens": 6, **fields}
    selector = Guess(loaded.model)
    return Suite(
        loaded, selector, SuiteOptions(data, **options), selection={"guess": 3}, folder=out
    )


@torch.inference_mode()
def test_figures_by_hand(loaded: LoadedModel, data: Path) -> None:
    """Dense accuracies from whole forwards without any sharing."""
    found = make(loaded, data).run()
    copa, lambada = found["tasks"]
    assert (copa["items"], copa["unfit"]["names"]) == (11, ["5"])
    assert (lambada["items"], lambada["unfit"]["names"]) == (11, ["9"])
    assert lambada["unfit"]["longest"] > CONTEXT
    tokenizer = load_tokenizer(loaded.checkpoint)

    def logprobs(context: str, continuation: str) -> torch.Tensor:
        ids = torch.tensor(tokenizer(context + continuation)["input_ids"])
        start = len(tokenizer(context)["input_ids"])
        logits = loaded.model.logits(ids, loaded.model.new_cache(len(ids)), Dense(), TorchOps())
        rows = logits[start - 1 : -1].double().log_softmax(1)
        return rows.gather(1, ids[start:, None])[:, 0]

    right, by_size = [], []
    for item in task("copa").items(data):
        if item.name == "5":
            continue
        sums = [
            float(logprobs(*pair).sum())
            for pair in zip(item.contexts, item.continuations, strict=True)
        ]
        right.append(sums.index(max(sums)) == item.gold)
        scaled = [s / (len(c) - 1) for s, c in zip(sums, item.continuations, strict=True)]
        by_size.append(scaled.index(max(scaled)) == item.gold)
    assert copa["dense"]["acc"] == pytest.approx(sum(right) / 11)
    assert copa["dense"]["acc_norm"] == pytest.approx(sum(by_size) / 11)
    losses = [
        -float(logprobs(item.contexts[0], item.continuations[0]).sum())
        for item in task("lambada").items(data)
        if item.name != "9"
    ]
    assert lambada["dense"]["loss"] == pytest.approx(math.fsum(losses) / 11, abs=1e-4)
    difference = copa["difference"]["acc"]
    assert difference["value"] == pytest.approx(copa["sparse"]["acc"] - copa["dense"]["acc"])
    assert copa["kl"] > 0
    assert 0 <= lambada["agreement"] <= 1
    assert found["mean"]["dense"] == pytest.approx(
        (copa["dense"]["acc"] + lambada["dense"]["acc"]) / 2
    )
    (text,) = found["texts"]
    assert text["ratio"] == pytest.approx(
        text["sparse"]["perplexity"] / text["dense"]["perplexity"]
    )
    free = found["free_run"]
    assert (free["prompts"], free["prompt_tokens"], free["new_tokens"]) == (3, 32, 6)
    assert free["identical"] <= free["together"] <= 1
    json.dumps(found, allow_nan=False)


def test_dense_beside_dense_differs_in_nothing(loaded: LoadedModel, data: Path) -> None:
    options = SuiteOptions(data, TASKS, shots=2, generations=3, new_tokens=6)
    found = Suite(loaded, Dense(), options, selection={}).run()
    for one in found["tasks"]:
        assert one["difference"][one["metric"]]["value"] == 0
        assert one["kl"] == pytest.approx(0, abs=1e-6)
        assert one["agreement"] == one["same_answer"] == 1
    assert found["mean"]["difference"]["errors"] == 0
    assert found["free_run"]["together"] == 1
    assert found["texts"][0]["ratio"] == 1


class StoppedError(Exception):
    pass


def near(found: Any, wanted: Any) -> bool:
    """Equal up to rounding: what is left to score after an interruption shares other contexts."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(near(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(near, found, wanted))
    return bool(found == (pytest.approx(wanted, abs=1e-5) if isinstance(wanted, float) else wanted))


@pytest.mark.parametrize("after", [0, 3, 14, 25])
def test_an_interrupted_run_goes_on_to_the_same_result(
    loaded: LoadedModel, data: Path, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = make(loaded, data).run()
    scored = []
    score = Suite._score

    def limited(self: Suite, item: Item, examples: str) -> dict[str, Any]:
        if len(scored) == after:
            raise StoppedError
        scored.append(item.name)
        return score(self, item, examples)

    monkeypatch.setattr(Suite, "_score", limited)
    out = tmp_path / "out"
    if after < 24:
        with pytest.raises(StoppedError):
            make(loaded, data, out).run()
    after = -1  # and now to the end
    assert near(make(loaded, data, out).run(), wanted)
    assert len(scored) == 24, "no item is scored twice"
    monkeypatch.setattr(suite_module, "compare", None)
    monkeypatch.setattr(suite_module, "free_run", None)
    assert near(make(loaded, data, out).run(), wanted), "a finished run is only read"
    with pytest.raises(InputError, match=r"is of another run .*prompts: 'dense', now 'sparse'"):
        make(loaded, data, out, prompts="sparse").run()


def test_a_larger_draw_goes_on_from_a_smaller_one(
    loaded: LoadedModel, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = make(loaded, data, tmp_path, tasks=("copa",), limit=5, generations=0, shots=1).run()
    scored = []
    score = Suite._score
    monkeypatch.setattr(
        Suite, "_score", lambda self, item, e: scored.append(item.name) or score(self, item, e)
    )
    make(loaded, data, tmp_path, tasks=("copa",), generations=0, shots=1).run()
    assert len(scored) == 11 - 5
    again = make(loaded, data, tmp_path, tasks=("copa",), limit=5, generations=0, shots=1).run()
    assert again == few
    assert len(scored) == 11 - 5


def test_examples_stand_before_every_question(
    loaded: LoadedModel, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    score = Suite._score

    def spy(self: Suite, item: Item, examples: str) -> dict[str, Any]:
        seen.append(examples)
        assert item.example not in examples.split("\n\n")
        return score(self, item, examples)

    monkeypatch.setattr(Suite, "_score", spy)
    (found,) = make(loaded, data, tasks=("copa",), shots=2, limit=6, generations=0).run()["tasks"]
    assert len(seen) == 6
    assert len(set(seen)) == 1
    assert seen[0].count("\n\n") == 2
    assert found["items"] + found["unfit"]["count"] == 6


def test_figures_of_a_task_whose_items_are_all_too_long() -> None:
    items = [Item(str(n), ("a",), (" b",)) for n in range(30)]
    found = task_result(Task("x", "f", "word"), items, [{"unfit": 700 + n} for n in range(30)])
    assert found["unfit"]["count"] == 30
    assert found["unfit"]["longest"] == 729
    assert found["items"] == 0
    assert summary([found]) is None


def test_bad_options(data: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'copa'"):
        SuiteOptions(data, ("cop",))
    with pytest.raises(InputError, match=r"rte\.dev\.jsonl is absent"):
        SuiteOptions(data, ("rte",))
    for field in ("shots", "generations"):
        with pytest.raises(InputError, match=f"{field}: -1"):
            SuiteOptions(data, TASKS, **{field: -1})
    with pytest.raises(InputError, match="limit: 0"):
        SuiteOptions(data, TASKS, limit=0)


def run(*argv: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["eval", *(str(part) for part in argv)])
    return int(stop.value.code or 0)


def test_the_command(
    folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (folder, "--policy", "topk:keep=0.5", "--suite", "paper", "--data", data)
    more = ("--tasks", "copa,c4", "--generations", 2, "--limit", 9, "--threads", 1)
    out = tmp_path / "out"
    assert run(*arguments, *more, "--out", out, "--json", tmp_path / "r.json") == 0
    shown = capsys.readouterr().out
    assert "copa" in shown
    assert "95 % interval" in shown
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["selection"] == {"policy": "topk:keep=0.5"}
    assert sorted(path.name for path in out.iterdir()) == [
        "c4.jsonl",
        "copa-0shot.jsonl",
        "free-run.jsonl",
    ]
    assert run(*arguments, *more, "--out", out, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out) == result


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--suite", "papr", "--data", "."), "did you mean 'paper'"),
        (("--suite", "paper"), "--data"),
        (("--suite", "paper", "--data", ".", "--window", "8"), "--window: not of a suite"),
        (("--shots", "2"), "--shots: needs --suite"),
        (("--out", "x", "--limit", "2"), "--out, --limit: needs --suite"),
    ],
)
def test_wrong_usage_is_named(
    folder: Path, argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, *argv) == 1
    assert message in capsys.readouterr().err


def test_a_suite_needs_two_arms(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--suite", "paper", "--data", data) == 1
    assert "--plan or --policy" in capsys.readouterr().err
