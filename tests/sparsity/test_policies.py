"""Policies that need no plan, each against its definition spelled out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.errors import InputError
from dejavu.kernels.reference import TorchOps
from dejavu.load import random_model
from dejavu.models.base import DecoderLM
from dejavu.sparsity.policies import POLICIES, parse_policy
from dejavu.sparsity.policies.signs import pack_signs
from dejavu.sparsity.policy import Points, Selector, Site

LAYERS, WIDTH, NEURONS = 2, 70, 45


def model(activation: str = "relu", gated: bool = False, dtype: str = "fp32") -> DecoderLM:
    config = ModelConfig(
        model_type="opt",
        vocab_size=31,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=35,
        intermediate_size=NEURONS,
        max_position_embeddings=64,
        activation=activation,
        gated_mlp=gated,
        mlp_bias=not gated,
        tie_word_embeddings=True,
    )
    found = random_model(config, dtype=dtype, seed=3)
    for block in found.weights.blocks:
        if block.mlp.up.bias is not None:
            block.mlp.up.bias.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    return found


def texts() -> Sequence[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 31, (20,), generator=generator) for _ in range(3)]


def points(rows: int = 9) -> tuple[Points, Tensor]:
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(2))
    found = Points()
    for _ in range(2 * LAYERS):
        found.add(x)
    return found, x


def masks(selector: Selector, rows: int = 9) -> list[Tensor]:
    source, _ = points(rows)
    chosen = []
    for layer in range(LAYERS):
        assert selector.select(Site.HEADS, layer, source, TorchOps()) is None
        selection = selector.select(Site.NEURONS, layer, source, TorchOps())
        assert selection is not None
        chosen.append(selection.to_mask(rows).clone())
    return chosen


def activations(of: DecoderLM, layer: int) -> Tensor:
    _, x = points()
    mlp = of.weights.blocks[layer].mlp
    up = x @ mlp.up.weight.float().t() + (0.0 if mlp.up.bias is None else mlp.up.bias)
    if mlp.gate is None:
        return torch.relu(up)
    return torch.nn.functional.silu(x @ mlp.gate.weight.float().t()) * up


def contributions(of: DecoderLM, layer: int) -> Tensor:
    down = of.weights.blocks[layer].mlp.down.weight.float()
    return activations(of, layer).abs() * down.norm(dim=1)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_oracle_and_threshold(gated: bool, dtype: str) -> None:
    net = model("silu" if gated else "relu", gated, dtype)
    for layer, mask in enumerate(masks(parse_policy("oracle", net, texts))):
        assert torch.equal(mask, activations(net, layer) != 0)
    limit = float(contributions(net, 0).median()) + 1e-3
    found = masks(parse_policy(f"oracle:contribution={limit!r}", net, texts))
    for layer, mask in enumerate(found):
        clear = (contributions(net, layer) - limit).abs() > 1e-6
        assert torch.equal(mask & clear, (contributions(net, layer) > limit) & clear)
    for layer, mask in enumerate(masks(parse_policy("threshold:value=0.05", net, texts))):
        clear = (activations(net, layer).abs() - 0.05).abs() > 1e-6
        assert torch.equal(mask & clear, (activations(net, layer).abs() > 0.05) & clear)


def test_topk_keeps_the_largest_of_every_row() -> None:
    net = model("silu", gated=True)
    for layer, mask in enumerate(masks(parse_policy("topk:keep=0.2", net, texts))):
        assert (mask.sum(dim=1) == 9).all()
        c = contributions(net, layer)
        kept = c.masked_fill(~mask, torch.inf).amin(dim=1)
        assert (c.masked_fill(mask, 0.0).amax(dim=1) <= kept).all()
    assert all(
        mask.sum(dim=1).eq(1).all() for mask in masks(parse_policy("topk:keep=0.001", net, texts))
    )


def test_static_is_the_same_for_every_token_and_chosen_over_all_layers() -> None:
    net = model()
    found = masks(parse_policy("static:keep=0.3", net, texts))
    assert sum(int(mask[0].sum()) for mask in found) == round(0.3 * LAYERS * NEURONS)
    for mask in found:
        assert torch.equal(mask, mask[:1].expand_as(mask))


@pytest.mark.parametrize("width", [1, 63, 64, 65, 130])
def test_signs_are_packed_bit_by_bit(width: int) -> None:
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    packed = pack_signs(x)
    assert packed.shape == (5, -(-width // 64))
    for row in range(5):
        for column in range(packed.shape[1] * 64):
            bit = int(packed[row, column // 64]) >> (column % 64) & 1
            assert bit == (column < width and bool(x[row, column] < 0))


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.3])
def test_signs_select_where_enough_channels_agree(alpha: float) -> None:
    net = model(dtype="int8")
    _, x = points()
    for layer, mask in enumerate(masks(parse_policy(f"signs:alpha={alpha}", net, texts))):
        weight = net.weights.blocks[layer].mlp.up.weight.data
        agree = ((x < 0)[:, None] == (weight < 0)).sum(dim=2)
        assert torch.equal(mask, agree > alpha * (WIDTH - agree))


def test_signs_need_exact_zeros() -> None:
    with pytest.raises(InputError, match="silu"):
        parse_policy("signs", model("silu", gated=True), texts)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("orcale", "did you mean 'oracle'"),
        ("topk:kep=0.1", "did you mean 'keep'"),
        ("topk:keep=many", "keep must be a number, not 'many'"),
        ("topk:keep=0", "keep must lie"),
        ("topk:keep=nan", "keep must lie"),
        ("threshold:value=-1", "value must be at least 0"),
        ("oracle:contribution=nan", "contribution must be at least 0"),
        ("static:keep=2", "keep must lie"),
        ("signs:alpha=0", "alpha must be above 0"),
        ("signs:windows=1", "windows"),
    ],
)
def test_a_wrong_policy_or_option_is_named(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_policy(spec, model(), texts)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_runs_a_forward(name: str) -> None:
    net = model()
    ids = texts()[0]
    logits = net.logits(ids, net.new_cache(20), parse_policy(name, net, texts), TorchOps())
    assert torch.isfinite(logits).all()
    if name == "oracle":
        dense = net.logits(ids, net.new_cache(20), Selector(), TorchOps())
        torch.testing.assert_close(logits, dense)
