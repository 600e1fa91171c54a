"""Text pieces of a token stream, joined, are the text; and no piece is half a character."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from dejavu.engine.detokenize import Detokenizer, StopMatcher

TEXTS = [
    "plain words, and more of them",
    "café naïve",
    "price: 5 € or 😀😀 😀",
    "汉字かな交じり文",
    "a\u200db\n\n\ttabs  and   spaces",
    "e\u0301 combining",
]


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2's kind with single bytes only: every other character takes several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama's kind: characters, spaces as ▁, bytes for what has no token, first space dropped."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyzé,:5", "▁a", "▁or"]
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *letters]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


KINDS = {"byte-level": byte_level(), "byte-fallback": byte_fallback()}


def pieces(tokenizer: tokenizers.Tokenizer, ids: Iterable[int], **options: object) -> list[str]:
    stream = Detokenizer(tokenizer.decode, **options)  # type: ignore[arg-type]
    return [*(stream.push(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_whole_characters_of_the_text(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text).ids
    assert len(ids) > len(text) // 2
    told = pieces(tokenizer, ids)
    assert "".join(told) == tokenizer.decode(ids) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in told)
    assert told[-1] == ""


@given(text=st.text(st.characters(codec="utf-8"), max_size=30), split=st.integers(0, 40))
def test_continues_any_prompt(text: str, split: int) -> None:
    tokenizer = KINDS["byte-level"]
    ids = tokenizer.encode(text).ids
    # A prompt ends with a whole character.
    while "\N{REPLACEMENT CHARACTER}" in tokenizer.decode(ids[:split]):
        split -= 1
        if text.count("\N{REPLACEMENT CHARACTER}"):
            return
    prompt, answer = ids[: max(split, 0)], ids[max(split, 0) :]
    assert tokenizer.decode(prompt) + "".join(pieces(tokenizer, answer, prompt=prompt)) == text


def test_a_space_after_the_prompt_is_kept() -> None:
    tokenizer = KINDS["byte-fallback"]
    prompt, answer = tokenizer.encode("a").ids, [tokenizer.token_to_id("▁or")]
    assert "".join(pieces(tokenizer, answer, prompt=prompt)) == " or"
    assert "".join(pieces(tokenizer, answer)) == "or"


@settings(max_examples=200)
@given(st.lists(st.integers(0, 255), max_size=60))
def test_bytes_of_no_character_come_through(ids: list[int]) -> None:
    tokenizer = KINDS["byte-level"]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("broken", range(12, 22))
def test_a_character_among_broken_bytes_is_whole(broken: int) -> None:
    tokenizer = KINDS["byte-level"]
    euro = tokenizer.encode("€").ids
    ids = [euro[1]] * broken + euro + [euro[1]] * broken
    told = "".join(pieces(tokenizer, ids))
    assert told == tokenizer.decode(ids)
    assert "€" in told


def test_unfinished_character_is_handed_out_at_the_end() -> None:
    tokenizer = KINDS["byte-level"]
    ids = tokenizer.encode("5 €").ids[:-1]
    *told, last = pieces(tokenizer, ids)
    assert "".join(told) == "5 "
    assert last == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("silent", [False, True], ids=["broken", "silent"])
def test_window_stays_small(kind: str, silent: bool) -> None:
    """Neither bytes that never become a character nor ids without text may pile up."""
    tokenizer = KINDS[kind]
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    stream = Detokenizer(decode)
    partial = tokenizer.encode("€").ids[-2]
    for _ in range(500):
        stream.push(100_000 if silent else partial)
    assert longest < 50
    text = "".join(stream.push(i) for i in tokenizer.encode("or €").ids)
    assert text.endswith("or €")


def test_skipped_ids_have_no_text_and_take_no_room() -> None:
    tokenizer = KINDS["byte-level"]
    a, euro = tokenizer.encode("a").ids, tokenizer.encode("€").ids
    ids = [999, *a, 999, *euro[:1], 999, *euro[1:], 999]
    assert "".join(pieces(tokenizer, ids, skip=frozenset([999]), prompt=[999])) == "a€"


def cut(text: str, stops: list[str]) -> str:
    """The obvious definition: at the first place where a stop string ends, before the longest."""
    for end in range(len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@example(chunks=["aab"], stops=["b", "ab"])
@example(chunks=["aab"], stops=["ab", "b"])
@given(
    chunks=st.lists(st.text("ab ", max_size=5), max_size=12),
    stops=st.lists(st.text("ab ", min_size=1, max_size=6), max_size=4, unique=True),
)
def test_stop_matcher_equals_its_definition(chunks: list[str], stops: list[str]) -> None:
    text = "".join(chunks)
    matcher = StopMatcher(stops)
    told = ""
    for i, chunk in enumerate(chunks):
        told += matcher.push(chunk)
        if matcher.matched is None:
            pushed = "".join(chunks[: i + 1])
            # Held back is exactly the longest end that may still become a stop string.
            ends = [pushed[k:] for k in range(len(pushed) + 1)]
            held = next(e for e in ends if any(s.startswith(e) for s in stops) or not e)
            assert told + held == pushed
    told += matcher.flush()
    assert told == cut(text, stops)
    assert (matcher.matched is not None) == any(s in text for s in stops)


def test_long_stop_strings_cost_no_more() -> None:
    stop = "a" * 50_000 + "b"
    matcher = StopMatcher([stop])
    assert matcher.push("a" * 49_999) == ""
    assert matcher.push("aaa") == "aa"
    assert matcher.push("b") == ""
    assert matcher.matched == stop


def test_real_tokenizer(shared: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(shared / "models/relu-30m/tokenizer.json"))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert "".join(pieces(tokenizer, ids)) == text
