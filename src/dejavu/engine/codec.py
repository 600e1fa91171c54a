"""Between text and token ids: the tokenizer behind a face that never changes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dejavu.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]  # {"role": ..., "content": text or a list of {"type": "text", ...}}


class Codec:
    """Encodes prompts and conversations, decodes answers.

    A transformers tokenizer keeps padding and truncation as state that any call may change; here
    both are turned off once and the Rust tokenizer is used directly, which several threads may do.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises CheckpointError for a tokenizer that is Python code and not a `tokenizer.json`."""
        self._tokenizer = tokenizer
        rust = getattr(tokenizer, "backend_tokenizer", None)
        if rust is None:
            raise CheckpointError(
                f"{tokenizer.name_or_path}: the tokenizer ({type(tokenizer).__name__}) has no fast "
                "version; put a tokenizer.json into the model's folder"
            )
        self._rust: Tokenizer = rust
        self._rust.no_padding()
        self._rust.no_truncation()
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        added = self._rust.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._byte_level = "ByteLevel" in type(self._rust.decoder).__name__
        vocab = self._rust.get_vocab(with_added_tokens=True)
        # Characters of the longest token's name: at least as many as its text has.
        self.longest_token = max(map(len, vocab))
        # One above the largest id that has a token; their number may be smaller (ids left out).
        self.vocab_size = 1 + max(vocab.values())

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt; whether a BOS goes first is the tokenizer's own rule.

        An empty prompt is the BOS alone. Raises InputError where there is none.
        """
        return self._encode(text, special=True) or self.start()

    def start(self) -> list[int]:
        """The prompt that says nothing: a BOS. Raises InputError where there is none."""
        if self.bos_token_id is None:
            raise InputError("the prompt is empty, and this model has no BOS token to start from")
        return [self.bos_token_id]

    def decode(self, ids: list[int]) -> str:
        """Text of the ids; special tokens and ids without a token have none."""
        text: str = self._rust.decode(ids, skip_special_tokens=True)
        return text

    @property
    def can_chat(self) -> bool:
        """Whether the tokenizer has a chat template of its own."""
        return self._tokenizer.chat_template is not None

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for, even where it is only part of a character; a special token's
        name, and nothing for an id without a token."""
        piece: str | None = self._rust.id_to_token(token)
        if piece is None:
            return b""
        if token in self.special_ids:
            return piece.encode()
        if (byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece)) is not None:
            return bytes.fromhex(byte[1])
        if self._byte_level and all(character in _BYTES for character in piece):
            return bytes(_BYTES[character] for character in piece)
        return self.decode([token]).encode()

    def encode_chat(
        self, messages: Sequence[Message], chat_template: str | None = None
    ) -> list[int]:
        """Ids of a conversation, up to where the assistant answers, by a chat template.

        chat_template: Jinja source; default: the tokenizer's own. The template writes a BOS itself
        if the model wants one. A content of several text parts is their texts, one below the other.
        Raises InputError for a message that the template or this engine cannot take, and where
        there is no template.
        """
        from jinja2 import TemplateError

        template = chat_template or self._tokenizer.chat_template
        if template is None:
            raise InputError(
                "this model has no chat template; pass chat_template= (a Jinja template), put "
                "chat_template.jinja into its folder, or use generate() with a prompt of your own"
            )
        conversation = [_message(i, message) for i, message in enumerate(_list(messages))]
        try:
            text: Any = self._tokenizer.apply_chat_template(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=True,
                tokenize=False,
            )
        # A template is a program: besides its own complaints it trips over types it did not expect.
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise InputError(f"the chat template refuses these messages: {error}") from error
        return self._encode(text, special=False) or self.start()

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate, which JSON may well contain
            raise InputError(f"the prompt is not valid Unicode: {error}") from error
        ids: list[int] = self._rust.encode(text, add_special_tokens=special).ids
        return ids


def _byte_characters() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes as: printable ones of Latin-1 as themselves,
    the others from U+0100 on, in order (GPT-2's encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_characters()


def _list(messages: object) -> Sequence[object]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError("messages must be a list of at least one {'role': ..., 'content': ...}")
    return messages


def _message(index: int, message: object) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(f"{where} must be an object with a 'role' and a 'content'")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise InputError(f"{where}.content must be a text or a list of text parts, not {content!r}")
    return {**message, "content": content}


def _part(where: str, part: object) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise InputError(f"{where} has type {kind!r}; only parts of type 'text' are understood")
    text = part.get("text")
    if not isinstance(text, str):
        raise InputError(f"{where}.text must be a string, not {text!r}")
    return text
