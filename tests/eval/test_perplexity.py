"""Perplexity against plain loops over transformers: every token once, with the stated context."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional

from dejavu.errors import DejavuError, InputError
from dejavu.eval.forced import Reader
from dejavu.eval.perplexity import blocks, evaluate
from dejavu.eval.text import EvalText, chunks, read_text, sliding_windows
from dejavu.kernels.native import NativeOps
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.load import load_model
from dejavu.models.base import DecoderLM
from dejavu.sparsity.losses import token_losses
from dejavu.sparsity.policy import Dense, Selector

from .conftest import Pair
from .tiny import CONTEXT, Guess, Reference, build, random_ids, small_tokenizer, text_of

CASES = [
    (1000, 128, 128),
    (1000, 128, 64),
    (1000, 128, 1),
    (60, 128, 128),
    (300, 128, 128),
    (2, 128, 5),
]


@torch.inference_mode()
def loop(reference: Reference, ids: Tensor, window: int, stride: int) -> list[float]:
    """Loss of every token but the first, from the first window that reaches it."""
    losses, cached = [], {}
    for target in range(1, len(ids)):
        start = max(0, math.ceil((target - window) / stride)) * stride
        if start not in cached:
            cached.clear()
            read = ids[start : start + window]
            cached[start] = reference(read[None]).logits[0].double().log_softmax(dim=1)
        losses.append(-float(cached[start][target - 1 - start, ids[target]]))
    return losses


@pytest.mark.parametrize(("length", "window", "stride"), CASES)
def test_every_token_once_with_its_context(
    opt: Pair, length: int, window: int, stride: int
) -> None:
    model, reference = opt
    ids = random_ids(length)
    found = evaluate(model, text_of(ids, window, stride))
    wanted = loop(reference, ids, window, stride)
    assert found.tokens == len(wanted) == length - 1
    assert found.loss == pytest.approx(sum(wanted) / len(wanted), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(sum(wanted) / len(wanted)), rel=1e-5)


@torch.inference_mode()
def test_equals_the_loop_of_the_transformers_guide(llama: Pair) -> None:
    """Its windows hold one token more than ours read; its means are weighted by scored tokens."""
    model, reference = llama
    ids, longest, stride = random_ids(700), 101, 37
    total, count, previous = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + longest, len(ids))
        labels = ids[begin:end].clone()
        labels[: -(end - previous)] = -100
        scored = int((labels[1:] != -100).sum())
        loss = reference(ids[None, begin:end], labels=labels[None]).loss
        total, count, previous = total + float(loss) * scored, count + scored, end
        if end == len(ids):
            break
    found = evaluate(model, text_of(ids, longest - 1, stride))
    assert found.tokens == count == 699
    assert found.loss == pytest.approx(total / count, rel=1e-6)


@torch.inference_mode()
def test_windows_side_by_side_as_papers_have_them(opt: Pair) -> None:
    model, reference = opt
    ids, window = random_ids(333), 40
    losses = [
        float(reference(part[None], labels=part[None]).loss)
        for part in ids[: 333 // window * window].view(-1, window)
    ]
    found = evaluate(model, text_of(ids, window, window, "within"))
    assert found.tokens == 8 * (window - 1)
    assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    deviation = torch.tensor(losses, dtype=torch.float64).std()
    assert found.loss_error == pytest.approx(float(deviation) / 8**0.5, rel=1e-4)


@pytest.mark.parametrize("length", [1, 2, 3, 50, 51, 97])
@pytest.mark.parametrize(("window", "stride"), [(1, 1), (7, 1), (7, 3), (7, 7), (50, 49), (64, 2)])
def test_windows_cover_the_text(length: int, window: int, stride: int) -> None:
    windows = list(sliding_windows(torch.arange(length), window, stride))
    scored = []
    for w in windows:
        assert 2 <= len(w.ids) <= window + 1
        assert w.ids[0] == w.offset
        targets = w.ids[1 + w.skip :].tolist()
        assert len(targets) == w.scored >= 1
        assert targets[0] - w.offset >= min(window - stride + 1, targets[0])
        scored += targets
    assert scored == list(range(1, length))
    assert sum(w.scored for w in chunks(torch.arange(length), window)) == length // window * (
        window - 1
    )


def test_blocks_are_as_long_as_a_window() -> None:
    windows = list(sliding_windows(torch.arange(100), 20, 5))
    parts = blocks(windows)
    assert sorted(n for part in parts for n in part) == list(range(len(windows)))
    sizes = [sum(windows[n].scored for n in part) for part in parts]
    assert all(20 <= size < 25 for size in sizes[:-1])
    assert blocks(list(sliding_windows(torch.arange(61), 20, 20))) == [[0], [1], [2]]


@pytest.mark.parametrize("kind", ["dense", "guess", "eager guess"])
@pytest.mark.parametrize("name", ["opt", "llama"])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_all_paths_agree(
    name: str, kind: str, backend: str, request: pytest.FixtureRequest
) -> None:
    """Batch 1, batch 16 and teacher-forced: every token has its own selection on each."""
    model, _ = request.getfixturevalue(name)
    native = NativeOps(threads=1)
    ops: Ops = native if backend == "native" else TorchOps()
    text = text_of(random_ids(226, seed=4), 21, 13)
    assert len(text.windows) > 16
    assert len(text.windows[-1].ids) < len(text.windows[0].ids)
    selector: Selector = Dense() if kind == "dense" else Guess(model, capturable=kind == "guess")
    forced = evaluate(model, text, selector)
    assert forced.backend == "torch"
    for rows in (1, 16):
        decoded = evaluate(model, text, selector, through="decode", ops=ops, rows=rows)
        assert decoded.tokens == forced.tokens
        assert decoded.loss == pytest.approx(forced.loss, rel=1e-5)
        assert decoded.loss_error == pytest.approx(forced.loss_error, rel=1e-3)
        assert decoded.backend == (f"native {native.isa}" if backend == "native" else "torch")
    if kind != "dense":
        assert abs(evaluate(model, text).loss - forced.loss) > 1e-2


def test_decode_uses_the_compiled_kernels_by_default(opt: Pair) -> None:
    assert evaluate(opt[0], text_of(random_ids(9), 4, 4), through="decode").backend.startswith(
        "native"
    )


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_widened_weights_are_the_same_weights(tmp_path: Path, dtype: str) -> None:
    build("opt", tmp_path)
    model = load_model(tmp_path, dtype=dtype).model
    ids = random_ids(30)
    found = evaluate(model, text_of(ids, 40, 40))
    with torch.inference_mode():
        logits = model.logits(ids[:-1], model.new_cache(30), Dense(), TorchOps())
        wanted = float(token_losses(logits, ids[1:]).mean())
    assert found.loss == wanted
    assert model.weights.lm_head is model.weights.embed_tokens
    wide = Reader(model)._model.weights
    assert wide.lm_head is wide.embed_tokens
    assert wide.lm_head.dtype == "fp32"
    assert model.weights.lm_head.dtype == dtype


def test_units_follow_by_arithmetic(opt: Pair, tmp_path: Path) -> None:
    model, _ = opt
    content = "Žluťoučký kůň 🐎 úpěl\r\nďábelské ódy.\n"
    path = tmp_path / "text.txt"
    path.write_bytes(content.encode())
    tokenizer = small_tokenizer("the cat sat on the mat")
    text = read_text(path, tokenizer, CONTEXT, "whole")
    # Ids beyond the tiny model's vocabulary would not do; the units do not depend on the ids.
    text = EvalText(text.setting, text.text, text.ids % 83, text.ends)
    found = evaluate(model, text)
    assert found.tokens == len(text.ids) - 1
    assert found.words == len(content.split()) - 1  # the first begins in the token not scored
    assert found.bytes == len(content.encode()) - len(content[0].encode())
    nats = found.loss * found.tokens
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / found.bytes)
    assert found.word_perplexity == pytest.approx(math.exp(nats / found.words))
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert document["setting"]["unit"] == "token"
    assert document["setting"]["tokenizer"] == type(tokenizer).__name__
    assert document["loss_error"] is None


def test_progress_counts_tokens(opt: Pair) -> None:
    seen: list[tuple[int, int]] = []
    evaluate(opt[0], text_of(random_ids(50), 20, 10), progress=lambda *at: seen.append(at))
    assert seen == sorted(seen)
    assert seen[-1] == (49, 49)


def test_bad_options_and_broken_weights(opt: Pair) -> None:
    model, _ = opt
    text = text_of(random_ids(9), 4, 4)
    with pytest.raises(InputError, match="decode"):
        evaluate(model, text, through="decoding")
    with pytest.raises(InputError, match="rows"):
        evaluate(model, text, through="decode", rows=17)
    broken = DecoderLM(model.config, model.weights)
    weight = model.weights.blocks[1].mlp.up.weight.data
    kept = weight[0, 0].clone()
    weight[0, 0] = math.nan
    try:
        with pytest.raises(DejavuError, match="not finite"):
            evaluate(broken, text)
    finally:
        weight[0, 0] = kept


def test_a_real_model_reads_real_text(shared: Path) -> None:
    """The reference protocol of this model, two windows of it, against transformers."""
    folder = shared / "models" / "relu-30m"
    loaded = load_model(folder, dtype="fp32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    path = shared / "corpus" / "validation.txt"
    text = read_text(path, tokenizer, loaded.model.config.context_length, max_tokens=600)
    found = evaluate(loaded.model, text)
    assert found.tokens == 600
    start = path.read_text(encoding="utf-8").split("\n<|endoftext|>\n")
    ids: list[int] = []
    for document in start[:20]:
        ids += [*tokenizer(document, add_special_tokens=False, verbose=False).input_ids, 2]
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = 0.0
    with torch.inference_mode():
        for begin, end in ((0, 512), (512, 600)):
            logits = reference(torch.tensor([ids[begin:end]])).logits[0]
            targets = torch.tensor(ids[begin + 1 : end + 1])
            total += float(functional.cross_entropy(logits, targets, reduction="sum"))
    assert found.loss == pytest.approx(total / 600, rel=1e-6)
