"""Sentinels: the tokens `<extra_id_0>`, `<extra_id_1>`, ... that replace spans.

Their ids are those of Hugging Face's tokenizers. A T5 vocabulary numbers them backward from its last id, so that
`<extra_id_0>` is the highest; ByT5's are numbered forward from 259. A file that has sentinels keeps its own; otherwise
they are appended to the vocabulary.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import UserError
from ..tokenizers.own_tokenizer import OwnTokenizer
from ..tokenizers.tokenizer import MAX_SENTINELS, ByteTokenizer, CharTokenizer, Tokenizer
from ..tokenizers.tokenizer_document import tokenizer_from_dict

BYT5_SENTINELS = 125
"""Gives ByT5's vocabulary size of 384."""
T5_SENTINELS = 100
USUAL_MASK_TOKENS = ("[MASK]", "<mask>")
"""Usual names of the mask token."""


def sentinel_name(number: int) -> str:
    """Return the text of a sentinel."""
    return f"<extra_id_{number}>"


def sentinel_ids(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return the ids of `<extra_id_0>`, `<extra_id_1>`, ... that the tokenizer has, int64 [count]."""
    ids: list[int] = []
    while len(ids) < MAX_SENTINELS and (id_ := tokenizer.token_id(sentinel_name(len(ids)))) is not None:
        ids.append(id_)
    return np.array(ids, np.int64)


def encode_with_sentinels(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode user input in which `<extra_id_0>` means the sentinel, with any tokenizer."""
    ids = sentinel_ids(tokenizer)
    tokens: list[int] = []
    for part in re.split(r"(<extra_id_[0-9]{1,5}>)", text):
        match = re.fullmatch(r"<extra_id_([0-9]{1,5})>", part)
        if match and int(match[1]) < len(ids):
            tokens.append(int(ids[int(match[1])]))
        elif part:
            tokens += tokenizer.encode(part).tolist()
    return tokens


def with_sentinels(tokenizer: Tokenizer, count: int | None) -> Tokenizer:
    """Return the tokenizer with at least `count` sentinels, adding those that it lacks.

    Args:
        tokenizer: must have EOS and padding.
        count: number of sentinels; None: ByT5's 125 for bytes; for files those they have, or T5's 100.

    Raises:
        UserError: a char tokenizer, which has no EOS.
    """
    if isinstance(tokenizer, CharTokenizer):
        raise UserError("`model.tokenizer.library` (char) has no EOS token and no sentinels; use byte-level")
    existing = len(sentinel_ids(tokenizer))
    if count is None:
        count = BYT5_SENTINELS if isinstance(tokenizer, ByteTokenizer) else existing or T5_SENTINELS
    if existing >= count:
        return tokenizer
    if isinstance(tokenizer, ByteTokenizer):
        return ByteTokenizer(count)
    if isinstance(tokenizer, OwnTokenizer):
        raise UserError(
            f"`model.tokenizer.library` ({tokenizer.kind}) has {existing} of {count} sentinels: its `token_id` must "
            "know <extra_id_0>, <extra_id_1>, ...; model.tokenizer.num_sentinel_tokens is their number"
        )
    return _extended(tokenizer, [sentinel_name(number) for number in reversed(range(existing, count))])


def _extended(tokenizer: Tokenizer, tokens: list[str]) -> Tokenizer:
    """Return a file's tokenizer with more tokens; they are part of its document, so checkpoints store them."""
    document = tokenizer.to_dict()
    if document["tokenizer"] == "sentencepiece":
        return tokenizer_from_dict({**document, "added": [*document["added"], *tokens]})
    from ..tokenizers.tokenizer_json import with_added_tokens

    return with_added_tokens(document, tokens)


def find_mask_token_id(tokenizer: Tokenizer, named: str | None = None) -> int | None:
    """Return the id of the mask token: `named`, or else [MASK], <mask> or the first sentinel; None if there is none."""
    for name in (*USUAL_MASK_TOKENS, sentinel_name(0)) if named is None else (named,):
        if (id_ := tokenizer.token_id(name)) is not None:
            return id_
    return None
