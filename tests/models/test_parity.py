"""Every architecture and every variant of it against transformers, on the same files."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dejavu.kernels.reference import TorchOps
from dejavu.load import load_model
from dejavu.models.base import DecoderLM
from dejavu.sparsity.policy import Selector

from .cases import CASES, ORIGINAL
from .decoding import Everything, Stepper, TrueActive, greedy
from .tiny import Tiny, difference, prompt, reference_logits

MATCH = 1e-4  # greatest difference of fp32 logits, relative to their spread
ROWS = ["opt", "opt-350m", "llama", "llama-relu", "mistral-window", "qwen2", "qwen3"]
names = pytest.mark.parametrize("name", [case.name for case in CASES])


def load(tiny: Tiny, dtype: str = "fp32") -> DecoderLM:
    return load_model(tiny.path, dtype=dtype).model


def logits(model: DecoderLM, ids: list[int], selector: Selector | None = None) -> Tensor:
    """fp32 `[len(ids), V]` of one uncached pass."""
    cache = model.new_cache(len(ids))
    with torch.inference_mode():
        return model.logits(torch.tensor(ids), cache, selector or Selector(), TorchOps())


@names
def test_logits_match(name: str, tiny: Callable[[str], Tiny]) -> None:
    case = tiny(name)
    ids = prompt(case.case.prompt)
    expected = reference_logits(case.reference, ids)
    assert difference(logits(load(case), ids), expected) < MATCH
    assert (
        difference(logits(load(case), ids[:1]), reference_logits(case.reference, ids[:1])) < MATCH
    )


@pytest.mark.parametrize("name", [c.name for c in CASES if c.off is not None or c.neutral])
def test_the_feature_shows(name: str, tiny: Callable[[str], Tiny]) -> None:
    """Without its feature the reference itself is far from a match: the tests above can fail."""
    case = tiny(name)
    ids = prompt(case.case.prompt)
    without = reference_logits(case.without_feature(), ids)
    assert difference(without, reference_logits(case.reference, ids)) > 10 * MATCH


@names
def test_greedy_tokens_match(
    name: str,
    tiny: Callable[[str], Tiny],
    reference_tokens: Callable[[str, tuple[int, ...]], list[int]],
    stepper: Callable[[], Stepper],
) -> None:
    case = tiny(name)
    model = load(case)
    ids = prompt(case.case.prompt)
    tokens, cached = greedy(model, stepper(), [ids], [40])[0]
    assert tokens == reference_tokens(name, tuple(ids))
    if model.config.rope is None or model.config.rope.kind != "dynamic":  # there, angles differ
        uncached = logits(model, ids + tokens[:-1])[len(ids) - 1 :]
        assert difference(cached, uncached) < MATCH


@names
def test_true_active_set_changes_nothing(name: str, tiny: Callable[[str], Tiny]) -> None:
    model = load(tiny(name))
    ids = prompt(tiny(name).case.prompt)
    selector = TrueActive(model)
    assert difference(logits(model, ids, selector), logits(model, ids)) < 1e-6
    # gelu too gives a few exact zeros, where it underflows
    assert (selector.used < 0.9 * selector.seen) == model.activation.is_sparse


@pytest.mark.parametrize("name", ["opt", "opt-350m", "llama-relu2", "llama-fatrelu", "qwen3-relu"])
def test_sparse_decode_matches(
    name: str,
    tiny: Callable[[str], Tiny],
    reference_tokens: Callable[[str, tuple[int, ...]], list[int]],
    stepper: Callable[[], Stepper],
) -> None:
    model = load(tiny(name))
    ids = prompt(30)
    runner = stepper()
    selector = Everything(model) if runner.capturable else TrueActive(model)
    tokens, _ = greedy(model, runner, [ids], [40], selector)[0]
    assert tokens == reference_tokens(name, tuple(ids))


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_equal_single_runs(
    name: str,
    sparse: bool,
    tiny: Callable[[str], Tiny],
    reference_tokens: Callable[[str, tuple[int, ...]], list[int]],
    stepper: Callable[[], Stepper],
) -> None:
    """Prompts of very different lengths in one batch, two of which finish early."""
    model = load(tiny(name))
    prompts = [prompt(length, seed=length) for length in (1, 2, 7, 30)]
    counts = [40, 11, 40, 25]

    def run(prompts: list[list[int]], counts: list[int]) -> list[tuple[list[int], Tensor]]:
        runner = stepper()
        active = Everything(model) if runner.capturable else TrueActive(model)
        return greedy(model, runner, prompts, counts, active if sparse else None)

    together = run(prompts, counts)
    for ids, count, row in zip(prompts, counts, together, strict=True):
        assert row[0] == reference_tokens(name, tuple(ids))[:count]
        assert_same_run(row, run([ids], [count])[0], stepper().bitwise)


def test_long_prompt_leaves_no_trace(tiny: Callable[[str], Tiny]) -> None:
    """Dynamic NTK: the table of a long sequence is gone with it."""
    case = tiny("llama-rope-dynamic")
    model = load(case)
    short, long = prompt(ORIGINAL // 2), prompt(5 * ORIGINAL)
    before = logits(model, short)
    assert difference(logits(model, long), reference_logits(case.reference, long)) < MATCH
    assert torch.equal(logits(model, short), before)
    assert difference(before, reference_logits(case.reference, short)) < MATCH


@pytest.mark.parametrize(
    "name", ["llama-head-dim", "llama-odd-heads", "mistral-odd-heads", "qwen3"]
)
def test_cache_is_made_for_the_explicit_head_dim(name: str, tiny: Callable[[str], Tiny]) -> None:
    model = load(tiny(name))
    groups = model.config.num_key_value_heads
    for stored in (*model.new_cache(1).keys, *model.new_cache(1).values):
        assert stored.shape[2:] == (groups, 16)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("name", ROWS)
def test_short_and_long_prompt_together_in_low_precision(
    name: str, dtype: str, tiny: Callable[[str], Tiny], stepper: Callable[[], Stepper]
) -> None:
    model = load(tiny(name), dtype)
    if not stepper().bitwise:  # a key that rounds the other way is no rounding error of its sums
        model.cache_dtype = torch.float32
    prompts = [prompt(1), prompt(40)]
    together = greedy(model, stepper(), prompts, [20, 20])
    for ids, row in zip(prompts, together, strict=True):
        assert row[1].isfinite().all()
        assert_same_run(row, greedy(model, stepper(), [ids], [20])[0], stepper().bitwise)


def assert_same_run(
    row: tuple[list[int], Tensor], alone: tuple[list[int], Tensor], bitwise: bool
) -> None:
    assert row[0] == alone[0]
    if bitwise:
        assert torch.equal(row[1], alone[1])
    else:  # a GEMM of several rows sums in another order than one of a single row
        assert difference(row[1], alone[1]) < MATCH
