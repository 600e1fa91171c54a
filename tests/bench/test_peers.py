"""Peers run on our weights, and leave nothing behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from dejavu.bench.hf_model import hf_model
from dejavu.bench.peers import open_peer, torch_threads
from dejavu.bench.subject import make_prompts, random_subject
from dejavu.errors import BackendError
from dejavu.kernels.reference import TorchOps
from dejavu.sparsity.policy import Dense

from .conftest import GATED, TINY

SHAPES = {
    "opt": TINY,
    "narrow opt": {**TINY, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "llama": GATED,
    "untied llama": {**GATED, "tie_word_embeddings": False, "attention_bias": True},
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_computes_our_model(shape, dtype):
    subject = random_subject(shape, SHAPES[shape], dtype=dtype)
    model = subject.loaded.model
    for block in model.weights.blocks:
        if block.attention.q.bias is not None:
            block.attention.q.bias.normal_()
    ids = torch.arange(3, 23)
    ours = model.logits(ids, model.new_cache(20), Dense(), TorchOps())
    with torch.inference_mode():
        theirs = hf_model(model, subject.hf_config, "fp32")(ids[None]).logits[0]
    # The same fp32 operations in another order at most: sums of 200 terms.
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_its_weights_are_its_own(tiny):
    before = tiny.loaded.model.weights.blocks[0].mlp.up.weight.data.clone()
    theirs = hf_model(tiny.loaded.model, tiny.hf_config, "fp32")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    assert torch.equal(tiny.loaded.model.weights.blocks[0].mlp.up.weight.data, before)


@pytest.mark.parametrize("name", ["transformers", "ctranslate2:fp32", "ctranslate2:int8"])
@pytest.mark.parametrize("batch", [1, 2])
def test_decodes_what_it_is_asked(tiny, name, batch):
    if name.startswith("ctranslate2"):
        pytest.importorskip("ctranslate2")
    arm = open_peer(name, tiny, threads=1)
    prompts = make_prompts(tiny, batch, 9, seed=4)
    done = arm.decode(prompts, 6, skip=2, fed=None)
    assert len(done.seconds) == 6
    assert all(seconds > 0 for seconds in done.seconds)
    assert len(done.token_ids) >= 8
    assert arm.decode(prompts, 6, skip=2, fed=None).token_ids == done.token_ids


def test_same_tokens_in_both(tiny):
    pytest.importorskip("ctranslate2")
    prompts = make_prompts(tiny, 1, 9, seed=4)
    ours = open_peer("transformers", tiny, threads=1).decode(prompts, 6, skip=0, fed=None)
    theirs = open_peer("ctranslate2:fp32", tiny, threads=1).decode(prompts, 6, skip=0, fed=None)
    assert ours.token_ids[:6] == theirs.token_ids[:6]


def test_converted_models_are_removed(tiny, tmp_path, monkeypatch):
    pytest.importorskip("ctranslate2")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_peer("ctranslate2:int8", tiny, threads=1)
    assert list(Path(tmp_path).iterdir()) == []


def test_a_model_that_cannot_be_converted_is_said_to_be_one(tmp_path, monkeypatch):
    pytest.importorskip("ctranslate2")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    odd = random_subject("odd", {**TINY, "vocab_size": 101}, dtype="fp32")
    with pytest.raises(BackendError, match="does not convert"):
        open_peer("ctranslate2:fp32", odd, threads=1)
    assert list(Path(tmp_path).iterdir()) == []


def test_threads_are_put_back_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError), torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise RuntimeError
    assert torch.get_num_threads() == before
