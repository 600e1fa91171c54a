"""Files to tokens: pieces, joiners, presets and what goes wrong."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from dejavu.errors import InputError
from dejavu.eval.text import PRESETS, Preset, read_text

from .tiny import small_tokenizer

CONTENT = "the cat sat\non the mat\n<|endoftext|>\n\n<|endoftext|>\na second <|endoftext|> one\n"
Tokenizer = transformers.PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return small_tokenizer("the cat sat on the mat, a second one")


def write(folder: Path, content: str | bytes, name: str = "text.txt") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def test_documents_are_joined_by_the_end_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = read_text(write(tmp_path, CONTENT), tokenizer, 64)
    first, second = "the cat sat\non the mat", "a second <|endoftext|> one\n"
    assert text.text == first + second
    assert text.ids.tolist() == [*plain(tokenizer, first), 1, *plain(tokenizer, second)]
    assert text.ends[-1] == len(text.text)
    assert list(text.ends) == sorted(text.ends)
    place = len(plain(tokenizer, first))
    assert text.ends[place - 1] == text.ends[place] == len(first)
    assert (text.setting.joiner, text.setting.pieces) == ("</s>", "documents")
    assert (text.setting.window, text.setting.stride) == (64, 64)


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("edges", [("", ""), ("<|endoftext|>\n", ""), ("", "\n<|endoftext|>")])
def test_separators_anywhere(
    tmp_path: Path, tokenizer: Tokenizer, line_end: str, edges: tuple[str, str]
) -> None:
    body = f"{edges[0]}one\n<|endoftext|>\n<|endoftext|>\ntwo{edges[1]}"
    path = write(tmp_path, body.replace("\n", line_end))
    assert read_text(path, tokenizer, 64).text == "onetwo"


def test_whole_file_byte_for_byte(tmp_path: Path, tokenizer: Tokenizer) -> None:
    content = "the cat\r\nsat \x0c on\u2028 a mat \n\n"
    text = read_text(write(tmp_path, content), tokenizer, 64, "whole")
    assert text.text == content
    assert text.ids.tolist() == plain(tokenizer, content)
    begin = len(tokenizer.decode(text.ids[:1]).encode())
    assert text.size()[0] == len(content.encode()) - begin


def test_wikitext2_as_papers_read_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Rows as Hugging Face's data set has them: text with its line end, or an empty string."""
    path = write(tmp_path, " \n = the mat = \n \n the cat sat on the mat , the cat sat \n")
    rows = ["", " = the mat = \n", "", " the cat sat on the mat , the cat sat \n"]
    joined = "\n\n".join(rows)
    text = read_text(path, tokenizer, 8, "wikitext2", split="test")
    assert text.text == joined
    assert text.ids.tolist() == [0, *plain(tokenizer, joined)]
    s = text.setting
    assert (s.window, s.stride, s.start_tokens, s.scored) == (8, 8, (0,), "within")
    assert (s.dataset, s.split, s.joiner) == ("text.txt", "test", "\n\n")
    assert len(text.windows) == len(text.ids) // 8
    assert {window.scored for window in text.windows} == {7}
    assert (
        read_text(path, tokenizer, 4096, replace(PRESETS["wikitext2"], scored="all")).setting.window
        == 2048
    )


def test_rows_end_at_line_feeds_only(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = read_text(write(tmp_path, "a\r\nb \x0c c\rd\n"), tokenizer, 64, Preset("rows", "|"))
    assert text.text == "a\r\n|b \x0c c\rd\n"


@pytest.mark.parametrize("stride", [None, 5, 1])
def test_bytes_and_words_do_not_depend_on_the_windows(
    tmp_path: Path, tokenizer: Tokenizer, stride: int | None
) -> None:
    content = "a \x7f\x80 \u07ff\u0800 \uffff\U00010000 the\u00a0cat  \n 🐎🐎\U0010ffff end"
    path = write(tmp_path, content)
    text = read_text(path, tokenizer, 64, "whole", window=7, stride=stride)
    assert text.ids[0] == tokenizer.convert_tokens_to_ids("a")
    assert text.size() == (len(content.encode()) - 1, len(content.split()) - 1)


def test_jsonl_and_compressed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = "".join(json.dumps({"text": t}) + "\n" for t in ("the cat", "a mat\nsat"))
    bare = read_text(write(tmp_path, lines, "c4.jsonl"), tokenizer, 64)
    packed = read_text(write(tmp_path, lzma.compress(lines.encode()), "c4.jsonl.xz"), tokenizer, 64)
    assert bare.text == packed.text == "the cata mat\nsat"
    assert bare.ids.equal(packed.ids)
    assert bare.setting.sha256 != packed.setting.sha256


def test_start_token_lets_the_first_token_count(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path, CONTENT)
    without = read_text(path, tokenizer, 64, "whole")
    with_start = read_text(path, tokenizer, 64, replace(PRESETS["whole"], start="bos"))
    assert with_start.ids.tolist() == [0, *without.ids.tolist()]
    assert sum(w.scored for w in with_start.windows) == len(without.ids)
    assert with_start.size() == (len(CONTENT.encode()), len(CONTENT.split()))


def test_every_option_shows_in_the_setting(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path, CONTENT)
    base = read_text(path, tokenizer, 64)
    changes = {
        "window": read_text(path, tokenizer, 64, window=9),
        "stride": read_text(path, tokenizer, 64, stride=9),
        "max_tokens": read_text(path, tokenizer, 64, max_tokens=9),
        "dataset": read_text(path, tokenizer, 64, dataset="tales"),
        "split": read_text(path, tokenizer, 64, split="test"),
        "pieces": read_text(path, tokenizer, 64, Preset(pieces="whole")),
        "joiner": read_text(path, tokenizer, 64, Preset(joiner="\n")),
        "start_tokens": read_text(path, tokenizer, 64, Preset(start="default")),
        "scored": read_text(path, tokenizer, 64, Preset(scored="within", window=8)),
        "vocab_size": read_text(path, small_tokenizer("x" * 50), 64),
        "sha256": read_text(write(tmp_path, CONTENT + "more", "other.txt"), tokenizer, 64),
    }
    for field, text in changes.items():
        assert getattr(text.setting, field) != getattr(base.setting, field), field
        assert sum(w.scored for w in text.windows) > 0
    assert sum(w.scored for w in changes["max_tokens"].windows) == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preset": "wikitext"}, "did you mean 'wikitext2'"),
        ({"window": 65}, "window: 65"),
        ({"window": 0}, "window: 0"),
        ({"stride": 0}, "stride: 0"),
        ({"window": 8, "stride": 9}, "stride: 9"),
        ({"preset": "wikitext2", "window": 8, "stride": 4}, "stride: 4"),
        ({"preset": "wikitext2", "window": 1}, "window: 1"),
        ({"max_tokens": 0}, "max_tokens: 0"),
        ({"preset": Preset(pieces="lines")}, "pieces"),
        ({"preset": Preset(start="eos")}, "start"),
        ({"preset": Preset("whole", "", 64, scored="within")}, "nothing to predict"),
    ],
)
def test_bad_options(
    tmp_path: Path, tokenizer: Tokenizer, change: dict[str, object], message: str
) -> None:
    path = write(tmp_path, "the cat sat on the mat")
    with pytest.raises(InputError, match=message):
        read_text(path, tokenizer, 64, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "text.txt", "nothing to predict"),
        (b"\n<|endoftext|>\n", "text.txt", "nothing to predict"),
        (b"a", "text.txt", "nothing to predict"),
        (b"caf\xe9", "text.txt", "UTF-8"),
        (b"not compressed", "text.txt.xz", "cannot be read"),
        (b'{"text": "a b"}\n{"words": 1}\n', "c4.jsonl", "line 2"),
        (b"[]\n", "c4.jsonl", "line 1"),
    ],
)
def test_bad_files(
    tmp_path: Path, tokenizer: Tokenizer, content: bytes, name: str, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_text(write(tmp_path, content, name), tokenizer, 64)
    assert name in str(caught.value)


def test_missing_file_and_missing_tokens(tmp_path: Path) -> None:
    bare = small_tokenizer("the cat")
    with pytest.raises(InputError, match=r"absent\.txt"):
        read_text(tmp_path / "absent.txt", bare, 64)
    path = write(tmp_path, "the cat sat")
    bare.eos_token = bare.bos_token = None
    with pytest.raises(InputError, match="joiner"):
        read_text(path, bare, 64)
    with pytest.raises(InputError, match="start"):
        read_text(path, bare, 64, Preset("whole", "", start="bos"))
