"""Pairs of texts (input and target): reading and tokenization."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...config.dataset_names import SPLITS, Split
from ...utils.errors import UserError
from ..datasets.seq2seq import Pair, PairShape
from ..tokenizers.tokenizer import TokenIds, Tokenizer
from .jsonl import CONTEXT_KEY, LABEL_KEY, RecordParser, read_splits, text_field
from .text_sources import Proportions


class TextPair(NamedTuple):
    """Input and target text."""

    input: str
    target: str


@dataclass(frozen=True)
class TextPairs:
    """Pairs of texts, by split.

    Attributes:
        name: of the data, for messages.
        pairs: of each split, in a fixed order.
        fingerprint: SHA-256 of all pairs, in hexadecimal.
        has_predefined_splits: the data come with their own splits.
    """

    name: str
    pairs: dict[Split, list[TextPair]]
    fingerprint: str
    has_predefined_splits: bool = False

    def inputs(self) -> list[str]:
        """Return the inputs of all splits."""
        return [pair.input for pairs in self.pairs.values() for pair in pairs]


def pairs_fingerprint(pairs: dict[Split, list[TextPair]]) -> str:
    """Return the SHA-256 of the pairs of all splits, in hexadecimal."""
    total = hashlib.sha256()
    for split in SPLITS:
        for pair in pairs[split]:
            total.update(json.dumps([split, *pair]).encode("utf-8"))
    return total.hexdigest()


class TokenPairs:
    """Token ids of pairs, each side truncated to the size of a row and ended with EOS; implements `pair_samples.Pairs`.

    Args:
        tokenizer: must have an EOS token.

    Raises:
        UserError: a text cannot be tokenized; the message gives the number of its pair.

    Attributes:
        num_truncated: number of truncated inputs and of truncated targets.
    """

    def __init__(self, pairs: Iterable[TextPair], tokenizer: Tokenizer, shape: PairShape) -> None:
        texts = list(pairs)
        sides = ([pair.input for pair in texts], [pair.target for pair in texts])
        sizes = (shape.encoder_length, shape.decoder_length)
        whole = [encode_texts(side, tokenizer, name) for side, name in zip(sides, ("input", "target"), strict=True)]
        self.num_truncated = tuple(
            sum(len(ids) >= size for ids in side) for side, size in zip(whole, sizes, strict=True)
        )
        assert tokenizer.eos_id is not None
        self._encoder, self._decoder = (
            [_append_eos(ids[: size - 1], tokenizer.eos_id) for ids in side]
            for side, size in zip(whole, sizes, strict=True)
        )

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._encoder)

    def lengths(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens of each pair on both sides."""
        encoder, decoder = (np.array([len(ids) for ids in side], np.int64) for side in (self._encoder, self._decoder))
        return encoder, decoder

    def pair(self, number: int, rng: np.random.Philox) -> Pair:
        """Return a pair; `rng` is not used."""
        return Pair(self._encoder[number], self._decoder[number])


def encode_texts(texts: list[str], tokenizer: Tokenizer, name: str) -> list[TokenIds]:
    """Tokenize texts.

    Args:
        texts: one of each pair, in order.
        name: of these texts, for messages.

    Raises:
        UserError: a text cannot be tokenized; the message gives the number of its pair.
    """
    try:
        return tokenizer.encode_batch(texts)
    except UserError:
        for number, text in enumerate(texts, 1):
            try:
                tokenizer.encode(text)
            except UserError as error:
                raise UserError([f"the {name} of pair {number}: {error.lines[0]}", *error.lines[1:]]) from None
        raise


def _append_eos(ids: TokenIds, eos_id: int) -> TokenIds:
    return np.append(ids, np.array(eos_id, ids.dtype))


# ---------------------------------------------------------------- JSONL


def read_text_pairs(
    path: Path, proportions: Proportions, input_key: str, target_key: str, named_by: str = "`model.data.path`"
) -> TextPairs:
    """Read pairs from JSONL: one object per line, with two string fields; see `read_splits`.

    Args:
        path: a file, or a folder of .jsonl files.
        input_key: field of the input.
        target_key: field of the target.
        named_by: the key or option that gave the path, for messages.

    Raises:
        UserError: a file is missing, unreadable or has an invalid line; the message gives its location.
    """
    pairs = read_splits(path, proportions, pair_parser(input_key, target_key), lambda pair: pair.input, named_by)
    return TextPairs(str(path), pairs, pairs_fingerprint(pairs))


def pair_parser(input_key: str, target_key: str) -> RecordParser[TextPair]:
    """Return a function that parses an object with two string fields."""

    def read(record: dict[str, Any], location: str) -> TextPair:
        return TextPair(
            text_field(record, input_key, location, CONTEXT_KEY),
            text_field(record, target_key, location, LABEL_KEY),
        )

    return read
