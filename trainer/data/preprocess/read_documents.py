"""Reading documents, and what is wrong with those that cannot be used.

A document is a text; a `Reject` is a line (or file, or row) that gives none. Reading never holds more than one line of
`MAX_DOCUMENT_BYTES`, whatever the file.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...utils.errors import UserError

MAX_DOCUMENT_BYTES = 64 << 20
"""Bytes of the longest line or text file that is read; the longest books have 10 million."""
_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 20
_ROWS = 256
_KEYS_SHOWN = 200

TOO_LONG = f"longer than {MAX_DOCUMENT_BYTES >> 20} MiB"
DAMAGED = "damaged compressed data"


@dataclass(frozen=True, slots=True)
class Reading:
    """How documents are written.

    Attributes:
        json_key: the key of a JSON line, or column of a table, that holds the text.
        text_lines: each line of a text file is a document; False: each file.
    """

    json_key: str
    text_lines: bool = False


@dataclass(frozen=True, slots=True)
class Reject:
    """What gave no document.

    Attributes:
        kind: what is wrong with it, in words.
        place: line (or row) counted from 1, or the byte offset of the line in its file.
        is_offset: which of the two `place` is.
        note: what else helps, of this one alone.
    """

    kind: str
    place: int
    is_offset: bool = False
    note: str = ""


class UnusableError(ValueError):
    """A line that gives no document; the message is its kind, and `note` what helps to mend this one."""

    def __init__(self, kind: str, note: str = "") -> None:
        super().__init__(kind)
        self.note = note


def text_of_json(line: bytes, key: str) -> str:
    """The text of one JSON line.

    Raises:
        UnusableError: what is wrong with the line, in words that are the same for all lines of this kind.
    """
    try:
        document = json.loads(_decoded(line))
    except UnusableError:
        raise
    except (ValueError, RecursionError):
        raise UnusableError("not JSON") from None
    if not isinstance(document, dict):
        raise UnusableError("not a JSON object")
    if key not in document:
        there = ", ".join(map(repr, document))
        raise UnusableError(f"no key {key!r}", f"--json-key is one of {there[:_KEYS_SHOWN]}" if there else "")
    return usable_text(document[key])


def usable_text(text: Any) -> str:
    """The text itself.

    Raises:
        UnusableError: it is no string, is empty or blank, or holds NUL or a lone surrogate.
    """
    if not isinstance(text, str):
        raise UnusableError("text is not a string")
    if not text:
        raise UnusableError("empty text")
    if text.isspace():
        raise UnusableError("only white space")
    if "\0" in text:
        raise UnusableError("NUL character in the text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UnusableError("lone surrogate in the text") from None
    return text


def documents_of_lines(
    file: IO[bytes], start: int, end: int, reading: Reading, *, is_json: bool, first_line: int | None = None
) -> Iterator[str | Reject]:
    """Documents of the lines that begin in a range of bytes, so that the ranges of a file share no line and miss none.

    Args:
        file: opened for reading, at any place.
        start: first byte of the range.
        end: the byte after the last.
        reading: how documents are written.
        is_json: JSON lines; False: plain lines.
        first_line: number of the first line of `file`, for rejects that tell lines; None: they tell offsets.
    """
    file.seek(max(start - 1, 0))
    place = start
    if start > 0:
        place = start - 1 + _skip_line(file)
    number = first_line or 0
    while place < end and (line := file.readline(MAX_DOCUMENT_BYTES + 2)):
        size = len(line)
        if not line.endswith(b"\n") and size == MAX_DOCUMENT_BYTES + 2:
            size += _skip_line(file)
        try:
            if len(line.rstrip(b"\r\n")) > MAX_DOCUMENT_BYTES:
                raise UnusableError(TOO_LONG)
            if place == 0 and line.startswith(_BOM):
                line = line[len(_BOM) :]
            if not line.strip():
                raise UnusableError("blank line")
            if is_json:
                yield text_of_json(line, reading.json_key)
            else:
                yield usable_text(_decoded(line).removesuffix("\n").removesuffix("\r"))
        except UnusableError as error:
            where, is_offset = (place, True) if first_line is None else (number, False)
            yield Reject(str(error), where, is_offset, error.note)
        place += size
        number += 1


def document_of_file(path: Path) -> str | Reject:
    """The document that a whole text file is; a byte order mark is left out."""
    with path.open("rb") as file:
        data = file.read(MAX_DOCUMENT_BYTES + 1)
    try:
        if len(data) > MAX_DOCUMENT_BYTES:
            raise UnusableError(f"text file {TOO_LONG}")
        return usable_text(_decoded(data.removeprefix(_BOM)))
    except UnusableError as error:
        return Reject(str(error), 1)


def documents_of_row_groups(path: Path, first: int, last: int, reading: Reading) -> Iterator[str | Reject]:
    """Documents of the row groups `first` to `last - 1` of a parquet file; a place is a row."""
    file = open_parquet(path, reading.json_key)
    row = 1 + sum(file.metadata.row_group(group).num_rows for group in range(first))
    groups = list(range(first, last))
    for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=[reading.json_key]):
        for value in batch.column(0).to_pylist():
            try:
                text = usable_text(value)
                if len(text) > MAX_DOCUMENT_BYTES:
                    raise UnusableError(TOO_LONG)
                yield text
            except UnusableError as error:
                yield Reject(str(error), row)
            row += 1


def open_parquet(path: Path, column: str) -> Any:
    """The `pyarrow.parquet.ParquetFile` of a file that has the column.

    Raises:
        UserError: pyarrow is missing, the file is no parquet, or has no such column.
    """
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(f"{path}: parquet files need the `pyarrow` package: pip install 'stoker[hf]'") from None
    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is no parquet file: {' '.join(str(error).split())[:200]}") from None
    names = file.schema_arrow.names
    if column not in names:
        raise UserError(f"{path} has no column {column!r}; --json-key is one of {', '.join(names)[:200]}")
    return file


def open_compressed(path: Path, file: IO[bytes], kind: str) -> IO[bytes]:
    """The uncompressed bytes of an open file.

    Raises:
        UserError: the zstandard package is missing.
    """
    if kind == "jsonl.gz":
        import gzip

        unpacked: Any = gzip.GzipFile(fileobj=file)
        return unpacked
    try:
        import zstandard  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(f"{path}: .zst files need the `zstandard` package: pip install zstandard") from None
    reader: Any = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    return io.BufferedReader(reader)


def cut_into_chunks(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Whole lines, at least `size` bytes at a time.

    The end of a line that is too long is left out; what stays of it is still too long, and its line end is kept. Where
    the compressed data is damaged, the whole lines before come first and then its error.
    """
    read = getattr(file, "read1", file.read)  # what there is, so that damage further on takes nothing of it along
    while True:
        pieces: list[bytes] = []
        held = 0
        try:
            while held < size and (piece := read(min(size - held, _SKIP_BYTES))):
                pieces.append(piece)
                held += len(piece)
            if pieces and not pieces[-1].endswith(b"\n"):
                rest = file.readline(MAX_DOCUMENT_BYTES + 2)
                pieces.append(rest)
                if rest and not rest.endswith(b"\n") and _skip_line(file):
                    pieces.append(b"\n")
        except decompression_errors():
            whole, end, _ = b"".join(pieces).rpartition(b"\n")
            if end:
                yield whole + end
            raise
        if not pieces:
            return
        yield b"".join(pieces)


def decompression_errors() -> tuple[type[Exception], ...]:
    """What reading damaged compressed data raises."""
    import gzip
    import zlib

    errors: list[type[Exception]] = [EOFError, zlib.error, gzip.BadGzipFile]
    try:
        import zstandard  # pyright: ignore[reportMissingImports]
    except ImportError:
        return tuple(errors)
    return (*errors, zstandard.ZstdError)


def line_number(path: Path, offset: int) -> int:
    """The number, from 1, of the line that begins at a byte offset."""
    lines, left = 1, offset
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, _SKIP_BYTES))):
            lines += block.count(b"\n")
            left -= len(block)
    return lines


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UnusableError("invalid UTF-8") from None


def _skip_line(file: IO[bytes]) -> int:
    """Read to the end of the line; the number of bytes that were left of it."""
    skipped = 0
    while part := file.readline(_SKIP_BYTES):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped
