"""JSONL: an object in each line of a file, and to which split it belongs."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...utils.errors import UserError
from ..tokenizers.tokenizer import utf8
from .text_sources import SPLITS, Proportions, Split

MAX_LINE_BYTES = 64 << 20
"""Of one line; a longer one is no example of a task."""
CONTEXT_KEY, LABEL_KEY = "model.data.context_key", "model.data.label_key"
_SUFFIXES = (".jsonl", ".json")
_ANSWERS = ("output", "completion", "response", "answer", "label", "target")
"""Usual names of an answer."""
RecordT = TypeVar("RecordT")
Reader = Callable[[dict[str, Any], str], RecordT]
"""Makes something of an object; the text says where it is, for the UserError that refuses it."""


def read_split(
    path: Path, proportions: Proportions, read: Reader[RecordT], input_of: Callable[[RecordT], str], named_by: str
) -> dict[Split, list[RecordT]]:
    """What a file or folder holds, by split.

    A folder that holds `train.jsonl` has its splits in files of those names (`train`, `validation`, `test`), and other
    files are not read. Otherwise each object goes to a split by the hash of its input, so that equal inputs are on one
    side and adding lines moves none of the others.

    Args:
        path: a file, or a folder of .jsonl files.
        proportions: parts of train, validation and test.
        read: makes what is wanted of an object.
        input_of: what is hashed.
        named_by: the key or option that gave the path, for messages.

    Raises:
        UserError: a file is missing, cannot be read or holds a line that is refused; one line with its place.
    """
    found: dict[Split, list[RecordT]] = {split: [] for split in SPLITS}
    try:
        by_split: dict[Split, Path] = {split: path / f"{split}.jsonl" for split in SPLITS}
        if has_own_splits(path):
            for split, file in by_split.items():
                if file.is_file():
                    found[split] += _read(file, read)
        else:
            held_out = [file.name for file in by_split.values() if file.is_file()]
            if held_out and proportions[0] > 0:
                raise UserError(
                    f"the folder {path} holds {' and '.join(held_out)}, but no train.jsonl: what is held out would be "
                    "trained on; rename the others to train.jsonl"
                )
            place = Placer(proportions)
            for file in _files(path):
                for record in _read(file, read):
                    found[place(input_of(record))].append(record)
    except OSError as error:
        raise UserError(f"{named_by}: cannot read {error.filename or path}: {error.strerror or error}") from None
    except UserError as error:
        raise UserError(f"{named_by}: {error}") from None
    if not any(found.values()):
        raise UserError(f"{named_by}: {path} holds no example")
    return found


def has_own_splits(path: Path) -> bool:
    """Whether a path is a folder that says itself what is trained on; see `read_split`."""
    return path.is_dir() and (path / "train.jsonl").is_file()


def read_files(paths: Sequence[Path], read: Reader[RecordT], named_by: str) -> list[list[RecordT]]:
    """What each file, or folder of .jsonl files, holds.

    Raises:
        UserError: as `read_split`.
    """
    try:
        sets = [[record for file in _files(path) for record in _read(file, read)] for path in paths]
    except OSError as error:
        raise UserError(f"{named_by}: cannot read {error.filename}: {error.strerror or error}") from None
    except UserError as error:
        raise UserError(f"{named_by}: {error}") from None
    if paths and not any(sets):
        raise UserError(f"{named_by}: no example in {', '.join(map(str, paths))}")
    return sets


class Placer:
    """The split of a text, by its hash.

    Args:
        proportions: parts of train, validation and test.
    """

    def __init__(self, proportions: Proportions) -> None:
        self._bounds = list(itertools.accumulate(proportions))
        self._last = max(number for number, share in enumerate(proportions) if share > 0)

    def __call__(self, text: str) -> Split:
        """Where a text belongs."""
        place = int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big") / 2**64
        return SPLITS[next((i for i in range(self._last) if place < self._bounds[i]), self._last)]


def text_of(found: Mapping[str, Any], key: str, where: str, named_by: str) -> str:
    """The text under a key of an object.

    Raises:
        UserError: there is none, or it is no Unicode.
    """
    if key not in found:
        names = ", ".join(f"`{name[:40]}`" for name in list(found)[:10])
        cure = _other_keys(found) if named_by in (CONTEXT_KEY, LABEL_KEY) else ""
        cure = f"; set {cure}" if cure else f" (`{named_by}` names it)"
        raise UserError(f"{where} must have a text `{key}`; it has {names or 'nothing'}{cure}")
    value = found[key]
    if not isinstance(value, str):
        raise UserError(f"{where}: `{key}` is {_kind(value)}, not a text")
    try:
        utf8(value)
    except UserError as error:
        raise UserError(f"{where}: `{key}`: {error}") from None
    return value


def _other_keys(found: Mapping[str, Any]) -> str:
    """What makes an object with other names a prompt with an answer; empty where that is not to be seen."""
    names = [name for name, value in found.items() if isinstance(value, str) and name.isidentifier()]
    if len(names) < 2:
        return ""
    label = next((name for name in names if name in _ANSWERS), names[-1])
    context = next(name for name in names if name != label)
    return f"{CONTEXT_KEY}={context[:40]} {LABEL_KEY}={label[:40]}"


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"a number ({str(value)[:40]})"
        case list():
            return "a list"
        case _:
            return "an object"


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    if not found:
        raise UserError(f"the folder {path} holds no .jsonl file")
    return found


def _read(path: Path, read: Reader[RecordT]) -> Iterator[RecordT]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise UserError(f"line {number} of {path} has more than {MAX_LINE_BYTES >> 20} MiB")
            if line.strip():
                where = f"line {number} of {path}"
                yield read(_object(line, where), where)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8: bad byte at offset {error.start}") from None
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.pos + 1}"
        raise UserError(f"{where} is not JSON ({reason}); one object a line is wanted") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(found, dict):
        raise UserError(f"{where} must be an object; one object a line is wanted")
    return found
