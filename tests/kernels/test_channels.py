"""Input channels that are large enough, and projections through those alone."""

import pytest
import torch
from truth import (
    activated,
    exact,
    mask_of,
    masked,
    misaligned,
    random_weight,
    selection_of,
    summed,
    times,
)

from dejavu.errors import BackendError, InputError
from dejavu.kernels.channels import WHOLE, Stacked, channel_ops
from dejavu.kernels.native import NativeOps, available_isas
from dejavu.kernels.ops import Activation
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection

KINDS = ["none", "empty", "all", "random"]
DTYPES = ["fp32", "bf16", "int8"]


try:
    BACKENDS = [*available_isas(), "torch"]
except BackendError:
    BACKENDS = ["torch"]


@pytest.fixture(params=BACKENDS)
def ops(request):
    """Each instruction set of the compiled kernels, and PyTorch."""
    return TorchOps() if request.param == "torch" else NativeOps(threads=1, isa=request.param)


def check(selection, kept):
    """Lists, counts and mask say what `kept` bool `[rows, entries]` says."""
    listed = []
    for t, count in enumerate(selection.counts.tolist()):
        listed += selection.indices[t, :count].tolist()
    assert listed == kept.any(dim=0).nonzero().flatten().tolist()
    assert torch.equal(selection.to_mask(len(kept)), kept)


@pytest.mark.parametrize("channels", [1, 5, 33, 257, 576, 2100])
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
def test_channels_not_below_their_floor(ops, rows, channels):
    g = torch.Generator().manual_seed(channels)
    # Few whole numbers: many magnitudes are exactly a floor, and those are kept.
    x = misaligned(torch.randint(-3, 4, (rows, channels), generator=g).float())
    floors = misaligned(torch.randint(0, 4, (channels,), generator=g).float())
    kept = x.double().abs() >= floors.double()
    counter = torch.tensor([10, 20, 30])
    out = Selection.empty(channels, rows)
    assert channel_ops(ops).choose(x, floors, counter, out) is out
    check(out, kept)
    check(channel_ops(ops).choose(x, floors, counter, None), kept)
    read, used = int(kept.any(dim=0).sum()), int(kept.sum())
    assert counter.tolist() == [10 + 2 * read, 20 + 2 * used, 30 + 2 * rows]
    channel_ops(ops).choose(x, floors + 10, counter, out)  # a list made before leaves nothing
    check(out, torch.zeros(rows, channels, dtype=torch.bool))


@pytest.mark.parametrize("rows", [1, 3])
def test_the_first_tokens_of_a_text_keep_everything(ops, rows):
    x, floors = torch.zeros(rows, 40), torch.ones(40)
    places = torch.tensor([WHOLE, WHOLE - 1, 0])[:rows]
    counter = torch.zeros(3, dtype=torch.int64)
    chosen = channel_ops(ops).choose(x, floors, counter, None, places)
    kept = (places < WHOLE)[:, None].expand(rows, 40)
    check(chosen, kept)
    assert counter.tolist() == [40 * (rows > 1), int(kept.sum()), rows]


def test_a_value_that_is_not_a_number_is_kept(ops):
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 0.0, -0.0]])
    floors = torch.tensor([5.0, 5.0, float("inf"), 0.0, 0.0])
    chosen = channel_ops(ops).choose(x, floors, torch.zeros(3, dtype=torch.int64), None)
    check(chosen, torch.ones(1, 5, dtype=torch.bool))
    nothing = channel_ops(ops).choose(x, floors * float("nan"), torch.zeros(3).long(), None)
    check(nothing, torch.ones(1, 5, dtype=torch.bool))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("channels", "widths"),
    [(1, (300,)), (5, (1, 1, 1)), (257, (31, 7, 65)), (2100, (33, 5))],
)
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_project(ops, rows, channels, widths, kind, dtype):
    g = torch.Generator().manual_seed(rows + channels)
    x = misaligned(torch.randn(rows, channels, generator=g))
    weight = random_weight(channels, sum(widths), dtype, g)
    used = mask_of(kind, rows, channels, g)
    for bias in (None, torch.randn(sum(widths), generator=g)):
        parts = channel_ops(ops).project(x, Stacked(weight, widths, bias), selection_of(used))
        assert [part.shape for part in parts] == [(rows, width) for width in widths]
        summed(masked(exact(x), used), weight, bias).check(torch.cat(parts, dim=1))


@pytest.mark.parametrize("name", ["relu", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "channels", "neurons", "dtype"),
    [
        (1, 257, 300, "int8"),
        (1, 2100, 31, "bf16"),
        (2, 5, 1, "fp32"),
        (3, 33, 65, "int8"),
        (16, 257, 64, "bf16"),
        (16, 1, 7, "fp32"),
    ],
)
def test_gated(ops, rows, channels, neurons, dtype, kind, name):
    g = torch.Generator().manual_seed(neurons)
    x = misaligned(torch.randn(rows, channels, generator=g))
    weight = random_weight(channels, 2 * neurons, dtype, g)
    bias = torch.randn(2 * neurons, generator=g)
    used = mask_of(kind, rows, channels, g)
    both = summed(masked(exact(x), used), weight, bias)
    gate, up = (type(both)(*(t[:, part] for t in both)) for part in _halves(neurons))
    truth = times(activated(gate, name, 0.0), up)
    stacked = Stacked(weight, (neurons, neurons), bias)
    truth.check(channel_ops(ops).gated(x, stacked, Activation(name), selection_of(used)))


def _halves(neurons):
    return slice(0, neurons), slice(neurons, 2 * neurons)


def test_what_is_not_used_is_not_touched(ops):
    """Poison in rows that are read for a neighbour, or not at all, reaches nobody."""
    if isinstance(ops, TorchOps):
        pytest.skip("a masked product of plain PyTorch multiplies NaN by 0")
    g = torch.Generator().manual_seed(3)
    weight = random_weight(96, 40, "fp32", g)
    used = torch.ones(3, 96, dtype=torch.bool)
    used[:, 10] = False
    used[1:, 20] = False  # row 0 alone uses the poisoned channel 20
    weight.data[[10, 20]] = float("nan")
    x = torch.randn(3, 96, generator=g)
    stacked, chosen = Stacked(weight, (20, 20)), selection_of(used)
    results = channel_ops(ops).project(x, stacked, chosen)
    for result in (*results, channel_ops(ops).gated(x, stacked, Activation("silu"), chosen)):
        assert result[0].isnan().all()
        assert not result[1:].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_row_depends_on_nothing_but_the_row(isa, rows, dtype):
    """Not on threads, neighbours, replay, or channels that are read for others."""
    g = torch.Generator().manual_seed(9)
    x, floors = torch.randn(rows, 260, generator=g), torch.full((260,), 0.7)
    stacked = Stacked(random_weight(260, 96, dtype, g), (48, 48), torch.randn(96, generator=g))

    def forward(ops, x):
        channels, counter = channel_ops(ops), torch.zeros(3, dtype=torch.int64)
        chosen = channels.choose(x, floors, counter, None)
        projected = channels.project(x, stacked, chosen)
        return torch.cat((*projected, channels.gated(x, stacked, Activation("silu"), chosen)), 1)

    expected = torch.cat([forward(NativeOps(1, isa), x[r : r + 1]) for r in range(rows)])
    for threads in (1, 2, 3):
        assert torch.equal(forward(NativeOps(threads, isa), x), expected)
    live = torch.zeros_like(x)
    counter = torch.zeros(3, dtype=torch.int64)
    recorder = NativeOps(2, isa).recorder()
    channels = channel_ops(recorder)
    chosen = channels.choose(live, floors, counter, None)
    parts = channels.project(live, stacked, chosen)
    parts.append(channels.gated(live, stacked, Activation("silu"), chosen))
    live.copy_(x)
    before = int(counter[2])
    recorder.program.run()
    assert torch.equal(torch.cat(parts, dim=1), expected)
    assert int(counter[2]) == before + rows


def test_wrong_inputs_are_named(isa):
    channels = channel_ops(NativeOps(1, isa))
    weight = random_weight(8, 6, "fp32", torch.Generator().manual_seed(0))
    x, counter = torch.ones(2, 8), torch.zeros(3, dtype=torch.int64)
    for message, call in (
        ("floors", lambda: channels.choose(x, torch.ones(7), counter, None)),
        ("counter", lambda: channels.choose(x, torch.ones(8), torch.zeros(6).long()[::2], None)),
        ("mask", lambda: channels.choose(x, torch.ones(8), counter, Selection.empty(8, 1))),
        ("stack", lambda: channels.project(x, Stacked(weight, (3, 2)), None)),
        ("stack", lambda: channels.project(x, Stacked(weight, (2, 2, 1, 1)), None)),
        ("wide", lambda: channels.gated(x, Stacked(weight, (4, 2)), Activation("silu"), None)),
        ("bias", lambda: channels.project(x, Stacked(weight, (6,), torch.ones(5)), None)),
        ("x must", lambda: channels.project(torch.ones(2, 9), Stacked(weight, (6,)), None)),
        ("entries", lambda: channels.project(x, Stacked(weight, (6,)), Selection.full(9))),
        ("17 rows", lambda: channels.choose(torch.ones(17, 8), torch.ones(8), counter, None)),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_other_backends_say_that_they_have_none():
    with pytest.raises(BackendError, match="on the CPU only"):
        channel_ops(object())
