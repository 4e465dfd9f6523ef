"""Sentinels: the tokens that stand for a missing span, `<extra_id_0>`, `<extra_id_1>`, ...

Their ids are those of Hugging Face's tokenizers. A T5 vocabulary counts down from its last id, so `<extra_id_0>` is the
highest; ByT5's counts up from 259. A file that has such tokens keeps its own; otherwise they are added behind its last.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import UserError
from ..tokenizers.tokenizer import MOST_SENTINELS, ByteTokenizer, CharTokenizer, Tokenizer, from_document

BYT5_SENTINELS = 125
"""They make ByT5's vocabulary 384 ids."""
T5_SENTINELS = 100
USUAL_MASKS = ("[MASK]", "<mask>")
"""Names that tokenizers have for the token that hides others."""


def sentinel_name(number: int) -> str:
    """The token of a sentinel."""
    return f"<extra_id_{number}>"


def sentinel_ids(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """The ids of `<extra_id_0>`, `<extra_id_1>`, ... as far as the tokenizer has them, int64 [count]."""
    ids: list[int] = []
    while len(ids) < MOST_SENTINELS and (id_ := tokenizer.token_id(sentinel_name(len(ids)))) is not None:
        ids.append(id_)
    return np.array(ids, np.int64)


def encode_spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that a person typed, in which `<extra_id_0>` means the sentinel, with every tokenizer."""
    ids = sentinel_ids(tokenizer)
    tokens: list[int] = []
    for part in re.split(r"(<extra_id_[0-9]{1,5}>)", text):
        number = re.fullmatch(r"<extra_id_([0-9]{1,5})>", part)
        if number and int(number[1]) < len(ids):
            tokens.append(int(ids[int(number[1])]))
        elif part:
            tokens += tokenizer.encode(part).tolist()
    return tokens


def with_sentinels(tokenizer: Tokenizer, count: int | None) -> Tokenizer:
    """The tokenizer with sentinels: as it is where it has that many, else with those that it lacks.

    Args:
        tokenizer: one that ends texts and fills up short ones.
        count: how many; None: ByT5's 125 for bytes, and for files those they have, or T5's 100.

    Raises:
        UserError: characters have no token to end a text with.
    """
    if isinstance(tokenizer, CharTokenizer):
        raise UserError(
            "`model.tokenizer.library` (char) has no token that ends a text, and no sentinels; use byte-level"
        )
    there = len(sentinel_ids(tokenizer))
    if count is None:
        count = BYT5_SENTINELS if isinstance(tokenizer, ByteTokenizer) else there or T5_SENTINELS
    if there >= count:
        return tokenizer
    if isinstance(tokenizer, ByteTokenizer):
        return ByteTokenizer(count)
    return _extended(tokenizer, [sentinel_name(number) for number in reversed(range(there, count))])


def _extended(tokenizer: Tokenizer, tokens: list[str]) -> Tokenizer:
    """A tokenizer of a file with more tokens; they are part of its document, so a checkpoint keeps them."""
    document = tokenizer.to_document()
    if document["tokenizer"] == "sentencepiece":
        return from_document({**document, "added": [*document["added"], *tokens]})
    from ..tokenizers.tokenizer_json import extended

    return extended(document, tokens)


def mask_id(tokenizer: Tokenizer, named: str | None = None) -> int | None:
    """The token that hides one, for masked language models: the named one, or [MASK], <mask> or the first sentinel."""
    for name in (*USUAL_MASKS, sentinel_name(0)) if named is None else (named,):
        if (id_ := tokenizer.token_id(name)) is not None:
            return id_
    return None
