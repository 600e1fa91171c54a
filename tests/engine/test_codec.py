"""Text to ids and back, with odd tokenizers and chat templates."""

from __future__ import annotations

import pytest

from dejavu import (
    InputError,
)
from dejavu.engine.codec import Codec

from .stub import word_tokenizer

MESSAGES = [{"role": "user", "content": "Hello"}]


def test_no_bos_no_empty_prompt() -> None:
    codec = Codec(word_tokenizer(10))
    with pytest.raises(InputError, match="no BOS"):
        codec.encode("")
    assert codec.encode("t003 t004") == [3, 4]


def test_tokenizer_is_left_alone_and_never_truncates() -> None:
    tokenizer = word_tokenizer(10, bos_token="t001")
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=20)
    codec = Codec(tokenizer)
    state = tokenizer.backend_tokenizer.to_str()
    assert codec.encode("t002 t003 t004") == [1, 2, 3, 4]
    codec.encode_chat(MESSAGES, "{{ messages[0].content }}")
    codec.decode([1, 2])
    assert tokenizer.backend_tokenizer.to_str() == state


def test_template_writes_the_only_bos() -> None:
    codec = Codec(word_tokenizer(10, bos_token="t001", eos_token="t002"))
    template = (
        "{{ bos_token }}{% for m in messages %} t005 {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} t006{% endif %}"
    )
    parts = [{"type": "text", "text": "t003"}, {"type": "text", "text": "t004"}]
    said = [{"role": "user", "content": parts}]
    assert codec.encode_chat(said, template) == [1, 5, 3, 4, 6]
    assert codec.encode_chat([{"role": "user", "content": "t003\nt004"}], template) == [
        1,
        5,
        3,
        4,
        6,
    ]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("Hello", "at least one"),
        ([{"content": "x"}], r"messages\[0\].*'role'"),
        ([*MESSAGES, {"role": "user"}], r"messages\[1\]\.content"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\].*'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text"),
        ([{"role": "system", "content": "x"}], "no system role here"),
        ([{"role": "tool", "content": "x"}], "chat template"),
    ],
)
def test_bad_messages_are_refused(messages: object, message: str) -> None:
    codec = Codec(word_tokenizer(10))
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}"
        "{% elif messages[0].role == 'tool' %}{{ messages[0].content + 1 }}{% endif %}t003"
    )
    with pytest.raises(InputError, match=message):
        codec.encode_chat(messages, template)  # type: ignore[arg-type]
