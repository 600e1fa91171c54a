import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dejavu.errors import CheckpointError, InputError
from dejavu.weights.checkpoint import open_checkpoint

from .folders import (
    CONFIG,
    PREFIX,
    Tensors,
    contents,
    opt_tensors,
    pickle_folder,
    safetensors_folder,
    split,
    write_config,
    write_index,
)

FC1 = f"{PREFIX}.layers.0.fc1.weight"
THREE = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
ODD = ["zz top.safetensors", "b-007.safetensors"]
BINS = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]

Write = Callable[[Path, Tensors], Path]
LAYOUTS: dict[str, Write] = {
    "one file": lambda f, t: safetensors_folder(f, {"model.safetensors": t}, index=False),
    "one odd file": lambda f, t: safetensors_folder(f, {"weights.safetensors": t}, index=False),
    "three shards": lambda f, t: safetensors_folder(f, split(t, *THREE)),
    "odd shards": lambda f, t: safetensors_folder(f, split(t, *ODD)),
    "one bin": lambda f, t: pickle_folder(f, {"pytorch_model.bin": t}, index=False),
    "two bins": lambda f, t: pickle_folder(f, split(t, *BINS)),
}


def assert_streams(folder: Path, expected: Tensors) -> None:
    checkpoint = open_checkpoint(folder)
    got = {name: tensor.clone() for name, tensor in checkpoint.stream()}
    assert got.keys() == expected.keys()
    assert checkpoint.tensor_names() == list(got)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name
        assert checkpoint.shapes()[name] == tuple(tensor.shape)
        assert checkpoint.tensor_infos()[name].dtype == tensor.dtype


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_tensors_and_identity(tmp_path: Path, layout: str) -> None:
    tensors = opt_tensors()
    folder = LAYOUTS[layout](tmp_path / "a", tensors)
    assert_streams(folder, tensors)
    plain = LAYOUTS["one file"](tmp_path / "b", dict(reversed(tensors.items())))
    assert open_checkpoint(folder).identity() == open_checkpoint(plain).identity()
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == {"eos_token_id": 2}
    assert checkpoint.quantization is checkpoint.source_identity is None


def test_bin_written_before_torch_1_6(tmp_path: Path) -> None:
    tensors = opt_tensors()
    write_config(tmp_path)
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_streams(tmp_path, tensors)


def test_bin_with_shared_storage_parameters_and_strides(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    tensors = {"a": base, "b": base, "c": base[1:3], "d": base.T, "e": torch.nn.Parameter(base)}
    assert_streams(pickle_folder(tmp_path / "a", {"pytorch_model.bin": tensors}, False), tensors)
    apart = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    folder = safetensors_folder(tmp_path / "b", {"model.safetensors": apart}, False)
    assert open_checkpoint(folder).identity() == open_checkpoint(tmp_path / "a").identity()


def test_bin_of_transformers_matches_the_model(tmp_path: Path) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    model = OPTForCausalLM(OPTConfig(**CONFIG, word_embed_proj_dim=12))
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state[f"{PREFIX}.embed_tokens.weight"].data_ptr()
    assert_streams(pickle_folder(tmp_path / "a", {"pytorch_model.bin": state}, False), state)
    assert_streams(pickle_folder(tmp_path / "b", split(state, *BINS)), state)


class Exploit:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("zipped", [True, False])
def test_bin_that_would_run_code_is_refused_and_runs_none(tmp_path: Path, zipped: bool) -> None:
    marker, folder = tmp_path / "marker", tmp_path / "model"
    write_config(folder)
    torch.save(
        {"weight": Exploit(marker)},
        folder / "pytorch_model.bin",
        _use_new_zipfile_serialization=zipped,
    )
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin was refused.*safetensors"):
        open_checkpoint(folder)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Exploit(marker)))
    assert marker.exists(), "the exploit would not have worked in the first place"


@pytest.mark.parametrize("state", [[torch.zeros(2)], {"a": 3}, {"a": {"b": torch.zeros(2)}}])
def test_bin_that_is_not_a_state_dict(tmp_path: Path, state: object) -> None:
    write_config(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="state dict"):
        open_checkpoint(tmp_path)


def test_safetensors_win_over_complete_bins(tmp_path: Path) -> None:
    pickle_folder(tmp_path, {"pytorch_model.bin": opt_tensors(1)}, index=False)
    safetensors_folder(tmp_path, split(opt_tensors(2), *THREE))
    assert_streams(tmp_path, opt_tensors(2))


def test_complete_bin_stands_in_for_incomplete_safetensors(tmp_path: Path) -> None:
    pickle_folder(tmp_path, {"pytorch_model.bin": opt_tensors(1)}, index=False)
    safetensors_folder(tmp_path, split(opt_tensors(2), *THREE))
    (tmp_path / THREE[1]).unlink()
    with pytest.warns(UserWarning, match=rf"{THREE[1]}.*Loading pytorch_model\.bin instead"):
        assert_streams(tmp_path, opt_tensors(1))


@pytest.mark.parametrize(
    ("write", "name"), [(safetensors_folder, THREE[1]), (pickle_folder, BINS[1])]
)
def test_missing_shard(tmp_path: Path, write: Callable[..., Path], name: str) -> None:
    names = THREE if name in THREE else BINS
    shards = split(opt_tensors(), *names)
    folder = write(tmp_path, shards)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=re.escape(name)) as error:
        open_checkpoint(folder)
    assert any(tensor in str(error.value) for tensor in shards[name])


@pytest.mark.parametrize("write", [safetensors_folder, pickle_folder])
def test_tensor_of_the_index_that_its_shard_lacks(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    names = THREE if write is safetensors_folder else BINS
    shards = split(opt_tensors(), *names)
    file = next(name for name, tensors in shards.items() if FC1 in tensors)
    write(tmp_path, shards)
    index = next(tmp_path.glob("*.index.json")).read_text()
    del shards[file][FC1]
    write(tmp_path, shards)
    next(tmp_path.glob("*.index.json")).write_text(index)
    with pytest.raises(CheckpointError, match=re.escape(FC1)) as error:
        open_checkpoint(tmp_path)
    assert file in str(error.value)


@pytest.mark.parametrize("absent", [True, False])
def test_single_file_beside_a_stale_index(tmp_path: Path, absent: bool) -> None:
    safetensors_folder(tmp_path, split(opt_tensors(1), *THREE))
    if absent:
        for name in THREE:
            (tmp_path / name).unlink()
    save_file(opt_tensors(2), tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"index\.json.*stale") as warned:
        assert_streams(tmp_path, opt_tensors(2))
    assert warned[0].filename == __file__  # points at the caller


def test_index_that_names_the_single_file_is_not_stale(tmp_path: Path) -> None:
    shards = split(opt_tensors(), "model.safetensors", "more.safetensors")
    assert_streams(safetensors_folder(tmp_path, shards), opt_tensors())


def test_shard_in_a_subfolder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    shards = split(opt_tensors(), "sub/a.safetensors", "b.safetensors")
    assert_streams(safetensors_folder(tmp_path, shards), opt_tensors())


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "a/../../x", "..\\x", "", 3]
)
def test_index_that_leaves_the_folder(tmp_path: Path, name: object) -> None:
    folder = safetensors_folder(tmp_path / "model", split(opt_tensors(), *THREE))
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="not a file inside"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "\x00"]
)
def test_unusable_index(tmp_path: Path, text: str) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(tmp_path)


def test_duplicate_across_shards(tmp_path: Path) -> None:
    shards = split(opt_tensors(), *THREE)
    for tensors in shards.values():
        tensors[FC1] = torch.zeros(20, 12)
    with pytest.raises(CheckpointError, match=rf"{FC1}.* both in .*00001.* and in .*00002"):
        open_checkpoint(safetensors_folder(tmp_path, shards))


def test_extra_tensor_is_offered(tmp_path: Path) -> None:
    shards = split(opt_tensors(), *THREE)
    safetensors_folder(tmp_path, shards)
    shards[THREE[0]]["extra"] = torch.ones(3)
    save_file(shards[THREE[0]], tmp_path / THREE[0])
    assert_streams(tmp_path, opt_tensors() | {"extra": torch.ones(3)})


def test_truncated_safetensors(tmp_path: Path) -> None:
    file = safetensors_folder(tmp_path, {"model.safetensors": opt_tensors()}, False)
    file = file / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in (0, 4, 8, 100, header - 1, header, header + 1, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors") as error:
            open_checkpoint(tmp_path)
        if size >= header:
            assert f"{size} of {len(whole)} bytes" in str(error.value)
            assert any(repr(name) in str(error.value) for name in opt_tensors())
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(tmp_path)
    file.write_bytes(b"\xff" * 8 + whole[8:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_truncated_bin(tmp_path: Path, zipped: bool) -> None:
    write_config(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save(opt_tensors(), file, _use_new_zipfile_serialization=zipped)
    whole = file.read_bytes()
    for size in (0, 1, 2, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
            open_checkpoint(tmp_path)


def test_stream_of_some_names(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(safetensors_folder(tmp_path, split(opt_tensors(), *THREE)))
    assert [name for name, _ in checkpoint.stream([FC1, "scalar", FC1])] == [
        name for name in checkpoint.tensor_names() if name in (FC1, "scalar")
    ]
    assert list(checkpoint.stream([])) == []
    with pytest.raises(CheckpointError, match="no tensor absent"):
        checkpoint.stream([FC1, "absent"])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at Linux's memory maps")
@pytest.mark.parametrize("layout", ["three shards", "two bins"])
def test_at_most_one_shard_is_mapped(tmp_path: Path, layout: str) -> None:
    checkpoint = open_checkpoint(LAYOUTS[layout](tmp_path, opt_tensors()))
    seen = set()
    for _, tensor in checkpoint.stream():
        del tensor
        lines = Path("/proc/self/maps").read_text().splitlines()
        mapped = {line.split("/", 1)[1] for line in lines if str(tmp_path) in line}
        assert len(mapped) <= 1
        seen |= mapped
    assert len(seen) == {"three shards": 3, "two bins": 2}[layout]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reading_writes_nothing(tmp_path: Path, layout: str) -> None:
    folder = LAYOUTS[layout](tmp_path / "model", opt_tensors())
    before = contents(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]}
    checkpoint = open_checkpoint(folder)
    for _ in checkpoint.stream():
        pass
    checkpoint.identity()
    assert contents(tmp_path) == before
    assert {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]} == times


def test_folder_without_weights_or_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)
    write_config(tmp_path)
    (tmp_path / "training_args.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="no weights in"):
        open_checkpoint(tmp_path)
    for name in ODD:
        save_file({"a": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"2 weight files .* no model\.safetensors\.index"):
        open_checkpoint(tmp_path)


def test_index_with_an_odd_name(tmp_path: Path) -> None:
    shards = split(opt_tensors(), *ODD)
    safetensors_folder(tmp_path, shards, index=False)
    write_index(tmp_path, shards, "variant.safetensors")
    assert_streams(tmp_path, opt_tensors())


@pytest.mark.parametrize("source", ["./no/such/folder", "/no/such", "a/b/c", "x.gguf", "a b", ""])
def test_source_that_is_neither_path_nor_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"no such file or folder.*'org/name'"):
        open_checkpoint(source)


def test_file_that_is_not_a_model(tmp_path: Path) -> None:
    folder = safetensors_folder(tmp_path, {"model.safetensors": opt_tensors()}, False)
    with pytest.raises(InputError, match="give the model's folder"):
        open_checkpoint(folder / "model.safetensors")


@pytest.mark.parametrize("text", ["", "{", "[1]", "\udc80"])
def test_unreadable_config(tmp_path: Path, text: str) -> None:
    safetensors_folder(tmp_path, {"model.safetensors": opt_tensors()}, False)
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_identity_sees_every_bit_and_every_name(tmp_path: Path) -> None:
    def identity(tensors: Tensors) -> str:
        folder = safetensors_folder(tmp_path, {"model.safetensors": tensors}, False)
        return open_checkpoint(folder).identity()

    tensors = opt_tensors()
    seen = {identity(tensors)}
    flipped = tensors[FC1].clone()
    flipped.view(torch.int32)[3, 5] ^= 1
    changes: list[Tensors] = [
        {FC1: flipped},
        {FC1: tensors[FC1].view(torch.int32)},
        {FC1: tensors[FC1].reshape(12, 20)},
        {FC1: tensors[f"{PREFIX}.layers.0.self_attn.q_proj.weight"].clone()},
        {"another": torch.zeros(0)},
    ]
    for change in changes:
        seen.add(identity(tensors | change))
    renamed = {("fc9" if name == FC1 else name): tensor for name, tensor in tensors.items()}
    seen.add(identity(renamed))
    assert len(seen) == len(changes) + 2
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in seen)


def test_relu_30m(shared: Path) -> None:
    checkpoint = open_checkpoint(shared / "models" / "relu-30m")
    assert len(checkpoint.tensor_names()) == 132
    assert checkpoint.shapes()["model.decoder.layers.7.fc1.weight"] == (2048, 512)
    assert checkpoint.tokenizer_path == shared / "models" / "relu-30m"
