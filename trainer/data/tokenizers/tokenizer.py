"""The tokenizer interface, and the two tokenizers that need no file: bytes (ByT5's scheme) and characters.

Tokenizers loaded from files are in `tokenizer_json.py` and `sentencepiece_tokenizer.py`; `tokenizer_files.py` loads
them. Every checkpoint stores its tokenizer as a small JSON document (`to_dict`). `tokenizer_document.py` validates it
when it is read (`tokenizer_from_dict`), because a checkpoint may come from an untrusted source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import UserError
from ..tasks.chat_template import ChatTemplate

TokenIds = NDArray[np.uint16 | np.int32]

MAX_SENTINELS = 10_000
_UNICODE_CHARACTERS = 0x110000 - 0x800
"""Number of code points that UTF-8 can encode: all but the surrogates."""


@runtime_checkable
class Tokenizer(Protocol):
    """Map text to token ids and back.

    Attributes:
        vocab_size: number of token ids; ids are 0 to vocab_size - 1.
        eos_id: the token that separates documents; None if the vocabulary has none.
        pad_id: pads short sequences; its labels are masked, so any id will do.
        chat_template: the chat template from the tokenizer's files or from the user; None without one.
    """

    chat_template: ChatTemplate | None

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def eos_id(self) -> int | None: ...  # noqa: D102
    @property
    def pad_id(self) -> int: ...  # noqa: D102

    def encode(self, text: str) -> TokenIds:
        """Return the token ids of `text`, [N]; uint16 if the vocabulary fits, else int32."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the token ids of each text."""
        ...

    def encode_bytes(self, data: bytes) -> TokenIds:
        """Return the token ids of UTF-8 encoded text."""
        ...

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Return the text of token ids; invalid UTF-8 becomes U+FFFD, special tokens are skipped."""
        ...

    def decode_bytes(self, ids: Sequence[int] | NDArray[Any]) -> bytes:
        """Return the UTF-8 bytes of token ids, without replacing invalid ones."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, such as a sentinel, by its text; None if there is none."""
        ...

    def token_name(self, id_: int) -> str | None:
        """Return the text of a special token, such as eos; None for any other id."""
        ...

    def token_byte_counts(self) -> NDArray[np.int64]:
        """Return the number of UTF-8 bytes of each token id, int64 [V]; 0 for eos, padding and unknown.

        All are 0 if the tokens of a text do not add up to its bytes; bits per byte are then not reported. eos counts -1
        if the tokenizer puts a space before every document.
        """
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON document from which `tokenizer_from_dict` rebuilds the tokenizer."""
        ...


class ByteTokenizer:
    """UTF-8 bytes in ByT5's scheme (Xue et al. 2021, arXiv 2105.13626): pad 0, eos 1, unk 2, byte b is b + 3.

    Args:
        sentinels: number of tokens `<extra_id_0>`, `<extra_id_1>`, ...; their ids start at 259, as in Hugging Face's
            ByT5.

    Raises:
        ValueError: `sentinels` is negative or too large.
    """

    eos_id = 1
    pad_id = 0
    chat_template: ChatTemplate | None = None
    _FIRST_BYTE = 3
    _FIRST_SENTINEL = 259
    _NAMES = ("<pad>", "</s>", "<unk>")

    def __init__(self, sentinels: int = 0) -> None:
        if type(sentinels) is not int or not 0 <= sentinels <= MAX_SENTINELS:
            raise ValueError(f"`sentinels` ({str(sentinels)[:40]}) must be 0 to {MAX_SENTINELS}")
        self.sentinels = sentinels

    @property
    def vocab_size(self) -> int:
        """Number of token ids: three special tokens, 256 bytes and the sentinels."""
        return self._FIRST_SENTINEL + self.sentinels

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Return the token ids of the UTF-8 bytes of `text`, uint16 [bytes]."""
        return self.encode_bytes(encode_utf8(text))

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the token ids of each text."""
        return [self.encode(text) for text in texts]

    def encode_bytes(self, data: bytes) -> NDArray[np.uint16]:
        """Return the token ids of `data`, uint16 [len(data)]; any bytes are accepted."""
        return np.frombuffer(data, np.uint8).astype(np.uint16) + np.uint16(self._FIRST_BYTE)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int] | NDArray[Any]) -> bytes:
        """Return the bytes of `ids`; pad, eos, unk and ids outside the vocabulary are skipped."""
        array = as_id_array(ids) - self._FIRST_BYTE
        return array[(array >= 0) & (array < 256)].astype(np.uint8).tobytes()

    def token_byte_counts(self) -> NDArray[np.int64]:
        """Return 1 for each byte and 0 for the special tokens; int64 [V]."""
        lengths = np.zeros(self.vocab_size, np.int64)
        lengths[self._FIRST_BYTE : self._FIRST_SENTINEL] = 1
        return lengths

    def token_id(self, token: str) -> int | None:
        """Return the id of a sentinel."""
        number = token.removeprefix("<extra_id_").removesuffix(">")
        if not (number.isdecimal() and len(number) < 6 and token == f"<extra_id_{int(number)}>"):
            return None
        return self._FIRST_SENTINEL + int(number) if int(number) < self.sentinels else None

    def token_name(self, id_: int) -> str | None:
        """Return the name of a special token, as in Hugging Face's ByT5."""
        if 0 <= id_ < len(self._NAMES):
            return self._NAMES[id_]
        return f"<extra_id_{id_ - self._FIRST_SENTINEL}>" if self._FIRST_SENTINEL <= id_ < self.vocab_size else None

    def to_dict(self) -> dict[str, Any]:
        """Return the name of the scheme, and the number of sentinels if there are any."""
        return {"tokenizer": "byte-level", **({"sentinels": self.sentinels} if self.sentinels else {})}


class CharTokenizer:
    """One token per character; the vocabulary is the sorted set of characters of a text.

    Args:
        characters: the vocabulary, sorted by code point, without repetition.

    Raises:
        ValueError: `characters` is empty, unsorted, repeats a character or contains a surrogate.
    """

    eos_id = None
    pad_id = 0
    chat_template: ChatTemplate | None = None

    def __init__(self, characters: str) -> None:
        if not 1 <= len(characters) <= _UNICODE_CHARACTERS:
            raise ValueError(f"`characters` ({len(characters)}) must be 1 to {_UNICODE_CHARACTERS} characters")
        try:
            self._codes = _code_points(characters)
        except UnicodeEncodeError as error:
            raise ValueError(f"`characters` must not hold surrogates (position {error.start})") from None
        if np.any(self._codes[1:] <= self._codes[:-1]):
            raise ValueError("`characters` must be sorted by code point, each once")
        self.characters = characters
        self._dtype = np.uint16 if len(characters) <= 1 << 16 else np.int32

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> CharTokenizer:
        """Build the tokenizer whose vocabulary is every character of `texts`."""
        return cls("".join(sorted(set().union(*texts))))

    @property
    def vocab_size(self) -> int:
        """Number of characters."""
        return len(self.characters)

    def encode(self, text: str) -> TokenIds:
        """Return the token ids of `text`, [characters].

        Raises:
            UserError: a character is not in the vocabulary; the message gives it and its position.
        """
        try:
            codes = _code_points(text)
        except UnicodeEncodeError as error:
            raise UserError(_surrogate_message(error.start)) from None
        ids = np.searchsorted(self._codes, codes)
        known = self._codes[np.minimum(ids, self.vocab_size - 1)] == codes
        if not known.all():
            position = int(np.argmin(known))
            character = text[position]
            raise UserError(
                f"character {character!r} (U+{ord(character):04X}) at position {position} is not among the "
                f"{self.vocab_size} characters of the training text; leave it out, or train with "
                "`model.tokenizer.library=byte-level`, which covers every character"
            )
        return ids.astype(self._dtype)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the token ids of each text."""
        return [self.encode(text) for text in texts]

    def encode_bytes(self, data: bytes) -> TokenIds:
        """Return the token ids of UTF-8 encoded text.

        Raises:
            UserError: `data` is not UTF-8, or contains a character outside the vocabulary.
        """
        return self.encode(decode_utf8(data))

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Return the text of `ids`; ids outside the vocabulary are skipped."""
        array = as_id_array(ids)
        return "".join(self.characters[i] for i in array[array < self.vocab_size])

    def decode_bytes(self, ids: Sequence[int] | NDArray[Any]) -> bytes:
        """Return the UTF-8 bytes of `ids`."""
        return self.decode(ids).encode("utf-8")

    def token_id(self, token: str) -> int | None:
        """Return None: there are no special tokens."""
        return None

    def token_name(self, id_: int) -> str | None:
        """Return None: there are no special tokens."""
        return None

    def token_byte_counts(self) -> NDArray[np.int64]:
        """Return the UTF-8 length of each character; int64 [V]."""
        return np.array([len(character.encode("utf-8")) for character in self.characters], np.int64)

    def to_dict(self) -> dict[str, Any]:
        """Return the name of the scheme and the vocabulary as one string."""
        return {"tokenizer": "char", "characters": self.characters}


def tokenizer_state(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the document that a checkpoint stores: the tokenizer and its chat template."""
    chat = {} if tokenizer.chat_template is None else {"chat": tokenizer.chat_template.to_dict()}
    return {**tokenizer.to_dict(), **chat}


def is_same_tokenizer(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if two tokenizer documents (possibly untrusted) map every text to the same ids.

    The post-processor of a Hugging Face tokenizer is ignored. Invalid documents compare by equality.
    """
    return _without_post_processor(one) == _without_post_processor(other)


def _without_post_processor(document: Mapping[str, Any]) -> dict[str, Any]:
    if document.get("tokenizer") != "huggingface":
        return dict(document)
    try:
        definition = json.loads(document["definition"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return dict(document)
    if not isinstance(definition, dict):
        return dict(document)
    return {**document, "definition": definition | {"post_processor": None}}


def as_id_array(ids: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """Return token ids as a flat array, int64 [N].

    Raises:
        ValueError: an id is negative.
    """
    array = np.asarray(ids, np.int64).reshape(-1)
    if array.size and array.min() < 0:
        raise ValueError(f"token ids ({int(array.min())}) must not be negative")
    return array


def decode_utf8(data: bytes) -> str:
    """Decode UTF-8 bytes.

    Raises:
        UserError: they are not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text: bad byte at offset {error.start}") from None


def encode_utf8(text: str) -> bytes:
    """Encode a text as UTF-8.

    Raises:
        UserError: it contains a lone surrogate.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(_surrogate_message(error.start)) from None


def _surrogate_message(position: int) -> str:
    return f"the text is not valid Unicode: lone surrogate at position {position}"


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), np.dtype("<u4"))
