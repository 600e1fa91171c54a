"""Ranks, budgets, losses and overlaps by themselves, on hostile inputs."""

import pytest
import torch

from dejavu.sparsity.budgets import Histogram, kept, mass_count, ranks
from dejavu.sparsity.losses import block_mean, mean_rise, token_losses
from dejavu.sparsity.similarity import Overlap, ResidualFlow


def test_ranks_break_ties_by_number() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 2.0, 1.0]])
    assert ranks(scores).tolist() == [[3, 0, 4, 1, 2]]
    assert ranks(torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize(
    ("density", "count"), [(1.0, 16), (0.05, 1), (0.5, 8), (0.03, 1), (0.8, 13)]
)
def test_kept(density: float, count: int) -> None:
    assert kept(density, 16) == count


def test_mass_count() -> None:
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 5.0, 0.0]])
    assert mass_count(scores, 0.7).tolist() == [2, 0, 1]
    assert mass_count(scores, 0.71).tolist() == [3, 0, 1]
    assert mass_count(scores, 1.0).tolist() == [4, 0, 1]


@pytest.mark.parametrize("density", [1.0, 0.5, 0.37, 0.01, 1e-9])
def test_histogram_threshold(density: float) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(301, 7, generator=generator).relu() * scale for scale in (1.0, 0.01)]
    histogram = Histogram(2)
    for layer, scores in enumerate(layers):
        for part in scores.t().split(3):  # not contiguous
            histogram.add(layer, part)
    scores = torch.cat([x.flatten() for x in layers])
    threshold = histogram.threshold(density)
    share = float((scores >= threshold).float().mean())
    assert threshold > 0
    assert share <= density
    positive = float((scores > 0).float().mean())
    below = float((scores >= threshold * (1 - 1 / 64)).float().mean())
    assert share == pytest.approx(positive) or below > density


def test_losses_and_their_error() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(600, 11, generator=generator) * 5
    targets = torch.randint(0, 11, (600,), generator=generator)
    losses = token_losses(logits, targets)
    wanted = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(losses, wanted, rtol=0, atol=2e-6)
    assert token_losses(logits[:0], targets[:0]).shape == (0,)
    blocks = losses.view(6, 100).sum(dim=1).tolist()
    mean = block_mean(blocks, [100] * 6)
    means = torch.tensor(blocks) / 100
    assert mean.value == pytest.approx(float(losses.mean()))
    assert mean.error == pytest.approx(float(means.std() / 6**0.5), rel=1e-5)
    assert block_mean([3.0], [2]) == (1.5, None)
    assert mean_rise([7.0, 14.0], [5.0, 10.0], [2, 2]) == block_mean([2.0, 4.0], [2, 2])
    assert mean.exp().error == pytest.approx(mean.exp().value * mean.error)


def test_overlap_and_flow_of_hostile_inputs() -> None:
    overlap = Overlap(1)
    overlap.add(0, torch.zeros(3, 4, dtype=torch.bool), torch.zeros(5, 4, dtype=torch.bool))
    overlap.add(0, torch.ones(0, 4, dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool))
    assert overlap.means() == [None]
    overlap.add(0, torch.tensor([[True, True, False]]), torch.tensor([[False, True, True]]))
    assert overlap.means() == [pytest.approx(1 / 3)]
    flow = ResidualFlow(1)
    flow.add([torch.tensor([x]) for x in ([2.0, 0.0], [2.0, 4.0], [-1.0, 0.0])])
    (change,) = flow.means()
    assert change == pytest.approx((-1.0, 1.5, 2.0, 5 / 20**0.5))
    flow = ResidualFlow(1)
    flow.add([torch.zeros(2, 3)] * 3)
    (change,) = flow.means()
    assert (change.block, change.attention, change.mlp) == (0.0, 0.0, 0.0)
