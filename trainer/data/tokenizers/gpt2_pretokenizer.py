"""GPT-2's pre-tokenizer with a word cache: the same ids as the `tokenizers` library, several times faster.

Byte-level BPE tokenizes each word independently, and words repeat. So the ids of each word are computed once and
cached, and texts are split by Python's `re`. On one core this is three times as fast as the library, which spends its
time on splitting, and a long text needs no more memory than its ids.

GPT-2's regular expression (Radford et al. 2019, `encoder.py`) depends on which characters are letters, numbers and
white space. That varies with the Unicode version, and Python's differs from the library's, so the classes are taken
from the library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .token_bytes import unicode_to_bytes
from .tokenizer import literal_pattern

if TYPE_CHECKING:
    import tokenizers

_LAST_LETTER = 0x3FFFF
"""Beyond plane 3 Unicode has tags, variation selectors and private characters: no letters, numbers or spaces."""
_MAX_CACHED_WORDS = 1 << 18
_MAX_CACHED_WORD_LENGTH = 48
"""Limits of the word cache: about 60 MB. Longer words rarely repeat."""
_SLICE = 1 << 20
"""Characters split at once."""

_ASCII_PUNCTUATION_CLASS = r"!-/:-@\[-`{-~\x00-\x08\x0e-\x1f\x7f"
_CONTRACTIONS = "'(?:[sdmt]|ll|ve|re)"


class CachedWordTokenizer:
    """Encode texts word by word with a cache.

    Args:
        library: a tokenizer of the `tokenizers` library for which `uses_gpt2_pre_tokenizer` is true, without a
            normalizer.
        dtype: of the ids.
    """

    def __init__(self, library: tokenizers.Tokenizer, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._ids_of_word = _WordIds(library.model, self._dtype)
        added_tokens = {token.content: id_ for id_, token in library.get_added_tokens_decoder().items()}
        self._ids_of_token = {token: np.array([id_], self._dtype) for token, id_ in added_tokens.items()}
        self._tokens = literal_pattern(added_tokens)  # the longest token wins, as in the library

    def encode(self, text: str) -> NDArray[Any]:
        """Return the token ids of `text`, [N].

        Raises:
            UnicodeEncodeError: it contains a lone surrogate.
        """
        parts = self._tokens.split(text)  # odd elements are added tokens
        if len(parts) == 1:
            return self._encode_words(text)
        return np.concatenate(
            [
                self._ids_of_token[part] if index % 2 else self._encode_words(part)
                for index, part in enumerate(parts)
                if part
            ]
        )

    def _encode_words(self, text: str) -> NDArray[Any]:
        pattern = _ascii_words() if text.isascii() else _all_words()
        if len(text) <= _SLICE:
            return np.frombuffer(b"".join(map(self._ids_of_word.__getitem__, pattern.findall(text))), self._dtype)
        return self._encode_long(text, pattern)

    def _encode_long(self, text: str, pattern: re.Pattern[str]) -> NDArray[Any]:
        encoded: list[bytes] = []
        start, size = 0, _SLICE
        while start < len(text):
            part = text[start : start + size]
            words = pattern.findall(part)
            if start + size < len(text):
                # The end of a word depends on the character after it, so the last two words may be incomplete.
                complete = words[:-2]
                size = _SLICE if complete else 2 * size
                words = complete
            encoded.append(b"".join(map(self._ids_of_word.__getitem__, words)))
            start += sum(map(len, words))
        return np.frombuffer(b"".join(encoded), self._dtype)


class _WordIds(dict[str, bytes]):
    """Cache of the ids of words, as bytes of an array; missing ones are computed by the library's model."""

    def __init__(self, model: Any, dtype: np.dtype[Any]) -> None:
        self._model = model
        self._array_dtype = dtype
        self._byte_characters = {byte: character for character, byte in unicode_to_bytes().items()}

    def __missing__(self, word: str) -> bytes:
        spelled = word.encode("utf-8").decode("latin-1").translate(self._byte_characters)
        ids = np.array([token.id for token in self._model.tokenize(spelled)], self._array_dtype).tobytes()
        if len(word) <= _MAX_CACHED_WORD_LENGTH:
            if len(self) >= _MAX_CACHED_WORDS:
                self.clear()
            self[word] = ids
        return ids


def uses_gpt2_pre_tokenizer(definition: Mapping[str, Any]) -> bool:
    """Return True if a parsed tokenizer.json uses GPT-2's regular expression, and added tokens that match literally.

    Added tokens with `lstrip`, `rstrip` or `single_word`, or with different `normalized` flags, are left to the
    library.
    """
    pre_tokenizer = definition.get("pre_tokenizer")
    tokens = definition.get("added_tokens") or []
    return (
        isinstance(pre_tokenizer, dict)
        and pre_tokenizer.get("type") == "ByteLevel"
        and pre_tokenizer.get("add_prefix_space") is False
        and pre_tokenizer.get("use_regex", True) is True
        and not any(token.get(flag) for token in tokens for flag in ("lstrip", "rstrip", "single_word"))
        and len({token.get("normalized") for token in tokens}) <= 1
    )


@cache
def _ascii_words() -> re.Pattern[str]:
    space = r"\t-\r "
    return re.compile(
        f" ?[A-Za-z]+|{_CONTRACTIONS}| ?[0-9]+| ?[{_ASCII_PUNCTUATION_CLASS}]+|[{space}]+(?![^{space}])|[{space}]+"
    )


@cache
def _all_words() -> re.Pattern[str]:
    letter, number, space = (_character_class(kind) for kind in (r"\p{L}", r"\p{N}", r"\s"))
    ascii_only = r"(?![^\x00-\x7f])"
    return re.compile(
        f" ?[A-Za-z]++{ascii_only}"  # a faster special case of the letters below
        f"|{_CONTRACTIONS}"
        f"| ?[{_ASCII_PUNCTUATION_CLASS}]++{ascii_only}"  # likewise of the last alternative but two
        f"| ?[{letter}]+"
        f"| ?[{number}]+"
        f"| ?[^{space}{letter}{number}]+"
        f"|[{space}]+(?![^{space}])"
        f"|[{space}]+"
    )


@cache
def _character_class(kind: str) -> str:
    """Return the characters of a class, as ranges of a regular expression, from the library's own expressions."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    codes = [code for code in range(_LAST_LETTER + 1) if not 0xD800 <= code < 0xE000]
    end = len(codes)
    others = Split(Regex(f"{kind}+"), "removed").pre_tokenize_str("".join(map(chr, codes)))
    ends = [0, *(bound for _, (first, last) in others for bound in (first, last)), end]
    runs = zip(ends[::2], ends[1::2], strict=True)
    return "".join(f"\\U{codes[first]:08x}-\\U{codes[last - 1]:08x}" for first, last in runs if first < last)
