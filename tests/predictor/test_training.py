"""Hand-written gradients against autograd, and what training promises about its data."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dejavu.predictor.start import Factors, random_start
from dejavu.predictor.training import TrainOptions, train

ROWS, WIDTH, ENTRIES = 301, 9, 17


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    truth = torch.randn(ENTRIES, WIDTH, generator=generator)
    return x, (x @ truth.t() - 1.0).clamp(min=0).square()


def test_one_step_is_autograd_and_torch_adam() -> None:
    x, weights = data()
    start = random_start(ENTRIES, WIDTH, 3, seed=1)
    options = TrainOptions(epochs=1.0, batch=ROWS, rate=0.01)
    (ours,) = train(x, lambda rows: weights[rows], [start], options)

    parameters = [p.clone().requires_grad_() for p in (start.first, start.second, start.bias)]
    # One step of the warm-up under the cosine's end: a twentieth of a fiftieth of the peak.
    shrink = 0.02 / 20
    groups = [
        {"params": [p], "lr": rate * shrink}
        for p, rate in zip(parameters, (0.01, 0.01, 0.03), strict=True)
    ]
    adam = torch.optim.Adam(groups, betas=(0.9, 0.99), eps=1e-8)
    s = Factors(*parameters).scores(x)
    (weights * F.softplus(-s) + F.softplus(s)).sum(dim=1).mean().backward()
    adam.step()
    for name, theirs in zip(("first", "second", "bias"), parameters, strict=True):
        moved = getattr(ours, name) - getattr(start, name)
        expected = theirs.detach() - getattr(start, name)
        torch.testing.assert_close(moved, expected, rtol=1e-2, atol=1e-8)


def test_scores_become_the_log_of_the_expected_cost() -> None:
    """Without inputs that tell anything, every entry's score is the log of its mean weight."""
    x = torch.zeros(400, WIDTH)
    weights = torch.rand(400, ENTRIES, generator=torch.Generator().manual_seed(0)) * torch.linspace(
        0.1, 20, ENTRIES
    )
    start = random_start(ENTRIES, WIDTH, 2, seed=0)
    (done,) = train(
        x, lambda r: weights[r], [start], TrainOptions(epochs=400, batch=100, rate=0.01)
    )
    torch.testing.assert_close(done.bias, weights.mean(dim=0).log(), atol=0.02, rtol=0)


def test_every_row_is_used_equally_often() -> None:
    x, weights = data()
    seen = torch.zeros(ROWS, dtype=torch.int64)

    def weights_of(rows: Tensor) -> Tensor:
        seen.index_add_(0, rows, torch.ones_like(rows))
        return weights[rows]

    start = random_start(ENTRIES, WIDTH, 2, seed=0)
    train(x, weights_of, [start], TrainOptions(epochs=3.0, batch=43))
    assert ROWS == 7 * 43
    assert (seen == 3).all()


def test_starts_side_by_side_train_as_alone_and_again_the_same() -> None:
    x, weights = data()
    starts = [random_start(ENTRIES, WIDTH, rank, seed=0) for rank in (1, 4)]
    options = TrainOptions(epochs=2.0, batch=32)

    def run(chosen: list[Factors], seed: int = 0) -> list[Factors]:
        return train(x, lambda r: weights[r], chosen, TrainOptions(2.0, 32, options.rate, seed))

    together = run(starts)
    for number, start in enumerate(starts):
        (alone,) = run([start])
        assert torch.equal(alone.second, together[number].second)
    assert not torch.equal(run(starts, seed=1)[0].second, together[0].second)


def test_training_helps_and_leaves_its_start_alone() -> None:
    x, weights = data()
    start = random_start(ENTRIES, WIDTH, 9, seed=0)
    before = start.second.clone()
    (done,) = train(x, lambda r: weights[r], [start], TrainOptions(epochs=40, batch=50, rate=0.02))
    assert torch.equal(start.second, before)

    def loss(f: Factors) -> float:
        s = f.scores(x)
        return float((weights * F.softplus(-s) + F.softplus(s)).mean())

    assert loss(done) < 0.5 * loss(start)


@pytest.mark.parametrize("rows", [1, 5])
def test_fewer_rows_than_a_batch_are_enough(rows: int) -> None:
    x, weights = data()
    start = random_start(ENTRIES, WIDTH, 2, seed=0)
    (done,) = train(x[:rows], lambda r: weights[r], [start], TrainOptions(batch=512))
    assert math.isfinite(float(done.second.sum()))
