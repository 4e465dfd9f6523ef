"""Text sources: the interpreter's standard library, or a text file or folder of the user.

A source is read as a whole, checked to be UTF-8, and split into train, validation and test. Files are assigned by the
hash of their content, so that adding one moves no other and equal files are in one split; a single file is cut by
position.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import platform
import shlex
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...config.dataset_names import SPLITS, Split
from ...utils.errors import UserError
from ...utils.text import pluralize

Proportions = tuple[float, float, float]
"""Fractions of train, validation and test, summing to 1."""

# Tests, graphical programs and their demos, other packages, and folders that are mostly generated tables.
_PYSTD_EXCLUDED = {
    *("test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "site-packages", "dist-packages"),
    *("encodings", "pydoc_data", "ensurepip", "__phello__", "__pycache__"),
}
_PYSTD_EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")
"""Files that describe how this interpreter was built."""
_RECORD_SUFFIXES = (".jsonl", ".ndjson", ".parquet")
_TOKEN_SUFFIXES = (".bin", ".idx")
_ARCHIVE_SUFFIXES = (".gz", ".zst")
"""File name suffixes that are not plain text: records with a text field, token ids, archives."""
_MAX_LISTED = 3


@dataclass(frozen=True)
class Corpus:
    """Text documents, by split.

    Attributes:
        name: of the text, for messages: `pystd` or the path.
        documents: the texts of each split, in a fixed order.
        fingerprint: SHA-256 of (relative path, SHA-256 of the content) of every file, in hexadecimal.
        files: number of files read.
        skipped_files: description of the skipped files of a folder, for the log; empty if there are none.
    """

    name: str
    documents: dict[Split, list[str]]
    fingerprint: str
    files: int
    skipped_files: str = ""

    def text(self, split: Split) -> bytes:
        """Return the UTF-8 bytes of a split, documents concatenated."""
        return "".join(self.documents[split]).encode("utf-8")


class _NotPlainTextError(UserError):
    """A file that is not plain text by its name, given directly or the first of a folder without any text file."""

    def __init__(self, path: Path) -> None:
        kinds = {
            _RECORD_SUFFIXES: "objects with texts in them",
            _TOKEN_SUFFIXES: "tokens",
            _ARCHIVE_SUFFIXES: "compressed data",
        }
        kind = next(text for suffixes, text in kinds.items() if path.name.lower().endswith(suffixes))
        super().__init__(f"{path} holds {kind}, not plain text")
        self.path = path


@dataclass(frozen=True)
class _File:
    relative_path: str
    text: str
    digest: bytes


def parse_proportions(splits_string: str) -> Proportions:
    """Return the fractions of train, validation and test, summing to 1, from NeMo's `900,50,50`; missing ones are 0.

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
    """Read the running interpreter's standard library: its Python sources without tests and generated tables.

    Nothing is shipped or downloaded; another Python version has another text and fingerprint. Files that are not UTF-8
    are skipped.

    Raises:
        UserError: this interpreter has no readable sources (some embedded or frozen ones have none).
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: list[_File] = []
    for path in walk_files(root, skip=_is_excluded_from_pystd):
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
    path: Path, proportions: Proportions, named_by: str = "`model.data.path`", *, for_training: bool = True
) -> Corpus:
    """Read a text file, which is cut by position in characters, or a folder, whose files are assigned by hash.

    All regular files below a folder are read, except hidden ones (a leading dot), empty ones, and those whose names say
    that they are not plain text, which `Corpus.skipped_files` lists.

    Args:
        named_by: the key or option that gave the path, for messages.
        for_training: the text is for a training run, which could read other kinds of files; used for messages.

    Raises:
        UserError: the path is missing, unreadable, empty, not UTF-8, or not plain text; the message gives the path and
            the reason.
    """
    try:
        return _read_folder(path, proportions) if path.is_dir() else _read_file(path, proportions)
    except _NotPlainTextError as error:
        fix = _how_to_train_on(error.path) if for_training else "give the text itself, as a plain file"
        raise UserError(f"{named_by}: {error}; {fix}") from None
    except UserError as error:
        raise UserError(f"{named_by}: {error}") from None
    except OSError as error:
        raise UserError(f"{named_by}: cannot read {path}: {_reason(error)}") from None


def _read_folder(path: Path, proportions: Proportions) -> Corpus:
    found = walk_files(path)
    others = [file for file in found if _is_not_plain_text(file)]
    files = [
        _file(file.relative_to(path), content, _utf8(file, content))
        for file in found
        if not _is_not_plain_text(file) and (content := _content(file))
    ]
    if not files and others:
        raise _NotPlainTextError(others[0])
    if not files:
        raise UserError(f"the folder {path} holds no text (no file, or only empty or hidden ones)")
    shown = ", ".join(str(file.relative_to(path)) for file in others[:_MAX_LISTED]) + ", ..." * (
        len(others) > _MAX_LISTED
    )
    skipped = f"{pluralize(len(others), 'file')} skipped, not plain text by name: {shown}" if others else ""
    return replace(_by_hash(str(path), files, proportions), skipped_files=skipped)


def _read_file(path: Path, proportions: Proportions) -> Corpus:
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is neither a file nor a folder; use a UTF-8 text file or a folder of them")
    if path.is_file() and _is_not_plain_text(path):
        raise _NotPlainTextError(path)
    content = _content(path)
    if not content:
        raise UserError(f"{path} is empty")
    return _by_position(str(path), _file(Path(), content, _utf8(path, content)), proportions)


def _is_not_plain_text(path: Path) -> bool:
    return path.name.lower().endswith(_RECORD_SUFFIXES + _TOKEN_SUFFIXES + _ARCHIVE_SUFFIXES)


def _how_to_train_on(path: Path) -> str:
    """Return how to train on a file that is not plain text."""
    name = path.name.lower()
    if name.endswith(_TOKEN_SUFFIXES):
        prefix = shlex.quote(f"model.data.data_prefix={path.with_suffix('')}")
        return f"train on it with data=mmap {prefix}"
    if name.endswith(_ARCHIVE_SUFFIXES) and not name.removesuffix(".gz").removesuffix(".zst").endswith(
        (*_RECORD_SUFFIXES, ".json")
    ):
        return "unpack it first"
    return (
        f"run stoker preprocess {shlex.quote(str(path))} --output-prefix NAME, then use data=mmap "
        "model.data.data_prefix=NAME; or use data=sft for prompts and answers (data=jsonl with a T5)"
    )


class HashSplitter:
    """Assign texts to splits by their SHA-256."""

    def __init__(self, proportions: Proportions) -> None:
        self._bounds = list(itertools.accumulate(proportions))
        # Rounding must not put the last hashes after the last non-empty split.
        self._last = max(number for number, share in enumerate(proportions) if share > 0)

    def split_of(self, text: str) -> Split:
        """Return the split of a text."""
        return self.split_of_digest(hashlib.sha256(text.encode("utf-8")).digest())

    def split_of_digest(self, digest: bytes) -> Split:
        """Return the split of a text with this hash."""
        fraction = int.from_bytes(digest[:8], "big") / 2**64
        return SPLITS[next((i for i in range(self._last) if fraction < self._bounds[i]), self._last)]


def _by_hash(name: str, files: Sequence[_File], proportions: Proportions) -> Corpus:
    splitter = HashSplitter(proportions)
    documents: dict[Split, list[str]] = {split: [] for split in SPLITS}
    for file in files:
        documents[splitter.split_of_digest(file.digest)].append(file.text)
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


def is_hidden(name: str) -> bool:
    """Return True for the name of a hidden file or folder."""
    return name.startswith(".")


def walk_files(root: Path, skip: Callable[[str], bool] = is_hidden) -> list[Path]:
    """Return every regular file below `root`, sorted by relative path, excluding names that `skip` matches.

    Raises:
        UserError: a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {_reason(error)}")

    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not skip(name)]
        paths = (Path(folder, name) for name in names if not skip(name))
        found += [path for path in paths if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _is_excluded_from_pystd(name: str) -> bool:
    return name in _PYSTD_EXCLUDED or name.startswith(_PYSTD_EXCLUDED_PREFIXES)


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
            f"{error.start}; convert it (iconv -t utf-8) or remove it"
        ) from None


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
