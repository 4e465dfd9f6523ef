"""Read and write checkpoint files: size-limited JSON and safetensors, hashed when written, never pickle.

Untrusted files are opened without following links, must be regular files, and are size-checked before parsing. Written
files are flushed to disk (fsync).
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .text import one_line

MAX_JSON_BYTES = 64 << 20
MAX_JSON_DEPTH = 64
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 200_000
"""Tensors of a file; the largest known model has 91,000 in all of its files."""

_HASHED_BYTES = 1 << 18

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TENSOR_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
"""Torch dtypes by their names in safetensors files."""


class DamagedFileError(Exception):
    """Raised for a missing, damaged or invalid file; the message names it with the reason, in one line."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 (hex) of a file."""

    size: int
    sha256: str


class _HashingFile:
    """A newly created file (O_EXCL) that hashes what is written to it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o644)
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data).cast("B")
        self._hash.update(rest)
        self._size += len(rest)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def finish(self) -> FileRecord:
        os.fsync(self._descriptor)
        return FileRecord(self._size, self._hash.hexdigest())

    def __enter__(self) -> _HashingFile:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)


def write_json(path: Path, document: Any) -> FileRecord:
    """Write a new JSON file with fsync. NaN and infinity, which are not JSON, raise ValueError."""
    with _HashingFile(path) as file:
        file.write(_encode(document))
        return file.finish()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype and shape of a tensor in a file header."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write a new safetensors file with fsync; one tensor at a time is copied to the host."""
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return write_safetensors_stream(path, specs, tensors.__getitem__, metadata)


def write_safetensors_stream(
    path: Path,
    specs: Mapping[str, TensorSpec],
    get_tensor: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
    on_write: Callable[[int], None] = lambda _: None,
) -> FileRecord:
    """Write a new safetensors file with fsync, from tensors that are produced one at a time.

    The format (https://github.com/huggingface/safetensors, "Format"): eight bytes of little-endian header length, a
    JSON header of name, dtype, shape and offsets, then the raw tensors without gaps. Wider dtypes come first, so that
    every tensor is aligned.

    Args:
        path: the file; must not exist.
        specs: dtype and shape by name.
        get_tensor: returns the tensor of a name, matching `specs`; called once per name.
        metadata: strings for the header.
        on_write: called with the size of each tensor once it is written.
    """
    order = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        spec = specs[name]
        end = offset + spec.num_bytes
        header[name] = {"dtype": _DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with _HashingFile(path) as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name in order:
            tensor = get_tensor(name)
            assert TensorSpec(tensor.dtype, tuple(tensor.shape)) == specs[name], name
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)
            on_write(specs[name].num_bytes)
        return file.finish()


def read_json(path: Path, *, byte_exact: bool = False, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file of at most 64 levels; NaN and infinity are rejected.

    Args:
        path: the file.
        byte_exact: require exactly the bytes that `write_json` writes, so that any changed bit is detected.
        max_bytes: maximum size in bytes.

    Raises:
        DamagedFileError: missing, not a regular file, too large, not JSON, or not as written.
    """
    with _open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise DamagedFileError(f"{path.name} is larger than {max_bytes >> 20} MiB")
    try:
        document = json.loads(data, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path.name} is not JSON: {one_line(error, 200)}") from None
    if _depth_exceeds(document, MAX_JSON_DEPTH):
        raise DamagedFileError(f"{path.name} is nested deeper than {MAX_JSON_DEPTH} levels")
    if byte_exact and _encode(document) != data:
        raise DamagedFileError(f"{path.name} was changed after it was written")
    return document


def verify_file(path: Path, record: FileRecord, on_read: Callable[[int], None] = lambda _: None) -> None:
    """Compare a file with its recorded size and hash; `on_read` is called with the size of each piece that is hashed.

    Raises:
        DamagedFileError: missing, not a regular file, or different.
    """
    with _open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != record.size:
            raise DamagedFileError(f"{path.name} has {size:,} bytes instead of {record.size:,}")
        digest, buffer = hashlib.sha256(), bytearray(_HASHED_BYTES)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            on_read(count)
        if digest.hexdigest() != record.sha256:
            raise DamagedFileError(f"{path.name} does not have the SHA-256 that was recorded when it was written")


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file for reading by name; the library checks its header against its size.

    Raises:
        DamagedFileError: missing, not a regular file, not a safetensors file, or with too many tensors.
    """
    with _open_regular(path) as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        if MAX_HEADER_BYTES < header_bytes < os.fstat(opened.fileno()).st_size:
            raise DamagedFileError(_too_large(path, f"{header_bytes >> 20:,} MiB of names"))
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            if (count := len(file.keys())) > MAX_TENSORS:
                raise DamagedFileError(_too_large(path, f"{count:,} tensors"))
            yield file
    except SafetensorError as error:
        raise DamagedFileError(f"{path.name} is not a safetensors file: {one_line(error, 200)}") from None


def _too_large(path: Path, found: str) -> str:
    limits = f"at most {MAX_TENSORS:,} tensors and {MAX_HEADER_BYTES >> 20} MiB of names are read"
    return f"{path.name} has {found} in its header: {limits}; split it into several files"


def tensor_dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype in safetensors files."""
    return _DTYPE_NAMES[tensor.dtype]


def _open_regular(path: Path) -> Any:
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise DamagedFileError(f"{path.name} is missing") from None
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise DamagedFileError(f"{path.name} cannot be opened: {reason}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedFileError(f"{path.name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def _encode(document: Any) -> bytes:
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not allowed")


def _depth_exceeds(document: Any, limit: int) -> bool:
    level = [document]
    for _ in range(limit):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return False
    return True
