"""Forced plans: the asked density, other neurons for every token."""

from __future__ import annotations

import pytest
import torch

from dejavu.bench.forced import Target, default_rank, force, gpu_rank, random_predictors
from dejavu.bench.subject import make_prompts
from dejavu.engine.engine import Engine
from dejavu.engine.params import SamplingParams
from dejavu.errors import InputError
from dejavu.kernels.native import NativeOps
from dejavu.kernels.nibbles import Nibbles
from dejavu.predictor.options import PrepareOptions
from dejavu.sparsity.policy import Site

PROMPT, ANSWER = 10, 40


def masks(subject, selector, prompt, answer, site=Site.NEURONS):
    """bool `[tokens, layers, entries]` of what the engine's own steps selected."""
    engine = Engine(
        subject.loaded, selector, max_batch=1, eos_token_ids=(), ops=NativeOps(1), max_model_len=64
    )
    request = engine.add(prompt, SamplingParams(max_tokens=len(answer) + 2, ignore_eos=True))
    engine.step()
    selector.reset()
    found = []
    for token in answer:
        request.token_ids[-1] = token
        engine.step()
        found.append(
            torch.stack(
                [selector._buffers[site, layer, 1].to_mask(1)[0] for layer in range(3)]
            ).clone()
        )
    return torch.stack(found)


@pytest.mark.parametrize("asked", [0.05, 0.1, 0.5, 1.0])
def test_density_and_variety(tiny, asked):
    prompt = make_prompts(tiny, 1, PROMPT, seed=1)[0]
    answer = make_prompts(tiny, 1, ANSWER, seed=2)[0]
    (forced,) = force(tiny.loaded, (asked,), prompt, answer)
    chosen = masks(tiny, forced, prompt, answer)
    density = chosen.float().mean().item()
    assert density == pytest.approx(asked, abs=0.01)
    if asked < 1.0:
        kept = (chosen[1:] & chosen[:-1]).sum() / chosen[1:].sum()
        assert kept < asked + 0.1  # what a token shares with the one before is hardly above chance
        assert chosen.float().mean(dim=0).max() < 0.85  # no neuron is chosen for every token


@pytest.mark.parametrize("look_ahead", [0.0, 0.5, 1.0])
def test_heads_are_forced_beside_neurons(tiny, look_ahead):
    prompt = make_prompts(tiny, 1, PROMPT, seed=1)[0]
    answer = make_prompts(tiny, 1, ANSWER, seed=2)[0]
    (forced,) = force(
        tiny.loaded, (Target(0.2, 0.5),), prompt, answer, head_rank=3, look_ahead=look_ahead
    )
    for _ in range(4):
        chosen = masks(tiny, forced, prompt, answer, Site.HEADS)
        if forced.correct() < 0.01:
            break
    assert chosen.shape == (ANSWER, 3, 4)
    assert chosen.float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert forced.meter.used(Site.HEADS) == pytest.approx([2, 2, 2], abs=0.5)
    heads = 3 * (3 * (16 + 4) + 4 * 2 + 4 * 4)
    rank = default_rank(tiny.loaded.model.config)
    neurons = 3 * (rank * (16 + 4) + 200 * -(-rank // 2) + 4 * 200)
    assert forced.predictor_bytes == heads + neurons
    distances = {key: choice.distance for key, choice in forced._choices.items()}
    assert distances[Site.HEADS, 0] == 0.0
    assert distances[Site.NEURONS, 0] == (0.5 if look_ahead == 0.5 else 0.0)
    assert distances[Site.HEADS, 1] == distances[Site.NEURONS, 2] == look_ahead


def test_targets():
    assert Target.parse("0.1") == Target(0.1, 1.0)
    assert Target.parse("0.1/0.5") == Target(0.1, 0.5)
    assert Target(0.1).label == "forced 0.1"
    assert Target(0.024, 0.5).label == "forced 0.024, heads 0.5"
    for wrong in ("", "a", "0.1/", "0.1/0.5/1", "0", "1.5", "0.5/0"):
        with pytest.raises(InputError):
            Target.parse(wrong)


def test_ranks_and_look_ahead(tiny):
    assert [gpu_rank(width) for width in (768, 4096, 7168, 12288)] == [128, 128, 256, 256]
    config = tiny.loaded.model.config
    assert default_rank(config, torch.device("cuda")) == 128
    assert default_rank(config) in PrepareOptions().neuron_ranks(config)
    with pytest.raises(InputError, match="look-ahead"):
        force(tiny.loaded, (0.1,), [1], [2, 3], look_ahead=2.0)


def test_correction_leads_from_a_wrong_density_to_the_asked_one(tiny):
    prompt = make_prompts(tiny, 1, PROMPT, seed=1)[0]
    answer = make_prompts(tiny, 1, ANSWER, seed=2)[0]
    (forced,) = force(tiny.loaded, (0.3,), prompt, answer)
    forced.target = Target(0.1)
    errors = []
    for _ in range(6):
        masks(tiny, forced, prompt, answer)
        errors.append(forced.correct())
    assert errors[0] > 0.15
    assert errors[-1] < 0.01


def test_predictors_have_4_bits_and_their_bytes_are_counted(tiny):
    config = tiny.loaded.model.config
    predictors = random_predictors(config, 7)
    for p in predictors:
        assert isinstance(p.first, Nibbles)
        assert isinstance(p.second, Nibbles)
        assert p.rank == 7
    (forced,) = force(tiny.loaded, (0.2,), [1, 2], [3, 4, 5], rank=7)
    hidden, neurons, layers = 32, 200, 3
    one = 7 * (hidden // 2 + 4) + neurons * 4 + 4 * neurons
    assert forced.predictor_bytes == layers * one


def test_a_bias_set_for_a_place_counts_from_the_next_step_on(tiny):
    prompt = make_prompts(tiny, 1, PROMPT, seed=1)[0]
    answer = make_prompts(tiny, 1, 4, seed=2)[0]
    (forced,) = force(tiny.loaded, (0.3,), prompt, answer)
    wanted = torch.rand(200, generator=torch.Generator().manual_seed(0)) < 0.4
    forced.set_bias((Site.NEURONS, 1), torch.where(wanted, 1e30, -1e30))
    chosen = masks(tiny, forced, prompt, answer)
    assert (chosen[:, 1] == wanted).all()
    assert not (chosen[:, 0] == wanted).all()
