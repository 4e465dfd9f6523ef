"""Read documents from files, and classify those that are rejected.

A document is a text; a `RejectedDocument` is a line (or file, or row) that is not a usable one. At most one line of
`MAX_DOCUMENT_BYTES` is held in memory.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...utils.errors import UserError
from ...utils.text import one_line
from ..tokenizers.tokenizer import MAX_WORD_LENGTH, has_long_word

MAX_DOCUMENT_BYTES = 64 << 20
"""Maximum size of a line or text file; the longest books have 10 million bytes."""
_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 20
_ROWS = 256
_MAX_KEYS_LENGTH = 200

TOO_LONG = f"longer than {MAX_DOCUMENT_BYTES >> 20} MiB"
LONG_WORD = f"more than {MAX_WORD_LENGTH:,} characters without white space"
DAMAGED = "damaged compressed data"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Format of the documents.

    Attributes:
        json_key: the key of a JSON line, or column of a table, that holds the text.
        text_lines: each line of a text file is a document; False: each file.
        limit_words: reject documents with words that are too long for a tokenizer library.
    """

    json_key: str
    text_lines: bool = False
    limit_words: bool = False

    def check(self, text: Any) -> str:
        """Return the text if it is usable.

        Raises:
            UnusableDocumentError: as `check_text`, or it has a word that is too long.
        """
        text = check_text(text)
        if self.limit_words and has_long_word(text):
            raise UnusableDocumentError(LONG_WORD, "break it into lines, or use a tokenizer of bytes or characters")
        return text


@dataclass(frozen=True, slots=True)
class RejectedDocument:
    """A line, file or row that is not a usable document.

    Attributes:
        kind: the reason, as text.
        place: line (or row) number from 1, or the byte offset of the line in its file.
        is_offset: `place` is an offset.
        note: a hint that applies to this one only.
    """

    kind: str
    place: int
    is_offset: bool = False
    note: str = ""


class UnusableDocumentError(ValueError):
    """An unusable document; the message is the kind of rejection, and `note` a hint for this one."""

    def __init__(self, kind: str, note: str = "") -> None:
        super().__init__(kind)
        self.note = note


def parse_json_line(line: bytes, reading: ReadOptions) -> str:
    """Return the text of one JSON line.

    Raises:
        UnusableDocumentError: the line is invalid; the message is the same for all lines with the same problem.
    """
    key = reading.json_key
    try:
        document = json.loads(_decoded(line))
    except UnusableDocumentError:
        raise
    except (ValueError, RecursionError):
        raise UnusableDocumentError("not JSON") from None
    if not isinstance(document, dict):
        raise UnusableDocumentError("not a JSON object")
    if key not in document:
        keys = ", ".join(map(repr, document))
        raise UnusableDocumentError(
            f"no key {key!r}", f"set --json-key to one of {keys[:_MAX_KEYS_LENGTH]}" if keys else ""
        )
    return reading.check(document[key])


def check_text(text: Any) -> str:
    """Return the text if it is usable.

    Raises:
        UnusableDocumentError: it is not a string, is empty or blank, or contains NUL or a lone surrogate.
    """
    if not isinstance(text, str):
        raise UnusableDocumentError("text is not a string")
    if not text:
        raise UnusableDocumentError("empty text")
    if text.isspace():
        raise UnusableDocumentError("only white space")
    if "\0" in text:
        raise UnusableDocumentError("NUL character in the text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UnusableDocumentError("lone surrogate in the text") from None
    return text


def read_lines(
    file: IO[bytes], start: int, end: int, reading: ReadOptions, *, is_json: bool, first_line: int | None = None
) -> Iterator[str | RejectedDocument]:
    """Yield the documents of lines that begin in a byte range; adjacent ranges share no line and skip none.

    Args:
        file: open for reading, at any position.
        start: first byte of the range.
        end: the byte after the last.
        is_json: JSON lines; False: plain lines.
        first_line: number of the first line of `file`, to report line numbers; None reports byte offsets.
    """
    file.seek(max(start - 1, 0))
    offset = start
    if start > 0:
        offset = start - 1 + _skip_line(file)
    current_line = first_line or 0
    while offset < end and (line := file.readline(MAX_DOCUMENT_BYTES + 2)):
        size = len(line)
        if not line.endswith(b"\n") and size == MAX_DOCUMENT_BYTES + 2:
            size += _skip_line(file)
        try:
            if len(line.rstrip(b"\r\n")) > MAX_DOCUMENT_BYTES:
                raise UnusableDocumentError(TOO_LONG)
            if offset == 0 and line.startswith(_BOM):
                line = line[len(_BOM) :]
            if not line.strip():
                raise UnusableDocumentError("blank line")
            if is_json:
                yield parse_json_line(line, reading)
            else:
                yield reading.check(_decoded(line).removesuffix("\n").removesuffix("\r"))
        except UnusableDocumentError as error:
            place, is_offset = (offset, True) if first_line is None else (current_line, False)
            yield RejectedDocument(str(error), place, is_offset, error.note)
        offset += size
        current_line += 1


def read_span(path: Path, kind: str, start: int, end: int, reading: ReadOptions) -> Iterator[str | RejectedDocument]:
    """Yield the documents of a range of a file with random access."""
    if kind == "parquet":
        yield from read_row_groups(path, start, end, reading)
    elif kind == "text" and not reading.text_lines:
        yield read_file(path, reading)
    else:
        with path.open("rb") as file:
            yield from read_lines(file, start, end, reading, is_json=kind == "jsonl")


def read_chunk(data: bytes, first_line: int, reading: ReadOptions) -> Iterator[str | RejectedDocument]:
    """Yield the documents of JSON lines; `first_line` is the number of the first one in its file."""
    return read_lines(io.BytesIO(data), 0, len(data), reading, is_json=True, first_line=first_line)


def read_file(path: Path, reading: ReadOptions) -> str | RejectedDocument:
    """Return a text file as one document; a byte order mark is removed."""
    with path.open("rb") as file:
        data = file.read(MAX_DOCUMENT_BYTES + 1)
    try:
        if len(data) > MAX_DOCUMENT_BYTES:
            raise UnusableDocumentError(f"text file {TOO_LONG}")
        return reading.check(_decoded(data.removeprefix(_BOM)))
    except UnusableDocumentError as error:
        return RejectedDocument(str(error), 1)


def read_row_groups(path: Path, first: int, last: int, reading: ReadOptions) -> Iterator[str | RejectedDocument]:
    """Yield the documents of row groups `first` to `last - 1` of a parquet file; rejections report row numbers."""
    file = open_parquet(path, reading.json_key)
    row = 1 + sum(file.metadata.row_group(group).num_rows for group in range(first))
    groups = list(range(first, last))
    for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=[reading.json_key]):
        for value in batch.column(0).to_pylist():
            try:
                if isinstance(value, str) and len(value) > MAX_DOCUMENT_BYTES:
                    raise UnusableDocumentError(TOO_LONG)
                yield reading.check(value)
            except UnusableDocumentError as error:
                yield RejectedDocument(str(error), row)
            row += 1


def open_parquet(path: Path, column: str) -> Any:
    """Open a file as `pyarrow.parquet.ParquetFile`, and check that it has the column.

    Raises:
        UserError: pyarrow is missing, the file is not parquet, or it has no such column.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{path}: parquet files need the `pyarrow` package: pip install 'stoker[hf]'") from None
    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a parquet file: {one_line(error, 200)}") from None
    names = file.schema_arrow.names
    if column not in names:
        raise UserError(f"{path} has no column {column!r}; set --json-key to one of {', '.join(names)[:200]}")
    return file


def open_compressed(path: Path, file: IO[bytes], kind: str) -> IO[bytes]:
    """Return an uncompressed stream of an open file.

    Raises:
        UserError: the zstandard package is missing.
    """
    if kind == "jsonl.gz":
        import gzip

        unpacked: Any = gzip.GzipFile(fileobj=file)
        return unpacked
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{path}: .zst files need the `zstandard` package: pip install zstandard") from None
    reader: Any = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    return io.BufferedReader(reader)


def split_into_chunks(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield whole lines, at least `size` bytes at a time.

    An overlong line is truncated to a length that is still rejected, and keeps its line end. If the compressed data is
    damaged, the whole lines before the damage are yielded before the error is raised.
    """
    read = getattr(file, "read1", file.read)  # returns available bytes, so that later damage does not discard them
    while True:
        pieces: list[bytes] = []
        size_read = 0
        try:
            while size_read < size and (piece := read(min(size - size_read, _SKIP_BYTES))):
                pieces.append(piece)
                size_read += len(piece)
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
    """Return the exceptions raised for damaged compressed data."""
    import gzip
    import zlib

    errors: list[type[Exception]] = [EOFError, zlib.error, gzip.BadGzipFile]
    try:
        import zstandard
    except ImportError:
        return tuple(errors)
    return (*errors, zstandard.ZstdError)


def line_number(path: Path, offset: int) -> int:
    """Return the number, from 1, of the line that begins at a byte offset."""
    number, remaining = 1, offset
    with path.open("rb") as file:
        while remaining > 0 and (block := file.read(min(remaining, _SKIP_BYTES))):
            number += block.count(b"\n")
            remaining -= len(block)
    return number


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UnusableDocumentError("invalid UTF-8") from None


def _skip_line(file: IO[bytes]) -> int:
    """Read to the end of the line; return the number of bytes read."""
    skipped = 0
    while part := file.readline(_SKIP_BYTES):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped
