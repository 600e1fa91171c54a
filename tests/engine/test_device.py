"""The engine around a GPU that is not there: everything is where it has to be.

Plain PyTorch stands for the kernels (its steps are not captured); see `pretend_gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dejavu.embedded import NAME
from dejavu.engine.engine import Engine
from dejavu.engine.graph_step import GraphStep
from dejavu.engine.params import SamplingParams
from dejavu.errors import BackendError, InputError
from dejavu.kernels.device import check_fit, resolve_device
from dejavu.kernels.reference import TorchOps
from dejavu.load import LoadedModel, load_model, random_model
from dejavu.sparsity.policies import parse_policy
from models.tiny import Case, Tiny, build, prompt
from pretend_gpu import DEVICE, pretend_gpu

ARCHITECTURES = ("opt", "llama", "mistral", "qwen2", "qwen3")
PARAMS = [
    SamplingParams(max_tokens=6),
    SamplingParams(max_tokens=5, temperature=0.8, top_p=0.9, seed=1),
    SamplingParams(max_tokens=4, repetition_penalty=1.2, logprobs=2, prompt_logprobs=1),
]


def answers(loaded: LoadedModel, policy: str | None = None) -> list[list[int]]:
    selector = None
    if policy is not None:
        windows = [torch.tensor(prompt(20, seed=9))]
        selector = parse_policy(policy, loaded.model, lambda: windows)
    engine = Engine(loaded, selector, ops=TorchOps(), max_batch=3, prefill_chunk=8)
    requests = [engine.add(prompt(3 + 15 * n, seed=n), p) for n, p in enumerate(PARAMS)]
    while engine.running or engine.waiting:
        engine.step()
    assert [r.error for r in requests] == [None] * 3
    assert all(isinstance(arm.step, GraphStep) for arm in engine.arms.values()) == (
        loaded.model.device == DEVICE
    )
    return [r.token_ids for r in requests]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_same_text_as_on_the_cpu(model_type: str, tiny: Callable[..., Tiny]) -> None:
    path = tiny(model_type).path
    expected = answers(load_model(path))
    with pretend_gpu():
        loaded = load_model(path, device="cuda")
        assert loaded.model.device == DEVICE
        assert answers(loaded) == expected


@pytest.mark.parametrize(
    "policy", ["oracle", "threshold:value=0.2", "topk:keep=0.3", "static:keep=0.6", "signs"]
)
def test_policies_choose_the_same(policy: str, tiny: Callable[..., Tiny]) -> None:
    path = tiny("opt").path
    expected = answers(load_model(path), policy)
    with pretend_gpu():
        assert answers(load_model(path, device="cuda:0"), policy) == expected


@pytest.mark.parametrize("rope_type", ["dynamic", "linear"])
def test_rope_tables_follow(rope_type: str, tmp_path: Path) -> None:
    """Beyond 20 tokens dynamic scaling fills its table anew at every step."""
    rope = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 50.0}
    fields = {"rope_parameters": rope, "max_position_embeddings": 20}
    path = build(Case("rope", "llama", fields), tmp_path).path
    expected = answers(load_model(path))
    with pretend_gpu():
        assert answers(load_model(path, device="cuda")) == expected


@pytest.mark.parametrize("dtype", ["auto", "fp16", "bf16"])
def test_halves_stay_halves(dtype: str, tiny: Callable[..., Tiny]) -> None:
    with pretend_gpu():
        loaded = load_model(tiny("llama").path, dtype=dtype, device="cuda")
        assert loaded.dtype == ("fp32" if dtype == "auto" else dtype)
        assert loaded.model.new_cache(9).keys[0].dtype == loaded.model.cache_dtype
        assert loaded.model.cache_dtype.itemsize == (4 if dtype == "auto" else 2)
        assert all(answers(loaded))
        model = random_model(loaded.model.config, dtype="fp16", device="cuda")
        assert model.weights.blocks[0].mlp.down.weight.dtype == "fp16"
        assert model.weights.blocks[0].mlp.down.weight.device == DEVICE


def test_int8_is_refused_and_can_be_dequantised() -> None:
    with pretend_gpu():
        with pytest.raises(InputError, match=r"int8 weights do not run on cuda.*--dtype fp16"):
            load_model(NAME, device="cuda")
        assert load_model(NAME, device="cuda", dtype="fp16").dtype == "fp16"
    with pytest.raises(InputError, match=r"fp16 weights need --device cuda.*bf16"):
        load_model(NAME, dtype="fp16")


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(tiny: Callable[..., Tiny]) -> None:
    path = tiny("llama").path
    with (
        pretend_gpu(free=50_000),
        pytest.raises(
            InputError,
            match=r"in auto needs 0.00 GB and cuda:0 has 0.00 GB free: 0.00 GB are missing; ",
        ),
    ):
        load_model(path, device="cuda")
    with pretend_gpu(free=8_000_000_000), pytest.raises(InputError, match=r"13\.50 .*5\.50 GB are"):
        check_fit(13_500_000_000, DEVICE, "it", "free some")
    config = load_model(path).model.config
    with pretend_gpu(free=50_000), pytest.raises(InputError, match="billion weights in fp16"):
        random_model(config, dtype="fp16", device="cuda")


def test_devices_that_are_not_there() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    for name in ("gpu", "cuda:", "cuda:x", "cpu:1", "mps", ""):
        with pytest.raises(InputError, match=r"--device .* is unknown; what exists is cpu, cuda"):
            resolve_device(name)
    with pretend_gpu():
        assert resolve_device("cuda") == resolve_device("cuda:0") == DEVICE
        with pytest.raises(BackendError, match=r"--device cuda:1 does not exist.*1 GPUs"):
            resolve_device("cuda:1")
    if not torch.cuda.is_available():
        with pytest.raises(BackendError, match=r"--device cuda cannot be used.*--device cpu"):
            resolve_device("cuda")
