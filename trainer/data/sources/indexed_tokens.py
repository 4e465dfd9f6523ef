r"""Megatron's indexed dataset: `PREFIX.bin` holds the token ids, `PREFIX.idx` the sequence and document boundaries.

The layout is that of Megatron-LM's IndexedDataset, version 1 (megatron/core/datasets/indexed_dataset.py); all numbers
are little-endian:

    9 bytes  magic "MMIDIDX\0\0"
    uint64   version, 1
    uint8    code of the dtype of the ids in PREFIX.bin
    uint64   n, sequences
    uint64   m, entries of the document table: documents + 1
    int32    [n] tokens of each sequence
    int64    [n] byte offset of each sequence in PREFIX.bin
    int64    [m] the first sequence of each document, and n at the end

The sequences are contiguous in PREFIX.bin. A document is one sequence, unless the data was split into sentences.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...utils.durable_files import fsync_directory
from ...utils.errors import EXIT_IO, UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences, entries of the document table."""

DTYPE_CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Megatron's codes of integer dtypes; 6 and 7 are floating point, which token ids cannot be."""

MAX_METADATA_BYTES = 256 << 20
"""Maximum size of PREFIX.json in bytes; it lists every input file, of which there may be a million."""

_CHUNK = 1 << 20
"""Entries read, checked or written at once, so that memory use does not grow with the data."""
_COPY_BYTES = 16 << 20


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype in which Megatron stores ids: uint16 for vocabularies below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: Path) -> Path:
    """Return the path of the token ids."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Return the path of the index."""
    return prefix.with_name(prefix.name + ".idx")


class IndexedWriter:
    """Write PREFIX.bin and PREFIX.idx; neither exists under its final name before `finish`.

    Data is written to temporary files in the same folder, so memory use does not depend on the number of documents.
    As a context manager it removes them if the block exits without `finish`.

    Args:
        prefix: path without `.bin` and `.idx`; its folder must exist.
        dtype: of the ids; see `token_dtype`.

    Raises:
        UserError: the files cannot be written (exit code 74); raised by every method.
        ValueError: `dtype` is not an integer type of the format.
    """

    def __init__(self, prefix: Path, dtype: DTypeLike) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPE_CODES.items() if known == self.dtype]
        if not codes:
            raise ValueError(f"`dtype` ({self.dtype}) must be an integer type of the format; use uint16 or int32")
        self._code = codes[0]
        self._bounds = np.iinfo(self.dtype.name)
        self.sequences = 0
        self.documents = 0
        self.tokens = 0
        self._open = contextlib.ExitStack()
        token = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._temporary = [path.with_name(f".{path.name}.{token}.tmp") for path in (bin_path(prefix), idx_path(prefix))]
        with self._writing():
            self._bin: IO[bytes] = self._open.enter_context(self._temporary[0].open("xb", buffering=1 << 20))
            self._lengths, self._ends = (
                self._open.enter_context(tempfile.TemporaryFile(dir=prefix.parent))  # noqa: SIM115
                for _ in range(2)
            )

    def add_document(self, ids: Sequence[int] | NDArray[Any]) -> None:
        """Append a document of one sequence; `ids` [N] are integers in the range of `dtype`.

        Raises:
            ValueError: an id is out of range.
        """
        array = np.asarray(ids, np.int64 if len(ids) == 0 else None)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"`ids` ({array.dtype}, {array.ndim} dimensions) must be one row of integers")
        if array.size > np.iinfo(np.int32).max:
            raise ValueError(f"`ids` ({array.size:,}) must be fewer than 2^31; use shorter documents")
        fits = array.dtype == self.dtype or not array.size
        if not fits and not (self._bounds.min <= array.min() and array.max() <= self._bounds.max):
            raise ValueError(
                f"`ids` ({array.min()} to {array.max()}) must fit `dtype` {self.dtype.name} "
                f"({self._bounds.min} to {self._bounds.max}); use token_dtype(vocab_size)"
            )
        with self._writing():
            self._bin.write(array.astype(self.dtype, copy=False).tobytes())
            self._lengths.write(array.size.to_bytes(4, "little"))
            self.sequences += 1
            self._ends.write(self.sequences.to_bytes(8, "little"))
        self.documents += 1
        self.tokens += array.size

    def add_index(self, other: Path) -> None:
        """Append the data of another prefix; it is checked first and copied in blocks.

        Raises:
            UserError: the other files are missing, damaged or of another dtype.
        """
        reader = IndexedReader(other)
        if reader.dtype != self.dtype:
            raise UserError(
                f"{bin_path(other)} holds {reader.dtype.name}, but {self.prefix} is {self.dtype.name}; "
                "data of one prefix has one dtype"
            )
        with self._writing():
            with bin_path(other).open("rb") as source:
                while block := source.read(_COPY_BYTES):
                    self._bin.write(block)
            for first in range(0, reader.sequences, _CHUNK):
                self._lengths.write(reader.lengths[first : first + _CHUNK].tobytes())
            for first in range(1, reader.documents + 1, _CHUNK):
                ends = reader.document_table[first : first + _CHUNK] + self.sequences
                self._ends.write(ends.astype("<i8", copy=False).tobytes())
        self.sequences += reader.sequences
        self.documents += reader.documents
        self.tokens += reader.tokens

    def finish(self) -> None:
        """Flush both files to disk and rename them: first the ids, then the index, which makes them readable.

        An existing index of the same name is removed first, so that it never points at the new ids.
        """
        temporary_bin, temporary_idx = self._temporary
        with self._writing():
            self._bin.flush()
            os.fsync(self._bin.fileno())
            with temporary_idx.open("xb", buffering=1 << 20) as index:
                self._write_index(index)
                index.flush()
                os.fsync(index.fileno())
            self._open.close()
            idx_path(self.prefix).unlink(missing_ok=True)
            temporary_bin.replace(bin_path(self.prefix))
            temporary_idx.replace(idx_path(self.prefix))
            fsync_directory(self.prefix.parent)

    def close(self) -> None:
        """Remove the temporary files that `finish` has not renamed."""
        with contextlib.suppress(OSError):  # on a full disk the last flush fails too
            self._open.close()
        for path in self._temporary:
            path.unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write_index(self, index: IO[bytes]) -> None:
        index.write(HEADER.pack(MAGIC, VERSION, self._code, self.sequences, self.documents + 1))
        for lengths in _entries(self._lengths, "<i4"):
            index.write(lengths.tobytes())
        pointer = 0
        for lengths in _entries(self._lengths, "<i4"):
            ends = pointer + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            index.write((ends - lengths.astype(np.int64) * self.dtype.itemsize).astype("<i8", copy=False).tobytes())
            pointer = int(ends[-1])
        index.write(bytes(8))  # the first document begins with sequence 0
        for ends in _entries(self._ends, "<i8"):
            index.write(ends.tobytes())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            raise UserError(f"cannot write {self.prefix}.bin/.idx: {error.strerror or error}", EXIT_IO) from None


def _entries(file: IO[bytes], dtype: str) -> Iterator[NDArray[Any]]:
    file.seek(0)
    while block := file.read(_CHUNK * np.dtype(dtype).itemsize):
        yield np.frombuffer(block, dtype)


class IndexedReader:
    """Memory-mapped PREFIX.bin and PREFIX.idx; all counts and pointers are validated when they are opened.

    A pickled copy reopens the files and checks only their sizes.

    Args:
        prefix: path without `.bin` and `.idx`.

    Attributes:
        dtype: of the ids.
        sequences, documents, tokens: their numbers.
        ids: all token ids, [tokens], read-only.
        lengths: tokens of each sequence, int32 [sequences].
        pointers: byte offset of each sequence in PREFIX.bin, int64 [sequences].
        document_table: first sequence of each document and the number of sequences, int64 [documents + 1].

    Raises:
        UserError: a file is missing, unreadable, truncated or not of this format; the message gives the file and the
            reason.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self._open()
        self._check()

    def document_starts(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the offsets in `ids` of documents `first` to `last - 1` and the end of the last one.

        Returns:
            int64 [last - first + 1].
        """
        return self._starts(self.document_table[first : last + 1])

    def document_lengths(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens of each document, int64 [n]."""
        ends = self._starts(self.document_table[documents + 1])
        return ends - self._starts(self.document_table[documents])

    def _starts(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the offset of each sequence in `ids`; an index past the last sequence gives the end."""
        starts = np.empty(len(sequences), np.int64)
        inner = sequences < self.sequences
        starts[inner] = self.pointers[sequences[inner]] // self.dtype.itemsize
        starts[~inner] = self.tokens
        return starts

    def document_span(self, document: int) -> tuple[int, int]:
        """Return begin and end of one document in `ids`.

        Scalar version of `document_starts`: array overhead would dominate the cost of a sample.
        """
        first, last = int(self.document_table[document]), int(self.document_table[document + 1])
        size = self.dtype.itemsize
        begin = int(self.pointers[first]) // size if first < self.sequences else self.tokens
        return begin, int(self.pointers[last]) // size if last < self.sequences else self.tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.prefix, self._sizes)

    def _open(self) -> None:
        try:
            self._map()
        except OSError as error:
            raise UserError(f"cannot read {error.filename or self.prefix}: {error.strerror or error}") from None

    def _map(self) -> None:
        index, data = idx_path(self.prefix), bin_path(self.prefix)
        with index.open("rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise UserError(f"{index} is not the index of a Megatron .bin/.idx dataset: it does not begin with MMIDIDX")
        _, version, code, sequences, entries = HEADER.unpack(header)
        if version != VERSION:
            raise UserError(f"{index} has version {version}; stoker reads version {VERSION}")
        if code not in DTYPE_CODES:
            raise UserError(f"{index} has dtype code {code}, which is no integer type of token ids")
        self._sizes = index.stat().st_size, data.stat().st_size
        expected = HEADER.size + 12 * sequences + 8 * entries
        if self._sizes[0] != expected:
            raise UserError(
                f"{index} has {self._sizes[0]:,} bytes, but its {sequences:,} sequences and {entries - 1:,} documents "
                f"need {expected:,}; " + _size_mismatch_reason(self._sizes[0] - expected, sequences)
            )
        self.dtype = DTYPE_CODES[code]
        self.sequences, self.documents = sequences, entries - 1
        self.tokens = self._sizes[1] // self.dtype.itemsize
        offset = HEADER.size
        self.lengths = _map_array(index, "<i4", offset, sequences)
        self.pointers = _map_array(index, "<i8", offset + 4 * sequences, sequences)
        self.document_table = _map_array(index, "<i8", offset + 12 * sequences, entries)
        self.ids = _map_array(data, self.dtype, 0, self.tokens)

    def _check(self) -> None:
        index, data = idx_path(self.prefix), bin_path(self.prefix)
        end = 0
        for first in range(0, self.sequences, _CHUNK):
            lengths = self.lengths[first : first + _CHUNK].astype(np.int64)
            ends = end + np.cumsum(lengths) * self.dtype.itemsize
            expected = ends - lengths * self.dtype.itemsize
            wrong = (lengths < 0) | (self.pointers[first : first + _CHUNK] != expected)
            if wrong.any():
                raise UserError(
                    f"{index} is damaged: sequence {first + int(wrong.argmax())} does not begin where the one before "
                    "it ends"
                )
            end = int(ends[-1])
        if end != self._sizes[1]:
            raise UserError(
                f"{data} has {self._sizes[1]:,} bytes, but {index.name} counts {end:,}: "
                + ("it is truncated" if self._sizes[1] < end else "the two files do not belong together")
            )
        previous = 0
        for first in range(0, self.documents + 1, _CHUNK):
            table = self.document_table[first : first + _CHUNK]
            if table[0] < previous or (np.diff(table) < 0).any() or table[-1] > self.sequences:
                raise UserError(f"{index} is damaged: its documents do not follow each other")
            previous = int(table[-1])
        if self.documents < 0 or self.document_table[0] != 0 or previous != self.sequences:
            raise UserError(f"{index} is damaged: its documents do not cover its {self.sequences:,} sequences")


def _reopen(prefix: Path, sizes: tuple[int, int]) -> IndexedReader:
    reader = IndexedReader.__new__(IndexedReader)
    reader.prefix = prefix
    reader._open()
    if reader._sizes != sizes:
        raise UserError(f"{prefix}.bin/.idx changed while they were in use")
    return reader


def _map_array(path: Path, dtype: DTypeLike, offset: int, count: int) -> NDArray[Any]:
    if count < 1:  # an empty part cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", offset, (count,)).view(np.ndarray)


def _size_mismatch_reason(surplus: int, sequences: int) -> str:
    if surplus < 0:
        return "it is truncated"
    if surplus == sequences:
        return "it is a multimodal dataset, which is not supported"
    return "it is damaged"
