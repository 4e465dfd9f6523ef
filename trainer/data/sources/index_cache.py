"""Cache of index arrays in .npy files, verified whenever they are read.

The name of an entry is the hash of everything it depends on, so entries are never stale. Several processes may write
the same entry at once: they write the same bytes to temporary files, and the last rename wins.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.durable_files import atomic_file
from ...utils.errors import EXIT_IO, UserError

ArrayChunks = Iterator[tuple[str, NDArray[Any]]]
"""Name of an array and its next rows."""
Arrays = Mapping[str, NDArray[Any]]
Layout = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Dtype and shape of each array."""

_MAX_RECORD_BYTES = 1 << 16


class IndexCache:
    """A folder of index arrays.

    Args:
        folder: location; None disables the cache.
        required: a folder that cannot be written is an error; otherwise arrays are then built in memory.
    """

    def __init__(self, folder: Path | None, *, required: bool = False) -> None:
        self.folder = folder
        self.required = required

    def arrays(self, key: Mapping[str, Any], layout: Layout, make: Callable[[], ArrayChunks]) -> Arrays:
        """Return the arrays of `key`, memory-mapped from the folder, or newly built.

        Args:
            key: everything they depend on, serializable as JSON.
            make: builds them in chunks; arrays that are written to files are never in memory as a whole.

        Raises:
            UserError: the folder is required and cannot be written (exit code 74).
        """
        if self.folder is None:
            return _in_memory(layout, make())
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
        found = self._read(self.folder, name, layout)
        if found is not None:
            return found
        try:
            self._write(self.folder, name, layout, make())
        except OSError as error:
            if self.required:
                raise UserError(
                    f"`model.data.index_mapping_dir`: cannot write to {self.folder}: {error.strerror or error}", EXIT_IO
                ) from None
            return _in_memory(layout, make())
        return self._read(self.folder, name, layout) or _in_memory(layout, make())

    def _read(self, folder: Path, name: str, layout: Layout) -> Arrays | None:
        """Return the arrays, or None if they are missing or corrupt."""
        try:
            with (folder / f"{name}.json").open("rb") as file:
                record = json.loads(file.read(_MAX_RECORD_BYTES))
            arrays: dict[str, NDArray[Any]] = {}
            for part, (dtype, shape) in layout.items():
                path = folder / f"{name}-{part}.npy"
                with path.open("rb") as file:  # verified before anything is parsed
                    if hashlib.file_digest(file, "sha256").hexdigest() != record[part]:
                        return None
                array = np.lib.format.open_memmap(path, mode="r")
                if array.dtype != dtype or array.shape != shape:
                    return None
                arrays[part] = array.view(np.ndarray)
        except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError):
            return None
        return arrays

    def _write(self, folder: Path, name: str, layout: Layout, pieces: ArrayChunks) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        writer = f"{os.getpid()}-{secrets.token_hex(4)}"
        hashes = {part: hashlib.sha256() for part in layout}
        with ExitStack() as stack:
            files = {part: stack.enter_context(atomic_file(folder / f"{name}-{part}.npy", writer)) for part in layout}

            def write(part: str, data: bytes) -> None:
                files[part].write(data)
                hashes[part].update(data)

            for part, (dtype, shape) in layout.items():
                write(part, _npy_header(dtype, shape))
            for part, rows in pieces:
                write(part, np.ascontiguousarray(rows, layout[part][0]).tobytes())
        record = {part: found.hexdigest() for part, found in hashes.items()}
        with atomic_file(folder / f"{name}.json", writer) as file:
            file.write(json.dumps(record).encode())


def _in_memory(layout: Layout, pieces: ArrayChunks) -> Arrays:
    arrays = {part: np.empty(shape, dtype) for part, (dtype, shape) in layout.items()}
    filled = dict.fromkeys(arrays, 0)
    for part, rows in pieces:
        arrays[part][filled[part] : filled[part] + len(rows)] = rows
        filled[part] += len(rows)
    return arrays


def _npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()
