"""Pairs of texts, an input and a target: where they come from, and their tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import UserError
from ..datasets.seq2seq import Pair, Shape
from ..tokenizers.tokenizer import TokenIds, Tokenizer
from .jsonl import CONTEXT_KEY, LABEL_KEY, Reader, read_split, text_of
from .text_sources import SPLITS, Proportions, Split


class TextPair(NamedTuple):
    """What is read and what is to be written."""

    input: str
    target: str


@dataclass(frozen=True)
class TextPairs:
    """Pairs of texts, by split.

    Attributes:
        name: what they are, for messages.
        pairs: of each split, in a fixed order.
        fingerprint: SHA-256 over all of them, in hexadecimal.
        has_own_splits: what was read says itself what is held out.
    """

    name: str
    pairs: dict[Split, list[TextPair]]
    fingerprint: str
    has_own_splits: bool = False

    def inputs(self) -> list[str]:
        """The input of each pair of all splits."""
        return [pair.input for pairs in self.pairs.values() for pair in pairs]


def fingerprint_of(pairs: dict[Split, list[TextPair]]) -> str:
    """SHA-256 over the pairs of all splits, in hexadecimal."""
    total = hashlib.sha256()
    for split in SPLITS:
        for pair in pairs[split]:
            total.update(json.dumps([split, *pair]).encode("utf-8"))
    return total.hexdigest()


class TokenPairs:
    """Pairs of token ids, each side with its end token and cut to the size of a row: `pair_samples.Pairs`.

    Args:
        pairs: the texts.
        tokenizer: one with an end token.
        shape: of the rows.

    Raises:
        UserError: a text cannot be tokenized; with the number of its pair.

    Attributes:
        cut: how many inputs and how many targets were longer than their side.
    """

    def __init__(self, pairs: Iterable[TextPair], tokenizer: Tokenizer, shape: Shape) -> None:
        texts = list(pairs)
        sides = ([pair.input for pair in texts], [pair.target for pair in texts])
        sizes = (shape.encoder, shape.decoder)
        whole = [encoded(side, tokenizer, name) for side, name in zip(sides, ("input", "target"), strict=True)]
        self.cut = tuple(sum(len(ids) >= size for ids in side) for side, size in zip(whole, sizes, strict=True))
        assert tokenizer.eos_id is not None
        self._encoder, self._decoder = (
            [_ended(ids[: size - 1], tokenizer.eos_id) for ids in side] for side, size in zip(whole, sizes, strict=True)
        )

    def __len__(self) -> int:
        """How many there are."""
        return len(self._encoder)

    def lengths(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of each pair on both sides."""
        encoder, decoder = (np.array([len(ids) for ids in side], np.int64) for side in (self._encoder, self._decoder))
        return encoder, decoder

    def pair(self, number: int, source: np.random.Philox) -> Pair:
        """A pair; nothing in it is random."""
        return Pair(self._encoder[number], self._decoder[number])


def encoded(texts: list[str], tokenizer: Tokenizer, name: str) -> list[TokenIds]:
    """The tokens of texts.

    Args:
        texts: one of each pair, in order.
        tokenizer: makes the tokens.
        name: of these texts, for messages.

    Raises:
        UserError: one cannot be tokenized; with the number of its pair.
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


def _ended(ids: TokenIds, eos_id: int) -> TokenIds:
    return np.append(ids, np.array(eos_id, ids.dtype))


# ---------------------------------------------------------------- JSONL


def read_jsonl(
    path: Path, proportions: Proportions, input_key: str, target_key: str, named_by: str = "`model.data.path`"
) -> TextPairs:
    """Pairs out of JSONL: an object in each line, with an input and a target, which are texts; see `read_split`.

    Args:
        path: a file, or a folder of .jsonl files.
        proportions: parts of train, validation and test.
        input_key: name of the input in each object.
        target_key: name of the target.
        named_by: the key or option that gave the path, for messages.

    Raises:
        UserError: a file is missing, cannot be read or holds a line that is no such object; one line with its place.
    """
    pairs = read_split(path, proportions, pair_reader(input_key, target_key), lambda pair: pair.input, named_by)
    return TextPairs(str(path), pairs, fingerprint_of(pairs))


def pair_reader(input_key: str, target_key: str) -> Reader[TextPair]:
    """Makes a pair of an object with two texts."""

    def read(found: dict[str, Any], where: str) -> TextPair:
        return TextPair(
            text_of(found, input_key, where, CONTEXT_KEY),
            text_of(found, target_key, where, LABEL_KEY),
        )

    return read
