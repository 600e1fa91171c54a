import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from dejavu.errors import CheckpointError, DejavuError, InputError
from dejavu.weights import quantize
from dejavu.weights.checkpoint import open_checkpoint
from dejavu.weights.quantize import (
    dequantize,
    quantize_checkpoint,
    quantize_rows,
    row_dimension,
)
from dejavu.weights.tokenizer import load_tokenizer

from .folders import (
    CONFIG,
    PREFIX,
    byte_level_tokenizer,
    contents,
    names,
    opt_tensors,
    pickle_folder,
    safetensors_folder,
    split,
)

LAYER = f"{PREFIX}.layers.0"
SCALE_SHAPES = {
    f"{PREFIX}.embed_tokens.weight": (37, 1),
    f"{LAYER}.self_attn.q_proj.weight": (12, 1),
    f"{LAYER}.self_attn.out_proj.weight": (1, 12),
    f"{LAYER}.fc1.weight": (20, 1),
    f"{LAYER}.fc2.weight": (1, 20),
}


def source_folder(path: Path) -> Path:
    folder = safetensors_folder(path, {"model.safetensors": opt_tensors()}, index=False)
    byte_level_tokenizer().save_pretrained(folder)
    (folder / "LICENSE").write_text("free")
    (folder / "notes.md").write_text("not copied")
    return folder


def numpy_rows(weight: np.ndarray, dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """Row by row, in double precision."""
    rows = weight.T if dimension else weight
    q, scales = np.zeros(rows.shape, np.int8), np.ones((len(rows), 1))
    for i, row in enumerate(rows.astype(np.float64)):
        largest = max(map(abs, row), default=0.0)
        if largest > 0:
            scales[i] = max(largest / 127, 2.0**-126)
            q[i] = [max(-127, min(127, round(value / scales[i, 0]))) for value in row]
    return (q.T, scales.T) if dimension else (q, scales)


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1, 7), (7, 1), (64, 33), (0, 4), (4, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rows_match_numpy(shape: tuple[int, int], dimension: int, dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    q, scale = quantize_rows(weight, dimension)
    expected_q, expected_scale = numpy_rows(weight.float().numpy(), dimension)
    assert q.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert q.shape == shape
    assert scale.shape == ((shape[0], 1) if dimension == 0 else (1, shape[1]))
    # One rounding to float32 separates the scales, so a quotient at a half may go either way.
    np.testing.assert_allclose(scale.numpy(), expected_scale, rtol=2**-23)
    assert np.abs(q.numpy().astype(int) - expected_q).max(initial=0) <= 1
    assert (q.numpy() != expected_q).sum() <= 0.01 * q.numel()


@given(
    st.lists(
        st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([0, 1]),
)
@settings(deadline=None, max_examples=60)
def test_error_is_at_most_half_a_step(rows: list[list[float]], dimension: int) -> None:
    weight = torch.tensor(rows)
    q, scale = quantize_rows(weight, dimension)
    assert (scale > 0).all()
    error = (dequantize(q, scale).double() - weight.double()).abs()
    # half a step, plus the float32 rounding of scale, quotient and product at magnitude 127 steps
    assert (error <= scale.double() * (0.5 + 127 * 3 * 2**-24)).all()


def test_zero_tiny_and_strided_rows() -> None:
    weight = torch.zeros(4, 3)
    weight[1] = 1e-44  # below float32's normal numbers
    weight[2, 1] = -5.0
    q, scale = quantize_rows(weight.T.contiguous().T, 0)
    assert scale[0] == 1
    assert q[2].tolist() == [0, -127, 0]
    assert (dequantize(q, scale) - weight).abs().max() <= 1e-38


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.3.self_attn.k_proj.weight", (4, 8), 0),
        ("model.layers.3.mlp.gate_proj.weight", (4, 8), 0),
        ("model.layers.3.mlp.down_proj.weight", (4, 8), 1),
        ("model.layers.3.self_attn.o_proj.weight", (4, 8), 1),
        ("lm_head.weight", (4, 8), 0),
        ("decoder.project_in.weight", (4, 8), 0),
        ("model.decoder.embed_positions.weight", (4, 8), None),
        ("model.layers.3.self_attn.k_proj.bias", (4,), None),
        ("model.norm.weight", (4,), None),
        ("something.new.weight", (4, 8), None),
        ("model.layers.3.fc1.weight", (4, 8, 2), None),
    ],
)
def test_row_dimension(name: str, shape: tuple[int, ...], expected: int | None) -> None:
    assert row_dimension(name, shape) == expected


def test_quantised_checkpoint(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "source")
    calls: list[tuple[int, int]] = []
    quantize_checkpoint(source, tmp_path / "out", progress=lambda *call: calls.append(call))
    assert calls == [(i + 1, 11) for i in range(11)]
    original, copy = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert copy.quantization == "int8"
    assert copy.identity() == copy.source_identity == original.identity()
    assert copy.generation_config == original.generation_config
    entry = {"format": "int8-row", "version": 1, "source_identity": original.identity()}
    sha256 = hashlib.sha256((tmp_path / "out" / "model.safetensors").read_bytes()).hexdigest()
    written = entry | {"sha256": {"model.safetensors": sha256}}
    assert copy.config == CONFIG | {"dejavu_quantization": written}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["dejavu_quantization"]) == entry

    got = dict(copy.stream())
    for name, tensor in opt_tensors().items():
        if name in SCALE_SHAPES:
            scale = got.pop(f"{name}_scale")
            assert tuple(scale.shape) == SCALE_SHAPES[name]
            error = (dequantize(got.pop(name), scale) - tensor.float()).abs()
            assert (error <= 0.5001 * scale).all()
        else:
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got.pop(name), tensor)
    assert not got
    assert (
        load_tokenizer(copy)("the cat").input_ids == load_tokenizer(original)("the cat").input_ids
    )
    assert (tmp_path / "out" / "LICENSE").read_text() == "free"
    assert not (tmp_path / "out" / "notes.md").exists()


def test_many_shards_in_and_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = source_folder(tmp_path / "whole")
    shards = split(opt_tensors(), *(f"pytorch_model-{i}.bin" for i in range(3)))
    sharded = pickle_folder(tmp_path / "sharded", shards)
    quantize_checkpoint(whole, tmp_path / "one")
    monkeypatch.setattr(quantize, "_MAX_SHARD_BYTES", 700)
    quantize_checkpoint(sharded, tmp_path / "many")
    written = sorted((tmp_path / "many").glob("*.safetensors"))
    assert [file.name for file in written] == [
        f"model-{i:05}-of-{len(written):05}.safetensors" for i in range(1, len(written) + 1)
    ]
    assert len(written) > 3
    one, many = (open_checkpoint(tmp_path / name) for name in ("one", "many"))
    assert one.identity() == many.identity()
    a, b = dict(one.stream()), dict(many.stream())
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_tied_tensors_of_a_bin(tmp_path: Path) -> None:
    table = torch.randn(5, 4)
    tensors = {"embed_tokens.weight": table, "lm_head.weight": table}
    tensors |= {"a.bias": table[0], "b.bias": table[0]}
    pickle_folder(tmp_path / "source", {"pytorch_model.bin": tensors}, index=False)
    quantize_checkpoint(tmp_path / "source", tmp_path / "out")
    got = dict(open_checkpoint(tmp_path / "out").stream())
    assert torch.equal(got["embed_tokens.weight"], got["lm_head.weight"])
    assert torch.equal(got["a.bias"], table[0])
    assert torch.equal(got["b.bias"], table[0])


@pytest.mark.parametrize("previous", [True, False])
def test_failure_in_the_middle_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, previous: bool
) -> None:
    source, out = source_folder(tmp_path / "source"), tmp_path / "results" / "out"
    out.parent.mkdir()
    if previous:
        quantize_checkpoint(source, out)
    before = contents(tmp_path)
    monkeypatch.setattr(quantize, "_MAX_SHARD_BYTES", 700)
    save, saved = safetensors.torch.save_file, []

    def fail_on_the_third(tensors: object, path: Path, metadata: object) -> None:
        saved.append(path)
        if len(saved) == 3:
            raise SafetensorError("No space left on device")
        save(tensors, path, metadata)

    monkeypatch.setattr(safetensors.torch, "save_file", fail_on_the_third)
    with pytest.raises(DejavuError, match=r"No space left.*MB are free") as error:
        quantize_checkpoint(source, out)
    assert f"cannot write {out}:" in str(error.value)
    assert len(saved) == 3
    assert contents(tmp_path) == before
    assert names(out.parent) == ["out"] * previous


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf")):
        tensors = opt_tensors()
        tensors[f"{LAYER}.fc1.weight"][3, 4] = value
        safetensors_folder(tmp_path / "source", {"model.safetensors": tensors}, index=False)
        with pytest.raises(CheckpointError, match=r"fc1\.weight.*NaN or infinity"):
            quantize_checkpoint(tmp_path / "source", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_destinations_that_are_refused(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "source")
    (tmp_path / "file").touch()
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "letter").write_text("dear")
    source_folder(tmp_path / "other model")
    before = contents(tmp_path)
    for out in ("source", ".", "file", "documents", "other model"):
        with pytest.raises(InputError, match="--out"):
            quantize_checkpoint(source, tmp_path / out)
    assert contents(tmp_path) == before
    (tmp_path / "empty").mkdir()
    quantize_checkpoint(source, tmp_path / "empty")
    with pytest.raises(InputError, match="quantised already"):
        quantize_checkpoint(tmp_path / "empty", tmp_path / "again")


@pytest.mark.parametrize("change", [{"version": 2}, {"format": "int4"}, {"source_identity": None}])
def test_checkpoint_of_another_version(tmp_path: Path, change: dict[str, object]) -> None:
    quantize_checkpoint(source_folder(tmp_path / "source"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["dejavu_quantization"] |= change
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="dejavu_quantization"):
        open_checkpoint(tmp_path / "out")


def test_any_flipped_byte_is_found(tmp_path: Path) -> None:
    quantize_checkpoint(source_folder(tmp_path / "source"), tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").verify() == []
    path = tmp_path / "out" / "model.safetensors"
    good = path.read_bytes()
    header = int.from_bytes(good[:8], "little")
    for place in (8 + header, (header + len(good)) // 2, len(good) - 1):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
            open_checkpoint(tmp_path / "out").verify()
    path.write_bytes(good[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path / "out")


def test_an_original_has_no_hash_but_may_be_not_finite(tmp_path: Path) -> None:
    tensors = opt_tensors()
    folder = safetensors_folder(tmp_path / "a", {"model.safetensors": tensors}, index=False)
    assert open_checkpoint(folder).verify() == ["model.safetensors"]
    name = f"{LAYER}.fc1.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][3, 5] = float("inf")
    folder = safetensors_folder(tmp_path / "b", {"model.safetensors": tensors}, index=False)
    with pytest.raises(CheckpointError, match=r"fc1\.weight' holds NaN or infinity"):
        open_checkpoint(folder).verify()


def test_relu_30m(shared: Path, tmp_path: Path) -> None:
    source = shared / "models" / "relu-30m"
    quantize_checkpoint(source, tmp_path / "out")
    original, copy = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    got = dict(copy.stream())
    squares = errors = 0.0
    for name, tensor in original.stream():
        if f"{name}_scale" in got:
            squares += tensor.float().square().sum().item()
            error = dequantize(got[name], got[f"{name}_scale"]) - tensor.float()
            errors += error.square().sum().item()
    # Uniform rounding with step max/127 and max = 4.5 deviations: 4.5 / 127 / sqrt(12) = 1.02 %.
    assert 0.003 < (errors / squares) ** 0.5 < 0.0102
