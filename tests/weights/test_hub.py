"""Loading by Hub id against a local server, from the cache, and without a network."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dejavu.errors import CheckpointError
from dejavu.weights.checkpoint import Checkpoint, open_checkpoint
from dejavu.weights.tokenizer import load_tokenizer
from hub_stub import HubStub

from .folders import (
    byte_level_tokenizer,
    contents,
    opt_tensors,
    pickle_folder,
    safetensors_folder,
    split,
)

SHARDS = ["odd-2.safetensors", "odd-1.safetensors"]
REPO = "org/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with HubStub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """A model in odd shards, with its tokenizer."""
    folder = safetensors_folder(tmp_path / "model", split(opt_tensors(), *SHARDS))
    byte_level_tokenizer().save_pretrained(folder)
    return contents(folder)


def check(checkpoint: Checkpoint) -> None:
    got = dict(checkpoint.stream())
    expected = opt_tensors()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert checkpoint.generation_config == {"eos_token_id": 2}


def test_download_of_what_is_needed_and_no_more(hub: HubStub, files: dict[str, bytes]) -> None:
    extra = ["README.md", "pytorch_model.bin", "spare.safetensors", "onnx/config.json", "logo.png"]
    hub.repos[REPO] = files | dict.fromkeys(extra, b"x")
    checkpoint = open_checkpoint(REPO)
    check(checkpoint)
    assert load_tokenizer(checkpoint)("the cat").input_ids
    assert contents(checkpoint.path) == files
    fetched = {path.rsplit("/", 1)[1] for method, path in hub.requests if "/resolve/" in path}
    assert fetched == files.keys()


def test_bin_only_without_safetensors(hub: HubStub, tmp_path: Path) -> None:
    folder = pickle_folder(tmp_path / "bin", {"pytorch_model.bin": opt_tensors()}, index=False)
    hub.repos[REPO] = contents(folder)
    check(open_checkpoint(REPO))


def test_cached_model_needs_no_network_and_no_writing(
    hub: HubStub, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[REPO] = files
    open_checkpoint(REPO)
    hub.requests.clear()
    before = contents(tmp_path / "cache")
    times = {path: path.lstat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    check(open_checkpoint(REPO))
    check(open_checkpoint(REPO, revision=hub.commit(REPO)))
    assert hub.requests == []
    assert contents(tmp_path / "cache") == before
    assert {p: p.lstat().st_mtime_ns for p in (tmp_path / "cache").rglob("*")} == times


def test_large_files_of_the_cache_are_checked_by_their_names(
    hub: HubStub, files: dict[str, bytes]
) -> None:
    hub.repos[REPO] = files
    checkpoint = open_checkpoint(REPO)
    assert checkpoint.verify() == []
    blob = (checkpoint.path / SHARDS[0]).resolve()
    content = blob.read_bytes()
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=rf"{SHARDS[0]} is damaged"):
        open_checkpoint(REPO).verify()


def test_offline(hub: HubStub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.repos[REPO] = files
    open_checkpoint(REPO)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check(open_checkpoint(REPO))
    with pytest.raises(CheckpointError, match=r"org/other: .*no such local.*HF_HUB_OFFLINE"):
        open_checkpoint("org/other")
    assert hub.requests == []


def test_unreachable_hub(
    hub: HubStub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[REPO] = files
    open_checkpoint(REPO)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    check(open_checkpoint(REPO))
    with pytest.raises(CheckpointError, match=r"org/other: .*no such local"):
        open_checkpoint("org/other")


def test_interrupted_download_is_completed(hub: HubStub, files: dict[str, bytes]) -> None:
    hub.repos[REPO] = files
    folder = open_checkpoint(REPO).path
    (folder / SHARDS[0]).unlink()
    hub.requests.clear()
    check(open_checkpoint(REPO))
    assert hub.requests


def test_cached_weights_without_tokenizer_still_load_offline(
    hub: HubStub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[REPO] = {n: d for n, d in files.items() if not n.startswith("tokenizer")}
    open_checkpoint(REPO)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    checkpoint = open_checkpoint(REPO)
    check(checkpoint)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer(checkpoint)


def test_absent_model(hub: HubStub) -> None:
    with pytest.raises(CheckpointError, match=r"org/none: .*no such local .*no such repository"):
        open_checkpoint("org/none")


def test_repository_without_usable_weights(hub: HubStub) -> None:
    hub.repos[REPO] = {"config.json": b"{}", "model.Q4_0.gguf": b"GGUF"}
    with pytest.raises(CheckpointError, match=r"model\.Q4_0\.gguf.*download one"):
        open_checkpoint(REPO)


def test_index_on_the_hub_that_leaves_the_folder(hub: HubStub, files: dict[str, bytes]) -> None:
    index = b'{"weight_map": {"a": "../../../../escaped.safetensors"}}'
    hub.repos[REPO] = files | {"model.safetensors.index.json": index}
    with pytest.raises(CheckpointError, match="not a file inside"):
        open_checkpoint(REPO)


def test_environment_of_a_new_process(
    hub: HubStub, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.repos[REPO] = files
    identity = open_checkpoint(REPO).identity()
    seen = len(hub.requests)
    code = (
        "from dejavu.weights.checkpoint import open_checkpoint\n"
        f"print(open_checkpoint({REPO!r}).identity())"
    )
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, timeout=120
    )
    assert done.stdout.decode().strip() == identity
    assert len(hub.requests) == seen
