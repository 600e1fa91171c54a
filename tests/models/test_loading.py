"""Every tensor of a file is used or named, every slot filled; nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from dejavu.errors import CheckpointError, ConfigError, InputError
from dejavu.kernels.reference import TorchOps
from dejavu.load import load_model, random_model
from dejavu.models.base import DecoderLM
from dejavu.models.slots import slots
from dejavu.sparsity.policy import Selector
from dejavu.weights.quantize import dequantize, quantize_checkpoint

from .tiny import Case, Tiny, build, difference, edit_config, prompt, reference_logits

IDS = prompt(12)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Tiny]:
    """A fresh checkpoint that a test may spoil."""

    def make(model_type: str, **fields: object) -> Tiny:
        return build(Case(model_type, model_type, fields), tmp_path / model_type)

    return make


def rewrite(tiny: Tiny, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = tiny.path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def logits(model: DecoderLM) -> Tensor:
    with torch.inference_mode():
        return model.logits(torch.tensor(IDS), model.new_cache(32), Selector(), TorchOps())


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("llama", "lm_head.weight"),
        ("mistral", "model.norm.weight"),
        ("opt", "model.decoder.embed_positions.weight"),
        ("opt", "model.decoder.layers.1.fc2.bias"),
    ],
)
def test_missing_tensor_is_named(make: Callable[..., Tiny], model_type: str, name: str) -> None:
    tiny = make(model_type)
    rewrite(tiny, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors of a {model_type} model: {name}"):
        load_model(tiny.path)


@pytest.mark.parametrize("model_type", ["opt", "llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rope.weight", "extra", "extra_scale"])
def test_unexpected_tensor_is_named(make: Callable[..., Tiny], model_type: str, name: str) -> None:
    tiny = make(model_type)
    load_model(tiny.path)
    rewrite(tiny, lambda tensors: tensors.update({name: torch.ones(3)}))
    with pytest.raises(CheckpointError, match=f"has unexpected 1 tensors .*: {name}"):
        load_model(tiny.path)


def test_biases_that_the_config_does_not_announce_are_not_dropped(
    make: Callable[..., Tiny],
) -> None:
    tiny = make("llama", attention_bias=True, mlp_bias=True)
    edit_config(tiny.path, {"attention_bias": None, "mlp_bias": None})
    with pytest.raises(CheckpointError, match=r"unexpected 14 tensors .*_proj\.bias.* and 6 more"):
        load_model(tiny.path)


def test_misshapen_tensor_is_named_with_both_shapes(make: Callable[..., Tiny]) -> None:
    tiny = make("llama")
    edit_config(tiny.path, {"intermediate_size": 54})
    with pytest.raises(CheckpointError, match=r"mlp\.\w+\.weight has shape .*53.* asks for .*54"):
        load_model(tiny.path)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.float8_e4m3fn])
def test_dtype_that_cannot_stand_alone_is_refused(
    make: Callable[..., Tiny], dtype: torch.dtype
) -> None:
    tiny = make("llama")
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(tiny, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(CheckpointError, match=f"{name} has dtype {dtype} without a scale"):
        load_model(tiny.path)


def test_scaled_float8_is_refused(make: Callable[..., Tiny]) -> None:
    tiny = make("llama")
    name = "model.layers.0.mlp.up_proj.weight"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.ones(53, 1)

    rewrite(tiny, change)
    with pytest.raises(CheckpointError, match=r"float8_e4m3fn with a scale"):
        load_model(tiny.path)


def test_two_spellings_of_one_tensor_are_refused(make: Callable[..., Tiny]) -> None:
    tiny = make("opt")
    name = "decoder.layers.0.fc1.bias"
    rewrite(tiny, lambda tensors: tensors.update({name: torch.zeros(53)}))
    with pytest.raises(CheckpointError, match=f"both .*{name}"):
        load_model(tiny.path)


@pytest.mark.parametrize("model_type", ["opt", "llama", "qwen2"])
def test_names_without_the_leading_model_load(make: Callable[..., Tiny], model_type: str) -> None:
    tiny = make(model_type, tie_word_embeddings=True)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop("lm_head.weight", None)
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(tiny, change)
    ours = logits(load_model(tiny.path, dtype="fp32").model)
    assert difference(ours, reference_logits(tiny.reference, IDS)) < 1e-4


def test_leftovers_of_old_files_are_ignored(make: Callable[..., Tiny]) -> None:
    tiny = make("llama")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tiny, lambda tensors: tensors.update({name: torch.ones(5)}))
    assert (
        difference(logits(load_model(tiny.path).model), reference_logits(tiny.reference, IDS))
        < 1e-4
    )


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("model_type", ["opt", "llama"])
def test_stored_head_of_a_tied_model(
    make: Callable[..., Tiny], model_type: str, equal: bool
) -> None:
    """As transformers do: a head that differs is used, whatever `tie_word_embeddings` says."""
    tiny = make(model_type, tie_word_embeddings=True)
    embedding = f"model.{'decoder.' if model_type == 'opt' else ''}embed_tokens.weight"

    def change(tensors: dict[str, Tensor]) -> None:
        head = tensors[embedding].clone()
        tensors["lm_head.weight"] = head if equal else head.flip(0)

    rewrite(tiny, change)
    model = load_model(tiny.path, dtype="fp32").model
    assert (model.weights.lm_head is model.weights.embed_tokens) == equal
    assert model.config.tie_word_embeddings == equal
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tiny.path, attn_implementation="eager"
    )
    assert difference(logits(model), reference_logits(reference, IDS)) < 1e-4


@pytest.mark.parametrize("model_type", ["opt", "llama", "qwen3"])
def test_int8_checkpoint_computes_what_its_numbers_say(
    make: Callable[..., Tiny], model_type: str, tmp_path: Path
) -> None:
    tiny = make(model_type)
    quantize_checkpoint(tiny.path, tmp_path / "int8")
    loaded = load_model(tmp_path / "int8")
    assert loaded.dtype == "int8"
    stored = load_file(tmp_path / "int8" / "model.safetensors")
    with torch.no_grad():
        for name, parameter in tiny.reference.named_parameters():
            if f"{name}_scale" in stored:
                parameter.copy_(dequantize(stored[name], stored[f"{name}_scale"]))
    expected = reference_logits(tiny.reference, IDS)
    loaded.model.cache_dtype = torch.float32  # transformers does not round keys and values
    assert difference(logits(loaded.model), expected) < 1e-4
    as_fp32 = load_model(tmp_path / "int8", dtype="fp32")
    assert as_fp32.dtype == "fp32"
    assert difference(logits(as_fp32.model), expected) < 1e-4


def test_scale_of_the_wrong_length_is_named(make: Callable[..., Tiny], tmp_path: Path) -> None:
    tiny = make("llama")
    quantize_checkpoint(tiny.path, tmp_path / "int8")
    int8 = Tiny(tiny.case, tmp_path / "int8", tiny.reference)
    name = "model.layers.0.mlp.down_proj.weight_scale"
    rewrite(int8, lambda tensors: tensors.update({name: torch.ones(40, 1)}))
    with pytest.raises(CheckpointError, match=f"{name} holds 40 numbers, 53 are needed"):
        load_model(int8.path)


def test_auto_keeps_the_dtype_of_the_file_and_halves_become_bf16(
    make: Callable[..., Tiny],
) -> None:
    tiny = make("llama")
    assert load_model(tiny.path).dtype == "fp32"
    for dtype in (torch.bfloat16, torch.float16):
        rewrite(
            tiny,
            lambda tensors, to=dtype: tensors.update(  # type: ignore[misc]
                {name: tensor.to(to) for name, tensor in tensors.items()}
            ),
        )
        loaded = load_model(tiny.path)
        assert loaded.dtype == "bf16"
        assert loaded.model.weights.blocks[0].mlp_norm.weight.dtype == torch.float32


def test_bad_options_and_configs(make: Callable[..., Tiny]) -> None:
    tiny = make("llama")
    with pytest.raises(InputError, match=r"unknown dtype 'fp8'.*auto, bf16, fp16, fp32, int8"):
        load_model(tiny.path, dtype="fp8")
    edit_config(tiny.path, {"model_type": "falcon"})
    with pytest.raises(ConfigError, match=r"unknown model_type 'falcon' .*known: llama, mistral"):
        load_model(tiny.path)


def test_progress_counts_every_slot_once(make: Callable[..., Tiny]) -> None:
    tiny = make("qwen2")
    seen: list[tuple[int, int]] = []
    model = load_model(tiny.path, progress=lambda done, total: seen.append((done, total))).model
    count = len(slots(model.config))
    assert seen == [(i + 1, count) for i in range(count)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("model_type", ["opt", "qwen3"])
def test_random_model_of_a_shape(make: Callable[..., Tiny], model_type: str, dtype: str) -> None:
    config = load_model(make(model_type).path).model.config
    model = random_model(config, dtype=dtype, seed=3)
    assert model.config == config
    assert model.weights.blocks[0].mlp.down.weight.dtype == dtype
    first = logits(model)
    assert first.isfinite().all()
    assert first.std() > 0
    assert torch.equal(first, logits(random_model(config, dtype=dtype, seed=3)))
