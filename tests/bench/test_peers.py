"""Peers run on our weights, in processes of their own, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from dejavu.bench.arms import engine_arms
from dejavu.bench.export import export
from dejavu.bench.peer_programs import CTranslate2, Generate, Transformers
from dejavu.bench.peers import _Worker, check_peers, open_peer, parse_peer
from dejavu.bench.subject import make_prompts, random_subject
from dejavu.errors import BackendError, InputError
from dejavu.kernels.device import CPU
from dejavu.kernels.native import NativeOps
from dejavu.kernels.reference import TorchOps
from dejavu.load import load_model
from dejavu.sparsity.policy import Dense

from .conftest import GATED, TINY

SHAPES = {
    "opt": TINY,
    "narrow opt": {**TINY, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "llama": GATED,
    "untied llama": {**GATED, "tie_word_embeddings": False, "attention_bias": True},
}


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def logits(model, ids):
    return model.logits(ids, model.new_cache(len(ids)), Dense(), TorchOps())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_and_our_loader_read_the_exported_model(shape, dtype, tmp_path):
    subject = random_subject(shape, SHAPES[shape], dtype=dtype)
    model = subject.loaded.model
    model.cache_dtype = torch.float32  # as the exported model's
    for block in model.weights.blocks:
        if block.attention.q.bias is not None:
            block.attention.q.bias.normal_()
    export(model, {**subject.hf_config, "torch_dtype": "float16"}, tmp_path, "fp32")
    ids = torch.arange(3, 23)
    ours = logits(model, ids)
    with torch.inference_mode():
        theirs = Transformers(tmp_path, "fp32", 1)._model(ids[None]).logits[0]
    # The same fp32 operations in another order at most: sums of 200 terms.
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours, logits(load_model(tmp_path).model, ids), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["transformers", "ctranslate2"])
def test_decodes_what_it_is_asked(tiny, name, request):
    arm = request.getfixturevalue(name)
    for batch in (1, 2):
        prompts = make_prompts(tiny, batch, 9, seed=4)
        done = arm.decode(prompts, 6, skip=2, fed=None)
        assert len(done.seconds) == 6
        assert all(seconds > 0 for seconds in done.seconds)
        assert len(done.token_ids) == 1 + 2 + 6
        assert arm.decode(prompts, 6, skip=2, fed=None).token_ids == done.token_ids
    with pytest.raises(BackendError):
        arm.decode([], 6, skip=2, fed=None)
    assert arm.decode(prompts, 6, skip=2, fed=None).token_ids == done.token_ids


def test_both_say_what_our_dense_arm_says(tiny, transformers, ctranslate2):
    prompts = make_prompts(tiny, 1, 9, seed=4)
    (arm,) = engine_arms(
        tiny.loaded, {"ours": Dense()}, ops=NativeOps(1), threads=1, batch=1, max_model_len=64
    )
    ours = arm.decode(prompts, 6, skip=0, fed=None)
    for arm in (transformers, ctranslate2):
        assert arm.decode(prompts, 6, skip=0, fed=None).token_ids == ours.token_ids


def test_generate_and_its_loop_say_the_same_on_given_and_on_random_weights(tiny, tmp_path):
    export(tiny.loaded.model, tiny.hf_config, tmp_path, "fp32")
    prompts = make_prompts(tiny, 2, 9, seed=4)
    eager, generate = (kind(tmp_path, "fp32", 1) for kind in (Transformers, Generate))
    for prompt in (prompts, prompts[:1]):
        ours, theirs = (program.decode(prompt, 6, None) for program in (eager, generate))
        assert ours.token_ids == theirs.token_ids
        assert len(ours.seconds) == len(theirs.seconds) == 6
    bare = Generate(dict(TINY), "bf16", 1)
    assert bare._model.dtype == torch.bfloat16
    assert len(bare.decode(prompts, 5, prompts).seconds) == 5


def test_nothing_is_left_behind(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []
    monkeypatch.setattr(_Worker, "ask", lambda self, folder, **_: seen.append(names(folder)))
    with pytest.raises(TypeError), open_peer("transformers", tiny, threads=1):
        pass
    assert seen == [["config.json", "model.safetensors"]]
    assert list(tmp_path.iterdir()) == []


def test_a_converted_model_is_gone_when_it_is_loaded(tiny, tmp_path):
    pytest.importorskip("ctranslate2")
    export(tiny.loaded.model, tiny.hf_config, tmp_path, "fp32")
    program = CTranslate2(tmp_path, "int8", 1)
    assert names(tmp_path) == ["config.json", "model.safetensors"]
    assert len(program.decode([[3, 4]], 3, None).seconds) == 3


def test_a_model_that_cannot_be_converted_is_said_to_be_one(tmp_path):
    pytest.importorskip("ctranslate2")
    odd = random_subject("odd", {**TINY, "vocab_size": 101}, dtype="fp32")
    export(odd.loaded.model, odd.hf_config, tmp_path, "fp32")
    with pytest.raises(BackendError, match="does not convert"):
        CTranslate2(tmp_path, "fp32", 1)


def test_a_process_that_dies_says_its_last_words():
    with _Worker() as worker:
        worker._process.stdin.write("not json\n")
        with pytest.raises(BackendError, match=r"has ended: json\.decoder\.JSONDecodeError"):
            worker.ask(steps=1)
        with pytest.raises(BackendError, match="has ended"):
            worker.ask(steps=1)


def test_names():
    assert parse_peer("transformers") == ("transformers", None)
    assert parse_peer("ctranslate2:int8") == ("ctranslate2", "int8")
    with pytest.raises(InputError, match="unknown peer 'vllm'"):
        parse_peer("vllm")
    with pytest.raises(InputError, match="dtype of transformers"):
        parse_peer("transformers:int8")


def test_peers_are_asked_for_where_they_run(monkeypatch):
    check_peers(("transformers", "transformers-generate:bf16"), CPU)
    with pytest.raises(BackendError, match=r"peers transformers-static: .* on cuda only"):
        check_peers(("transformers", "transformers-static"), CPU)
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(BackendError, match=r"peers ctranslate2:int8: .*dejavu-llm\[peers\]"):
        check_peers(("ctranslate2:int8",), CPU)
    with pytest.raises(InputError, match="unknown peer"):
        check_peers(("vllm",), CPU)


def test_the_parent_stays_free_of_them():
    code = (
        "import sys, dejavu.bench.decode;"
        "assert not {'transformers', 'ctranslate2', 'matplotlib', 'rich'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
