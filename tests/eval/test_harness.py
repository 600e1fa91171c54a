"""The harness's model against the harness's own for transformers, on the same files."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs dejavu-llm[eval]")
pytest.importorskip("accelerate", reason="the harness's own model needs lm-eval[hf]")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from dejavu.errors import InputError
from dejavu.eval.harness import DejavuLM
from dejavu.eval.harness_data import FOLDER
from dejavu.eval.tasks import SUITES

from .conftest import TEXT
from .tiny import CONTEXT

PAIRS = [
    ("the old king", " said that"),
    ("the old king ", "said that"),
    ("the old king", " said true"),
    ("", "the old"),
    ("a ", "b"),
    ("Q: x A:", " C"),
    ("the old kin", "g"),
    ("said that the answer", "s"),
    ("naïve 汉字", " 😀 end"),
]
OVER_THE_BORDER = [(" an", "swer"), ("the ol", "d"), ("Ans", "wer")]


def request(*arguments: Any, kind: str = "loglikelihood") -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@pytest.fixture(scope="module")
def ours(folder: Path) -> DejavuLM:
    assert get_model("dejavu") is DejavuLM
    return DejavuLM(str(folder), device="cuda:0", batch_size=1, max_batch_size=None)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return get_model("hf")(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)


def test_same_sums_and_greedy_flags(ours: DejavuLM, theirs: Any) -> None:
    requests = [request(*pair) for pair in PAIRS]
    found = ours.loglikelihood(requests, disable_tqdm=True)
    for mine, other in zip(found, theirs.loglikelihood(requests, disable_tqdm=True), strict=True):
        assert mine[0] == pytest.approx(other[0], abs=1e-3)
        assert mine[1] == other[1]


@pytest.mark.parametrize("pair", OVER_THE_BORDER)
def test_a_token_over_the_border_crashes_nothing(ours: DejavuLM, pair: tuple[str, str]) -> None:
    ((total, _),) = ours.loglikelihood([request(*pair)], disable_tqdm=True)
    assert total < 0, "at least one token is scored"


def test_whole_documents(ours: DejavuLM, theirs: Any) -> None:
    requests = [request(text, kind="loglikelihood_rolling") for text in ("the", TEXT, TEXT * 9)]
    assert len(ours.tok_encode(TEXT * 9)) > 2 * CONTEXT
    mine = ours.loglikelihood_rolling(requests, disable_tqdm=True)
    other = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    assert mine == pytest.approx(other, rel=1e-5)


def test_generation(ours: DejavuLM, theirs: Any) -> None:
    options = [{"max_gen_toks": 12}, {"until": ["e", "zz"], "max_gen_toks": 20, "do_sample": False}]
    requests = [
        request(text, dict(one), kind="generate_until")
        for one in options
        for text in ("the old king", "a question", TEXT * 9)
    ]
    assert ours.generate_until(requests) == theirs.generate_until(requests, disable_tqdm=True)


def test_long_contexts_are_cut_as_the_harness_does_and_counted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """16 tokens: a context of 30 and a continuation of 4, 10 and 20, generation from 30 for 8."""
    ours = DejavuLM(str(folder), max_length=16)
    theirs = get_model("hf")(
        pretrained=str(folder), dtype="float32", device="cpu", batch_size=1, max_length=16
    )
    ids = ours.tok_encode(TEXT)[1:]
    named = [(("c", "d"), [0, *ids[:29]], ids[29:33])]
    with caplog.at_level(logging.WARNING, "dejavu.eval.harness"):
        (mine,) = ours._loglikelihood_tokens(named, disable_tqdm=True)
    assert "1 of 1 requests do not fit 16 tokens" in caplog.text
    assert "the longest has 33" in caplog.text
    (other,) = theirs._loglikelihood_tokens(named, disable_tqdm=True)
    assert mine[0] == pytest.approx(other[0], abs=1e-3)
    (last,) = ours._loglikelihood_tokens([(("c", "d"), ids[16:29], ids[29:33])], disable_tqdm=True)
    assert mine == pytest.approx(last), "the last 13 tokens of the context"
    # A continuation beyond the context, which the harness's own model cannot score at all.
    (long,) = ours._loglikelihood_tokens([(("c", "d"), ids[:10], ids[10:30])], disable_tqdm=True)
    parts = [(("", ""), ids[9:10], ids[10:26]), (("", ""), ids[13:26], ids[26:30])]
    assert long[0] == pytest.approx(
        sum(total for total, _ in ours._loglikelihood_tokens(parts, disable_tqdm=True)), abs=1e-4
    )
    written = [request(TEXT, {"max_gen_toks": 8}, kind="generate_until")]
    assert ours.generate_until(written) == theirs.generate_until(written, disable_tqdm=True)
    with pytest.raises(InputError, match="max_gen_toks: 16"):
        ours.generate_until([request(TEXT, {"max_gen_toks": 16}, kind="generate_until")])


def test_options_reach_the_model_or_are_refused(folder: Path, ours: DejavuLM) -> None:
    sparse = DejavuLM(str(folder), policy="topk:keep=0.2")
    requests = [request(*pair) for pair in PAIRS]
    dense = ours.loglikelihood(requests, disable_tqdm=True)
    few = sparse.loglikelihood(requests, disable_tqdm=True)
    assert all(abs(a - b) > 1e-4 for (a, _), (b, _) in zip(dense, few, strict=True))
    fewer = DejavuLM(str(folder), policy="topk:keep=0.2", prompts="sparse")
    assert fewer.loglikelihood(requests, disable_tqdm=True) != few
    everything = DejavuLM(str(folder), policy="topk:keep=1.0")
    for one, other in zip(everything.loglikelihood(requests), dense, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert sparse.get_model_info()["policy"] == "topk:keep=0.2"
    without = DejavuLM(str(folder), add_bos_token=False)
    assert without.tok_encode("the") == ours.tok_encode("the")[1:]
    for wrong in ({"plan": "p", "policy": "signs"}, {"level": "fast"}, {"policy": "tpok"}):
        with pytest.raises(InputError):
            DejavuLM(str(folder), **wrong)
    with pytest.raises(InputError, match="num_beams"):
        ours.generate_until([request("a", {"num_beams": 4}, kind="generate_until")])


def test_the_suites_tasks_in_the_harness(
    folder: Path, ours: DejavuLM, theirs: Any, shared: Path
) -> None:
    """The YAML files over the real data, with one example; figures are those of transformers."""
    manager = TaskManager(
        include_path=str(FOLDER),
        include_defaults=False,
        metadata={"data": str(shared / "evaldata")},
    )
    names = sorted(manager.all_tasks)
    assert names == sorted(f"dejavu_{name}" for name in SUITES["paper"])
    assert len(manager.load(["dejavu_wikitext2"])["tasks"]["dejavu_wikitext2"].test_docs()) == 62
    small = [name for name in names if name not in ("dejavu_wikitext2", "dejavu_c4")]
    mine, other = (
        simple_evaluate(
            model=model,
            tasks=small,
            num_fewshot=1,
            limit=3,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=False,
        )["results"]
        for model in (ours, theirs)
    )
    assert mine.keys() == other.keys() == set(small)
    for name, figures in other.items():
        for metric, value in figures.items():
            if isinstance(value, float):
                assert mine[name][metric] == pytest.approx(value, rel=1e-3), (name, metric)


def test_the_command_knows_the_model() -> None:
    """`python -m dejavu.eval.harness` is the harness's own command, after registration."""
    code = (
        "import runpy, lm_eval.__main__ as command\n"
        "from lm_eval.api.registry import get_model\n"
        "command.cli_evaluate = lambda: print(get_model('dejavu').__name__)\n"
        "runpy.run_module('dejavu.eval.harness', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "DejavuLM"
