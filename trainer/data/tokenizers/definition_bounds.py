"""Bounds on the cost of a `tokenizer.json`, which may come from an untrusted source.

Normalizers can multiply the length of a text with every step, and regular expressions can backtrack for hours. A file
whose parts are all of known cost (those of the usual models are) is run in this process; `unbounded_part` names the
first part of any other, which `isolated_encoder.py` runs in a separate process with limits on time and memory.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_STEPS = 16
"""Steps and sequences of a part."""
_MAX_GROWTH = 32
"""Factor by which all `Replace` steps may lengthen a text; Unicode's own normal forms have at most 18."""
_MAX_INSERTED = 16
_MAX_WORD = 1000
"""Characters of a word or token that is looked up piece by piece, in quadratic time."""
_MAX_CHARSMAP_BYTES = 1 << 20
_MAX_REPLACEMENT_BYTES = 64
_MAX_KEY_BYTES = 256

_NORMALIZERS = {
    *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "BertNormalizer", "Nmt", "ByteLevel"),
    *("Prepend", "Replace", "Precompiled"),
}
_PRE_TOKENIZERS = {
    *("ByteLevel", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Metaspace", "CharDelimiterSplit"),
    *("Punctuation", "Digits", "UnicodeScripts", "Split"),
}
_POST_PROCESSORS = {"ByteLevel", "BertProcessing", "RobertaProcessing", "TemplateProcessing"}

_ONE_ATOM = re.compile(
    r"(?:\\[sSdDwWrnt]|\\[pP]\{\^?\w+\}|\[\^?(?:[^\\\[\]&]|\\[sSdDwWrntpP])+\]|[^\\.\[\](){}*+?|^$])"
    r"(?:\+|\{\d{1,3}(?:,\d{0,3})?\})?"
)
"""A character or class, perhaps repeated: it never backtracks."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_OTHER = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_KNOWN_EXPRESSIONS = frozenset(
    {
        # GPT-2, Llama 3 (GPT-4), Qwen 2, Qwen 3.5, GPT-4o, Mistral's Tekken, DeepSeek 3, CLIP, BLOOM
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        *(
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}|\p{{N}}{digits}| ?[^\s{other}\p{{N}}]+[\r\n]*|{_SPACES}"
            for letters, other in ((r"\p{L}+", r"\p{L}"), (r"[\p{L}\p{M}]+", r"\p{L}\p{M}"))
            for digits in ("", "{1,3}")
        ),
        rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_OTHER}[\r\n/]*|{_SPACES}",
        rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_OTHER}[\r\n/]*|{_SPACES}",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        r" ?[^(\s|[.,!?…。，、।۔،])]+",  # noqa: RUF001
    }
)


def unbounded_part(definition: Mapping[str, Any]) -> str | None:
    """Return the field of the first part of a parsed `tokenizer.json` without a known bound on its cost, or None.

    Raises:
        ValueError: the character map of a `Precompiled` normalizer is damaged.
    """
    for name, is_bounded in (
        ("normalizer", _normalizers_are_bounded),
        ("pre_tokenizer", _pre_tokenizers_are_bounded),
        ("post_processor", _post_processors_are_bounded),
    ):
        steps = _steps(definition.get(name))
        if steps is None or not is_bounded(steps):
            return name
    return None if _model_is_bounded(definition["model"]) else "model"


def _steps(part: Any) -> list[Any] | None:
    """Return the steps of a part, with sequences flattened; None if there are too many."""
    waiting, found, num_parts = [part], [], 0
    while waiting and num_parts <= _MAX_STEPS:
        step = waiting.pop()
        inner = None
        if _kind(step) == "Sequence":
            inner = next((step[key] for key in ("normalizers", "pretokenizers", "processors") if key in step), None)
        if isinstance(inner, list):
            waiting += reversed(inner[: _MAX_STEPS + 1])
            num_parts += 1
        elif step is not None:
            found.append(step)
            num_parts += 1
    return None if num_parts > _MAX_STEPS else found


def _kind(step: Any) -> str:
    kind = step.get("type") if isinstance(step, dict) else None
    return kind if isinstance(kind, str) else ""


def _normalizers_are_bounded(steps: list[Any]) -> bool:
    growth, num_charsmaps = 1.0, 0
    for step in steps:
        match _kind(step):
            case "Prepend":
                if not isinstance(step.get("prepend"), str) or len(step["prepend"]) > _MAX_INSERTED:
                    return False
            case "Replace":
                growth *= _growth_of_replace(step)
            case "Precompiled":
                num_charsmaps += 1
                if not _charsmap_is_bounded(step.get("precompiled_charsmap")):
                    return False
            case kind if kind not in _NORMALIZERS:
                return False
    return growth <= _MAX_GROWTH and num_charsmaps <= 1


def _growth_of_replace(step: Mapping[str, Any]) -> float:
    """Return the factor by which a `Replace` may lengthen a text; infinity if unknown."""
    content, pattern = step.get("content"), step.get("pattern")
    if not isinstance(content, str) or not isinstance(pattern, dict) or not _is_known_pattern(pattern):
        return float("inf")
    matched = len(pattern["String"]) if "String" in pattern else 1
    return max(1.0, len(content) / matched)


def _is_known_pattern(pattern: Any) -> bool:
    """Return True for a plain string, or a regular expression that cannot backtrack or is a known one."""
    match pattern:
        case {"String": str(text)} if len(pattern) == 1:
            return text != ""
        case {"Regex": str(text)} if len(pattern) == 1:
            return text in _KNOWN_EXPRESSIONS or _ONE_ATOM.fullmatch(text) is not None
        case _:
            return False


def _pre_tokenizers_are_bounded(steps: list[Any]) -> bool:
    return all(
        _kind(step) in _PRE_TOKENIZERS and (_kind(step) != "Split" or _is_known_pattern(step.get("pattern")))
        for step in steps
    )


def _post_processors_are_bounded(steps: list[Any]) -> bool:
    """Templates can repeat the text; one of them may name it once."""
    templates = [step.get("single") for step in steps if _kind(step) == "TemplateProcessing"]
    return (
        all(_kind(step) in _POST_PROCESSORS for step in steps)
        and len(templates) <= 1
        and all(
            isinstance(pieces, list) and sum("Sequence" in piece for piece in pieces if isinstance(piece, dict)) <= 1
            for pieces in templates
        )
    )


def _model_is_bounded(model: Mapping[str, Any]) -> bool:
    match model.get("type"):
        case "WordPiece":
            longest = model.get("max_input_chars_per_word", 100)
            return type(longest) is int and longest <= _MAX_WORD
        case "BPE" | "WordLevel":
            return True
        case _:  # Unigram, or a file without the type
            vocab = model.get("vocab")
            rows = vocab if isinstance(vocab, list) else []
            tokens = [row[0] for row in rows if isinstance(row, list) and row]
            return all(not isinstance(token, str) or len(token) <= _MAX_WORD for token in tokens)


def _charsmap_is_bounded(text: Any) -> bool:
    try:
        data = base64.b64decode(text if isinstance(text, str) else "", validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("the character map of its normalizer is not base64") from None
    return len(data) <= _MAX_CHARSMAP_BYTES and longest_replacement(data) <= _MAX_REPLACEMENT_BYTES


def longest_replacement(charsmap: bytes) -> int:
    """Check SentencePiece's compiled character map: a double-array trie, then the replacements, each before a NUL byte.

    The tokenizers library follows the trie without such a check, and stops the process if it leads outside.

    Returns:
        The length of the longest replacement in bytes.

    Raises:
        ValueError: it is damaged.
    """
    damaged = "the character map of its normalizer is damaged: its"
    size = int.from_bytes(charsmap[:4], "little")
    if not 4 <= size <= len(charsmap) - 4 or size % 4:
        raise ValueError(f"{damaged} header names a trie of {size:,} bytes")
    units, normalized = np.frombuffer(charsmap, "<u4", size // 4, 4).astype(np.int64), charsmap[4 + size :]
    values = _trie_values(units)
    starts = np.frombuffer(normalized + b"\0", np.uint8)
    if values is None or values.max(initial=0) >= len(starts) or np.any(starts[values] & 0xC0 == 0x80):
        raise ValueError(f"{damaged} trie leads outside")
    try:
        normalized.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{damaged} replacements are not UTF-8") from None
    ends = np.flatnonzero(starts == 0)
    return int((ends[np.searchsorted(ends, values)] - values).max(initial=0))


def _trie_values(units: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the values of all keys of a double-array trie (Darts), or None if it leads outside of its units."""
    seen = np.zeros(len(units), bool)
    nodes = np.zeros(1, np.int64)
    values: list[NDArray[np.int64]] = []
    letters = np.arange(1, 256)
    for _ in range(_MAX_KEY_BYTES):
        seen[nodes] = True
        bases = nodes ^ (units[nodes] >> 10 << ((units[nodes] & 0x200) >> 6))
        if np.any((bases | 0xFF) >= len(units)):
            return None
        has_leaf = (units[nodes] >> 8 & 1 == 1) & (nodes != 0)
        values.append(units[bases[has_leaf]] & 0x7FFFFFFF)
        parts = (bases[first : first + 4096, None] ^ letters for first in range(0, len(bases), 4096))
        nodes = np.unique(np.concatenate([below[units[below] & 0x800000FF == letters] for below in parts]))
        nodes = nodes[~seen[nodes]]
        if not len(nodes):
            return np.concatenate(values)
    return None
