"""The sampler against transformers' own logits processors."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from dejavu.engine.params import REPETITION_PENALTIES, SamplingParams
from dejavu.engine.sampling import Sampler, _draw, probabilities

VOCAB = 400


def logits(seed: int, spread: float = 3.0, vocab: int = VOCAB) -> NDArray[np.float32]:
    drawn = np.random.default_rng(seed).standard_normal(vocab) * spread
    return drawn.astype(np.float32)


def reference(scores: NDArray[np.float32], **options: Any) -> NDArray[np.float32]:
    """Probabilities after transformers' warpers, in its own order."""
    warpers = transformers.LogitsProcessorList()
    warpers.append(transformers.TemperatureLogitsWarper(options["temperature"]))
    if options["top_k"]:
        warpers.append(transformers.TopKLogitsWarper(options["top_k"]))
    if options["top_p"] < 1.0:
        warpers.append(transformers.TopPLogitsWarper(options["top_p"]))
    if options["min_p"]:
        warpers.append(transformers.MinPLogitsWarper(options["min_p"]))
    ids = torch.zeros(1, 1, dtype=torch.long)
    kept = warpers(ids, torch.from_numpy(scores)[None])
    return torch.softmax(kept, dim=-1)[0].numpy()


@pytest.mark.parametrize("temperature", [0.2, 1.0, 2.5])
@pytest.mark.parametrize("seed", range(3))
def test_filters_match_transformers(temperature: float, seed: int) -> None:
    scores = logits(seed)
    for top_k, top_p, min_p in product((0, 1, 7, VOCAB, 999), (0.1, 0.9, 1.0), (0.0, 0.05, 1.0)):
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        weights = probabilities(scores, SamplingParams(**options))
        ours = weights / weights.sum()
        theirs = reference(scores, **options)
        assert ((ours > 0) == (theirs > 0)).all(), options
        # Both softmaxes sum VOCAB fp32 numbers: a relative error of a few times 2^-24 * log2(V).
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=0, err_msg=str(options))


def test_order_of_the_filters_is_transformers() -> None:
    """Weights 8, 4, 2, 1, 1: top_p sees what top_k left, min_p cuts last."""
    scores = np.log(np.array([8, 4, 2, 1, 1], dtype=np.float32))
    kept = probabilities(scores, SamplingParams(temperature=1, top_k=3, top_p=0.8))
    assert (kept > 0).tolist() == [True, True, False, False, False]  # 8/14 and 12/14 of three
    kept = probabilities(scores, SamplingParams(temperature=1, top_p=0.8, min_p=0.2))
    assert (kept > 0).tolist() == [True, True, True, False, False]  # 12/16 < 0.8; min_p first: 2


def test_top_p_0_keeps_the_likeliest() -> None:
    kept = probabilities(logits(0), SamplingParams(temperature=1, top_p=0))
    assert np.count_nonzero(kept) == 1
    assert kept.argmax() == logits(0).argmax()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-4])
def test_tiny_temperatures_are_greedy(temperature: float, dtype: type) -> None:
    for seed in range(20):
        scores = logits(seed, spread=1e3).astype(dtype)
        sampler = Sampler(SamplingParams(temperature=temperature), (1,), VOCAB)
        with np.errstate(all="raise"):
            assert [sampler.sample(scores) for _ in range(3)] == [int(scores.argmax())] * 3


def test_smallest_sampled_temperature_does_not_overflow() -> None:
    scores = logits(0, spread=1e3)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        weights = probabilities(scores, SamplingParams(temperature=1.01e-4))
    assert np.isfinite(weights).all()
    assert weights.argmax() == scores.argmax()


@pytest.mark.parametrize("shift", [0.0, -50.0], ids=["mixed", "all-negative"])
def test_repetition_penalty_matches_transformers(shift: float) -> None:
    prompt = (3, 5, 5, 250)
    sampler = Sampler(SamplingParams(repetition_penalty=1.5), prompt, VOCAB)
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.5)
    history = list(prompt)
    for step in range(200):
        scores = logits(step) + np.float32(shift)
        before = scores.copy()
        expected = processor(torch.tensor([history]), torch.from_numpy(scores)[None])[0]
        token = sampler.sample(scores)
        assert token == int(expected.argmax())
        assert (scores == before).all(), "the model's buffer is left alone"
        history.append(token)
    assert len(set(history)) > 100, "the history has outgrown its first arrays"


def test_presence_and_frequency_count_the_answer_only() -> None:
    scores = np.array([3.0, 2.9, 2.0, 0.0], dtype=np.float32)
    presence = Sampler(SamplingParams(presence_penalty=0.5), (1, 1, 1), 4)
    assert [presence.sample(scores) for _ in range(4)] == [0, 1, 0, 0]
    frequency = Sampler(SamplingParams(frequency_penalty=0.5), (1, 1, 1), 4)
    # 3.0, 2.9 -> 2.5, 2.9 -> 2.5, 2.4 -> 2.0, 2.4 -> 2.0, 1.9, 2.0
    assert [frequency.sample(scores) for _ in range(5)] == [0, 1, 0, 1, 0]


def test_logit_bias_and_penalties_add_up() -> None:
    scores = np.array([3.0, -1.0, 2.0], dtype=np.float32)
    assert Sampler(SamplingParams(logit_bias={1: 100}), (0,), 3).sample(scores) == 1
    assert Sampler(SamplingParams(logit_bias={0: -100}), (0,), 3).sample(scores) == 2
    both = SamplingParams(logit_bias={1: 4.5}, repetition_penalty=2.0)
    # Bias first: id 1 is positive (3.5) when the penalty halves it.
    assert Sampler(both, (0, 1), 3).sample(scores) == 2


def test_prompt_may_have_ids_that_are_never_sampled() -> None:
    """A model can know more ids than its tokenizer; the logits end where the tokenizer does."""
    params = SamplingParams(repetition_penalty=2.0)
    scores = np.array([0.5, 1.9, 2.0, 1.0], dtype=np.float32)
    assert Sampler(params, (8, 2), 4).sample(scores) == 1


def test_frequencies_follow_the_probabilities() -> None:
    scores = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], dtype=np.float32))
    sampler = Sampler(SamplingParams(temperature=1, min_p=0.12, seed=5), (0,), 5)
    draws = 4000
    counts = np.bincount([sampler.sample(scores) for _ in range(draws)], minlength=5)
    expected = np.array([0.4, 0.3, 0.2, 0.06, 0.0]) / 0.96
    spread = np.sqrt(draws * expected * (1 - expected))
    assert (np.abs(counts - draws * expected) <= 4.5 * spread).all()


def test_draw_equals_the_running_sum() -> None:
    """Over several blocks, some of them empty, and at both ends of the unit interval."""
    weights = np.zeros(2000, dtype=np.float32)
    weights[[300, 301, 900, 1023, 1024, 1900]] = [1e-3, 0.4, 1e-7, 0.3, 0.1, 1.0]
    running = np.cumsum(weights, dtype=np.float64)
    edges = [0.0, 1e-12, 0.5, 1 - 2**-24, 1 - 2**-53]
    for uniform in [*edges, *np.random.default_rng(0).random(500)]:
        index = _draw(weights, float(uniform))
        assert weights[index] > 0
        expected = np.searchsorted(running, uniform * running[-1], side="right")
        assert index == min(expected, 1900)


def test_draw_survives_rounding() -> None:
    """Weights of very different sizes: their sum depends on the order in the last bit."""
    for seed in range(50):
        exponents = np.random.default_rng(seed).uniform(-70, 0, 100)
        weights = np.exp2(exponents).astype(np.float32)
        assert _draw(weights, 1 - 2**-53) < len(weights)


def test_seed_reproduces_and_only_a_seed() -> None:
    def run(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1, seed=seed), (0,), VOCAB)
        return [sampler.sample(logits(0, spread=1.0)) for _ in range(20)]

    assert run(7) == run(7)
    assert run(7) != run(8)
    assert run(-7) != run(8)
    assert run(None) != run(None)


@pytest.mark.parametrize("penalty", REPETITION_PENALTIES)
def test_no_allowed_penalty_leaves_the_finite(penalty: float) -> None:
    logits = np.linspace(-1e4, 1e4, VOCAB, dtype=np.float32)
    for temperature in (0.0, 2e-4, 2.0):
        params = SamplingParams(temperature=temperature, repetition_penalty=penalty, seed=0)
        sampler = Sampler(params, list(range(VOCAB)), VOCAB)
        with np.errstate(all="raise", under="ignore"):
            assert 0 <= sampler.sample(logits) < VOCAB
