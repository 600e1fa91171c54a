"""Bundled weights files: what stands in them, what is refused, and packing that is interrupted."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from dejavu.embedded import MODEL
from dejavu.errors import CheckpointError, DejavuError, InputError
from dejavu.kernels.matrix import Matrix
from dejavu.load import CheckpointNeurons, load_model
from dejavu.models.neurons import ModelNeurons
from dejavu.weights import bundle_write
from dejavu.weights.bundle import LayerNeurons, is_bundle, open_bundle, write_bundle
from dejavu.weights.bundle_format import strides


class Source:
    """Random neurons of any shape; `stop_at` ends the process in the middle of packing."""

    name = "random"

    def __init__(self, dtype="int8", hidden=8, neurons=(5, 3), gated=False, biases=(), seed=0):
        self.dtype, self.hidden_size, self.neurons = dtype, hidden, neurons
        self.gated, self.biases, self.seed = gated, tuple(biases), seed
        self.asked = []

    def identity(self):
        return f"{self.seed:064x}"

    def layer(self, index):
        self.asked.append(index)
        g = torch.Generator().manual_seed(100 * self.seed + index)
        count = self.neurons[index]
        parts = ("up", "gate", "down") if self.gated else ("up", "down")
        return LayerNeurons(
            {
                part: Matrix.from_float(
                    torch.randn(count, self.hidden_size, generator=g), self.dtype
                )
                for part in parts
            },
            {
                part: torch.randn(self.hidden_size if part == "down" else count, generator=g)
                for part in self.biases
            },
        )


def records(bundle, layer, neurons=None):
    """The truth: seek and read, one record after the other."""
    found = []
    with bundle.path.open("rb") as file:
        for offset in bundle.offsets(layer, neurons).tolist():
            file.seek(offset)
            found.append(bytearray(file.read(bundle.record_bytes)))
    if not found:
        return torch.empty(0, bundle.record_bytes, dtype=torch.uint8)
    return torch.stack([torch.frombuffer(each, dtype=torch.uint8) for each in found])


def expected(layer, bundle):
    rows = [layer.parts[part].data.view(torch.uint8) for part in bundle.parts]
    return torch.cat(rows, dim=1)


SHAPES = [
    ("int8", 8, (5, 3), False, ()),
    ("int8", 512, (9, 2), False, ("up", "down")),
    ("int8", 171, (7,), True, ("up", "gate", "down")),  # 513 bytes: one over a block
    ("bf16", 33, (1, 4, 2), True, ()),
    ("fp16", 64, (3,), False, ("up",)),
    ("fp32", 1, (6, 1), False, ()),
    ("fp32", 700, (3, 3), True, ("down",)),
]


@pytest.mark.parametrize("block", [512, 4096])
@pytest.mark.parametrize(("dtype", "hidden", "neurons", "gated", "biases"), SHAPES)
def test_holds_what_the_source_has(tmp_path, dtype, hidden, neurons, gated, biases, block):
    source = Source(dtype, hidden, neurons, gated, biases)
    write_bundle(tmp_path / "b", source, block=block)
    bundle = open_bundle(tmp_path / "b", identity=source.identity())
    assert (bundle.dtype, bundle.hidden_size, bundle.neurons) == (dtype, hidden, neurons)
    assert bundle.gated == gated
    assert is_bundle(bundle.path)
    for index in range(len(neurons)):
        layer = source.layer(index)
        assert torch.equal(records(bundle, index), expected(layer, bundle))
        scales = bundle.scales(index)
        assert (scales is not None) == (dtype == "int8")
        for part in bundle.parts:
            if scales is not None:
                assert torch.equal(scales[part], layer.parts[part].scale)
            bias = bundle.bias(index, part)
            assert (bias is None) == (part not in biases)
            assert bias is None or torch.equal(bias, layer.biases[part])
        for neuron, offset in enumerate(bundle.offsets(index).tolist()):
            assert bundle.locate(offset) == (index, neuron)
    bundle.verify()
    assert [entry.name for entry in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize(
    ("record", "block", "stride", "unit"),
    [
        (1, 512, 1, 512),
        (100, 512, 128, 512),
        (1024, 512, 1024, 1024),
        (1024, 4096, 1024, 4096),
        (1300, 4096, 2048, 4096),
        (1536, 512, 1536, 1536),
        (4097, 4096, 8192, 8192),
    ],
)
def test_small_records_share_a_block_and_none_crosses_one(record, block, stride, unit):
    assert strides(record, block) == (stride, unit)
    assert unit % stride == 0
    assert stride >= record


def test_an_order_places_neurons(tmp_path):
    source = Source("bf16", 16, (40, 7))
    order = [torch.randperm(40), torch.randperm(7)]
    write_bundle(tmp_path / "b", source, order=order)
    bundle = open_bundle(tmp_path / "b")
    for index in range(2):
        assert torch.equal(records(bundle, index), expected(source.layer(index), bundle))
        along = bundle.offsets(index, order[index])
        assert torch.equal(along, along.sort().values)
        for neuron, offset in enumerate(bundle.offsets(index).tolist()):
            assert bundle.locate(offset) == (index, neuron)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([torch.arange(5)], "1 layers"),
        ([torch.arange(5), torch.tensor([0, 0, 1])], "layer 1 is not a permutation"),
        ([torch.arange(4), torch.arange(3)], "layer 0 is not a permutation"),
    ],
)
def test_a_bad_order_is_refused(tmp_path, order, message):
    with pytest.raises(InputError, match=message):
        write_bundle(tmp_path / "b", Source(), order=order)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp32"])
def test_a_checkpoint_packs_to_the_bits_of_the_loaded_model(tmp_path, dtype):
    loaded = load_model(MODEL, dtype=dtype)
    source = CheckpointNeurons(MODEL, dtype=dtype)
    write_bundle(tmp_path / "a", source)
    write_bundle(
        tmp_path / "b",
        ModelNeurons(loaded.model, name=str(MODEL), identity=loaded.checkpoint.identity()),
    )
    a, b = open_bundle(tmp_path / "a"), open_bundle(tmp_path / "b")
    assert a.identity == b.identity == loaded.checkpoint.identity()
    start = a.blocks.start
    assert (tmp_path / "a").read_bytes()[start:] == (tmp_path / "b").read_bytes()[start:]
    mlp = loaded.model.weights.blocks[3].mlp
    assert torch.equal(a.bias(3, "up"), mlp.up.bias)


def test_a_model_without_a_checkpoint_is_known_by_its_weights():
    model = load_model(MODEL).model
    one, two = ModelNeurons(model, name="x"), ModelNeurons(model, name="y")
    assert one.identity() == two.identity()
    assert len(one.identity()) == 64


def damaged(path, offset, flip=1):
    data = bytearray(path.read_bytes())
    data[offset] ^= flip
    path.write_bytes(data)


def test_every_part_of_the_file_is_checked(tmp_path):
    path = tmp_path / "b"
    write_bundle(path, Source("int8", 512, (4, 4)))
    bundle = open_bundle(path)
    d = bundle.description
    whole = path.read_bytes()
    for offset, message in [
        (0, "not a bundled"),
        (8, "first bytes are damaged"),
        (40, "header is damaged"),
        (d.tables["scales"][2], "tables behind"),
        (d.checksums, "tables behind"),
    ]:
        damaged(path, offset)
        with pytest.raises(CheckpointError, match=message):
            open_bundle(path)
        path.write_bytes(whole)
    damaged(path, d.offsets[1] + 2 * d.stride + 5)
    with pytest.raises(CheckpointError, match="layer 1, neuron 2"):
        open_bundle(path).verify()


@pytest.mark.parametrize("kept", [0, 7, 100, 9000, -1])
def test_a_truncated_file_is_refused(tmp_path, kept):
    path = tmp_path / "b"
    write_bundle(path, Source("int8", 512, (9, 9)))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=str(path)):
        open_bundle(path)


def test_foreign_missing_and_other_models_files(tmp_path):
    (tmp_path / "text").write_text("not weights" * 100)
    with pytest.raises(CheckpointError, match="not a bundled"):
        open_bundle(tmp_path / "text")
    with pytest.raises(InputError, match="No such file"):
        open_bundle(tmp_path / "none")
    write_bundle(tmp_path / "b", Source())
    with pytest.raises(CheckpointError, match="not from the model"):
        open_bundle(tmp_path / "b", identity="f" * 64)


def test_not_finite_weights_are_refused(tmp_path):
    source = Source("fp32", 4, (2,))
    layer = source.layer(0)
    layer.parts["up"].data[1, 1] = float("nan")
    source.layer = lambda index: layer
    with pytest.raises(CheckpointError, match="layer 0, up projection holds NaN"):
        write_bundle(tmp_path / "b", source)


class Interrupted(Source):
    def layer(self, index):
        if index == 2:
            raise KeyboardInterrupt
        return super().layer(index)


@pytest.mark.parametrize("biases", [(), ("up", "down")])
def test_an_interrupted_packing_continues(tmp_path, biases):
    shape = ("int8", 100, (6, 5, 4, 3), True, biases)
    write_bundle(tmp_path / "whole", Source(*shape))
    (tmp_path / "b").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write_bundle(tmp_path / "b", Interrupted(*shape))
    assert (tmp_path / "b").read_bytes() == b"old"
    with pytest.raises(CheckpointError, match="2 of 4 layers"):
        open_bundle(tmp_path / "b.partial")
    source = Source(*shape)
    write_bundle(tmp_path / "b", source)
    assert source.asked == [2, 3]
    assert (tmp_path / "b").read_bytes() == (tmp_path / "whole").read_bytes()
    assert not (tmp_path / "b.partial").exists()


def test_what_an_interruption_lost_is_written_again(tmp_path):
    shape = ("int8", 100, (6, 5, 4))
    with pytest.raises(KeyboardInterrupt):
        write_bundle(tmp_path / "b", Interrupted(*shape))
    write_bundle(tmp_path / "whole", Source(*shape))
    damaged(tmp_path / "b.partial", open_bundle(tmp_path / "whole").description.offsets[1] + 3)
    source = Source(*shape)
    write_bundle(tmp_path / "b", source)
    assert source.asked == [1, 2]
    assert (tmp_path / "b").read_bytes() == (tmp_path / "whole").read_bytes()


def test_another_models_leftover_is_not_continued(tmp_path):
    shape = ("int8", 100, (6, 5, 4))
    with pytest.raises(KeyboardInterrupt):
        write_bundle(tmp_path / "b", Interrupted(*shape))
    source = Source(*shape, seed=1)
    write_bundle(tmp_path / "b", source)
    assert source.asked == [0, 1, 2]
    open_bundle(tmp_path / "b", identity=source.identity()).verify()


KILLED = """
    import os, signal, sys
    sys.path.insert(0, {folder!r})
    from test_bundle import Source
    from dejavu.weights import bundle_write

    class Killed(Source):
        def layer(self, index):
            if index == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().layer(index)

    bundle_write.write_bundle({path!r}, Killed("bf16", 96, (50, 40, 30, 20), True))
"""


def test_a_killed_packing_continues(tmp_path):
    path = tmp_path / "b"
    script = textwrap.dedent(KILLED).format(folder=str(Path(__file__).parent), path=str(path))
    killed = subprocess.run([sys.executable, "-c", script], check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert not path.exists()
    source = Source("bf16", 96, (50, 40, 30, 20), True)
    write_bundle(path, source)
    assert source.asked == [2, 3]
    bundle = open_bundle(path)
    bundle.verify()
    for index in range(4):
        assert torch.equal(records(bundle, index), expected(source.layer(index), bundle))


def test_two_packings_of_one_file_do_not_mix(tmp_path):
    class Nested(Source):
        def layer(self, index):
            with pytest.raises(InputError, match="another process"):
                write_bundle(tmp_path / "b", Source())
            return super().layer(index)

    write_bundle(tmp_path / "b", Nested())
    open_bundle(tmp_path / "b").verify()


def test_a_full_disk_is_found_before_anything_is_written(tmp_path, monkeypatch):
    def full(file, start, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(bundle_write.os, "posix_fallocate", full)
    (tmp_path / "b").write_bytes(b"old")
    source = Source()
    with pytest.raises(DejavuError, match=r"No space left.*MB are free") as caught:
        write_bundle(tmp_path / "b", source)
    assert str(tmp_path / "b") in str(caught.value)
    assert source.asked == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["b"]
    assert (tmp_path / "b").read_bytes() == b"old"


def test_a_folder_is_no_bundle(tmp_path):
    (tmp_path / "d").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        write_bundle(tmp_path / "d", Source())
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
