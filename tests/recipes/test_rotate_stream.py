"""A model in other coordinates is the same model, by transformers' own forward."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dejavu.kernels.channels import WHOLE
from dejavu.kernels.reference import TorchOps
from dejavu.load import load_model

RECIPES = Path(__file__).parents[2] / "recipes"
CONFIG = transformers.LlamaConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    initializer_range=0.3,
    tie_word_embeddings=True,
)
IDS = torch.arange(20).mul_(7).remainder_(50)


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(CONFIG).float().eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.2, 2.0)
    return model


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("llama")
    reference.save_pretrained(out)
    return out


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("rotate_stream")


@torch.inference_mode()
def test_a_rotated_model_computes_the_same(recipe: Any, reference: Any, folder: Path) -> None:
    model = load_model(folder, dtype="fp32").model

    def turned(*shape: int) -> torch.Tensor:
        return torch.linalg.qr(torch.randn(*shape, dtype=torch.float64))[0].float()

    torch.manual_seed(1)
    tensors = recipe.rotated(model, turned(24, 24), turned(2, 2, 4, 4))
    untied = transformers.LlamaConfig(**CONFIG.to_dict() | {"tie_word_embeddings": False})
    other = transformers.LlamaForCausalLM(untied).float().eval()
    other.load_state_dict({recipe.checkpoint_name(slot): t for slot, t in tensors.items()})
    own, turned_too = reference(IDS[None]).logits, other(IDS[None]).logits
    assert float((own - turned_too).abs().max()) < 1e-4 * float(own.abs().max())
    before = reference.model.layers[0].mlp.down_proj.weight
    assert not torch.allclose(before, other.model.layers[0].mlp.down_proj.weight, atol=0.01)


@torch.inference_mode()
def test_moments_are_those_of_the_inputs(recipe: Any, reference: Any, folder: Path) -> None:
    seen: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, inputs, name=name: seen.update({name: inputs[0][0, WHOLE:]})
        )
        for name, module in reference.named_modules()
        if name.endswith(("q_proj", "gate_proj", "o_proj"))
    ]
    reference(IDS[None])
    for hook in hooks:
        hook.remove()
    model = load_model(folder, dtype="fp32").model
    found = recipe.Moments(model)
    model.logits(IDS, model.new_cache(len(IDS)), found, TorchOps(), last_only=True)
    stream = torch.zeros(24, 24)
    for n, layer in enumerate(reference.model.layers):
        for name, norm in (
            ("self_attn.q_proj", layer.input_layernorm),
            ("mlp.gate_proj", layer.post_attention_layernorm),
        ):
            x = seen[f"model.layers.{n}.{name}"] / norm.weight
            stream += x.t() @ x / x.square().sum()
        outputs = seen[f"model.layers.{n}.self_attn.o_proj"].view(-1, 2, 3, 4)
        for group in range(2):
            y = outputs[:, group].reshape(-1, 4)
            torch.testing.assert_close(found.heads[n, group], y.t() @ y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.stream, stream, rtol=1e-4, atol=1e-5)
    axes = recipe.axes(stream)
    turned = axes @ stream @ axes.t()
    assert float((turned - torch.diag(turned.diagonal())).abs().max()) < 1e-5
