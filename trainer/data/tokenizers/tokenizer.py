"""The tokenizer interface, and the two tokenizers that need no file: bytes (ByT5's scheme) and characters.

Tokenizers loaded from files are in `tokenizer_json.py` and `sentencepiece_tokenizer.py`; `tokenizer_files.py` loads
them. Every checkpoint stores its tokenizer as a small JSON document (`to_dict`). `tokenizer_document.py` validates it
when it is read (`tokenizer_from_dict`), because a checkpoint may come from an untrusted source.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import UserError
from ..tasks.chat_template import ChatTemplate
from .special_tokens import SpecialTokenIds

TokenIds = NDArray[np.uint16 | np.int32]

MAX_SENTINELS = 10_000
MAX_WORD_LENGTH = 1 << 22
"""Characters without white space between them, for each of which tokenizer libraries take about 150 bytes of memory."""
_UNICODE_CHARACTERS = 0x110000 - 0x800
"""Number of code points that UTF-8 can encode: all but the surrogates."""


class Tokenizer(ABC):
    """Map text to token ids and back.

    Attributes:
        kind: `byte-level`, `char`, `huggingface`, `sentencepiece` or the name of the user's own, as in its document.
        limits_words: a word of more than `MAX_WORD_LENGTH` characters is an error.
        vocab_size: number of token ids; ids are 0 to vocab_size - 1.
        eos_id: the token that separates documents; None if the vocabulary has none.
        pad_id: pads short sequences; its labels are masked, so any id will do.
        special: ids of the special tokens of a file.
        chat_template: the chat template from the tokenizer's files or from the user; None without one.
    """

    kind: str
    limits_words = False
    vocab_size: int
    eos_id: int | None
    pad_id: int
    special = SpecialTokenIds()
    chat_template: ChatTemplate | None = None

    @abstractmethod
    def encode(self, text: str) -> TokenIds:
        """Return the token ids of `text`, [N]; uint16 if the vocabulary fits, else int32."""

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the token ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Return the text of token ids; invalid UTF-8 becomes U+FFFD, special tokens are skipped."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @abstractmethod
    def decode_bytes(self, ids: Sequence[int] | NDArray[Any]) -> bytes:
        """Return the UTF-8 bytes of token ids, without replacing invalid ones; ids that stand for no text are skipped.

        Raises:
            ValueError: an id is negative.
        """

    def continuation_bytes(self, before: Sequence[int], token: int) -> bytes:
        """Return the bytes that a token adds to the text of the tokens before it."""
        return self.decode_bytes([token])

    def document_start_ids(self) -> list[int]:
        """Return the tokens before a text that a GPT continues or scores.

        stoker's own tokenizers have no BOS: documents follow one another, each after the EOS of the previous one, so a
        text does too.
        """
        return [] if self.eos_id is None else [self.eos_id]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, such as a sentinel, by its text; None if there is none."""
        return None

    def token_name(self, id_: int) -> str | None:
        """Return the text of a special token, such as eos; None for any other id."""
        return None

    @abstractmethod
    def token_byte_counts(self) -> NDArray[np.int64]:
        """Return the number of UTF-8 bytes of each token id, int64 [V]; 0 for eos, padding and unknown.

        All are 0 if the tokens of a text do not add up to its bytes; bits per byte are then not reported. eos counts -1
        if the tokenizer puts a space before every document.
        """

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return a JSON document from which `tokenizer_from_dict` rebuilds the tokenizer."""


class PieceTokenizer(Tokenizer):
    """A tokenizer of a file, in which each id stands for fixed bytes.

    Args:
        pieces: the bytes of each id; empty for special tokens.
        space_first: encoding adds a space before a text, which decoding removes.
        space_last: likewise after a text.

    Raises:
        ValueError: a special token is not in the vocabulary.
    """

    limits_words = True

    def __init__(
        self, pieces: Sequence[bytes], special: SpecialTokenIds, *, space_first: bool, space_last: bool = False
    ) -> None:
        special.check(len(pieces))
        self._pieces = pieces
        self._space_first = space_first
        self._space_last = space_last
        self._dtype = id_dtype(len(pieces))
        self.special = special
        self.vocab_size = len(pieces)
        self.eos_id = special.eos
        self.pad_id = special.padding_id

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Return the text of a document's ids, without the space added to it; invalid UTF-8 becomes U+FFFD."""
        text = super().decode(ids)
        text = text.removeprefix(" ") if self._space_first else text
        return text.removesuffix(" ") if self._space_last else text

    def decode_bytes(self, ids: Sequence[int] | NDArray[Any]) -> bytes:
        """Return the concatenated bytes of `ids`; special tokens and unknown ids are skipped."""
        return b"".join(self._pieces[id_] for id_ in as_id_array(ids).tolist() if id_ < self.vocab_size)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes in ByT5's scheme (Xue et al. 2021, arXiv 2105.13626): pad 0, eos 1, unk 2, byte b is b + 3.

    Args:
        sentinels: number of tokens `<extra_id_0>`, `<extra_id_1>`, ...; their ids start at 259, as in Hugging Face's
            ByT5.

    Raises:
        ValueError: `sentinels` is negative or too large.
    """

    kind = "byte-level"
    eos_id = 1
    pad_id = 0
    _FIRST_BYTE = 3
    _FIRST_SENTINEL = 259
    _NAMES = ("<pad>", "</s>", "<unk>")

    def __init__(self, sentinels: int = 0) -> None:
        if type(sentinels) is not int or not 0 <= sentinels <= MAX_SENTINELS:
            raise ValueError(f"`sentinels` ({str(sentinels)[:40]}) must be 0 to {MAX_SENTINELS}")
        self.sentinels = sentinels
        self.vocab_size = self._FIRST_SENTINEL + sentinels  # three special tokens, 256 bytes and the sentinels

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Return the token ids of the UTF-8 bytes of `text`, uint16 [bytes]."""
        return self.encode_bytes(encode_utf8(text))

    def encode_bytes(self, data: bytes) -> NDArray[np.uint16]:
        """Return the token ids of `data`, uint16 [len(data)]; any bytes are accepted."""
        return np.frombuffer(data, np.uint8).astype(np.uint16) + np.uint16(self._FIRST_BYTE)

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
        return {"tokenizer": self.kind, **({"sentinels": self.sentinels} if self.sentinels else {})}


class CharTokenizer(Tokenizer):
    """One token per character; the vocabulary is the sorted set of characters of a text.

    Args:
        characters: the vocabulary, sorted by code point, without repetition.

    Raises:
        ValueError: `characters` is empty, unsorted, repeats a character or contains a surrogate.
    """

    kind = "char"
    eos_id = None
    pad_id = 0

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
        self.vocab_size = len(characters)
        self._dtype = id_dtype(self.vocab_size)

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> CharTokenizer:
        """Build the tokenizer whose vocabulary is every character of `texts`."""
        return cls("".join(sorted(set().union(*texts))))

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

    def decode_bytes(self, ids: Sequence[int] | NDArray[Any]) -> bytes:
        """Return the UTF-8 bytes of `ids`; ids outside the vocabulary are skipped."""
        array = as_id_array(ids)
        return "".join(self.characters[i] for i in array[array < self.vocab_size]).encode()

    def token_byte_counts(self) -> NDArray[np.int64]:
        """Return the UTF-8 length of each character; int64 [V]."""
        return np.array([len(character.encode("utf-8")) for character in self.characters], np.int64)

    def to_dict(self) -> dict[str, Any]:
        """Return the name of the scheme and the vocabulary as one string."""
        return {"tokenizer": self.kind, "characters": self.characters}


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


def literal_pattern(texts: Collection[str]) -> re.Pattern[str]:
    """Return a pattern whose `split` puts these texts at odd positions; where several begin, the longest matches."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")  # `(?!)` never matches


def id_dtype(vocab_size: int) -> type[np.uint16 | np.int32]:
    """Return the dtype of token ids."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def as_id_array(ids: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """Return token ids as a flat array, int64 [N].

    Raises:
        ValueError: an id is negative.
    """
    array = np.asarray(ids, np.int64).reshape(-1)
    if array.size and array.min() < 0:
        raise ValueError(f"token ids ({int(array.min())}) must not be negative")
    return array


def encode_utf8(text: str) -> bytes:
    """Encode a text as UTF-8.

    Raises:
        UserError: it contains a lone surrogate.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(_surrogate_message(error.start)) from None


def has_long_word(text: str, limit: int = MAX_WORD_LENGTH) -> bool:
    """Return True if a text has more than `limit` characters without white space between them."""
    start = 0
    while len(text) - start > limit:
        window = text[start : start + limit + 1]
        last_word = (window.rsplit(maxsplit=1) or [""])[-1]
        if len(last_word) == len(window):
            return True
        start += len(window) - len(last_word)
    return False


def check_words(text: str) -> None:
    """Check that `has_long_word` is False.

    Raises:
        UserError: it is True.
    """
    if has_long_word(text):
        raise UserError(
            f"it has more than {MAX_WORD_LENGTH:,} characters without white space between them; break them into lines, "
            "remove them, or use a tokenizer of bytes or characters"
        )


def _surrogate_message(position: int) -> str:
    return f"the text is not valid Unicode: lone surrogate at position {position}"


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), np.dtype("<u4"))
