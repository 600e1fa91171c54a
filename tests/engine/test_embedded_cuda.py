"""The embedded model on a GPU and on the CPU: the same text, the same perplexity in decoding."""

from __future__ import annotations

import pytest
import torch

from dejavu.embedded import HELDOUT_TEXT, NAME
from dejavu.engine.engine import Engine
from dejavu.engine.params import SamplingParams
from dejavu.eval.perplexity import evaluate
from dejavu.eval.text import EvalText, read_text
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel, load_model
from dejavu.predictor.plan import load_plan
from dejavu.sparsity.policy import Selector
from dejavu.weights.tokenizer import load_tokenizer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:the plan was calibrated on int8 weights"),
]
TIE = 1e-3  # of the logits' spread: closer than this, the first difference is no error


@pytest.fixture(scope="module")
def here() -> LoadedModel:
    return load_model(NAME, dtype="fp32")


@pytest.fixture(scope="module")
def there() -> LoadedModel:
    return load_model(NAME, dtype="fp32", device="cuda")


@pytest.fixture(scope="module")
def text(here: LoadedModel) -> EvalText:
    context = here.model.config.context_length
    tokenizer = load_tokenizer(here.checkpoint)
    return read_text(HELDOUT_TEXT, tokenizer, context, "documents", max_tokens=4096)


def answers(loaded: LoadedModel, text: EvalText, ops: Ops | None) -> list[list[int]]:
    """48 tokens after each of four pieces of the text, side by side."""
    engine = Engine(loaded, ops=ops, max_batch=4)
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    requests = [
        engine.add(w.ids[:n].tolist(), params)
        for w, n in zip(text.windows, (5, 40, 100, 7), strict=False)
    ]
    while engine.running or engine.waiting:
        engine.step()
    assert [r.error for r in requests] == [None] * len(requests)
    return [r.token_ids for r in requests]


def test_the_same_text(here: LoadedModel, there: LoadedModel, text: EvalText) -> None:
    expected, found = answers(here, text, TorchOps()), answers(there, text, None)
    for window, length, ours, theirs in zip(
        text.windows, (5, 40, 100, 7), found, expected, strict=False
    ):
        differing = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        if differing:
            first = differing[0]
            ids = torch.tensor(window.ids[:length].tolist() + theirs[:first])
            logits = here.model.logits(ids, here.model.new_cache(len(ids)), Selector(), TorchOps())
            gap = float(logits[-1, theirs[first]] - logits[-1, ours[first]])
            assert gap < TIE * float(logits[-1].std())


@pytest.mark.parametrize("level", [None, "exact", "balanced"])
def test_the_same_perplexity(
    level: str | None, here: LoadedModel, there: LoadedModel, text: EvalText
) -> None:
    """Decoding on the GPU, windows side by side, against whole windows on the CPU."""

    def selector(loaded: LoadedModel) -> Selector | None:
        return None if level is None else load_plan(NAME).selector(loaded, level)

    expected = evaluate(here.model, text, selector(here))
    found = evaluate(there.model, text, selector(there), through="decode")
    # Scores of 4-bit predictors round their inputs on the CPU alone; every other difference is of
    # fp32 sums.
    allowed = 5e-3 if level == "balanced" else 2e-4
    assert abs(found.loss - expected.loss) < allowed


def test_the_same_perplexity_in_half_precision(here: LoadedModel, text: EvalText) -> None:
    half = load_model(NAME, dtype="fp16", device="cuda")
    expected = evaluate(here.model, text)
    found = evaluate(half.model, text, through="decode")
    assert abs(found.loss - expected.loss) < 5e-3
