"""From texts to windows: nothing joined that should not be, nothing trained on is held out."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest
import torch

from dejavu.errors import InputError
from dejavu.predictor.calibration import Windows, documents, make_windows

from .tiny import Characters

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def windows(text: str | list[str | Path], **fields: int | None) -> Windows:
    options: dict[str, int | None] = {"length": 8, "train": 1000, "held_out": 1000, "separator": 1}
    texts = [text] if isinstance(text, str) else text
    return make_windows(texts, Characters(), **(options | fields))  # type: ignore[arg-type]


def test_documents_end_at_separator_lines_in_strings_and_files(tmp_path: Path) -> None:
    content = "one\nmore\n<|endoftext|>\ntwo <|endoftext|> inside\n<|endoftext|>\nthree"
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    with lzma.open(tmp_path / "a.txt.xz", "wt", encoding="utf-8") as file:
        file.write(content)
    expected = ["one\nmore\n", "two <|endoftext|> inside\n", "three"]
    assert list(documents([content])) == expected
    assert list(documents([tmp_path / "a.txt", tmp_path / "a.txt.xz"])) == 2 * expected


def test_a_separator_token_stands_between_documents_and_nowhere_else() -> None:
    texts = [LETTERS * 9, LETTERS[::-1] * 9] * 3
    found = windows("\n<|endoftext|>\n".join(texts), length=4)
    ids = torch.cat([found.train[:, :-1].flatten(), found.held_out[:, :-1].flatten()]).tolist()
    expected = []
    for text in texts:
        expected += [*Characters().encode(text, add_special_tokens=False), 1]
    assert ids == expected[: len(ids)]
    assert len(ids) > 0.95 * len(expected)


def test_windows_overlap_by_the_token_that_is_predicted() -> None:
    found = windows(LETTERS * 40)
    assert found.train.shape[1] == 9
    assert found.length == 8
    assert torch.equal(found.train[:-1, -1], found.train[1:, 0])


def test_held_out_windows_are_the_end_of_the_text_and_few_are_spread() -> None:
    every = windows(LETTERS * 40)
    assert len(every.held_out) == pytest.approx(0.15 * len(every.train) / 0.85, abs=1)
    assert torch.equal(every.train[-1, -1], every.held_out[0, 0])  # they meet, and do not overlap
    numbered = "".join(chr(97 + n) * 8 for n in range(60)) * 2
    few = windows(numbered, train=5, held_out=2)
    assert few.train.shape[0] == 5
    assert few.held_out.shape[0] == 2
    starts = few.train[:, 0].unique()
    assert len(starts) == 5  # from different places, not the first five


def test_a_long_text_is_read_only_as_far_as_needed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefg\n<|endoftext|>\n" * 500, encoding="utf-8")
    found = windows([tmp_path / "a.txt", tmp_path / "missing.txt"], train=4, held_out=2)
    assert len(found.train) == 4


@pytest.mark.parametrize("name", ["missing.txt", "broken.xz", "latin.txt"])
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    if name == "broken.xz":
        (tmp_path / name).write_bytes(b"no archive")
    if name == "latin.txt":
        (tmp_path / name).write_bytes("é".encode("latin-1"))
    with pytest.raises(InputError, match=name):
        windows([tmp_path / name])


def test_too_little_text_says_how_much_is_needed() -> None:
    with pytest.raises(InputError, match=r"of 12 tokens is too short.*at least 112"):
        windows("abcdefghijk")


def test_without_an_end_token_documents_cannot_be_joined() -> None:
    class Endless(Characters):
        eos_token_id = None

    with pytest.raises(InputError, match="eos_token_id"):
        make_windows([LETTERS * 40], Endless(), length=8, train=10, held_out=4, separator=None)


def test_the_fingerprint_sees_every_token() -> None:
    one, other = windows(LETTERS * 40), windows(LETTERS * 40)
    assert one.fingerprint() == other.fingerprint()
    other.held_out[-1, -1] += 1
    assert one.fingerprint() != other.fingerprint()
