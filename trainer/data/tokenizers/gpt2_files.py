"""Convert GPT-2's two tokenizer files, `vocab.json` and `merges.txt`, to a `tokenizer.json`.

Radford et al. 2019, section 2.2: byte pair encoding over bytes, written as printable characters, after a regular
expression has split the text into words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...utils.text import one_line
from .tokenizer_json import added_token, json_text

EOS_TOKEN = "<|endoftext|>"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
"""GPT-2's pre-tokenizer, and its decoder, in tokenizer.json format."""


def gpt2_tokenizer_json(vocab: str, merges: str) -> str:
    """Return the `tokenizer.json` equivalent to GPT-2's files.

    Args:
        vocab: text of `vocab.json`: id by token.
        merges: text of `merges.txt`: two tokens per line, the most frequent pair first; a first line with `#version` is
            skipped.

    Raises:
        ValueError: a text is not of this format, or the two do not match.
    """
    try:
        vocabulary = json.loads(vocab)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the vocabulary is not JSON: {one_line(error, 200)}") from None
    if not isinstance(vocabulary, dict) or not all(type(id_) is int for id_ in vocabulary.values()):
        raise ValueError("the vocabulary must be an object of ids by token")
    pairs: list[list[str]] = []
    for number, line in enumerate(merges.split("\n"), 1):  # tokens may contain characters that `splitlines` splits at
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(pair):
            raise ValueError(f"line {number} of the merges ({line[:60]!r}) must be two tokens with a space between")
        if not {*pair, "".join(pair)} <= vocabulary.keys():
            raise ValueError(f"line {number} of the merges ({line[:60]!r}) has tokens that the vocabulary lacks")
        pairs.append(pair)
    # The end-of-text token is the only EOS of such a vocabulary, so it is added if missing; GPT-2's id is the last.
    eos_id = vocabulary.get(EOS_TOKEN, max(vocabulary.values(), default=-1) + 1)
    return json_text(
        byte_level_bpe(vocabulary, pairs, [added_token(eos_id, EOS_TOKEN)], BYTE_LEVEL, ignore_merges=False)
    )


def byte_level_bpe(
    vocabulary: Mapping[str, int],
    merges: Sequence[Any],
    added_tokens: Sequence[Mapping[str, Any]],
    pre_tokenizer: Mapping[str, Any],
    **model_options: bool,
) -> dict[str, Any]:
    """Return the parsed `tokenizer.json` of a byte-level BPE tokenizer, in the order of keys of the library."""
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        **model_options,
        "vocab": vocabulary,
        "merges": merges,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": model,
    }
