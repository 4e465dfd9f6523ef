"""Pairs of texts, an input and a target: where they come from, and their tokens."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .seq2seq import Pair, Shape
from .sources import SPLITS, Proportions, Split
from .tokenizers import TokenIds, Tokenizer, utf8

MAX_LINE_BYTES = 64 << 20
"""Of one line of a JSONL file; a longer one is no pair of texts."""
_SUFFIXES = (".jsonl", ".json")


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
    """

    name: str
    pairs: dict[Split, list[TextPair]]
    fingerprint: str


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
        whole = [_encoded(side, tokenizer, name) for side, name in zip(sides, ("input", "target"), strict=True)]
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


def _encoded(texts: list[str], tokenizer: Tokenizer, name: str) -> list[TokenIds]:
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
    """Pairs out of JSONL: an object in each line, with an input and a target, which are texts.

    A folder that holds `train.jsonl` has its splits in files of those names (`train`, `validation`, `test`), and other
    files are not read. Otherwise each pair goes to a split by the hash of its input, so that equal inputs are on one
    side and adding lines moves none of the others.

    Args:
        path: a file, or a folder of .jsonl files.
        proportions: parts of train, validation and test.
        input_key: name of the input in each object.
        target_key: name of the target.
        named_by: the key or option that gave the path, for messages.

    Raises:
        UserError: a file is missing, cannot be read or holds a line that is no such object; one line with its place.
    """
    pairs: dict[Split, list[TextPair]] = {split: [] for split in SPLITS}
    try:
        by_split: dict[Split, Path] = {split: path / f"{split}.jsonl" for split in SPLITS}
        if path.is_dir() and by_split["train"].is_file():
            for split, file in by_split.items():
                if file.is_file():
                    pairs[split] += _read(file, input_key, target_key)
        else:
            held_out = [file.name for file in by_split.values() if file.is_file()]
            if held_out and proportions[0] > 0:
                raise UserError(
                    f"the folder {path} holds {' and '.join(held_out)}, but no train.jsonl: what is held out would be "
                    "trained on; rename the others to train.jsonl"
                )
            bounds = list(itertools.accumulate(proportions))
            last = max(i for i, share in enumerate(proportions) if share > 0)
            for file in _files(path):
                for pair in _read(file, input_key, target_key):
                    digest = hashlib.sha256(pair.input.encode("utf-8")).digest()
                    place = int.from_bytes(digest[:8], "big") / 2**64
                    index = next((i for i in range(last) if place < bounds[i]), last)
                    pairs[SPLITS[index]].append(pair)
    except OSError as error:
        raise UserError(f"{named_by}: cannot read {error.filename or path}: {error.strerror or error}") from None
    except UserError as error:
        raise UserError(f"{named_by}: {error}") from None
    return TextPairs(str(path), pairs, fingerprint_of(pairs))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    if not found:
        raise UserError(f"the folder {path} holds no .jsonl file")
    return found


def _read(path: Path, input_key: str, target_key: str) -> Iterator[TextPair]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise UserError(f"line {number} of {path} has more than {MAX_LINE_BYTES >> 20} MiB")
            if line.strip():
                yield _pair(line, f"line {number} of {path}", input_key, target_key)


def _pair(line: bytes, where: str, input_key: str, target_key: str) -> TextPair:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(found, dict):
        raise UserError(f"{where} must be an object with `{input_key}` and `{target_key}`")
    for option, key in (("context_key", input_key), ("label_key", target_key)):
        if not isinstance(found.get(key), str):
            raise UserError(
                f"{where} must have a text `{key}`; it has "
                f"{', '.join(f'`{name[:40]}`' for name in list(found)[:10]) or 'nothing'} "
                f"(`model.data.{option}` names it)"
            )
        try:
            utf8(found[key])
        except UserError as error:
            raise UserError(f"{where}: `{key}`: {error}") from None
    return TextPair(found[input_key], found[target_key])
