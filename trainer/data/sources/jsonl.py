"""JSONL files, one object per line, and the assignment of objects to splits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...config.dataset_names import SPLITS, Split
from ...utils.errors import UserError
from ...utils.text import one_line
from ..tokenizers.tokenizer import encode_utf8
from .text_sources import HashSplitter, Proportions

MAX_LINE_BYTES = 64 << 20
"""Maximum length of a line."""
CONTEXT_KEY, LABEL_KEY = "model.data.context_key", "model.data.label_key"
_SUFFIXES = (".jsonl", ".json")
_ANSWER_KEYS = ("output", "completion", "response", "answer", "label", "target")
"""Usual keys of an answer."""
RecordT = TypeVar("RecordT")
RecordParser = Callable[[dict[str, Any], str], RecordT]
"""Parse an object; the string is its location, for the UserError raised for an invalid one."""


def read_splits(
    path: Path, proportions: Proportions, read: RecordParser[RecordT], input_of: Callable[[RecordT], str], named_by: str
) -> dict[Split, list[RecordT]]:
    """Read a file or folder, by split.

    A folder with a `train.jsonl` has one file per split (`train`, `validation`, `test`); other files are ignored.
    Otherwise each object is assigned to a split by the hash of its input, so that equal inputs are in one split, and
    adding lines moves none of the others.

    Args:
        path: a file, or a folder of .jsonl files.
        input_of: returns the text that is hashed.
        named_by: the key or option that gave the path, for messages.

    Raises:
        UserError: a file is missing, unreadable or has an invalid line; the message gives its location.
    """
    records: dict[Split, list[RecordT]] = {split: [] for split in SPLITS}
    try:
        by_split: dict[Split, Path] = {split: path / f"{split}.jsonl" for split in SPLITS}
        if has_split_files(path):
            for split, file in by_split.items():
                if file.is_file():
                    records[split] += _read(file, read)
        else:
            held_out_files = [file.name for file in by_split.values() if file.is_file()]
            if held_out_files and proportions[0] > 0:
                raise UserError(
                    f"the folder {path} holds {' and '.join(held_out_files)}, but no train.jsonl: the held-out data "
                    "would be trained on; rename the others to train.jsonl"
                )
            splitter = HashSplitter(proportions)
            for file in _files(path):
                for record in _read(file, read):
                    records[splitter.split_of(input_of(record))].append(record)
    except OSError as error:
        raise UserError(f"{named_by}: cannot read {error.filename or path}: {error.strerror or error}") from None
    except UserError as error:
        raise UserError(f"{named_by}: {error}") from None
    if not any(records.values()):
        raise UserError(f"{named_by}: {path} holds no example")
    return records


def has_split_files(path: Path) -> bool:
    """Return True if the path is a folder with a file per split; see `read_splits`."""
    return path.is_dir() and (path / "train.jsonl").is_file()


def read_files(paths: Sequence[Path], read: RecordParser[RecordT], named_by: str) -> list[list[RecordT]]:
    """Read the records of each file, or folder of .jsonl files.

    Raises:
        UserError: as `read_splits`.
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


def text_field(record: Mapping[str, Any], key: str, location: str, named_by: str) -> str:
    """Return the text under a key of an object.

    Raises:
        UserError: it is missing, not a string, or not valid Unicode.
    """
    if key not in record:
        names = ", ".join(f"`{name[:40]}`" for name in list(record)[:10])
        fix = _suggest_keys(record) if named_by in (CONTEXT_KEY, LABEL_KEY) else ""
        fix = f"; set {fix}" if fix else f" (`{named_by}` names it)"
        raise UserError(f"{location} must have a text `{key}`; it has {names or 'nothing'}{fix}")
    value = record[key]
    if not isinstance(value, str):
        raise UserError(f"{location}: `{key}` is {_describe_type(value)}, not a text")
    try:
        encode_utf8(value)
    except UserError as error:
        raise UserError(f"{location}: `{key}`: {error}") from None
    return value


def _suggest_keys(record: Mapping[str, Any]) -> str:
    """Suggest keys under which the object is a prompt with an answer; empty if there is no obvious choice."""
    names = [name for name, value in record.items() if isinstance(value, str) and name.isidentifier()]
    if len(names) < 2:
        return ""
    label = next((name for name in names if name in _ANSWER_KEYS), names[-1])
    context = next(name for name in names if name != label)
    return f"{CONTEXT_KEY}={context[:40]} {LABEL_KEY}={label[:40]}"


def _describe_type(value: object) -> str:
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


def _read(path: Path, read: RecordParser[RecordT]) -> Iterator[RecordT]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise UserError(f"line {number} of {path} has more than {MAX_LINE_BYTES >> 20} MiB")
            if line.strip():
                location = f"line {number} of {path}"
                yield read(_object(line, location), location)


def _object(line: bytes, location: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{location} is not UTF-8: bad byte at offset {error.start}") from None
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.pos + 1}"
        raise UserError(f"{location} is not JSON ({reason}); each line must be one object") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location} is not JSON: {one_line(error, 200)}") from None
    if not isinstance(record, dict):
        raise UserError(f"{location} must be a JSON object; each line must be one")
    return record
