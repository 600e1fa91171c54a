import json
from pathlib import Path

import pytest

from dejavu.errors import CheckpointError
from dejavu.weights.checkpoint import open_checkpoint
from dejavu.weights.tokenizer import load_tokenizer

from .folders import byte_level_tokenizer, contents, opt_tensors, safetensors_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = safetensors_folder(tmp_path / "m", {"model.safetensors": opt_tensors()}, index=False)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


def test_files_beside_the_weights(folder: Path) -> None:
    before = contents(folder)
    got, expected = load_tokenizer(open_checkpoint(folder)), byte_level_tokenizer()
    for text in ("the cat  sat\n", "<s>é 7</s>", ""):
        assert got(text).input_ids == expected(text).input_ids
    assert got.eos_token == "</s>"
    assert got.chat_template == expected.chat_template
    assert contents(folder) == before


def test_relu_30m(shared: Path) -> None:
    tokenizer = load_tokenizer(open_checkpoint(shared / "models" / "relu-30m"))
    text = "It was the best of times,\n it was the worst of times."
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert tokenizer.eos_token_id == 2


def test_no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer \(tokenizer\.json"):
        load_tokenizer(open_checkpoint(folder))


@pytest.mark.parametrize("damage", ["", "{}", "[]", "\x00", '{"model": {"type": "BPE"}}'])
def test_damaged_tokenizer(folder: Path, damage: str) -> None:
    (folder / "tokenizer.json").write_text(damage)
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        load_tokenizer(open_checkpoint(folder))


def test_code_in_the_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (folder / "custom.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass Custom: pass\n"
    )
    for name in ("config.json", "tokenizer_config.json"):
        config = json.loads((folder / name).read_text())
        config["auto_map"] = {"AutoTokenizer": [None, "custom.Custom"]}
        (folder / name).write_text(json.dumps(config | {"tokenizer_class": "Custom"}))
    assert load_tokenizer(open_checkpoint(folder))("the cat").input_ids
    assert not marker.exists()
