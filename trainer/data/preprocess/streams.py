"""Chunks of JSON lines from inputs without random access: compressed files and Hugging Face datasets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...utils.errors import UserError
from .input_sources import InputSource, load_hf_dataset
from .read_documents import (
    DAMAGED,
    ReadOptions,
    RejectedDocument,
    decompression_errors,
    open_compressed,
    read_chunk,
    split_into_chunks,
)

_SAMPLE_CHUNK = 4 << 20
_ROWS = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """Lines of one input.

    Attributes:
        data: whole JSON lines.
        first_line: the number of the first, from 1.
        consumed: bytes of the file (rows of the dataset) read so far.
        damaged: the input cannot be read beyond this point.
    """

    data: bytes
    first_line: int
    consumed: int
    damaged: bool = False


def read_stream_chunks(source: InputSource, reading: ReadOptions, size: int) -> Iterator[Chunk]:
    """Yield the chunks of an input; their boundaries are deterministic.

    Args:
        source: a compressed file or a dataset.
        size: approximate bytes of a chunk.

    Raises:
        UserError: the input cannot be read, or a required package is missing.
    """
    if source.kind == "hf":
        yield from _chunks_of_data_set(source, reading, size)
        return
    path = Path(source.path)
    line = 1
    try:
        with path.open("rb") as file, open_compressed(path, file, source.kind) as lines:
            try:
                for data in split_into_chunks(lines, size):
                    yield Chunk(data, line, file.tell())
                    line += data.count(b"\n")
            except decompression_errors():
                yield Chunk(b"", line, source.size, damaged=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def read_stream(source: InputSource, reading: ReadOptions) -> Iterator[str | RejectedDocument]:
    """Yield the documents of such an input, read in this process."""
    for chunk in read_stream_chunks(source, reading, _SAMPLE_CHUNK):
        yield from read_chunk(chunk.data, chunk.first_line, reading)
        if chunk.damaged:
            yield RejectedDocument(DAMAGED, chunk.first_line)


def _chunks_of_data_set(source: InputSource, reading: ReadOptions, size: int) -> Iterator[Chunk]:
    data = load_hf_dataset(source.path)
    if reading.json_key not in data.column_names:
        names = ", ".join(data.column_names)[:200]
        raise UserError(f"hf:{source.path} has no column {reading.json_key!r}; set --json-key to one of {names}")
    buffer: list[bytes] = []
    buffered_bytes, first = 0, 1
    for row in range(0, len(data), _ROWS):
        for text in data[row : row + _ROWS][reading.json_key]:
            line = json.dumps({reading.json_key: text}, default=str).encode() + b"\n"
            buffer.append(line)
            buffered_bytes += len(line)
        if buffered_bytes >= size:
            yield Chunk(b"".join(buffer), first, row + _ROWS)
            first += len(buffer)
            buffer, buffered_bytes = [], 0
    if buffer:
        yield Chunk(b"".join(buffer), first, len(data))
