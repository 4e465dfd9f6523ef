"""GPT-2's words, cut and remembered here: the ids of the `tokenizers` library, several times as fast.

Byte-level BPE tokenizes each word by itself, and text repeats its words. So the ids of a word are asked for once and
kept, and a text is cut by Python's `re`. On one core that gives three times the speed of the library, whose time goes
into cutting, and a long text takes no more memory than its ids.

GPT-2's expression (Radford et al. 2019, `encoder.py`) asks which characters are letters, numbers and white space. The
answer depends on the Unicode version, and Python's is another than the library's: so the library is asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .token_bytes import byte_alphabet

if TYPE_CHECKING:
    import tokenizers

_LAST_LETTER = 0x3FFFF
"""Beyond plane 3 Unicode has tags, variation selectors and private characters: no letters, numbers or spaces."""
_REMEMBERED_WORDS = 1 << 18
_LONGEST_REMEMBERED = 48
"""Bounds of the memory of words: about 60 MB. Longer words are seldom seen twice."""
_SLICE = 1 << 20
"""Characters that are cut at once."""

_ASCII_PUNCTUATION = r"!-/:-@\[-`{-~\x00-\x08\x0e-\x1f\x7f"
_ENDINGS = "'(?:[sdmt]|ll|ve|re)"


class WordTokenizer:
    """Token ids of text by GPT-2's words.

    Args:
        library: a tokenizer of the `tokenizers` library for which `has_gpt2_words` is true, without a normalizer.
        dtype: of the ids.
    """

    def __init__(self, library: tokenizers.Tokenizer, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._ids_of_word = _WordIds(library.model, self._dtype)
        written = {token.content: id_ for id_, token in library.get_added_tokens_decoder().items()}
        self._ids_of_token = {token: np.array([id_], self._dtype) for token, id_ in written.items()}
        # The longest of the tokens that begin at the first place, as in the library. One that never matches: (?!)
        longest_first = sorted(written, key=len, reverse=True)
        self._tokens = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def encode(self, text: str) -> NDArray[Any]:
        """Token ids of `text`, [n].

        Raises:
            UnicodeEncodeError: it has a lone surrogate.
        """
        parts = self._tokens.split(text)  # every second one is a token
        if len(parts) == 1:
            return self._encode_words(text)
        return np.concatenate(
            [
                self._ids_of_token[part] if place % 2 else self._encode_words(part)
                for place, part in enumerate(parts)
                if part
            ]
        )

    def _encode_words(self, text: str) -> NDArray[Any]:
        pattern = _ascii_words() if text.isascii() else _all_words()
        if len(text) <= _SLICE:
            return np.frombuffer(b"".join(map(self._ids_of_word.__getitem__, pattern.findall(text))), self._dtype)
        return self._encode_long(text, pattern)

    def _encode_long(self, text: str, pattern: re.Pattern[str]) -> NDArray[Any]:
        pieces: list[bytes] = []
        at, size = 0, _SLICE
        while at < len(text):
            part = text[at : at + size]
            words = pattern.findall(part)
            if at + size < len(text):
                # Whether a word ends there depends on the text up to one character beyond it, so two words wait.
                kept = words[:-2]
                size = _SLICE if kept else 2 * size
                words = kept
            pieces.append(b"".join(map(self._ids_of_word.__getitem__, words)))
            at += sum(map(len, words))
        return np.frombuffer(b"".join(pieces), self._dtype)


class _WordIds(dict[str, bytes]):
    """The ids of a word as the bytes of an array, from the library's model where they are not known yet."""

    def __init__(self, model: Any, dtype: np.dtype[Any]) -> None:
        self._model = model
        self._array_dtype = dtype
        self._characters = {byte: character for character, byte in byte_alphabet().items()}

    def __missing__(self, word: str) -> bytes:
        spelled = word.encode("utf-8").decode("latin-1").translate(self._characters)
        ids = np.array([token.id for token in self._model.tokenize(spelled)], self._array_dtype).tobytes()
        if len(word) <= _LONGEST_REMEMBERED:
            if len(self) >= _REMEMBERED_WORDS:
                self.clear()
            self[word] = ids
        return ids


def has_gpt2_words(definition: Mapping[str, Any]) -> bool:
    """Whether a parsed tokenizer.json cuts text by GPT-2's expression, and by tokens that stand for themselves.

    A token that takes the spaces beside it too, or one found in a second search, is left to the library.
    """
    cut = definition.get("pre_tokenizer")
    tokens = definition.get("added_tokens") or []
    return (
        isinstance(cut, dict)
        and cut.get("type") == "ByteLevel"
        and cut.get("add_prefix_space") is False
        and cut.get("use_regex", True) is True
        and not any(token.get(flag) for token in tokens for flag in ("lstrip", "rstrip", "single_word"))
        and len({token.get("normalized") for token in tokens}) <= 1
    )


@cache
def _ascii_words() -> re.Pattern[str]:
    space = r"\t-\r "
    return re.compile(f" ?[A-Za-z]+|{_ENDINGS}| ?[0-9]+| ?[{_ASCII_PUNCTUATION}]+|[{space}]+(?![^{space}])|[{space}]+")


@cache
def _all_words() -> re.Pattern[str]:
    letter, number, space = (_characters(kind) for kind in (r"\p{L}", r"\p{N}", r"\s"))
    ascii_only = r"(?![^\x00-\x7f])"
    return re.compile(
        f" ?[A-Za-z]++{ascii_only}"  # what the letters below say, faster
        f"|{_ENDINGS}"
        f"| ?[{_ASCII_PUNCTUATION}]++{ascii_only}"  # and what the last but two says
        f"| ?[{letter}]+"
        f"| ?[{number}]+"
        f"| ?[^{space}{letter}{number}]+"
        f"|[{space}]+(?![^{space}])"
        f"|[{space}]+"
    )


@cache
def _characters(kind: str) -> str:
    """The characters of a kind, as ranges of a character class, by the library's own expressions."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    codes = [code for code in range(_LAST_LETTER + 1) if not 0xD800 <= code < 0xE000]
    end = len(codes)
    others = Split(Regex(f"{kind}+"), "removed").pre_tokenize_str("".join(map(chr, codes)))
    ends = [0, *(bound for _, (first, last) in others for bound in (first, last)), end]
    runs = zip(ends[::2], ends[1::2], strict=True)
    return "".join(f"\\U{codes[first]:08x}-\\U{codes[last - 1]:08x}" for first, last in runs if first < last)
