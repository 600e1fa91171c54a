"""The comparison of flash with what else could be done: recorded selections, every arm, one run."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dejavu.bench.flash import bench_flash, true_sets
from dejavu.bench.mapped import MappedNeurons
from dejavu.bench.trace import Replayed, Trace, record_trace
from dejavu.errors import DejavuError, InputError
from dejavu.flash.store import FlashStore, placeholders
from dejavu.kernels.native import NativeOps
from dejavu.load import random_model
from dejavu.models.base import DecoderLM
from dejavu.models.neurons import ModelNeurons
from dejavu.registry import architecture
from dejavu.weights.bundle import open_bundle, write_bundle

SMALL = {
    "model_type": "opt",
    "vocab_size": 64,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
LARGE = SMALL | {
    "hidden_size": 256,
    "word_embed_proj_dim": 256,
    "ffn_dim": 300,
    "num_hidden_layers": 4,
}


def config_of(fields):
    return architecture("opt").config_from_hf(fields)


@pytest.fixture(scope="module")
def recorded():
    model = random_model(config_of(SMALL), dtype="fp32", seed=1)
    for block in model.weights.blocks:
        block.mlp.up.bias.fill_(-0.1)  # some neurons are 0
    return model


@pytest.fixture(scope="module")
def trace(recorded):
    ids = torch.randint(64, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    return record_trace(recorded, ids, config_of(LARGE), 24)


def outside_of(model, matrices, parts=("up", "down")):
    blocks = []
    for layer, block in enumerate(model.weights.blocks):
        weights = {
            part: replace(
                getattr(block.mlp, part), weight=matrices[f"layers.{layer}.mlp.{part}.weight"]
            )
            for part in parts
        }
        blocks.append(replace(block, mlp=replace(block.mlp, **weights)))
    return DecoderLM(model.config, replace(model.weights, blocks=tuple(blocks)))


@pytest.fixture
def packed(tmp_path):
    model = random_model(config_of(LARGE), dtype="bf16")
    write_bundle(tmp_path / "b", ModelNeurons(model, name="large"))
    return model, open_bundle(tmp_path / "b")


def test_a_layer_follows_its_recorded_layer_on_stretches_of_its_own(recorded, trace):
    ids = torch.randint(64, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    assert trace.masks.shape == (24, 4, 300)
    assert trace.stretches == 10  # five groups of 64 neurons, two layers for each recorded one
    whole = []
    for stretch in range(10):
        piece = record_trace(recorded, ids[24 * stretch :][:48], config_of(SMALL), 24)
        whole.append(piece.masks)
    for layer, source, place in ((0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)):
        for group in range(5):
            own = trace.masks[:, layer, 64 * group : 64 * (group + 1)]
            expected = whole[5 * place + group][:, source, : own.shape[1]]
            assert torch.equal(own, expected)
    assert 0 < trace.density < 1


def test_overlap_of_neighbours_is_that_of_the_sets():
    masks = torch.tensor([[[1, 1, 0, 0]], [[0, 1, 1, 1]], [[0, 1, 1, 1]]], dtype=torch.bool)
    found = Trace(masks, 1)
    assert found.repeated == pytest.approx((1 + 3) / 6)
    assert found.jaccard == pytest.approx((1 / 4 + 1) / 2)
    assert found.density == pytest.approx(8 / 12)


def test_too_little_text_is_refused(recorded):
    with pytest.raises(InputError, match="10 stretches"):
        record_trace(recorded, [1] * 100, config_of(LARGE), 24)
    with pytest.raises(InputError, match="at most 64 tokens"):
        record_trace(recorded, [1] * 1000, config_of(LARGE), 65)


@pytest.mark.parametrize("look_ahead", [0.0, 0.5, 1.0])
def test_every_arm_agrees_and_reads_what_the_trace_says(packed, trace, look_ahead):
    model, bundle = packed
    matrices = placeholders(bundle)
    store = FlashStore(bundle, 700, matrices)
    selectors = []

    def selector():
        selectors.append(Replayed(model.config, trace, rank=8, look_ahead=look_ahead))
        return selectors[-1]

    ids = torch.randint(64, (24,), generator=torch.Generator().manual_seed(2)).tolist()
    found = bench_flash(
        model,
        outside_of(model, matrices),
        store,
        selector,
        ids,
        warm=8,
        naive=2,
        threads=1,
        seconds=0.02,
    )
    arms = {arm["name"]: arm for arm in found["arms"]}
    assert list(arms) == ["memory", "flash", "read in full", "mapped", "dense in memory"]
    wanted = int(trace.masks[8:].sum()) * bundle.record_bytes / 16
    assert arms["flash"]["wanted_bytes"] == pytest.approx(wanted)
    assert 0 < arms["flash"]["fresh_bytes"] < wanted
    assert arms["read in full"]["read_bytes"] >= bundle.mlp_bytes
    assert arms["memory"]["tokens"] == arms["flash"]["tokens"]
    assert arms["mapped"]["logits"] == arms["dense in memory"]["logits"]
    assert found["bound"]["flash_over_larger"] > 0
    used = selectors[0].meter.used()
    assert used == pytest.approx((trace.masks[:24].sum(dim=(0, 2)) / 24).tolist())


def test_true_sets_are_all_that_is_wanted(tmp_path, recorded):
    write_bundle(tmp_path / "b", ModelNeurons(recorded, name="small"))
    bundle = open_bundle(tmp_path / "b")
    matrices = placeholders(bundle)
    store = FlashStore(bundle, 128, matrices)
    windows = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(3)).tolist()
    found = true_sets(recorded, outside_of(recorded, matrices), store, windows, warm=4, threads=1)
    sets = [record_trace(recorded, ids, recorded.config, 12).masks for ids in windows]
    assert found["density"] == pytest.approx(float(torch.stack(sets).float().mean()))
    assert found["tokens"] == 16
    # All neurons fit, so that each is fresh once; those of the first tokens are not counted.
    early, late = sets[0][:4].any(0), sets[0][4:].any(0)
    first = int((late & ~early).sum())
    second = int((sets[1][4:].any(0) & ~(early | late | sets[1][:4].any(0))).sum())
    assert first > 0
    assert found["fresh"] == pytest.approx((first + second) / 8 / 2 / 128)
    with pytest.raises(DejavuError, match="other logits"):
        other = random_model(recorded.config, dtype="fp32", seed=9)
        true_sets(other, outside_of(recorded, matrices), store, windows, warm=4, threads=1)


def test_a_wrong_bit_in_an_arm_is_an_error(packed, trace):
    model, bundle = packed
    matrices = placeholders(bundle)
    other = random_model(model.config, dtype="bf16", seed=5)
    with pytest.raises(DejavuError, match="other logits"):
        bench_flash(
            other,
            outside_of(model, matrices),
            FlashStore(bundle, 700, matrices),
            lambda: Replayed(model.config, trace, rank=8),
            [1] * 12,
            warm=4,
            naive=1,
            threads=1,
            seconds=0.02,
        )


def test_a_mapping_keeps_no_more_than_its_limit(packed):
    model, bundle = packed
    with MappedNeurons(bundle, 8192) as mapped:
        over = outside_of(model, mapped.matrices)
        x = torch.randn(1, 256)
        for own, its in zip(model.weights.blocks, over.weights.blocks, strict=True):
            (expected,) = NativeOps(1).linear(x, [(own.mlp.up.weight, None, None)])
            (found,) = NativeOps(1).linear(x, [(its.mlp.up.weight, None, None)])
            assert torch.equal(expected, found)
        mapped.drop()
        kept = mapped.residency()
        assert kept.locked == 8192
        assert kept.after_dropping <= 8192 + 4096  # the last page is not a whole one
        del over


def test_a_file_that_cannot_be_mapped_is_an_error_and_closed(packed, monkeypatch):
    _, bundle = packed
    monkeypatch.setattr("mmap.mmap", _refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(DejavuError, match="cannot be mapped"):
        MappedNeurons(bundle, 8192)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def _refuse(*arguments, **options):
    raise OSError(errno.ENOMEM, "Cannot allocate memory")
