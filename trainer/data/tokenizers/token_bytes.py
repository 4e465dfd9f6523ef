"""The bytes of each token of a `tokenizer.json`, and whether they add up to the bytes of the text.

The `decoder` of the file says how tokens are spelled: GPT-2's printable stand-ins for bytes, "▁" for a space, `<0x0A>`
for a byte, "##" for the inside of a word. The text of one token does not depend on its neighbours here, so that text
can be shown while it is generated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_KEEPING_SPLITS = {"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"}
"""Behaviours of a pre-tokenizer that lose no text; the fifth is `Removed`."""

Part = Mapping[str, Any]


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: itself where it is visible Latin-1, else 256 and up, in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def pieces_of(
    definition: Part, vocabulary: Mapping[str, int], added: Mapping[int, str], silent: Collection[int]
) -> list[bytes]:
    """The UTF-8 bytes of every token id, [largest id + 1]; nothing for ids in `silent` and ids without a token.

    Args:
        definition: the parsed `tokenizer.json`.
        vocabulary: id by token.
        added: tokens that are written in text as they are, by id.
        silent: ids that stand for no text.

    Raises:
        ValueError: the file's decoder is of a kind that stoker does not know.
    """
    spell = _speller(definition)
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for token, id_ in vocabulary.items():
        if id_ not in silent:
            pieces[id_] = added[id_].encode() if id_ in added else spell(token)
    return pieces


def puts_space_first(definition: Part) -> bool:
    """Whether text may get a space before it that decoding has to take away."""
    if _prepends_always(definition):
        return True
    parts = [*_parts(definition, "pre_tokenizer"), *_parts(definition, "normalizer")]
    if any(part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never" for part in parts):
        return True
    if any(part["type"] == "ByteLevel" and part.get("add_prefix_space", True) for part in parts):
        return True
    decoders = _parts(definition, "decoder")
    return not decoders or any(part["type"] in ("WordPiece", "BPEDecoder") for part in decoders)


def token_lengths(
    definition: Part, pieces: Sequence[bytes], vocabulary: Mapping[str, int], eos: int | None
) -> NDArray[np.int64]:
    """Bytes of text that each id stands for, int64 [len(pieces)], or zeros where ids do not tell.

    They tell where tokenizing loses nothing: byte-level BPE, and BPE with bytes for unknown characters, without a
    normalizer that changes text (NFC, lower case). Two things make the count smaller, never larger, than the text: a
    special token written in it, and a written "▁" where that stands for a space.
    """
    if is_byte_level(definition, vocabulary):
        return exact_lengths(pieces, eos, space_first=False)
    if _falls_back_to_bytes(definition) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return exact_lengths(pieces, eos, space_first=_prepends_always(definition))
    return np.zeros(len(pieces), np.int64)


def is_byte_level(definition: Part, vocabulary: Mapping[str, int]) -> bool:
    """Whether it is byte-level BPE that keeps every byte of a text: each has a token, and nothing is normalized."""
    steps = _parts(definition, "pre_tokenizer")
    levels = [step for step in steps if step["type"] == "ByteLevel"]
    return (
        _model_is_bpe(definition)
        and not _parts(definition, "normalizer")
        and len(levels) > 0
        and not any(level.get("add_prefix_space", True) for level in levels)
        and all(step["type"] == "ByteLevel" or _keeps_text(step) for step in steps)
        and byte_alphabet().keys() <= vocabulary.keys()
    )


def exact_lengths(pieces: Sequence[bytes], eos: int | None, *, space_first: bool) -> NDArray[np.int64]:
    """The length of each piece, int64 [len(pieces)].

    Args:
        pieces: the bytes of each id.
        eos: the id that ends documents.
        space_first: every text gets a space before it. The eos after it then stands for -1 bytes, so that a document
            counts as many bytes as its text has; without an eos the count is not known, and all is zero.
    """
    lengths = np.fromiter((len(piece) for piece in pieces), np.int64, len(pieces))
    if space_first:
        if eos is None:
            return np.zeros_like(lengths)
        lengths[eos] = -1
    return lengths


def _speller(definition: Part) -> Callable[[str], bytes]:
    decoders = _parts(definition, "decoder")
    kinds = {part["type"] for part in decoders}
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()
        return lambda token: (
            bytes(alphabet[character] for character in token)
            if all(character in alphabet for character in token)
            else token.encode()
        )
    unknown = kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece", "BPEDecoder"}
    if unknown:
        raise ValueError(f"its decoder {sorted(unknown)[0]!r} is of a kind that stoker does not know")
    if not decoders:
        return lambda token: f" {token}".encode()

    def spell(token: str) -> bytes:
        for part in decoders:
            match part["type"]:
                case "Replace" if isinstance(part.get("pattern"), dict) and "String" in part["pattern"]:
                    token = token.replace(part["pattern"]["String"], part["content"])
                case "ByteFallback" if byte := _BYTE_PIECE.fullmatch(token):
                    return bytes([int(byte[1], 16)])
                case "Metaspace":
                    token = token.replace(part["replacement"], " ")
                case "WordPiece":
                    token = token.removeprefix(part["prefix"]) if token.startswith(part["prefix"]) else f" {token}"
                case "BPEDecoder":
                    token = token.removesuffix(part["suffix"]) + " " * token.endswith(part["suffix"])
        return token.encode()

    return spell


def _parts(definition: Part, name: str) -> list[Part]:
    """The steps of a normalizer, pre-tokenizer or decoder, those of sequences one by one."""
    waiting, found = [definition.get(name)], []
    while waiting:
        part = waiting.pop(0)
        if not isinstance(part, dict):
            continue
        if part.get("type") == "Sequence":
            inner = next((part[key] for key in ("normalizers", "pretokenizers", "decoders") if key in part), [])
            waiting = [*inner, *waiting]
        else:
            found.append(part)
    return found


def _model_is_bpe(definition: Part) -> bool:
    model = definition["model"]
    return model.get("type", "BPE") == "BPE" and isinstance(model.get("merges"), list)


def _falls_back_to_bytes(definition: Part) -> bool:
    model = definition["model"]
    return (
        _model_is_bpe(definition)
        and bool(model.get("byte_fallback"))
        and all(_marks_spaces(step) or step["type"] == "Prepend" for step in _parts(definition, "normalizer"))
        and all(_keeps_text(step) or _only_marks_spaces(step) for step in _parts(definition, "pre_tokenizer"))
    )


def _prepends_always(definition: Part) -> bool:
    return any(step["type"] == "Prepend" and step.get("prepend") == "▁" for step in _parts(definition, "normalizer"))


def _marks_spaces(step: Part) -> bool:
    return step["type"] == "Replace" and step.get("pattern") == {"String": " "} and step.get("content") == "▁"


def _only_marks_spaces(step: Part) -> bool:
    # The other schemes put a space only before texts that begin without one, which no count of bytes can tell.
    return step["type"] == "Metaspace" and step.get("replacement") == "▁" and step.get("prepend_scheme") == "never"


def _keeps_text(step: Part) -> bool:
    if step["type"] == "Digits":
        return True
    return step["type"] in ("Split", "Punctuation") and step.get("behavior") in _KEEPING_SPLITS
