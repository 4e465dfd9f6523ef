"""Where text comes from: the interpreter's own standard library, or a text file or folder of the user.

A source is read whole, checked to be UTF-8, and split into train, validation and test. Files are assigned by the hash
of their content, so that adding one moves no other and equal files land on the same side; a single file is cut by
position.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...utils.errors import UserError
from ...utils.text import counted

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

Proportions = tuple[float, float, float]

# Tests, graphical programs and their demos, other packages, and folders that are mostly generated tables.
_PYSTD_LEFT_OUT = {
    *("test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "site-packages", "dist-packages"),
    *("encodings", "pydoc_data", "ensurepip", "__phello__", "__pycache__"),
}
_PYSTD_LEFT_OUT_PREFIXES = ("_sysconfigdata", "config-")
"""Files that describe how this interpreter was built."""
_RECORDS = (".jsonl", ".ndjson", ".parquet")
_TOKENS = (".bin", ".idx")
_PACKED = (".gz", ".zst")
"""Names of files that hold no plain text, whatever their bytes are: objects with a text in them, tokens, archives."""
_SHOWN = 3


@dataclass(frozen=True)
class Corpus:
    """Documents of text, by split.

    Attributes:
        name: what the text is, for messages: `pystd` or the path.
        documents: the texts of each split, in a fixed order.
        fingerprint: SHA-256 over the (relative path, SHA-256 of the content) of every file, in hexadecimal.
        files: how many files were read.
        left_out: what of a folder was not read, for the reader of a log; empty for nothing.
    """

    name: str
    documents: dict[Split, list[str]]
    fingerprint: str
    files: int
    left_out: str = ""

    def text(self, split: Split) -> bytes:
        """The UTF-8 bytes of a split, documents joined."""
        return "".join(self.documents[split]).encode("utf-8")


class _NoTextError(UserError):
    """A file that by its name holds no plain text, named directly or the first of a folder that has no other."""

    def __init__(self, path: Path) -> None:
        kinds = {_RECORDS: "objects with texts in them", _TOKENS: "tokens", _PACKED: "compressed data"}
        what = next(text for suffixes, text in kinds.items() if path.name.lower().endswith(suffixes))
        super().__init__(f"{path} holds {what}, not plain text")
        self.path = path


@dataclass(frozen=True)
class _File:
    relative_path: str
    text: str
    digest: bytes


def parse_proportions(splits_string: str) -> Proportions:
    """The parts of train, validation and test, summing to 1, from NeMo's `900,50,50`; missing ones are 0.

    Raises:
        UserError: the numbers do not have a positive, finite sum.
    """
    weights = [float(part) for part in splits_string.split(",")]
    total = sum(weights)
    if not (total > 0 and math.isfinite(total)):
        raise UserError(
            f"`model.data.splits_string` ({splits_string[:40]}) must have a positive, finite sum; use 900,50,50"
        )
    train, validation, test = (weight / total for weight in (*weights, 0.0, 0.0)[:3])
    return train, validation, test


def read_pystd(proportions: Proportions) -> Corpus:
    """The running interpreter's standard library: its Python sources without tests and generated tables.

    Read live, so nothing is shipped and nothing downloaded; another Python version has other text and another
    fingerprint. Files that are not UTF-8 are left out.

    Raises:
        UserError: this interpreter has no readable sources (some embedded or frozen ones have none).
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: list[_File] = []
    for path in _walk(root, skip=_left_out_of_pystd):
        if path.suffix != ".py":
            continue
        content = _content(path)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text:
            files.append(_file(path.relative_to(root), content, text))
    if not files:
        raise UserError(
            f"`model.data.data_impl=pystd`: {root} holds no Python sources (Python {platform.python_version()}); "
            "use `model.data.data_impl=text model.data.path=FILE`"
        )
    return _by_hash(f"pystd (Python {platform.python_version()})", files, proportions)


def read_text(
    path: Path, proportions: Proportions, named_by: str = "`model.data.path`", *, trains: bool = True
) -> Corpus:
    """A text file, cut by position in characters, or a folder, whose files are assigned by hash.

    In a folder every regular file below it counts, except hidden ones (a leading dot), empty ones, and those whose
    names say that they hold no plain text, which `Corpus.left_out` tells.

    Args:
        path: the file or folder.
        proportions: parts of train, validation and test.
        named_by: the key or option that gave the path, for messages.
        trains: whether it is for a run that trains, which could read other kinds of files.

    Raises:
        UserError: the path is missing, unreadable, empty, not UTF-8, or of a kind that holds no plain text; one line
            with the path and the reason.
    """
    try:
        return _read_folder(path, proportions) if path.is_dir() else _read_file(path, proportions)
    except _NoTextError as error:
        cure = _what_trains_on(error.path) if trains else "give the text itself, as a plain file"
        raise UserError(f"{named_by}: {error}; {cure}") from None
    except UserError as error:
        raise UserError(f"{named_by}: {error}") from None
    except OSError as error:
        raise UserError(f"{named_by}: cannot read {path}: {_reason(error)}") from None


def _read_folder(path: Path, proportions: Proportions) -> Corpus:
    found = _walk(path, skip=lambda name: name.startswith("."))
    others = [file for file in found if _is_no_text(file)]
    files = [
        _file(file.relative_to(path), content, _utf8(file, content))
        for file in found
        if not _is_no_text(file) and (content := _content(file))
    ]
    if not files and others:
        raise _NoTextError(others[0])
    if not files:
        raise UserError(f"the folder {path} holds no text (no file, or only empty or hidden ones)")
    shown = ", ".join(str(file.relative_to(path)) for file in others[:_SHOWN]) + ", ..." * (len(others) > _SHOWN)
    left_out = f"{counted(len(others), 'file')} left out, no plain text by name: {shown}" if others else ""
    return replace(_by_hash(str(path), files, proportions), left_out=left_out)


def _read_file(path: Path, proportions: Proportions) -> Corpus:
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is neither a file nor a folder; use a UTF-8 text file or a folder of them")
    if path.is_file() and _is_no_text(path):
        raise _NoTextError(path)
    content = _content(path)
    if not content:
        raise UserError(f"{path} is empty")
    return _by_position(str(path), _file(Path(), content, _utf8(path, content)), proportions)


def _is_no_text(path: Path) -> bool:
    return path.name.lower().endswith(_RECORDS + _TOKENS + _PACKED)


def _what_trains_on(path: Path) -> str:
    """The way to train on a file that holds no plain text."""
    name = path.name.lower()
    if name.endswith(_TOKENS):
        return f"train on it with data=mmap model.data.data_prefix={path.with_suffix('')}"
    if name.endswith(_PACKED) and not name.removesuffix(".gz").removesuffix(".zst").endswith((*_RECORDS, ".json")):
        return "unpack it first"
    return (
        f"write stoker preprocess {path} --output-prefix NAME, then data=mmap model.data.data_prefix=NAME, or take "
        "data=sft for prompts and answers (data=jsonl with a T5)"
    )


def _by_hash(name: str, files: Sequence[_File], proportions: Proportions) -> Corpus:
    bounds = list(itertools.accumulate(proportions))
    documents: dict[Split, list[str]] = {split: [] for split in SPLITS}
    # Rounding must not leave the last hashes beyond the last split that has any share.
    last = max(i for i, share in enumerate(proportions) if share > 0)
    for file in files:
        place = int.from_bytes(file.digest[:8], "big") / 2**64
        index = next((i for i in range(last) if place < bounds[i]), last)
        documents[SPLITS[index]].append(file.text)
    return Corpus(name, documents, _fingerprint(files), len(files))


def _by_position(name: str, file: _File, proportions: Proportions) -> Corpus:
    length = len(file.text)
    first = int(length * proportions[0])
    # The sum of two shares may round to just below 1, which would cut off the last character.
    second = length if proportions[2] == 0 else int(length * (proportions[0] + proportions[1]))
    parts = file.text[:first], file.text[first:second], file.text[second:]
    documents: dict[Split, list[str]] = {
        split: [part] if part else [] for split, part in zip(SPLITS, parts, strict=True)
    }
    return Corpus(name, documents, _fingerprint([file]), 1)


def _fingerprint(files: Iterable[_File]) -> str:
    total = hashlib.sha256()
    for file in files:
        total.update(file.relative_path.encode("utf-8", "surrogateescape") + b"\0" + file.digest + b"\n")
    return total.hexdigest()


def _file(relative_path: Path, content: bytes, text: str) -> _File:
    return _File(relative_path.as_posix(), text, hashlib.sha256(content).digest())


def _walk(root: Path, skip: Callable[[str], bool]) -> list[Path]:
    """Every regular file below `root`, sorted by relative path, without folders and files whose name `skip` takes."""

    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {_reason(error)}")

    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not skip(name)]
        paths = (Path(folder, name) for name in names if not skip(name))
        found += [path for path in paths if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _left_out_of_pystd(name: str) -> bool:
    return name in _PYSTD_LEFT_OUT or name.startswith(_PYSTD_LEFT_OUT_PREFIXES)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise UserError(f"cannot read {path}: {_reason(error)}") from None


def _utf8(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: bad byte 0x{content[error.start]:02x} at byte offset "
            f"{error.start}; convert it (iconv -t utf-8) or leave it out"
        ) from None


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
