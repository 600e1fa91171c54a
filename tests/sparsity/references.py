"""Tiny models, ours and those of transformers, and what hooks and plain loops see in the latter."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers
from torch import Tensor

from dejavu.load import load_model
from dejavu.models.base import DecoderLM

NEURONS, HEADS, LAYERS, VOCAB = 50, 4, 2, 67
Reference = transformers.PreTrainedModel
Pair = tuple[DecoderLM, Reference]


def pair(folder: Path, config: transformers.PretrainedConfig) -> Pair:
    """A random model with real biases and spread, ours and the reference's."""
    torch.manual_seed(7)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            spread = 0.1 if "norm" in name else 0.3
            parameter.add_(torch.randn_like(parameter) * spread)
    reference.save_pretrained(folder)
    return load_model(folder, dtype="fp32").model, reference


def windows(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]


def parts(reference: Reference) -> Iterator[tuple[torch.nn.Linear, torch.nn.Linear]]:
    """(output projection, down projection) of each layer."""
    if reference.config.model_type == "opt":
        for layer in reference.model.decoder.layers:
            yield layer.self_attn.out_proj, layer.fc2
    else:
        for layer in reference.model.layers:
            yield layer.self_attn.o_proj, layer.mlp.down_proj


Edit = Callable[[int, int, Tensor], Tensor]  # layer, 0 for heads or 1 for neurons, input -> input


@torch.inference_mode()
def run_reference(reference: Reference, ids: Tensor, edit: Edit) -> float:
    """Sum of losses with the inputs of output and down projections edited."""
    handles = []
    for layer, pair in enumerate(parts(reference)):
        for kind, module in enumerate(pair):

            def hook(
                _: object, inputs: tuple[Tensor], layer: int = layer, kind: int = kind
            ) -> tuple:
                return (edit(layer, kind, inputs[0]),)

            handles.append(module.register_forward_pre_hook(hook))
    logits = reference(ids[None, :-1]).logits[0]
    for handle in handles:
        handle.remove()
    return float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))


def observe_reference(reference: Reference, ids: Tensor) -> tuple[float, dict, dict]:
    """Loss, contributions `[N, F]` and group norms `[N, K]` by layer, from plain loops."""
    projections = list(parts(reference))
    groups = getattr(reference.config, "num_key_value_heads", HEADS)
    neurons, heads = {}, {}

    def look(layer: int, kind: int, x: Tensor) -> Tensor:
        weight = projections[layer][kind].weight  # [D, in]
        rows = x.reshape(-1, x.shape[-1])
        if kind == 1:
            neurons[layer] = rows.abs() * weight.norm(dim=0)
        else:
            size = weight.shape[1] // groups
            slices = [slice(g * size, (g + 1) * size) for g in range(groups)]
            heads[layer] = torch.stack(
                [torch.stack([(weight[:, s] @ row[s]).norm() for s in slices]) for row in rows]
            )
        return x

    return run_reference(reference, ids, look), neurons, heads


@torch.inference_mode()
def reference_stream(reference: Reference, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The residual stream `[N, D]` after attention and after the MLP of each layer."""
    middle: list[Tensor] = []
    after: list[Tensor] = []
    is_opt = reference.config.model_type == "opt"
    layers = reference.model.decoder.layers if is_opt else reference.model.layers
    handles = []
    for layer in layers:
        norm = layer.final_layer_norm if is_opt else layer.post_attention_layernorm
        handles.append(norm.register_forward_pre_hook(lambda _, x: middle.append(x[0])))
        handles.append(
            layer.register_forward_hook(
                lambda *at: after.append(at[2][0] if isinstance(at[2], tuple) else at[2])
            )
        )
    reference(ids[None, :-1])
    for handle in handles:
        handle.remove()
    width = reference.config.hidden_size
    pairs = zip(middle, after, strict=True)
    return [(m.reshape(-1, width), a.reshape(-1, width)) for m, a in pairs]
